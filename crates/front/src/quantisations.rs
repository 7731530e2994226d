//! A folder with several quantisations of a model: GGUF files in it, and in folders of it, as the hub's repositories have them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use sluice_engine::source;

/// Folders are looked into so deep.
const DEPTH: usize = 2;
/// Choices that a message lists.
const LISTED: usize = 24;

/// The GGUF models in `folder` and in folders of it; of a split model the first file. None if it has safetensors, which come first.
pub fn quantisations(folder: &Path) -> Vec<PathBuf> {
    let has_safetensors = || {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).any(|path| path.extension().is_some_and(|end| end == "safetensors"))
    };
    let mut found = Vec::new();
    if folder.is_dir() && !has_safetensors() {
        gather(folder, DEPTH, &mut found);
    }
    found.sort();
    found
}

fn gather(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    found.extend(source::gguf_files(folder).unwrap_or_default());
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // Links to folders could lead back.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder && !entry.file_name().as_encoded_bytes().starts_with(b".") {
            gather(&entry.path(), depth - 1, found);
        }
    }
}

/// The one model that a folder means.
///
/// # Errors
/// Several quantisations; the message lists them as they are named on the command line.
pub fn meant(folder: PathBuf) -> Result<PathBuf> {
    let mut found = quantisations(&folder);
    match found.len() {
        0 => Ok(folder),
        // The folder itself is a model's name where the file lies in it.
        1 if found[0].parent() == Some(&folder) => Ok(folder),
        1 => Ok(found.remove(0)),
        several => {
            let shown = |file: &PathBuf| name_of(file).unwrap_or_else(|| file.display().to_string());
            let list: Vec<String> = found.iter().take(LISTED).map(shown).collect();
            let more = if several > LISTED { format!(" and {} more", several - LISTED) } else { String::new() };
            bail!(
                "{}: several GGUF models in one folder; name one of them: {}{more}",
                folder.display(),
                list.join(", ")
            )
        }
    }
}

/// `ORG/NAME` of a snapshot's folder, `ORG/NAME:QUANT` of a GGUF file in it.
pub fn name_of(path: &Path) -> Option<String> {
    let (repo, commit) = sluice_hub::origin(path)?;
    if path.is_dir() {
        return Some(repo.to_string());
    }
    let inside = path.components().skip_while(|part| part.as_os_str() != &*commit).skip(1).collect::<PathBuf>();
    let label = sluice_hub::read_gguf_name(inside.to_str()?)?.label;
    Some(format!("{repo}:{label}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshots_files_have_the_models_name() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("models--org--m-GGUF/snapshots/0123");
        std::fs::create_dir_all(snapshot.join("UD-Q2_K_XL")).unwrap();
        assert_eq!(name_of(&snapshot).as_deref(), Some("org/m-GGUF"));
        for (file, name) in
            [("m-Q4_K_M.gguf", "org/m-GGUF:Q4_K_M"), ("UD-Q2_K_XL/m-00001-of-00002.gguf", "org/m-GGUF:UD-Q2_K_XL")]
        {
            assert_eq!(name_of(&snapshot.join(file)).as_deref(), Some(name));
        }
        assert_eq!(name_of(dir.path()), None);
    }

    #[test]
    fn quantisations_lie_in_a_folder_and_in_its_folders() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("models--org--m-GGUF/snapshots/0123");
        fs::create_dir_all(snapshot.join("UD-Q2_K_XL")).unwrap();
        let files = [
            "m-Q4_K_M.gguf",
            "mmproj-m.gguf",
            "UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf",
            "UD-Q2_K_XL/m-UD-Q2_K_XL-00002-of-00002.gguf",
        ];
        files.iter().for_each(|file| fs::write(snapshot.join(file), "GGUF").unwrap());
        let found = quantisations(&snapshot);
        assert_eq!(found, [snapshot.join(files[2]), snapshot.join(files[0])]);
        let error = meant(snapshot.clone()).unwrap_err().to_string();
        assert!(error.contains("org/m-GGUF:Q4_K_M") && error.contains("org/m-GGUF:UD-Q2_K_XL"), "{error}");
        fs::remove_file(&found[1]).unwrap();
        assert_eq!(meant(snapshot.clone()).unwrap(), found[0]);
        fs::write(snapshot.join("model.safetensors"), "").unwrap();
        assert_eq!(meant(snapshot.clone()).unwrap(), snapshot);
    }
}
