//! What all dialects share: requests once they are parsed, and answers before they are worded.

pub mod answer;
pub mod blocks;
pub mod chat;
pub mod conversation;
pub mod embeddings;
pub mod fields;
pub mod messages;
pub mod output_spec;
pub mod pending;
pub mod prompt;
pub mod sampling;
pub mod stream;
