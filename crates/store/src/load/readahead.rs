//! Reading ahead while a device starts and the disk has nothing else to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use super::bring::populate_cache;
use super::choose;
use super::opened::OpenCheckpoint;
use super::options::{LoadMode, LoadOptions};
use super::read::ReadFile;
use crate::error::Error;
use crate::map::Map;

/// Reads a checkpoint's files into the page cache, in order, until all of them are there or this is dropped. Errors
/// are left to the load.
#[derive(Debug)]
pub struct ReadAhead {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ReadAhead {
    /// For a load with these options: files that it will map, if there is memory for all of them. `open` opens the checkpoint, on the thread that reads.
    pub fn begin(
        open: impl FnOnce() -> Result<OpenCheckpoint, Error> + Send + 'static,
        options: &LoadOptions,
    ) -> ReadAhead {
        let stopped = Arc::new(AtomicBool::new(false));
        let (options, stop) = (options.clone(), Arc::clone(&stopped));
        let thread = thread::Builder::new().name("sluice-ahead".into());
        // Without a thread it is read later.
        let thread = thread.spawn(move || read_all(open, &options, &stop)).ok();
        ReadAhead { stopped, thread }
    }

    /// Waits until reading ahead is over.
    pub fn wait(mut self) {
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

fn read_all(open: impl FnOnce() -> Result<OpenCheckpoint, Error>, options: &LoadOptions, stopped: &AtomicBool) {
    if !matches!(options.mode, LoadMode::Auto | LoadMode::Mmap) {
        return;
    }
    let Ok(OpenCheckpoint { files, .. }) = open() else { return };
    let total: u64 = files.iter().map(|file| file.len).sum();
    if options.copy_budget.is_some_and(|room| room < total) {
        return;
    }
    for file in files.iter().filter(|file| choose::is_read_ahead(file, options)) {
        read(file, options, stopped);
    }
}

fn read(file: &ReadFile, options: &LoadOptions, stopped: &AtomicBool) {
    let Ok(map) = Map::file(&file.buffered, file.len as usize) else { return };
    let (next, size) = (AtomicU64::new(0), options.request(LoadMode::Mmap) as u64);
    let work = || {
        while !stopped.load(Ordering::Relaxed) {
            let from = next.fetch_add(size, Ordering::Relaxed);
            let chunk = from as usize..(from + size).min(file.len) as usize;
            if from >= file.len || populate_cache(file, &map, chunk).is_err() {
                break;
            }
        }
    };
    thread::scope(|scope| {
        (1..options.threads).for_each(|_| drop(thread::Builder::new().spawn_scoped(scope, work)));
        work();
    });
}
