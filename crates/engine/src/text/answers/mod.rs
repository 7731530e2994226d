//! The meaning of an answer: which parts of its text are thoughts, and which call tools.
//!
//! Each model family writes and reads them in its own way. [`Style`] tells which, by the text of the chat template. [`AnswerParser`] parses answers while they
//! stream. [`history`] passes earlier answers back to the template so that it writes the text that was generated, whose blocks are then in the prefix cache.

mod call_syntax;
mod dsml;
mod gemma;
mod harmony;
mod history;
mod json;
pub(crate) mod marks;
mod matching;
mod parser;
mod piece_list;
mod reading;
mod sections;
mod stand_in;
mod style;
#[cfg(test)]
mod test_pieces;
mod tools;
mod xtml;

pub(super) use harmony::effort as harmony_effort;
pub(crate) use harmony::marks as harmony_marks;
pub(super) use history::{TemplateHistory, thoughts_in_parts};
pub use parser::AnswerParser;
pub use reading::Reading;
pub(super) use stand_in::Written;
pub use style::{Calls, DsmlBlock, Opened, Style};
pub use tools::Tools;
pub(crate) use xtml::escaped as xtml_escaped;
