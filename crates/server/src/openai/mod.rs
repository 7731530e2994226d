//! OpenAI's dialect: `/v1/completions`, `/v1/chat/completions`, `/v1/responses`, `/v1/embeddings`.

pub mod chat;
pub mod chat_fields;
pub mod completions;
pub mod embeddings;
mod fields;
mod reply;
pub mod responses;
pub mod sessions;

pub use fields::{SamplingFields, Stop};
