//! Split files: which files a model consists of. A set is named `NAME-00001-of-00003.gguf`; the first has the metadata, each has some of the tensors.
//! Whichever part a user names, the set is opened.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::header::Header;
use super::metadata::Metadata;

/// Files that a set may have.
const MAX_PARTS: u64 = 9_999;

/// The number of a part, from 0.
const NUMBER: &str = "split.no";
/// How many parts there are.
const COUNT: &str = "split.count";
/// Tensors of all parts together.
const TENSORS: &str = "split.tensors.count";

/// A file name as the part of a set: what comes before, number (from 1), count.
fn part_of(name: &str) -> Option<(&str, u64, u64)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    let (number, count) = (digits(number).then(|| number.parse().ok())??, digits(count).then(|| count.parse().ok())??);
    (number >= 1 && number <= count).then_some((stem, number, count))
}

/// The name of the model in a file of that name.
pub(in crate::source) fn name_of(file: &str) -> Option<&str> {
    part_of(file).map(|(stem, ..)| stem).or_else(|| file.strip_suffix(".gguf"))
}

/// The files of the model of which `path` is one, in order: itself, or all parts of its set. `header`: its own.
///
/// # Errors
/// A part under another name than sets have, and a part that is not there. The message names it.
pub fn files_of(path: &Path, header: &Header) -> Result<Vec<PathBuf>> {
    let metadata = &header.metadata;
    let count = metadata.unsigned(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![path.to_owned()]);
    }
    ensure!(count <= MAX_PARTS, "{}: key {COUNT:?} is {count}; sets have at most {MAX_PARTS} parts", path.display());
    let number = metadata.unsigned(NUMBER)?.unwrap_or(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some((stem, ..)) = part_of(&name).filter(|(_, n, of)| (*n, *of) == (number.saturating_add(1), count)) else {
        bail!(
            "{}: part {} of {count} of a split model, which must be named like NAME-{:05}-of-{count:05}.gguf",
            path.display(),
            number.saturating_add(1),
            number.saturating_add(1)
        );
    };
    let all = (1..=count).map(|n| path.with_file_name(format!("{stem}-{n:05}-of-{count:05}.gguf")));
    let all: Vec<PathBuf> = all.collect();
    match all.iter().find(|part| !part.exists()) {
        Some(missing) => bail!("{}: part of a split model that is not there", missing.display()),
        None => Ok(all),
    }
}

/// Checks that `part` is number `number` of the set of `count` files to which `first` is the first.
///
/// # Errors
/// A file of another model, or another part under this name. The message names it.
pub fn check_part(first: &Metadata, part: &Metadata, number: usize, count: usize) -> Result<()> {
    let at = part.path().display();
    let (found, of) = (part.unsigned(NUMBER)?, part.unsigned(COUNT)?);
    ensure!(
        (found, of) == (Some(number as u64), Some(count as u64)),
        "{at}: not part {} of {count}: its keys {NUMBER:?} and {COUNT:?} say {} of {}",
        number + 1,
        found.map_or("nothing".to_owned(), |n| n.saturating_add(1).to_string()),
        of.map_or("nothing".to_owned(), |n| n.to_string())
    );
    for key in [TENSORS, "general.architecture", "general.name"] {
        let other = part.get(key).is_some_and(|value| first.get(key) != Some(value));
        ensure!(!other, "{at}: part of another model: its key {key:?} differs from that of {}", first.path().display());
    }
    Ok(())
}

/// Checks that all parts together have as many tensors as the first of them says.
///
/// # Errors
/// Another number.
pub fn check_tensors(first: &Metadata, found: usize) -> Result<()> {
    match first.unsigned(TENSORS)? {
        Some(promised) if promised != found as u64 => {
            Err(first.wrong(TENSORS, &format!("is {promised}, but the parts have {found} tensors")))
        }
        _ => Ok(()),
    }
}

/// The GGUF models in a folder: of a set its first part. Files for images and sound (`mmproj`) are none. Nothing where `folder` is something else.
///
/// # Errors
/// A folder that cannot be listed.
pub(in crate::source) fn models_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !folder.is_dir() {
        return Ok(found);
    }
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let is_hidden = name.starts_with('.') || name.to_ascii_lowercase().starts_with("mmproj");
        if is_hidden || !name.ends_with(".gguf") || part_of(&name).is_some_and(|(_, number, _)| number > 1) {
            continue;
        }
        found.push(folder.join(name));
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_told_from_others() {
        assert_eq!(part_of("a-b-00002-of-00003.gguf"), Some(("a-b", 2, 3)));
        for name in
            ["a.gguf", "a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-1-of-3.gguf", "a-00001-of-00003.bin"]
        {
            assert_eq!(part_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_folder_has_the_first_part_of_each_set() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-b.gguf", ".c.gguf", "d.txt"];
        names.iter().for_each(|name| fs::write(folder.path().join(name), "").unwrap());
        let found = models_in(folder.path()).unwrap();
        assert_eq!(found, ["a-00001-of-00002.gguf", "b.gguf"].map(|name| folder.path().join(name)));
    }
}
