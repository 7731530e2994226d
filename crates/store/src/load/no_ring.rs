//! Where there is no io_uring.

use super::read::ReadFile;
use super::sink::ChunkSink;

/// # Errors
/// Always.
pub(crate) fn read(_files: &[&ReadFile], _sink: &dyn ChunkSink, _depth: usize) -> Result<(), String> {
    Err("no io_uring on this system; direct reads by threads instead".into())
}
