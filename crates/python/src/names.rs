//! What a model's name means: a path that is there, or a model of the hub's, which is fetched if it is not in the cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use pyo3::prelude::*;
use sluice_hub::{Client, Event, Extent, Watch};

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
    sluice_front::resolve(Path::new(named), Extent::Whole, |settings, name| {
        Ok(sluice_hub::pull(&Arc::new(Client::new(settings)), name, Extent::Whole, watch)?.path)
    })
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
