//! OpenAI's dialect: chat completions, completions, responses and embeddings, with the extensions of other servers that use the same API (vLLM, llama-server).

pub mod chat;
pub mod chunks;
pub mod completions;
pub mod embeddings;
pub mod logprobs;
pub mod messages;
pub mod output_fields;
pub mod prompt;
pub mod responses;
pub mod sessions;
pub mod tokenize;
