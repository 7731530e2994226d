//! The prompt cache on disk, looked at from outside of an engine: what `sluice cache` does. Each call opens the folder and closes it again, and answers with JSON.

use std::path::PathBuf;

use anyhow::{Context, Result};
use pyo3::prelude::*;
use serde_json::{Value, json};
use sluice_cache::disk::{DiskCache, Error, FileKey, ModelStat};

use crate::errors;
use crate::waiting::detached;

/// A folder of a prompt cache.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct PromptCache {
    folder: PathBuf,
    key_file: Option<PathBuf>,
}

impl PromptCache {
    fn key(&self) -> Result<Option<FileKey>> {
        Ok(self.key_file.as_deref().map(FileKey::read).transpose()?)
    }

    /// The cache for this call alone.
    fn open(&self) -> Result<DiskCache> {
        Ok(DiskCache::open_existing(&self.folder, self.key()?)?)
    }

    /// The same, or while another process uses it what that has written so far; then the second value is true.
    fn look(&self) -> Result<(DiskCache, bool)> {
        match DiskCache::open_existing(&self.folder, self.key()?) {
            Err(Error::InUse { .. }) => Ok((DiskCache::look_at(&self.folder, self.key()?)?, true)),
            opened => Ok((opened?, false)),
        }
    }

    fn answer(&self, py: Python<'_>, ask: impl FnOnce() -> Result<Value> + Send) -> PyResult<String> {
        let folder = || self.folder.display().to_string();
        detached(py, || {
            let answer = ask().map_err(|e| if format!("{e:#}").contains(&folder()) { e } else { e.context(folder()) });
            answer.map(|value| value.to_string()).map_err(|e| errors::model(&e))
        })
    }
}

#[pymethods]
impl PromptCache {
    #[new]
    #[pyo3(signature = (folder, key_file=None))]
    fn new(folder: PathBuf, key_file: Option<PathBuf>) -> PromptCache {
        PromptCache { folder, key_file }
    }

    /// Totals, and what is kept of which model.
    fn stat(&self, py: Python<'_>) -> PyResult<String> {
        self.answer(py, || {
            let (mut cache, in_use) = self.look()?;
            let stat = cache.stat()?;
            let model = |(fingerprint, m): (&u64, &ModelStat)| {
                json!({
                    "fingerprint": format!("{fingerprint:016x}"), "name": m.model.name, "path": m.model.path, "entries": m.entries, "states": m.states,
                    "tokens": m.tokens, "bytes": m.bytes, "hits": m.model.hits, "last_hit": (m.model.used > 0).then_some(m.model.used),
                })
            };
            // A cache that was never written to has no quota yet.
            let quota = (stat.quota < u64::MAX).then_some(stat.quota);
            Ok(json!({
                "folder": self.folder.display().to_string(), "quota": quota, "bytes": stat.bytes, "slabs": stat.slabs, "slab_bytes": stat.slab_bytes,
                "encrypted": stat.encrypted, "written_today": stat.written_today, "in_use": in_use,
                "models": stat.models.iter().map(model).collect::<Vec<Value>>(),
            }))
        })
    }

    /// Reads all of it; what is wrong is removed.
    fn verify(&self, py: Python<'_>) -> PyResult<String> {
        self.answer(py, || {
            let mut cache = self.open()?;
            let verified = cache.verify(|_, _| ())?;
            Ok(json!({
                "entries": verified.entries, "bytes": verified.bytes, "wrong": verified.wrong, "unreachable": verified.unreachable,
                "index": cache.inconsistencies()?,
            }))
        })
    }

    /// Gives back what is not needed.
    fn gc(&self, py: Python<'_>) -> PyResult<String> {
        self.answer(py, || {
            let (removed, bytes) = self.open()?.collect_garbage()?;
            Ok(json!({"removed": removed, "bytes": bytes}))
        })
    }

    /// Removes all of it.
    fn clear(&self, py: Python<'_>) -> PyResult<String> {
        self.answer(py, || {
            DiskCache::clear_folder(&self.folder).context("cannot be cleared")?;
            Ok(Value::Null)
        })
    }
}
