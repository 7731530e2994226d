//! What everything that opens an engine for a user shares, the program and the Python package: the machine's memory, kinds of devices, what a model's name
//! means, and how an engine is opened.
#![forbid(unsafe_code)]

mod device;
pub mod machine;
mod names;
mod opening;
mod quantisations;

pub use device::{Device, DeviceArg, Probes};
pub use names::{is_below_a_folder, is_path, named_at, resolve};
pub use opening::{naming, open};
pub use quantisations::{name_of, quantisations};
