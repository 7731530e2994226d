//! What an unfinished packing remembers: which files of the output are whole, and for which command. It is written after each file, so that whatever ends a
//! packing (Ctrl-C, `kill -9`, a full disk) costs the unfinished files and no more.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use sluice_store::bundle::{ExpertLayer, FileEntry};
use sluice_store::{AtomicFile, Error, read_small};

use crate::quantize::SquaredError;

pub const NAME: &str = ".sluice-pack.json";
/// Bytes that it may have: a few thousand for each file of weights.
const MAX_JOURNAL: u64 = 64 << 20;

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Journal {
    /// Of everything that decides what the files hold: only the same packing goes on.
    pub fingerprint: String,
    pub done: BTreeMap<String, Finished>,
}

/// A file that is whole.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Finished {
    pub entry: FileEntry,
    /// The layer and its experts' place in the file.
    pub experts: Option<(usize, ExpertLayer)>,
    /// By class of module.
    pub errors: BTreeMap<String, SquaredError>,
    /// What the calibration had to say of it.
    pub notes: Vec<String>,
}

pub fn path(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

impl Journal {
    /// The journal of `folder`, if there is one that can be parsed. Files that are not as it says are left out of it.
    ///
    /// # Errors
    /// Something else than a file in its place, one that is too large, or that cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Journal>> {
        let path = path(folder);
        let missing = |cause: &std::io::Error| matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
        let text = match read_small(&path, MAX_JOURNAL) {
            Err(Error::Io { cause, .. }) if missing(&cause) => return Ok(None),
            text => text?,
        };
        // It was renamed to its place whole; another program's file of that name is ignored.
        let Ok(mut journal) = serde_json::from_slice::<Journal>(&text) else { return Ok(None) };
        journal.done.retain(|name, f| fs::metadata(folder.join(name)).is_ok_and(|m| m.len() == f.entry.bytes));
        Ok(Some(journal))
    }

    pub fn write(&self, folder: &Path) -> Result<()> {
        let mut file = AtomicFile::create(&path(folder))?;
        file.write_all(&serde_json::to_vec_pretty(self)?)?;
        Ok(file.commit()?)
    }
}
