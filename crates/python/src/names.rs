//! What a model's name means: a path that is there, or a model of the hub's, which is fetched if it is not in the cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail, ensure};
use pyo3::prelude::*;
use sluice_engine::source;
use sluice_hub::{Client, Event, Extent, ModelName, Settings, Watch};

use crate::errors;
use crate::waiting::on_thread;

/// Hears of a transfer.
struct Progress {
    stop: Arc<AtomicBool>,
    /// Called with bytes that are there, and all bytes.
    told: Option<Py<PyAny>>,
}

impl Watch for Progress {
    fn event(&self, event: Event) {
        if let (Some(told), Event::Progress { done, all }) = (&self.told, event) {
            // An exception of the callback is no reason to stop.
            Python::attach(|py| told.call1(py, (done, all)).map_or_else(|e| e.write_unraisable(py, None), drop));
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

fn path_of(named: &str, watch: &Progress) -> Result<PathBuf> {
    let path = Path::new(named);
    ensure!(!named.is_empty(), "the model's name is empty");
    if path.exists() {
        return the_one_in(sluice_hub::followed(path.to_owned())?);
    }
    let is_path = ["/", "./", "../", "~"].iter().any(|begin| named.starts_with(begin));
    let is_file = [".gguf", ".safetensors", ".json"].iter().any(|end| named.ends_with(end)) && !named.contains(':');
    if is_path || is_file {
        bail!("{named}: no such folder or file");
    }
    let settings = Settings::from_env()?;
    let name = match ModelName::parse(named, settings.host()) {
        Ok(name) => name,
        Err(e) => bail!("{named}: no such folder or file; {e}"),
    };
    if let Some(model) = sluice_hub::find(&settings, &name, Extent::Whole) {
        return Ok(model.path);
    }
    Ok(sluice_hub::pull(&Arc::new(Client::new(settings)), &name, Extent::Whole, watch)?.path)
}

/// The model that a folder means.
fn the_one_in(path: PathBuf) -> Result<PathBuf> {
    if path.is_dir() && !path.join("config.json").is_file() {
        let files = source::gguf_files(&path).unwrap_or_default();
        if files.len() > 1 {
            let list: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            bail!("{}: several GGUF models in one folder; name one of them: {}", path.display(), list.join(", "));
        }
    }
    Ok(path)
}

/// The folder or the file of a model. `progress(done, all)` hears of bytes that are fetched.
#[pyfunction]
#[pyo3(signature = (name, progress=None))]
pub fn resolve(py: Python<'_>, name: String, progress: Option<Py<PyAny>>) -> PyResult<PathBuf> {
    let stop = Arc::new(AtomicBool::new(false));
    let watch = Progress { stop: Arc::clone(&stop), told: progress };
    let work = move || path_of(&name, &watch).map_err(|e| errors::model(&e));
    on_thread(py, "pull", work, || stop.store(true, Ordering::Relaxed))
}
