//! What a model's answer means: which parts of its text are thoughts, and which call tools.
//!
//! Each family of models writes them in its own way, and reads its own way when a conversation goes on. [`Style`] says which way that is, by what the chat template
//! itself writes; [`AnswerParser`] takes the text apart as it comes; `echo.rs` hands what clients send back to the template such that it writes the very text that was
//! generated, so that what was computed of it is found again.

mod history;
mod json;
mod parser;
mod reading;
mod style;
mod tools;

pub(super) use history::TemplateHistory;
pub use parser::AnswerParser;
pub use reading::Reading;
pub use style::{Calls, Opened, Style};
pub use tools::Tools;

/// What families write around thoughts and calls.
pub(crate) const THINK: &str = "<think>";
pub(crate) const THOUGHT: &str = "</think>";
pub(crate) const CALL: &str = "<tool_call>";
pub(crate) const CALLED: &str = "</tool_call>";
