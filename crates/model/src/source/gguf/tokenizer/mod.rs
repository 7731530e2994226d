//! The tokenizer that a file's metadata describes, as the texts that a Hugging Face folder has: `tokenizer.json`, `tokenizer_config.json` and
//! `generation_config.json`.
//!
//! Metadata has the vocabulary, and of the rules only names. What a name stands for is known from the models that have it: it is what their own
//! `tokenizer.json` says. Where llama.cpp approximates (it knows no Unicode normalisation, for example), the models' own files count. A name that is not
//! known is an error, because a guess would cut text in another way than the model has learned, and nobody would see it.

mod files;
mod json;
mod keys;
mod pieces;
mod pre_tokenizer;
mod special;
mod templates;
mod text;
mod vocabulary;

pub use files::MetadataFiles;
pub use text::{fingerprint, main_key, text_file, tokenizer_json, tokenizer_name};
