//! Files that are read while their bytes still arrive, such as from a network.
//!
//! This crate does not know who brings the bytes. Whoever does registers the open file here, for as long as it is read: then every reader of that file, under
//! whatever name, waits for the parts that it is about to read, and has them brought before the rest.
//!
//! Until such a file is whole, changes of it are no errors. Then it is looked at once more, and from there on it is like any other.

use std::fmt::Debug;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::error::Error;

/// How long a reader sleeps until it looks again. Bytes come from far away: a few of these are not felt.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Brings the bytes of a file.
pub trait Arriving: Debug + Send + Sync {
    /// Whether a part of the file is there.
    ///
    /// # Errors
    /// Why it never will be, or why nothing of the file is to be used.
    fn has(&self, part: &Range<u64>) -> Result<bool, String>;

    /// Has a part brought before the rest. `waits`: somebody waits for it, rather than will, after what was asked for before it.
    fn ask(&self, part: &Range<u64>, waits: bool);

    /// Whether all of the file is there and known to be right. Then this changes no more.
    ///
    /// # Errors
    /// As for [`Arriving::has`].
    fn is_whole(&self) -> Result<bool, String>;
}

/// Device and inode, and who brings its bytes.
type Known = ((u64, u64), Arc<dyn Arriving>);

static FILES: Mutex<Vec<Known>> = Mutex::new(Vec::new());

fn files() -> MutexGuard<'static, Vec<Known>> {
    FILES.lock().unwrap_or_else(|e| e.into_inner())
}

fn key(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// As long as this exists, whoever opens the file knows that it is arriving. Whoever opened it before keeps to it.
#[derive(Debug)]
pub struct ArrivingHere(Arc<dyn Arriving>);

/// Registers an open file whose bytes are arriving.
///
/// # Errors
/// When the system does not tell which file it is.
pub fn register(file: &File, arriving: Arc<dyn Arriving>) -> io::Result<ArrivingHere> {
    let known = (key(&file.metadata()?), Arc::clone(&arriving));
    files().push(known);
    Ok(ArrivingHere(arriving))
}

impl Drop for ArrivingHere {
    fn drop(&mut self) {
        files().retain(|(_, other)| !Arc::ptr_eq(other, &self.0));
    }
}

/// The source of this file's bytes, if it is arriving.
pub(crate) fn find(found: &Metadata) -> Option<Arc<dyn Arriving>> {
    let key = key(found);
    files().iter().rev().find(|(other, _)| *other == key).map(|(_, arriving)| Arc::clone(arriving))
}

/// Waits for a part of a file.
pub(crate) fn wait(arriving: &dyn Arriving, part: &Range<u64>) -> Result<(), String> {
    if arriving.has(part)? {
        return Ok(());
    }
    arriving.ask(part, true);
    while !arriving.has(part)? {
        thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

pub(crate) fn error(path: &Path, why: String) -> Error {
    Error::NotArrived { path: path.to_owned(), why }
}
