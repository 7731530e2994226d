//! The crate against a local hub: what it fetches, from whom, and what it makes of a hub that misbehaves. The program's tests kill it and fill its disk.

mod arrivals;
mod denials;
mod interruptions;
mod pulls;
mod shelf;
mod support;
