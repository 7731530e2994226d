//! The journal of an unfinished packing: which output files are complete, and for which command. It is written after each file, so that an interruption (Ctrl-C,
//! `kill -9`, a full disk) costs unfinished files only.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use sluice_store::bundle::{ExpertLayer, FileEntry};
use sluice_store::{AtomicFile, Error, read_small};

use crate::quantize::SquaredError;

/// Its file name in the output folder.
pub const NAME: &str = ".sluice-pack.json";
/// The most bytes of a journal: a few thousand for each file of weights.
const MAX_JOURNAL: u64 = 64 << 20;

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Journal {
    /// A hash of everything that decides the files' bytes: only the same packing may go on.
    pub fingerprint: String,
    pub done: BTreeMap<String, Finished>,
}

/// A complete file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Finished {
    pub entry: FileEntry,
    /// The layer, and where in the file its experts are.
    pub experts: Option<(usize, ExpertLayer)>,
    /// Errors by class of module.
    pub errors: BTreeMap<String, SquaredError>,
    /// Messages of the calibration.
    pub notes: Vec<String>,
}

pub fn path(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

impl Journal {
    /// The journal in `folder`, if it can be parsed, without the files that have changed since.
    ///
    /// # Errors
    /// It is no regular file, too large, or cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Journal>> {
        let path = path(folder);
        let missing = |cause: &std::io::Error| matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
        let text = match read_small(&path, MAX_JOURNAL) {
            Err(Error::Io { cause, .. }) if missing(&cause) => return Ok(None),
            text => text?,
        };
        // Ours was renamed into place, so it is complete; a file that cannot be parsed is another program's.
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
