//! The CPU backend: buffers in anonymous memory, weights where their files are mapped or copied to each memory node, a pool of threads.
//!
//! [`Cpu`] implements the traits of `sluice-backend`. An operation is a few rounds of tasks on the pool. Which thread runs a task changes no bit of any result.

mod attention;
mod channel_delta;
mod compressed;
mod convolution;
mod cpu;
mod delta_net;
mod elementwise;
mod encoded;
mod exec;
mod matmul;
mod memory;
mod moe;
mod ngrams;
mod numa;
mod pairs;
mod platform;
mod recurrence;
mod resources;
mod scratch;
mod state_space;
mod step;
mod streams;
mod tables;
mod threads;

pub use cpu::Cpu;
pub use moe::{HostExperts, OffloadedExpert};
pub use numa::{Numa, Processors, default_threads};
pub use tables::Tables;
pub use threads::Pool;
