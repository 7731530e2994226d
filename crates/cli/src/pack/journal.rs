//! What an unfinished packing remembers: which files of the output are whole, and for which command. It is written after each file, so that whatever ends a
//! packing (Ctrl-C, `kill -9`, a full disk) costs the files under way and no more.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sluice_store::AtomicFile;
use sluice_store::bundle::{ExpertLayer, FileEntry};

use super::quantize::Error;

const NAME: &str = ".sluice-pack.json";

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
    pub errors: BTreeMap<String, Error>,
    /// What the calibration had to say of it.
    pub notes: Vec<String>,
}

pub fn path(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

impl Journal {
    /// The journal of `folder`, if there is one that can be read. Files that are not as it says are left out of it.
    pub fn read(folder: &Path) -> Result<Option<Journal>> {
        let path = path(folder);
        let text = match fs::read(&path) {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            text => text.with_context(|| path.display().to_string())?,
        };
        // It was renamed to its place whole; another program's file of that name is as good as none.
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
