//! Portable Rust, the oracle for every other instruction set.

mod bf16_dot;
mod bytes;
mod encode;
mod f32_dot;
mod int11_dot;
mod int8_dot;
mod peak;
mod unpack;

/// Sixteen lanes in an array.
#[derive(Clone, Copy)]
pub struct Generic16([f32; 16]);
