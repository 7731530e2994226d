//! The driver and what it gives: devices, streams, events, memory and graphs. Nothing here knows a model.

pub mod copies;
#[expect(clippy::module_inception, reason = "the device itself, beside its streams and memory")]
pub mod device;
pub mod event;
pub mod graph;
pub mod memory;
pub mod pinned;
pub mod retired;
pub mod shared;
pub mod stream;
pub mod sys;
pub mod wait;
