//! Packing: a checkpoint to quantised safetensors, in bounded memory, as MLX's layout or as a bundle that experts stream from.
//!
//! [`pack`] does it. `planner` says from the headers alone what becomes of each tensor, `layout` into which files and where, `write` carries it out, `calibrate`
//! looks at what experts see where that is wanted, `journal` remembers what is whole, and `folder` sees to it that what looks like a model is one. [`compare`]
//! looks at what came of it.
#![forbid(unsafe_code)]

mod calibrate;
mod compare;
mod config;
mod conversion;
mod folder;
mod input;
mod journal;
mod layout;
mod ordered;
mod planner;
mod quantize;
mod rules;
mod run;
mod space;
mod watch;
mod write;

pub use calibrate::Calibration;
pub use compare::{Compared, compare};
pub use conversion::Conversion;
pub use layout::Layout;
pub use quantize::SquaredError;
pub use rules::{Rule, Rules, parse_bits, parse_group, parse_recipe};
pub use run::{ClassReport, Error, Outcome, PackOptions, Report, pack};
pub use sluice_kernels::quantize::Rounding;
pub use space::Space;
pub use watch::{Event, Watch};
