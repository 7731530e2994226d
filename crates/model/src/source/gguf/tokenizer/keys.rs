//! Keys that several files read.

/// The kind of vocabulary.
pub const MODEL: &str = "tokenizer.ggml.model";
/// The name of the rule that cuts text into words.
pub const PRE: &str = "tokenizer.ggml.pre";
/// The family: how merges of equal rank are ordered depends on it.
pub const ARCHITECTURE: &str = "general.architecture";
/// The token that ends a text.
pub const EOS: &str = "tokenizer.ggml.eos_token_id";
/// The default chat template. Others are `tokenizer.chat_template.NAME`.
pub const TEMPLATE: &str = "tokenizer.chat_template";
