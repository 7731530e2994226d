//! A hub for tests: a local server that answers as huggingface.co does, and misbehaves on demand.
//!
//! The hub itself lists files and redirects large ones to signed addresses of a second server, which stands for the network that has the bytes. It is another
//! host (another port), so a token that reaches it has leaked.
#![forbid(unsafe_code)]

mod content;
mod faults;
mod http;
mod serve;

pub use content::{Content, git_sha1, sha256};
pub use faults::Faults;
pub use http::Request;
pub use serve::TestHub;
