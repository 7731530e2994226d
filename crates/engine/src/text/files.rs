//! The small JSON files beside a checkpoint.

use anyhow::{Context, Result};
use serde_json::Value;
use sluice_store::{Error, MAX_SETTINGS, read_small};
use std::io::ErrorKind;
use std::path::Path;

/// Reads the JSON in `folder/name`; `None` if there is no such file.
///
/// # Errors
/// A file that cannot be read, or is not JSON. The message names the file, line and column.
pub(super) fn read_json(folder: &Path, name: &str) -> Result<Option<Value>> {
    let path = folder.join(name);
    match read_small(&path, MAX_SETTINGS) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?)),
        Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.into()),
    }
}
