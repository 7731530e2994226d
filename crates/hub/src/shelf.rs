//! What lies in the cache: lists it, checks it, removes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::cache::RepoCache;
use crate::digest::Digest;
use crate::error::{Error, Naming, Result};
use crate::lock::Lock;
use crate::name::{Choice, ModelName, Repo};
use crate::partial;
use crate::pull::Model;
use crate::quant;
use crate::selection::{self, Selection};
use crate::watch::{Event, Watch};

/// A model in the cache, or what there is of one.
#[derive(Clone, Debug)]
pub struct Listed {
    /// `ORG/NAME`, or `ORG/NAME:QUANT`.
    pub name: String,
    /// The commit, and the branches and tags that stand for it.
    pub commit: String,
    /// Branches and tags that stand for the commit.
    pub references: Vec<String>,
    /// `safetensors` or `gguf`.
    pub format: &'static str,
    /// Bytes that are there.
    pub bytes: u64,
    /// Bytes that are still missing, where that is known: a transfer was interrupted.
    pub missing: Option<u64>,
    /// What to open, if it is whole.
    pub path: Option<PathBuf>,
    /// When its files were last changed.
    pub modified: Option<SystemTime>,
}

/// All models in a cache, by name.
pub fn list(cache: &Path) -> Result<Vec<Listed>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(cache) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        entries => entries.naming(cache)?,
    };
    let names = entries.flatten().filter_map(|e| e.file_name().into_string().ok());
    for repo in names.filter_map(|name| Repo::of_folder(&name)) {
        let cache = RepoCache::new(cache, &repo);
        for (commit, references) in cache.commits() {
            for selection in models(&cache, &commit) {
                let name = ModelName { repo: repo.clone(), revision: None, choice: Choice::Usual };
                let model = Model::of(&cache, &name, &commit, &selection);
                let changed =
                    |(file, _): &(String, u64)| fs::metadata(cache.snapshot(&commit).join(file)).ok()?.modified().ok();
                found.push(Listed {
                    format: if selection.entry.is_some() { "gguf" } else { "safetensors" },
                    bytes: model.bytes(),
                    missing: None,
                    modified: model.files.iter().filter_map(changed).max(),
                    path: Some(model.path),
                    name: model.name,
                    commit: commit.clone(),
                    references: references.clone(),
                });
            }
        }
        let (done, all) = incomplete(&cache).into_iter().fold((0, 0), |(a, b), (done, all)| (a + done, b + all));
        if all > 0 {
            found.push(Listed {
                name: repo.to_string(),
                commit: String::new(),
                references: Vec::new(),
                format: "partial",
                bytes: done,
                missing: Some(all - done),
                path: None,
                modified: None,
            });
        }
    }
    found.sort_by(|a, b| (a.name.to_lowercase(), &a.commit).cmp(&(b.name.to_lowercase(), &b.commit)));
    Ok(found)
}

/// The whole models of a commit: at most one of safetensors, and each quantisation.
fn models(cache: &RepoCache, commit: &str) -> Vec<Selection> {
    let files = cache.files(commit);
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let mut read = |file: &str| cache.read(commit, file);
    let usual = selection::select(&files, &Choice::Usual, &mut read).ok();
    let mut found: Vec<Selection> = usual.into_iter().filter(|selection| selection.entry.is_none()).collect();
    let mut seen = BTreeSet::new();
    for file in files.iter().filter(|file| quant::read(file).is_some()) {
        let chosen = selection::select(&files, &Choice::File((*file).to_owned()), &mut read);
        found.extend(chosen.ok().filter(|selection| seen.insert(selection.entry.clone())));
    }
    found
}

/// Bytes that are there and all bytes of blobs that are still arriving.
fn incomplete(cache: &RepoCache) -> Vec<(u64, u64)> {
    let folder = cache.folder().join("blobs");
    let names = fs::read_dir(&folder).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok());
    let blobs = names.filter_map(|name| Some(folder.join(name.strip_suffix(partial::INCOMPLETE)?)));
    blobs.filter_map(|blob| partial::progress(&blob)).collect()
}

/// What a check of a file found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The bytes are those that the hub announced.
    Right,
    /// They are not; the file was removed, so that it is fetched again.
    Wrong,
    /// The file has no checksum for a name.
    Unknown,
}

/// Reads all files of a model and compares them with their checksums, which are their blobs' names. Wrong files are removed.
///
/// # Errors
/// A model that is not in the cache.
pub fn verify(cache: &Path, name: &ModelName, watch: &dyn Watch) -> Result<Vec<(String, Finding)>> {
    let repo = RepoCache::new(cache, &name.repo);
    let mut files = BTreeMap::new();
    for (commit, selection) in named(&repo, name)? {
        for file in selection.small.into_iter().chain(selection.weights) {
            files.insert(repo.snapshot(&commit).join(&file), file);
        }
    }
    let all = files.keys().filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum();
    let (mut done, mut checked, mut findings) = (0, BTreeMap::new(), Vec::new());
    for (path, file) in files {
        let target = fs::read_link(&path).ok().and_then(|to| to.file_name()?.to_str().map(str::to_owned));
        let Some(digest) = target.as_deref().and_then(Digest::of_etag) else {
            findings.push((file, Finding::Unknown));
            continue;
        };
        // A blob may be a file of several commits.
        let known = checked.get(digest.hex()).copied();
        let is_right = match known {
            Some(known) => known,
            None => {
                let mut opened = File::open(&path).naming(&path)?;
                let mut stopped = false;
                let sum = digest.sum_of_file(&mut opened, |bytes| {
                    done += bytes;
                    watch.event(Event::Progress { done, all });
                    stopped |= watch.is_stopped();
                });
                if stopped {
                    return Err(Error::Stopped);
                }
                sum.naming(&path)? == digest.hex()
            }
        };
        checked.insert(digest.hex().to_owned(), is_right);
        if !is_right {
            let blob = repo.blob(digest.hex());
            fs::remove_file(&path).naming(&path)?;
            if known.is_none() {
                fs::remove_file(&blob).naming(&blob)?;
            }
        }
        findings.push((file, if is_right { Finding::Right } else { Finding::Wrong }));
    }
    Ok(findings)
}

/// The files of a name in the cache, by commit: of that revision, or of all; of that quantisation, or of all.
fn named(repo: &RepoCache, name: &ModelName) -> Result<Vec<(String, Selection)>> {
    let commits = match &name.revision {
        Some(revision) => repo.commit_of(revision).into_iter().collect(),
        None => repo.commits().into_iter().map(|(commit, _)| commit).collect::<Vec<_>>(),
    };
    let mut found = Vec::new();
    for commit in commits {
        let files = repo.files(&commit);
        if name.choice == Choice::Usual {
            // All that there is, whether or not it makes a model.
            if !files.is_empty() {
                found.push((commit, Selection { small: files, weights: Vec::new(), entry: None, label: None }));
            }
            continue;
        }
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let chosen = selection::select(&files, &name.choice, &mut |file| repo.read(&commit, file));
        found.extend(chosen.ok().map(|selection| (commit, selection)));
    }
    if found.is_empty() && (name.choice != Choice::Usual || name.revision.is_some() || !repo.folder().is_dir()) {
        let folder = repo.folder().parent().unwrap_or(repo.folder()).display();
        return Err(Error::NotFound(format!("{name}: not in {folder}; `sluice list` shows what is")));
    }
    Ok(found)
}

/// Removes a model: all of its repository's part of the cache, or one revision or quantisation of it. Returns the bytes that became free.
///
/// # Errors
/// A model that is not in the cache, or that another process is fetching.
pub fn remove(cache: &Path, name: &ModelName) -> Result<u64> {
    let repo = RepoCache::new(cache, &name.repo);
    let chosen = named(&repo, name)?;
    if Lock::any_held(&repo.locks()) {
        return Err(Error::NotFound(format!("{name}: another process is fetching it")));
    }
    let before = size_of(&repo.folder().join("blobs")) + size_of(&repo.folder().join("snapshots"));
    if name.choice == Choice::Usual && name.revision.is_none() {
        // References first, then links, then what they lead to: at no time does a name lead nowhere.
        for part in ["refs", "snapshots"] {
            let folder = repo.folder().join(part);
            if folder.exists() {
                fs::remove_dir_all(&folder).naming(&folder)?;
            }
        }
        fs::remove_dir_all(repo.folder()).naming(repo.folder())?;
        let _ = fs::remove_dir_all(repo.locks());
        return Ok(before);
    }
    for (commit, selection) in chosen {
        for file in selection.small.iter().chain(&selection.weights) {
            let path = repo.snapshot(&commit).join(file);
            fs::remove_file(&path).naming(&path)?;
        }
        if repo.files(&commit).is_empty() {
            for reference in
                repo.commits().into_iter().filter(|(other, _)| *other == commit).flat_map(|(_, names)| names)
            {
                let _ = fs::remove_file(repo.folder().join("refs").join(reference));
            }
            let folder = repo.snapshot(&commit);
            fs::remove_dir_all(&folder).naming(&folder)?;
        }
    }
    sweep(&repo)?;
    Ok(before - size_of(&repo.folder().join("blobs")) - size_of(&repo.folder().join("snapshots")))
}

/// Removes blobs that no snapshot has. Those that are still arriving stay.
fn sweep(repo: &RepoCache) -> Result<()> {
    let mut used = BTreeSet::new();
    for (commit, _) in repo.commits() {
        let links =
            repo.files(&commit).into_iter().filter_map(|file| fs::read_link(repo.snapshot(&commit).join(file)).ok());
        used.extend(links.filter_map(|to| to.file_name().map(ToOwned::to_owned)));
    }
    let folder = repo.folder().join("blobs");
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let is_blob = entry.file_name().to_str().is_some_and(|name| Digest::of_etag(name).is_some());
        if is_blob && !used.contains(&entry.file_name()) {
            fs::remove_file(entry.path()).naming(&entry.path())?;
        }
    }
    Ok(())
}

/// Bytes of the regular files below a folder, without those that links lead to.
fn size_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.path().symlink_metadata() {
            Ok(meta) if meta.is_dir() => size_of(&entry.path()),
            Ok(meta) if meta.is_file() => meta.len(),
            _ => 0,
        })
        .sum()
}
