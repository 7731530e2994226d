//! Between people's text and the model's token ids: tokenizer, chat template, incremental detokenizer, stop strings and the
//! defaults that a checkpoint states for generation.
//!
//! The files are the ones that the Python stack reads, and the results are the ones that it gives: `tests/golden/text` holds it to
//! that. All of them are hostile input: a broken one is an error that names the file, never a panic.

mod answers;
mod bpe;
mod compiled;
mod detokenizer;
mod dialogue;
mod embedding;
mod files;
mod generation;
mod guard;
mod image;
mod jinja;
mod messages;
mod model_text;
mod percent;
mod pieces;
mod prompt;
mod python;
mod sandbox;
mod special;
mod stop;
mod strings;
mod template;
mod tojson;
mod tokenizer;

pub use answers::{AnswerParser, Calls, Opened, Reading, Style, Tools};
pub use compiled::Origin;
pub use detokenizer::Detokenizer;
pub use dialogue::Dialogue;
pub use embedding::Embedding;
pub use generation::{GenerationDefaults, stop_ids};
pub use messages::{Message, parse_messages};
pub use model_text::ModelText;
pub use pieces::{Piece, text_of};
pub use prompt::Prompt;
pub use sandbox::{Patience, serve_templates};
pub use stop::StopStrings;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
