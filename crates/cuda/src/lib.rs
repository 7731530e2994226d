//! The second backend: an NVIDIA GPU, with the bits of `docs/numerics.md`.
//!
//! libcuda is loaded when a device is asked for, so the same binary runs where there is none, and the driver is all that a user needs: kernels are embedded as
//! PTX (`kernels`). One file is one idea: the driver and a device (`driver`), memory, kernels and what they are given (`kernels`, `parameters`), weights, what a
//! step is told (`step`), and then each family of operations beside its `.cu` file in `kernels/`.
//!
//! Work is split as on the CPU: by output rows, heads and columns, never inside a sum whose order counts. All of a backend's work is in one stream; the host
//! waits at the end of a step, and within it only for experts that are on disk.

mod attention;
mod backend;
mod coherence;
mod delta_net;
mod driver;
mod expert_pool;
mod gemv;
mod graphs;
mod grouped_gemm;
mod host_split;
mod kernels;
mod loading;
mod mailbox;
mod matmul;
mod memory;
mod mixture;
mod mixture_one;
mod parameters;
mod pipeline;
mod quiet;
mod roofline;
mod sampling;
mod sizing;
mod split;
mod step;
mod streaming;
mod streams;
mod tables;
mod timing;
mod weights;

pub use backend::Cuda;
pub use driver::{count, describe, open};
pub use host_split::Host;
pub use kernels::{Kernel, embedded_bytes};
pub use pipeline::Pipeline;
pub use roofline::Probes;
