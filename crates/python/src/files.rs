//! Files of tensors, read into memory of their own for whoever makes arrays of it.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use pyo3::prelude::*;
use sluice_store::load::{OpenCheckpoint, OpenFile};
use sluice_store::safetensors::Header;
use sluice_store::{Checkpoint, LoadMode, LoadOptions, Loading, load, resident_bytes};

use crate::errors;
use crate::options::LOADS;
use crate::waiting::on_thread;

/// Files of which so large a part is cached are read through the page cache: a copy is faster than the disk.
const CACHED: f64 = 0.5;
/// How often a load is looked at.
const POLL: Duration = Duration::from_millis(2);

/// A file of safetensors in memory. The memory is this object's: whoever uses an address keeps it alive.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct LoadedFile {
    checkpoint: Checkpoint,
    loading: Loading,
    metadata: Vec<(String, String)>,
}

fn read(path: &Path, mode: LoadMode, stop: &AtomicBool) -> Result<LoadedFile> {
    let file = OpenFile::open(path)?;
    let len = file.bytes().len() as u64;
    let header = Header::read(file.file(), len, path)?;
    let mode = match mode {
        LoadMode::Auto if resident_bytes(file.file(), 0, len).unwrap_or(0) as f64 > CACHED * len as f64 => {
            LoadMode::Pread
        }
        // Pages of a map cannot be written to, as those who get tensors may want.
        LoadMode::Auto | LoadMode::Mmap => LoadMode::Direct,
        mode => mode,
    };
    let metadata = header.metadata.into_iter().collect();
    let opened = OpenCheckpoint::of_files(path, vec![(file, header.tensors)])?;
    let (checkpoint, loading) =
        load::begin(opened, &LoadOptions { mode, ..LoadOptions::default() }, |_| HashSet::new())?;
    loading.start(checkpoint.tensors().iter().map(|tensor| &tensor.bytes));
    let progress = loading.progress();
    while !progress.is_over() {
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        thread::sleep(POLL);
    }
    loading.finish()?;
    Ok(LoadedFile { checkpoint, loading, metadata })
}

#[pymethods]
impl LoadedFile {
    /// Reads a file: `auto` takes the page cache if most of the file is there, and else `direct`.
    #[new]
    #[pyo3(signature = (path, reader="auto"))]
    fn new(py: Python<'_>, path: PathBuf, reader: &str) -> PyResult<LoadedFile> {
        let mode = LOADS.iter().find(|(name, _)| *name == reader && reader != "mmap").map(|(_, mode)| *mode);
        let mode = mode.ok_or_else(|| errors::argument("reader", "auto, pread or direct", format!("{reader:?}")))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || read(&path, mode, &stopped).map_err(|e| errors::model(&e));
        on_thread(py, "read", work, || stop.store(true, Ordering::Relaxed))
    }

    /// (name, type, shape, address, bytes) of each tensor, in the order of the file.
    fn tensors(&self) -> Vec<(String, &'static str, Vec<usize>, usize, usize)> {
        let one = |tensor: &sluice_store::Tensor| {
            let address = tensor.bytes.as_ptr() as usize;
            (tensor.name.to_string(), tensor.dtype.name(), tensor.shape.clone(), address, tensor.bytes.len())
        };
        self.checkpoint.tensors().iter().map(one).collect()
    }

    /// The file's own `__metadata__`.
    #[getter]
    fn metadata(&self) -> Vec<(String, String)> {
        self.metadata.clone()
    }

    /// How it was read, and fallbacks.
    #[getter]
    fn notes(&self) -> Vec<String> {
        let files = self.loading.files().iter().map(|file| format!("{}: {}", file.mode.name(), file.reason));
        files.chain(self.loading.notes()).collect()
    }
}
