//! Anthropic's dialect: `/v1/messages` and `/v1/messages/count_tokens`.

pub mod content;
pub mod encoder;
pub mod endpoints;
pub mod error;
pub mod request;
pub mod system;
pub mod tools;
