//! The engine's thread. Between steps it takes commands, and after each step it sends every request what the step has produced. It sleeps when there is nothing
//! to do.
//!
//! No request can block it: updates go into unbounded channels, which a server task empties at once, however slowly the client reads (`api/stream.rs`). A channel
//! whose receiver is gone cancels its sequences. Whenever the thread ends without being told to, by an error or a panic, all requests get the reason and the
//! server ends.

pub mod commands;
pub mod thread;
mod worker;
