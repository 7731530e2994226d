//! Packing turns a checkpoint into quantised safetensors, in bounded memory: in MLX's layout, or as a bundle that experts stream from.
//!
//! [`pack`] does it. `planner` decides from headers alone what becomes of each tensor, `layout` where it goes, and `write` writes it. `calibrate` fits experts to
//! their inputs. `journal` remembers which files are complete, and `folder` makes sure that only a complete model looks like one. [`compare`] measures the
//! error afterwards.
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
