//! Messages to the user, besides the answer itself. File names, tensor names and old conversations are untrusted text: none of it may control the terminal.

use std::io::{self, Write};

/// Writes one line to standard error, `sluice: ..`. Errors of standard error are ignored.
pub fn note(line: &str) {
    let _ = writeln!(io::stderr(), "sluice: {}", one_line(line));
}

/// Writes lines to standard error.
pub fn say(lines: &str) {
    let shown: Vec<String> = lines.split('\n').map(shown).collect();
    let _ = writeln!(io::stderr(), "{}", shown.join("\n"));
}

/// Escapes control characters: `\u{1b}` for the one that begins an escape sequence.
pub fn shown(text: &str) -> String {
    let spelled = |c: char| if c.is_control() { c.escape_unicode().to_string() } else { c.to_string() };
    text.chars().map(spelled).collect()
}

/// Escapes control characters in JSON. JSON itself leaves U+007F to U+009F as they are, and some terminals take U+009B as the start of an escape sequence.
pub fn shown_json(json: &str) -> String {
    let spelled = |c: char| match c {
        '\n' => c.to_string(),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    json.chars().map(spelled).collect()
}

/// Messages have untrusted text (file names, templates): makes one line without control characters.
fn one_line(text: &str) -> String {
    let shown: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    shown.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_without_escape_sequences() {
        assert_eq!(one_line("bad:\n  line 2\x1b[31m\r\n"), "bad: line 2 [31m");
    }

    #[test]
    fn control_characters_are_spelled_out() {
        assert_eq!(shown("é \x1b[31m\u{9b}2J"), r"é \u{1b}[31m\u{9b}2J");
        let json = serde_json::json!({"a\u{9b}\x7f": "\x1b\n"}).to_string();
        let safe = shown_json(&json);
        assert!(!safe.chars().any(char::is_control), "{safe}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap().to_string(), json);
    }
}
