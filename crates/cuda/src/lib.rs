//! The backend for NVIDIA GPUs. Its results have the bits of `docs/numerics.md`.
//!
//! libcuda is loaded when a device is opened, so the same binary runs without one, and the driver is all that a user needs: the kernels that `scripts/kernels` made are embedded ([`kernels`]).
//! `device` wraps the driver; `ops` has the operations of a step, and `moe` those of mixtures; `multi` makes one backend of several GPUs; `plan` knows what steps take.
//!
//! As on the CPU, work is divided by output rows, heads and columns, never inside a sum whose order matters. All work of a backend is in one stream. The host waits at the
//! end of a step, and within it only for experts that are not on the device.

mod backend;
mod blocks;
mod caches;
mod cuda;
mod device;
mod kernels;
mod loading;
mod moe;
mod multi;
mod ops;
mod parameters;
mod plan;
mod weights;

pub use cuda::Cuda;
pub use device::device::{describe, open};
pub use device::sys::count;
pub use kernels::{Kernel, embedded_bytes, row_bytes_on_device};
pub use moe::host_split::HostOffload;
pub use multi::pipeline::Pipeline;
pub use plan::probes::Probes;
