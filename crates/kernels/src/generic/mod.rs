//! Portable Rust, the oracle for every other instruction set.

mod bytes;
mod encode;
mod integers;
mod lanes;
mod pairs;
mod peak;
mod unpack;

/// Sixteen lanes in an array.
#[derive(Clone, Copy)]
pub struct Generic16([f32; 16]);
