//! What is said to a person, beside the answer itself.

use std::io::{self, Write};

/// One line on standard error, `sluice: ..`. A standard error that is closed is nobody's fault.
pub fn note(line: &str) {
    let _ = writeln!(io::stderr(), "sluice: {}", one_line(line));
}

/// One line on standard error as it is.
pub fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Messages carry texts of strangers (file names, templates): one line, and nothing that steers a terminal.
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
}
