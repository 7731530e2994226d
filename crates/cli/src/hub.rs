//! Folders of Hugging Face's cache: `models--ORG--NAME` holds its files in `snapshots/COMMIT`, and `refs/main` names the commit.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sluice_store::read_small;

/// The most bytes of a reference; a commit has forty.
const MAX_REFERENCE: u64 = 1024;

/// Whether this is the cache folder of a model, and not a model itself.
pub fn is_cached(folder: &Path) -> bool {
    !folder.join("config.json").exists() && folder.join("snapshots").is_dir()
}

/// The folder with the model. For a cache folder that is the snapshot that `refs/main` names, or the only one; any other folder is returned unchanged.
///
/// # Errors
/// A cached model without that snapshot; the message says what to give instead.
pub fn followed(folder: PathBuf) -> Result<PathBuf> {
    if !is_cached(&folder) {
        return Ok(folder);
    }
    let (shown, snapshots, main) = (folder.display(), folder.join("snapshots"), folder.join("refs/main"));
    if main.exists() {
        let name = String::from_utf8_lossy(&read_small(&main, MAX_REFERENCE)?).trim().to_owned();
        let is_plain = !name.is_empty() && name != "." && name != ".." && !name.contains('/');
        let found = snapshots.join(&name);
        ensure!(
            is_plain && found.is_dir(),
            "{shown}: refs/main names the snapshot {name:?}, which is not in snapshots/: download the model again"
        );
        return Ok(found);
    }
    let entries = fs::read_dir(&snapshots).with_context(|| snapshots.display().to_string())?;
    let mut all: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|path| path.is_dir()).collect();
    match (all.pop(), all.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => bail!("{shown}: no snapshot in it: download the model again"),
        (Some(_), false) => {
            bail!("{shown}: several snapshots, and no refs/main: give one of the folders in snapshots/")
        }
    }
}

/// `ORG/NAME` of a snapshot's folder.
pub fn name_of(folder: &Path) -> Option<String> {
    let snapshots = folder.parent().filter(|p| p.file_name().is_some_and(|name| name == "snapshots"))?;
    let name = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(name.replacen("--", "/", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_model_is_found_by_its_reference() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("models--org--some--model");
        let refused = || format!("{:#}", followed(folder.clone()).unwrap_err());
        fs::create_dir_all(folder.join("snapshots")).unwrap();
        assert!(refused().contains("no snapshot"), "{}", refused());
        fs::create_dir(folder.join("snapshots/aaa")).unwrap();
        assert_eq!(followed(folder.clone()).unwrap(), folder.join("snapshots/aaa"));
        fs::create_dir(folder.join("snapshots/bbb")).unwrap();
        assert!(refused().contains("give one of the folders in snapshots/"), "{}", refused());
        fs::create_dir(folder.join("refs")).unwrap();
        for wrong in ["ccc", "", "..", "../snapshots/aaa"] {
            fs::write(folder.join("refs/main"), wrong).unwrap();
            assert!(refused().contains("refs/main"), "{wrong:?}: {}", refused());
        }
        fs::write(folder.join("refs/main"), "bbb\n").unwrap();
        let found = followed(folder.clone()).unwrap();
        assert_eq!(found, folder.join("snapshots/bbb"));
        assert_eq!(name_of(&found).as_deref(), Some("org/some--model"));
        // A folder with a config is a model itself.
        fs::write(folder.join("config.json"), "{}").unwrap();
        assert_eq!(followed(folder.clone()).unwrap(), folder);
        assert_eq!(name_of(&folder), None);
    }
}
