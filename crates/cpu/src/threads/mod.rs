//! Threads of the CPU backend: the pool that runs tasks, and how many of its threads short steps use.

mod pool;
mod threading;
mod tuner;

pub use pool::Pool;
pub use tuner::{SHORT, ThreadTuner, Waits};
