//! Stand-ins: what a template gets in place of a text that it would change, and that replaces them in the rendered text.

/// A stand-in is the index of a text between these characters.
pub const STAND_IN: [char; 2] = ['\u{F0000}', '\u{F0001}'];

/// A part of a rendered text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// Control tokens, and what stands between them.
    Markup(String),
    /// What somebody said.
    Said(String),
}

/// What stands for the text number `i`.
pub fn stand_in(i: usize) -> String {
    format!("{}{i}{}", STAND_IN[0], STAND_IN[1])
}
