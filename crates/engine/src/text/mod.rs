//! Between text and token ids: tokenizer, chat template, detokenizer, stop strings, answers, and a checkpoint's defaults for generation.
//!
//! The files are those of the Python stack, and the results are the same: `tests/golden/text` checks that. All files are untrusted. A broken one is an error that
//! names it, never a panic.

mod answers;
mod byte_level;
mod detokenizer;
mod dialogue;
mod embedding;
mod files;
mod generation;
mod guard;
mod messages;
mod model_text;
mod pieces;
mod prompt;
mod stop;
mod template;
mod tokenizer;

pub use answers::{AnswerParser, Calls, DsmlBlock, Opened, Reading, Style, Tools};
pub(crate) use answers::{harmony_marks, marks, xtml_escaped};
pub use detokenizer::Detokenizer;
pub use dialogue::Dialogue;
pub use embedding::Embedding;
pub use generation::{GenerationDefaults, stop_ids};
pub use messages::{Message, parse_messages};
pub use model_text::ModelText;
pub use pieces::{Piece, text_of};
pub use prompt::Prompt;
pub use stop::StopStrings;
pub use template::{ChatTemplate, Patience, serve_templates};
pub use tokenizer::{Origin, Tokenizer};
