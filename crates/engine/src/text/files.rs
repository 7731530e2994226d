//! The small JSON files beside a checkpoint.

use anyhow::{Context, Result};
use serde_json::Value;
use sluice_model::source::{TextFiles, is_missing};
use sluice_store::MAX_SETTINGS;

/// Reads the JSON in file `name`; `None` if there is no such file.
///
/// # Errors
/// A file that cannot be read, or is not JSON. The message names the file, line and column.
pub(super) fn read_json(files: &dyn TextFiles, name: &str) -> Result<Option<Value>> {
    match files.read(name, MAX_SETTINGS) {
        Ok(bytes) => {
            let json = serde_json::from_slice(&bytes).with_context(|| files.locate(name).display().to_string())?;
            Ok(Some(json))
        }
        Err(e) if is_missing(&e) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
