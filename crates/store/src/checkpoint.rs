//! A model's folder: one safetensors file, or shards and their index. Files are mapped once, and headers checked once. A tensor is a view of its file. Only
//! headers are read here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bundle::{MANIFEST, Manifest, RESIDENT, is_of_a_bundle};
use crate::bytes::Bytes;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::index::{INDEX_NAME, Index, siblings};
use crate::load::ReadFile;
use crate::map::{Buffer, Map};
use crate::quote::quoted;
use crate::safetensors::{Entry, Header, MAX_HEADER};

const SINGLE_NAME: &str = "model.safetensors";

/// Files that a note names.
const LISTED: usize = 3;

/// One tensor of a checkpoint. Cheap to clone, and keeps its file mapped.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name of the tensor.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major; the last dimension is contiguous. Empty for a scalar.
    pub shape: Vec<usize>,
    /// Exactly the elements of `shape`, little-endian, at any alignment.
    pub bytes: Bytes,
}

impl Tensor {
    /// The bytes, aligned to the element's size: the view itself if it is aligned, else a copy of this one tensor. Files promise no alignment. Typed slices and
    /// uploads to a device need it; our kernels do not.
    ///
    /// # Errors
    /// When there is no memory for the copy.
    pub fn aligned(&self) -> std::io::Result<Bytes> {
        if (self.bytes.as_ptr() as usize).is_multiple_of(self.dtype.size()) {
            return Ok(self.bytes.clone());
        }
        let mut copy = Buffer::zeroed(self.bytes.len())?;
        copy.copy_from_slice(&self.bytes);
        Ok(copy.into())
    }
}

/// An open checkpoint: all its tensors by name.
#[derive(Debug)]
pub struct Checkpoint {
    /// What the user gave, for messages: the folder, or a file in it.
    named: PathBuf,
    folder: PathBuf,
    /// Name and bytes of each file, in order of name.
    files: Vec<(String, u64)>,
    /// In file order: files by name, and in a file by offset.
    tensors: Vec<Tensor>,
    /// For each tensor its file (position in `files`) and the offset of its bytes there.
    places: Vec<(usize, u64)>,
    by_name: HashMap<Arc<str>, usize>,
    metadata: BTreeMap<String, String>,
    manifest: Option<Manifest>,
    notes: Vec<String>,
}

impl Checkpoint {
    /// Opens the safetensors of `folder`: `model.safetensors` (which goes before an index of other files, as in the reference), else those that
    /// `model.safetensors.index.json` names, else those of a bundle's manifest, else every `*.safetensors` that is no adapter. Where there is an index, a
    /// shard's tensors that it does not mention are left out.
    ///
    /// # Errors
    /// Anything missing, truncated or contradictory in the folder, the index, the manifest or a header: see [`Error`].
    pub fn open(folder: &Path) -> Result<Checkpoint, Error> {
        Checkpoint::open_keeping_files(folder).map(|(checkpoint, _)| checkpoint)
    }

    /// The same, with each file still open.
    pub(crate) fn open_keeping_files(folder: &Path) -> Result<(Checkpoint, Vec<ReadFile>), Error> {
        // 1. which files
        check_folder(folder)?;
        let index_path = folder.join(INDEX_NAME);
        let mut notes = Vec::new();
        let index = if is_there(&index_path)? {
            let index = Index::read(&index_path);
            let is_of_single = index.as_ref().is_ok_and(|index| index.files.iter().any(|name| name == SINGLE_NAME));
            if !is_of_single && folder.join(SINGLE_NAME).is_file() {
                notes.push(format!(
                    "{SINGLE_NAME} is read, and what {INDEX_NAME} names is not: remove what is out of date"
                ));
                None
            } else {
                Some(index?)
            }
        } else {
            None
        };
        let single = index.is_none() && is_there(&folder.join(SINGLE_NAME))?;
        let manifest = match &index {
            Some(index) if !index.files.iter().any(|name| is_of_a_bundle(name)) => None,
            None if single => None,
            _ => Manifest::read(folder)?,
        };
        let (names, if_missing) = match (&index, &manifest) {
            (Some(index), _) => (index.files.clone(), "named by the index but not there"),
            (None, Some(manifest)) => {
                (manifest.files.keys().cloned().collect(), "named by the manifest (bundle.json) but not there")
            }
            (None, None) if single => (vec![SINGLE_NAME.to_owned()], "gone since it was found"),
            (None, None) => (all_safetensors(folder)?, "one of a set of shards but not there"),
        };
        check_bundle(folder, &names, index.is_some(), manifest.is_some())?;
        notes.extend(others(folder, &names)?);

        // 2. their tensors; of two of the same name the index tells which is meant
        let expected = index.as_ref().map(|i| i.tensors.iter().map(|(t, file)| (t.as_str(), *file)).collect());
        let expected: Option<HashMap<&str, usize>> = expected;
        let mut checkpoint = Checkpoint { notes, ..Checkpoint::empty(folder, folder) };
        let mut files = Vec::with_capacity(names.len());
        for (number, name) in names.iter().enumerate() {
            let path = folder.join(name);
            let (header, bytes, file) = open_file(&path, if_missing)?;
            if let Some(manifest) = &manifest {
                manifest.compare(folder, name, bytes.len() as u64, &header)?;
            }
            files.push(file);
            checkpoint.files.push((name.clone(), bytes.len() as u64));
            for (key, value) in header.metadata {
                checkpoint.metadata.entry(key).or_insert(value);
            }
            for entry in header.tensors {
                if expected.as_ref().is_some_and(|e| e.get(entry.name.as_str()) != Some(&number)) {
                    continue;
                }
                checkpoint.add(number, &path, &bytes, entry)?;
            }
        }

        // 3. tensors that the index names and no file has
        for (tensor, file) in index.iter().flat_map(|i| &i.tensors) {
            if !checkpoint.by_name.contains_key(tensor.as_str()) {
                return Err(Error::MissingTensor { path: folder.join(&names[*file]), tensor: tensor.clone() });
            }
        }
        checkpoint.manifest = manifest;
        Ok((checkpoint, files))
    }

    fn empty(named: &Path, folder: &Path) -> Checkpoint {
        Checkpoint {
            named: named.to_owned(),
            folder: folder.to_owned(),
            files: Vec::new(),
            tensors: Vec::new(),
            places: Vec::new(),
            by_name: HashMap::new(),
            metadata: BTreeMap::new(),
            manifest: None,
            notes: Vec::new(),
        }
    }

    /// Files of one folder, each with its path, its bytes and the tensors in it.
    pub(crate) fn of_files(
        named: &Path,
        files: impl Iterator<Item = (PathBuf, Bytes, Vec<Entry>)>,
    ) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint::empty(named, Path::new(""));
        for (number, (path, bytes, mut entries)) in files.enumerate() {
            checkpoint.folder = path.parent().map(Path::to_owned).unwrap_or_default();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            checkpoint.files.push((name, bytes.len() as u64));
            entries.sort_by_key(|entry| (entry.range.start, entry.range.end));
            entries.into_iter().try_for_each(|entry| checkpoint.add(number, &path, &bytes, entry))?;
        }
        Ok(checkpoint)
    }

    /// Adds a tensor of file `number`, whose bytes these are.
    fn add(&mut self, number: usize, path: &Path, bytes: &Bytes, entry: Entry) -> Result<(), Error> {
        if let Some(&other) = self.by_name.get(entry.name.as_str()) {
            let other = self.files[self.places[other].0].0.clone();
            return Err(Error::DuplicateTensor { path: path.to_owned(), tensor: entry.name, other });
        }
        // Headers are checked against their file's length, which fits `usize` because the file is mapped.
        let bytes = bytes.slice(entry.range.start as usize..entry.range.end as usize);
        let tensor = Tensor { name: entry.name.into(), dtype: entry.dtype, shape: entry.shape, bytes };
        self.by_name.insert(Arc::clone(&tensor.name), self.tensors.len());
        self.places.push((number, entry.range.start));
        self.tensors.push(tensor);
        Ok(())
    }

    /// For each file its tensors' bytes and names, by offset.
    pub(crate) fn tensors_by_file(&self) -> Vec<Vec<(Range<u64>, Arc<str>)>> {
        let mut all = vec![Vec::new(); self.files.len()];
        for (tensor, &(file, offset)) in self.tensors.iter().zip(&self.places) {
            all[file].push((offset..offset + tensor.bytes.len() as u64, Arc::clone(&tensor.name)));
        }
        all
    }

    /// Replaces the bytes of each tensor by `of(tensor, file, range in the file)`.
    pub(crate) fn replace_bytes(&mut self, mut of: impl FnMut(&Tensor, usize, Range<usize>) -> Bytes) {
        for (tensor, &(file, offset)) in self.tensors.iter_mut().zip(&self.places) {
            let start = offset as usize;
            tensor.bytes = of(tensor, file, start..start + tensor.bytes.len());
        }
    }

    /// Replaces the bytes of tensor `number`, in file order, by others of the same length.
    pub(crate) fn set_bytes(&mut self, number: usize, bytes: Bytes) {
        assert_eq!(bytes.len(), self.tensors[number].bytes.len());
        self.tensors[number].bytes = bytes;
    }

    /// What the user gave, for messages: a folder, or a file.
    pub fn named(&self) -> &Path {
        &self.named
    }

    /// The folder that all files are in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Name and size in bytes of each file of weights, in order of name.
    pub fn file_sizes(&self) -> &[(String, u64)] {
        &self.files
    }

    /// A line for the user about each file that was found and not read.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// A bundle's manifest, which its files' headers agree with; `None` for other checkpoints.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        self.by_name.get(name).map(|&i| self.tensors[i].clone())
    }

    /// All tensors in file order: files by name, and in a file by offset.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// All names in file order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|t| &*t.name)
    }

    /// The file that holds the tensor of that name, and the offset of its first byte there: for messages.
    pub fn place(&self, name: &str) -> Option<(&str, u64)> {
        let (file, offset) = self.places[*self.by_name.get(name)?];
        Some((&self.files[file].0, offset))
    }

    /// What the headers say in `__metadata__`, such as `format` -> `pt` or `mlx`; the first file that has a key wins.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// An error that says what to give instead, unless `folder` is one.
fn check_folder(folder: &Path) -> Result<(), Error> {
    let path = folder.to_owned();
    match fs::metadata(folder) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => {
            let hint = match folder.extension().and_then(|e| e.to_str()) {
                Some("safetensors") => {
                    "; give the folder that holds this file, its config.json and its tokenizer".to_owned()
                }
                Some(extension) => unsupported(extension).map(|why| format!("; {why}")).unwrap_or_default(),
                None => String::new(),
            };
            Err(Error::NotAFolder { path, hint })
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Err(Error::NotFound { path }),
        Err(e) => Err(Error::io(folder, "open")(e)),
    }
}

/// An error where files of a bundle are to be read without its manifest, or lie beside another model that would be read instead of it.
fn check_bundle(folder: &Path, names: &[String], has_index: bool, has_manifest: bool) -> Result<(), Error> {
    let bad = |why: String| Err(Error::BadManifest { path: folder.join(MANIFEST), why });
    match names.iter().find(|name| is_of_a_bundle(name)) {
        _ if has_manifest => Ok(()),
        Some(name) if !has_index => {
            bad(format!("missing: {name} is part of a bundle, which is not read without its manifest"))
        }
        None if is_there(&folder.join(MANIFEST))? && is_there(&folder.join(RESIDENT))? => {
            bad(format!("two models in one folder: this bundle, and {}; remove the files of one", names[0]))
        }
        _ => Ok(()),
    }
}

/// Whether something has that name. A dangling link counts, so that its error names it.
fn is_there(path: &Path) -> Result<bool, Error> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(path, "open")(e)),
    }
}

/// Whether a file of this name belongs to an adapter such as LoRA, which is no model by itself.
fn is_adapter(name: &str) -> bool {
    let stem = name.strip_suffix(".safetensors").or_else(|| name.strip_suffix(".bin"));
    name == "adapter_config.json"
        || stem.is_some_and(|stem| stem.starts_with("adapter_model") || stem.ends_with("adapters"))
}

/// Files in `folder`, other than those `read`, that look like a part of the model: a line for adapters, one for other
/// weights.
fn others(folder: &Path, read: &[String]) -> Result<Vec<String>, Error> {
    let (mut adapters, mut unread) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let Ok(name) = entry.map_err(Error::io(folder, "list"))?.file_name().into_string() else { continue };
        if name.starts_with('.') || read.contains(&name) {
            continue;
        }
        if is_adapter(&name) {
            adapters.push(name);
        } else if name.ends_with(".safetensors") {
            unread.push(name);
        }
    }
    let list = |mut names: Vec<String>| {
        names.sort();
        let more = names.len().saturating_sub(LISTED);
        let listed = names[..names.len() - more].iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ");
        if more > 0 { format!("{listed} and {more} more") } else { listed }
    };
    let mut notes = Vec::new();
    if !adapters.is_empty() {
        notes.push(format!(
            "an adapter lies beside the weights and is not applied (merge it into them): {}",
            list(adapters)
        ));
    }
    if !unread.is_empty() {
        notes.push(format!("files beside the weights that are not read: {}", list(unread)));
    }
    Ok(notes)
}

/// Every `*.safetensors` of `folder` and, if some are named as parts of a set, the whole set, sorted. Hidden files are not
/// weights: temporaries of writers, and what macOS leaves on foreign disks.
fn all_safetensors(folder: &Path) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    let mut hint = String::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "list"))? {
        let Ok(name) = entry.map_err(Error::io(folder, "list"))?.file_name().into_string() else { continue };
        match name.rsplit_once('.') {
            _ if name.starts_with('.') => {}
            _ if is_adapter(&name) => {
                hint = format!("; {name:?} is of an adapter: give the model that it was merged into")
            }
            Some((_, "safetensors")) => names.push(name),
            Some((_, extension)) => {
                if let Some(why) = unsupported(extension) {
                    hint = format!("; {name:?}: {why}");
                }
            }
            None => {}
        }
    }
    if names.is_empty() {
        return Err(Error::NoWeights { folder: folder.to_owned(), hint });
    }
    // Each set is completed once, at its first file in order of name.
    names.sort();
    let count = names.len();
    let mut whole = BTreeSet::new();
    for name in names {
        if !whole.contains(&name) {
            // If a set has more members than there are files, one of the first members is missing, so no more names than that are looked at.
            whole.extend(siblings(&name).into_iter().flatten().take(count + 1));
            whole.insert(name);
        }
    }
    Ok(whole.into_iter().collect())
}

/// A hint for a file of another weight format, by its extension.
fn unsupported(extension: &str) -> Option<&'static str> {
    match extension {
        "bin" | "pt" | "pth" | "ckpt" => Some("PyTorch pickles are not supported; safetensors are"),
        "npz" => Some("NumPy archives are not supported; safetensors are"),
        _ => None,
    }
}

/// Maps a file and checks its header. The map stays as long as its bytes are used, even if the descriptor is closed.
fn open_file(path: &Path, if_missing: &'static str) -> Result<(Header, Bytes, ReadFile), Error> {
    // Asked before opening, since opening a pipe would wait for a writer.
    match fs::metadata(path) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(Error::NotAFile { path: path.to_owned() }),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let dangling = fs::symlink_metadata(path).is_ok();
            let why = if dangling { "a link to a file that is not there" } else { if_missing };
            return Err(Error::MissingShard { path: path.to_owned(), why });
        }
        Err(e) => return Err(Error::io(path, "open")(e)),
    }
    // The length and stamp are taken before anything is read, so that later changes show.
    let file = ReadFile::open(path)?;
    // Read, not mapped: one request instead of a page fault for every few pages of JSON.
    let mut prefix = [0; 8];
    if file.is_arriving() {
        file.wait_for(0..8)?;
        // Whatever it says: the header is checked once it is there.
        let _ = file.buffered.read_exact_at(&mut prefix, 0);
        file.wait_for(0..u64::from_le_bytes(prefix).min(MAX_HEADER).saturating_add(8))?;
    }
    let header = Header::read(&file.buffered, file.len, path)?;
    let too_long = |_| Error::io(path, "map")(ErrorKind::FileTooLarge.into());
    let len = usize::try_from(file.len).map_err(too_long)?;
    let map = Map::file(&file.buffered, len).map_err(Error::io(path, "map"))?;
    Ok((header, Bytes::mapped(map, file.arriving().cloned()), file))
}
