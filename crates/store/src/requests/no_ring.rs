//! Where there is no io_uring.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::flight::Flight;
use super::request::{Completion, ReadFaults};
use crate::load::Source;

/// How long a waiting thread would poll before it sleeps.
pub const SPIN: Duration = Duration::ZERO;

/// A ring, of which there can be none.
pub(super) enum Ring {}

impl Ring {
    /// # Errors
    /// Always.
    pub fn new(_depth: usize, _faults: Option<Arc<dyn ReadFaults>>) -> io::Result<Ring> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn push(&mut self, _flight: Flight) {
        match *self {}
    }

    pub fn enter(&mut self, _files: &[Arc<Source>], _wanted: usize) {
        match *self {}
    }

    pub fn wait(&mut self, _files: &[Arc<Source>]) {
        match *self {}
    }

    pub fn collect(&mut self, _files: &[Arc<Source>], _notes: &mut Vec<String>, _each: impl FnMut(Completion)) {
        match *self {}
    }
}
