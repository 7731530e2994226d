//! What systems do in ways of their own: one file for each, with the same functions. Everything else here is what POSIX has.
//!
//! Another system is a file beside these, and a line below.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "macos")]
mod macos;

#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(target_os = "macos")]
pub(crate) use macos::*;
