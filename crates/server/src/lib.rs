//! A model behind HTTP, in the dialects that people's tools speak. The engine runs on a thread of its own; a request is a submission to it and a stream of
//! what comes of it.
#![forbid(unsafe_code)]
// Schemas that are written down are long.
#![recursion_limit = "512"]

mod access;
mod answer;
mod anthropic;
mod app;
mod blocks;
mod bodies;
mod context;
mod embeddings;
mod error;
mod facts;
mod given;
mod listen;
mod metrics;
mod model_manager;
mod models;
mod ollama;
mod openai;
mod openapi;
mod outbox;
mod output_spec;
mod page;
mod reply;
mod request;
mod runtime;
mod tokenize;

pub use access::{Access, Keys};
pub use app::{Bound, LoadedModel, Server, Settings, memory};
pub use bodies::read;
pub use facts::Facts;
pub use model_manager::Offer;
pub use runtime::Limits;

/// One line on standard error.
fn note(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "sluice: {line}");
}
