//! A model behind HTTP, in the dialects that people's tools speak. The engine runs on a thread of its own; a request is a submission to it and a stream of
//! what comes of it.
#![forbid(unsafe_code)]

mod answer;
mod app;
mod error;
mod metrics;
mod openai;
mod page;
mod runtime;

pub use app::{Bound, Ready, Server, Settings, memory};
pub use runtime::Limits;
