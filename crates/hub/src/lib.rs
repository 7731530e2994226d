//! Models by name: reads names of the Hugging Face hub, finds their files in the cache that Hugging Face's own programs share, and fetches what is missing.
//!
//! What this crate promises:
//! - What lies in the cache is found without asking anybody.
//! - A file under its final name is whole: its bytes were summed and are on the disk. Whatever interrupts a transfer, the next one goes on with the bytes that are there.
//! - The token goes to the hub and to no other host.
//!
//! What the hub says is untrusted: names, sizes and lists are checked here, once.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod api;
mod arrival;
mod cache;
mod client;
mod digest;
mod error;
mod fuzzing;
mod known;
mod lock;
mod name;
mod partial;
mod pull;
mod quant;
mod selection;
mod settings;
mod shelf;
mod transfer;
mod url;
mod watch;

pub use arrival::{Arrival, ArrivingFile};
pub use cache::{followed, is_cached, origin};
pub use client::Client;
pub use error::{Error, Result};
#[doc(hidden)]
pub use fuzzing::read_answer;
pub use known::likely;
pub use name::{Choice, ModelName, Repo};
pub use pull::{Begun, Extent, Model, find, pull, pull_in_use};
pub use quant::GgufName;
pub use quant::read as read_gguf_name;
pub use settings::Settings;
pub use shelf::{Finding, Listed, list, remove, verify};
pub use url::Url;
pub use watch::{Event, Planned, Watch};
