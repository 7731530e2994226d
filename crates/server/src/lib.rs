//! A server for language models. It speaks the dialects of OpenAI's, Anthropic's and Ollama's clients. The engine runs on a thread of its own; a request is a
//! submission to it and a stream of updates from it.
//!
//! - [`http`]: connections, access, routes, and what every request carries with it.
//! - [`local`]: a server without sockets, inside of another program.
//! - [`models`]: which model is in memory, and the thread of its engine.
//! - [`api`]: requests and answers independent of dialects.
//! - [`openai`], [`anthropic`], [`ollama`]: one folder per dialect, with its endpoints, its requests and the encoding of its answers.
#![forbid(unsafe_code)]
// Schemas are long macro arguments.
#![recursion_limit = "512"]

mod anthropic;
mod api;
mod clock;
mod http;
mod local;
mod log;
mod metrics;
mod models;
mod ollama;
mod openai;
mod request_check;

pub use http::access::{Access, Keys};
pub use http::listen::Bound;
pub use http::server::Server;
pub use http::settings::{Limits, Settings, memory};
pub use local::{LocalServer, Reply, ReplyPart};
pub use models::facts::ModelFacts;
pub use models::loaded::LoadedModel;
pub use models::manager::Offer;
pub use models::runtime::commands::{Submission, Update};
pub use models::runtime::thread::{Refused, Ticket};
pub use request_check::check_request;
