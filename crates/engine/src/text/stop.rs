//! Finds stop strings in a stream of text.
//!
//! A stop string may begin in one piece and end in another, so the longest end of the text that could become one is held back. How the text is cut into pieces
//! never changes the result: the stop string that is complete first ends the text. Of two that are complete at the same character, it is the longer one.
//! Neither it nor anything after it is shown.

/// Watches a text for stop strings.
pub struct StopStrings {
    stops: Vec<String>,
    /// The end of the text that may be the beginning of a stop string.
    held: String,
    stopped: Option<usize>,
}

impl StopStrings {
    /// Watches for these strings. Empty ones are ignored, as they would match everywhere.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new(), stopped: None }
    }

    /// Takes the next piece of text. Returns what can be shown, and whether a stop string was found. After that the text has ended.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        if self.stopped.is_some() {
            return (String::new(), true);
        }
        if self.stops.is_empty() {
            return (text.to_owned(), false);
        }
        self.held.push_str(text);

        // 1. the stop string that ends first, and of those the one that begins first
        let found = self.stops.iter().enumerate().filter_map(|(i, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, i))
        });
        if let Some((_, start, i)) = found.min() {
            self.stopped = Some(i);
            let mut shown = std::mem::take(&mut self.held);
            shown.truncate(start);
            return (shown, true);
        }

        // 2. hold back an end that may become one
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, held), false)
    }

    /// Returns what was held back, after a text that ended without a stop string.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that ended the text, if one did.
    pub fn stopped_by(&self) -> Option<&str> {
        self.stopped.map(|i| self.stops[i].as_str())
    }
}

/// Bytes of the longest end of `text` that is a beginning of `stop`, but not all of it.
pub(super) fn overlap(text: &str, stop: &str) -> usize {
    let longest = (stop.len() - 1).min(text.len());
    // A match ends at the end of `text`, so both of its ends are character boundaries.
    (1..=longest).rev().find(|&n| text.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut watcher = StopStrings::new(stops.iter().map(|s| s.to_string()));
        let mut shown = String::new();
        for piece in pieces {
            let (text, stopped) = watcher.push(piece);
            shown.push_str(&text);
            if stopped {
                return (shown, true);
            }
        }
        (shown + &watcher.flush(), false)
    }

    #[test]
    fn stop_string_across_pieces_is_never_shown() {
        assert_eq!(run(&["\n\nUser:"], &["Hi", "\n", "\nUs", "er", ": more"]), ("Hi".into(), true));
        assert_eq!(run(&["\n\nUser:"], &["Hi\n", "\nUse", " it"]), ("Hi\n\nUse it".into(), false));
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), true));
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        let mut watcher = StopStrings::new([String::new()]);
        assert_eq!(watcher.push("abc"), ("abc".into(), false));
    }

    #[test]
    fn first_complete_stop_string_wins_and_is_named() {
        let mut watcher = StopStrings::new(["abc".into(), "b".into()]);
        assert_eq!(watcher.push("xabc"), ("xa".into(), true));
        assert_eq!(watcher.stopped_by(), Some("b"));
        assert_eq!(watcher.push("more"), (String::new(), true));
    }

    /// The definition, on the whole text at once.
    fn oracle(stops: &[String], text: &str) -> (String, bool) {
        for end in text.char_indices().map(|(i, c)| i + c.len_utf8()) {
            let longest = stops.iter().filter(|s| text[..end].ends_with(s.as_str())).map(String::len).max();
            if let Some(n) = longest {
                return (text[..end - n].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn pieces_do_not_change_the_outcome(
            stops in prop::collection::vec("[abé]{1,4}", 1..4),
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        ) {
            let refs: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let names: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&names, &refs), oracle(&stops, &pieces.concat()));
        }
    }
}
