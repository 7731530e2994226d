//! Ollama's dialect: `/api/chat`, `/api/generate`, `/api/embed`, and what its clients ask about the server and its models.

pub mod catalog;
pub mod embed;
pub mod encoder;
pub mod endpoints;
pub mod error;
pub mod names;
pub mod options;
pub mod request;
