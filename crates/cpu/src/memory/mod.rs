//! Memory of the CPU backend, and how threads write to it in parallel.

mod buffer;
mod parts;
mod place;
mod rotary;
mod weight;

pub use buffer::Buffer;
pub use parts::{Parts, PerThread, grow, part};
pub use place::Place;
pub use rotary::RotaryTable;
pub use weight::Weight;
