//! Drafts by look-up: where the newest tokens have come before, what followed them then may follow now.
//!
//! The longest match wins. It is found by two indices, of long and of short runs of tokens: each position knows where the same run ended before it, so that a look-up
//! follows a few links and reads no text but the candidates'.

use super::proposal::Draft;

/// Tokens of the runs that are indexed. A match of the long ones makes a look at the short ones needless.
const LONG: usize = 6;
const SHORT: usize = 2;
/// Earlier places that a look-up compares, at most.
const MOST_PLACES: usize = 32;
/// Tokens that it compares at each. A longer match is as good as one of these.
const MOST_COMPARED: usize = 64;
/// Stands between a predicted answer and the sequence. No vocabulary has it.
const BORDER: u32 = u32::MAX;
/// No earlier place.
const NOWHERE: u32 = 0;
/// The class of the first tokens of a predicted answer, before anything matches.
const PREDICTED: usize = 5;
/// Bytes that a sequence's index takes for each of its tokens, at most.
pub(crate) const BYTES_PER_TOKEN: usize = 4 + 2 * (4 + 8);

/// Where runs of `length` tokens ended before.
struct Index {
    length: usize,
    /// By hash: the newest end of such a run, or [`NOWHERE`]. `[power of two]`
    newest: Vec<u32>,
    /// By end of a run: the end before it with the same hash. `[tokens + 1]`
    before: Vec<u32>,
}

impl Index {
    fn new(length: usize, tokens: usize) -> Index {
        let mut before = Vec::with_capacity(tokens + 1);
        before.push(NOWHERE);
        Index { length, newest: vec![NOWHERE; tokens.next_power_of_two()], before }
    }

    /// Where the newest end of the run at the end of `text` is kept. `None`: `text` is shorter than a run.
    fn slot(&self, text: &[u32]) -> Option<usize> {
        let from = text.len().checked_sub(self.length)?;
        let mut hash = 0_u64;
        for token in &text[from..] {
            hash = (hash ^ u64::from(*token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
        }
        Some((hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & (self.newest.len() - 1))
    }

    /// Adds the run that ends behind the last of `text`, which is one token longer than at the last call.
    fn add(&mut self, text: &[u32]) {
        let slot = self.slot(text);
        let before = slot.map_or(NOWHERE, |slot| std::mem::replace(&mut self.newest[slot], text.len() as u32));
        self.before.push(before);
    }

    /// The earlier place whose tokens before it equal the newest of `text` as far as possible: (end, equal tokens). Of equally good ones it is the one
    /// that is nearest to `near`.
    fn find(&self, text: &[u32], near: usize) -> Option<(usize, usize)> {
        self.compare(self.before[text.len()], text, text, near)
    }

    /// The same in `text` for the newest tokens of another one.
    fn find_for(&self, other: &[u32], text: &[u32]) -> Option<(usize, usize)> {
        self.compare(self.newest[self.slot(other)?], other, text, text.len())
    }

    /// Compares the newest of `wanted` with what ends at `place` of `text`, and at the places linked from there.
    fn compare(&self, mut place: u32, wanted: &[u32], text: &[u32], near: usize) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        for _ in 0..MOST_PLACES {
            if place == NOWHERE {
                break;
            }
            let end = place as usize;
            let (new, old) = (wanted.iter().rev(), text[..end].iter().rev());
            let equal = new.zip(old).take(MOST_COMPARED).take_while(|(a, b)| a == b).count();
            let better = best
                .is_none_or(|(at, known)| equal > known || (equal == known && end.abs_diff(near) < at.abs_diff(near)));
            if equal >= self.length && better {
                best = Some((end, equal));
            }
            place = self.before[end];
        }
        best
    }
}

/// Drafts from what one sequence has seen: its prompt, its answer, and a prediction of that.
pub(crate) struct Ngram {
    /// A predicted answer, a border, and the sequence's tokens.
    text: Vec<u32>,
    /// How many of `text` come before the sequence's tokens.
    predicted: usize,
    long: Index,
    short: Index,
    /// Tokens of the prompt.
    prompt: usize,
    /// The place that the last draft came from, and the length of `text` then.
    last: (usize, usize),
}

impl Ngram {
    /// For a sequence with this prompt that may grow to `most` tokens. `prediction`: tokens that its answer may have, or nothing.
    pub fn new(prompt: &[u32], prediction: &[u32], most: usize) -> Ngram {
        let border = usize::from(!prediction.is_empty());
        let predicted = prediction.len() + border;
        let capacity = predicted + most.max(prompt.len());
        let (long, short) = (Index::new(LONG, capacity), Index::new(SHORT, capacity));
        let text = Vec::with_capacity(capacity);
        let mut ngram = Ngram { text, predicted, long, short, prompt: prompt.len(), last: (0, 0) };
        prediction.iter().copied().chain([BORDER].into_iter().take(border)).for_each(|token| ngram.add(token));
        prompt.iter().for_each(|token| ngram.add(*token));
        ngram
    }

    fn add(&mut self, token: u32) {
        self.text.push(token);
        self.long.add(&self.text);
        self.short.add(&self.text);
    }

    /// Copies what follows `from`. Where that reaches the newest tokens, they are a period that goes on.
    fn copy(&self, from: usize, most: usize, class_of: impl Fn(usize) -> usize, draft: &mut Draft) {
        for i in 0..most {
            let at = from + i;
            let token = if at < self.text.len() { self.text[at] } else { draft.tokens[at - self.text.len()] };
            if token == BORDER {
                return;
            }
            draft.push(token, class_of(i));
        }
    }

    /// Writes at most `most` tokens behind `tokens` to `draft`, which is empty. `tokens` are the sequence's: those of the last call, and more. Returns how many of the newest
    /// tokens the draft's place has before it; behind a predicted answer, which is the client's own, as many as are ever compared.
    pub fn propose(&mut self, tokens: &[u32], most: usize, draft: &mut Draft) -> usize {
        for token in &tokens[(self.text.len() - self.predicted).min(tokens.len())..] {
            self.add(*token);
        }
        let near = self.last.0 + (self.text.len() - self.last.1);
        let found = self.long.find(&self.text, near).or_else(|| self.short.find(&self.text, near));
        if let Some((end, equal)) = found {
            self.last = (end, self.text.len());
            self.copy(end, most, |i| class_of(equal + i), draft);
            return equal;
        }
        if self.text.starts_with(tokens.get(self.prompt..).unwrap_or(&[])) && self.predicted > 0 {
            // The beginning of an answer is too short to be looked up.
            self.copy(tokens.len() - self.prompt, most, |i| PREDICTED.max(class_of(i)), draft);
            return MOST_COMPARED;
        }
        0
    }

    /// Looks up the newest of another sequence's `tokens` in what this one has seen. If more than `known` of them are here, and followed by others, these become the draft.
    /// Returns how many are, or `known`.
    pub fn propose_for(&self, tokens: &[u32], most: usize, known: usize, draft: &mut Draft) -> usize {
        let found =
            self.long.find_for(tokens, &self.text).filter(|(end, equal)| *equal > known && *end < self.text.len());
        let Some((end, equal)) = found else { return known };
        draft.clear();
        // A copy ends with this text: only a sequence's own text may repeat itself beyond its end.
        self.copy(end, most.min(self.text.len() - end), |i| class_of(equal + i), draft);
        equal
    }
}

/// The class of a token behind so many equal ones.
fn class_of(equal: usize) -> usize {
    match equal {
        0..=2 => 0,
        3 => 1,
        4 => 2,
        5..=6 => 3,
        7..=9 => 4,
        10..=15 => 5,
        16..=31 => 6,
        _ => 7,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::draft::acceptance::CLASSES;

    fn proposed(ngram: &mut Ngram, tokens: &[u32], most: usize) -> Vec<u32> {
        let mut draft = Draft::default();
        ngram.propose(tokens, most, &mut draft);
        assert!(draft.classes.len() == draft.tokens.len() && draft.classes.iter().all(|c| usize::from(*c) < CLASSES));
        draft.tokens
    }

    #[test]
    fn the_longest_match_says_what_follows() {
        // Behind 2 3 comes 9 lately, but behind 1 2 3 came 4.
        let mut tokens = vec![1, 2, 3, 4, 5, 6, 7, 2, 3, 9, 8];
        let mut ngram = Ngram::new(&tokens, &[], 100);
        assert_eq!(proposed(&mut ngram, &tokens, 4), [0; 0]);
        tokens.extend([1, 2, 3]);
        assert_eq!(proposed(&mut ngram, &tokens, 4), [4, 5, 6, 7]);
        tokens.extend([4, 5, 0, 2, 3]);
        // Both 2 3 9 and 2 3 4 have two equal tokens: the draft goes on from the place that is nearest to the last.
        assert_eq!(proposed(&mut ngram, &tokens, 1).len(), 1);
    }

    #[test]
    fn a_period_goes_on() {
        let tokens = [5, 1, 2, 3, 1, 2, 3, 1, 2];
        let mut ngram = Ngram::new(&tokens, &[], 9);
        assert_eq!(proposed(&mut ngram, &tokens, 7), [3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn what_a_sibling_has_seen_is_looked_up_where_it_matches_further() {
        let sibling = Ngram::new(&[1, 2, 3, 4, 5, 6, 7, 8, 9], &[], 9);
        let found = |tokens: &[u32], known: usize| {
            let mut draft = Draft::default();
            draft.push(99, 0);
            (sibling.propose_for(tokens, 8, known, &mut draft), draft.tokens)
        };
        assert_eq!(found(&[1, 2, 3, 4, 5, 6, 7], 6), (7, vec![8, 9]));
        assert_eq!(found(&[1, 2, 3, 4, 5, 6, 7], 7), (7, vec![99]), "the own match is as long");
        assert_eq!(found(&[4, 5, 6, 7, 8, 9], 0), (0, vec![99]), "nothing follows there yet");
        assert_eq!(found(&[5, 6, 7], 0), (0, vec![99]), "short runs say too little of another's text");
    }

    #[test]
    fn a_predicted_answer_is_drafted_from_its_beginning() {
        let mut tokens = vec![1, 2, 3];
        let mut ngram = Ngram::new(&tokens, &[10, 11, 12, 13], 20);
        assert_eq!(proposed(&mut ngram, &tokens, 8), [10, 11, 12, 13]);
        tokens.push(10);
        assert_eq!(proposed(&mut ngram, &tokens, 2), [11, 12]);
        // The prediction was wrong here. Where it is right again, drafts go on from it, but not beyond its end.
        tokens.extend([9, 11, 12]);
        assert_eq!(proposed(&mut ngram, &tokens, 8), [13]);
        tokens.push(13);
        assert_eq!(proposed(&mut ngram, &tokens, 8), [0; 0]);
    }

    proptest! {
        /// The index finds as long a match as a scan of everything does. There are not more places than a look-up compares.
        #[test]
        fn the_index_finds_what_a_scan_finds(text in prop::collection::vec(0u32..4, 2..MOST_PLACES)) {
            let mut ngram = Ngram::new(&text, &[], text.len());
            let found = ngram.long.find(&ngram.text, 0).or_else(|| ngram.short.find(&ngram.text, 0));
            let equal = |end: usize| text.iter().rev().zip(text[..end].iter().rev()).take(MOST_COMPARED).take_while(|(a, b)| a == b).count();
            let longest = (0..text.len()).map(equal).max().unwrap();
            match found {
                Some((end, known)) => {
                    prop_assert_eq!((equal(end), known), (known, longest));
                }
                None => prop_assert!(longest < SHORT),
            }
            let _ = proposed(&mut ngram, &text, 8);
        }
    }
}
