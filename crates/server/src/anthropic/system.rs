//! The first block of a system prompt, where Claude Code puts a value that changes with every request.

use std::sync::Once;

use crate::log::note;

/// How the block begins, and the value in it that changes.
const BILLING: &str = "x-anthropic-billing-header:";
const CHANGING: &str = "cch=";
const CONSTANT: &str = "00000";

/// Replaces the value that changes by a constant. With it, no two prompts would begin alike, and nothing of them could be cached.
pub fn with_constant_value(text: &str) -> String {
    let Some(at) = text.trim_start().starts_with(BILLING).then(|| text.find(CHANGING)).flatten() else {
        return text.to_owned();
    };
    let begin = at + CHANGING.len();
    let length = text[begin..].find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(text.len() - begin);
    static NOTED: Once = Once::new();
    NOTED.call_once(|| {
        note(&format!(
            "the value of {CHANGING} in the first block of the system prompt is replaced by {CONSTANT}, so that prompts can be cached"
        ));
    });
    [&text[..begin], CONSTANT, &text[begin + length..]].concat()
}
