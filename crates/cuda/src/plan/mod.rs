//! What steps take and what the hardware gives: scratch known beforehand, profiles, and probes of a device.

pub mod probes;
pub mod profile;
pub mod scratch;
