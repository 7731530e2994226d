//! What routers chose: recorded in files, and replayed by a simulator.

mod recording;
pub mod simulate;

pub use recording::{MAX_RECORDING, Recording};
