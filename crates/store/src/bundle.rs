//! A bundle: what `sluice pack` writes. A folder of ordinary safetensors files in which each expert is one run of bytes: `resident.safetensors`, and
//! `experts-LL.safetensors` for each layer with experts. The data section of the latter starts on a 4 KiB boundary. It holds one expert after the other at a
//! fixed stride of whole 4 KiB pages, with the parts of an expert in a fixed order and padding as a tensor of its own. The manifest, `bundle.json`, says in a
//! few kilobytes where each expert is, so that nobody has to parse megabytes of headers. It also has each file's length and XXH3.
//!
//! A manifest is untrusted, like any header. It is checked when it is read, so a [`Manifest`] can be relied on. Opening a bundle compares it with the header of
//! every file ([`Checkpoint::open`](crate::Checkpoint::open)). Only [`Manifest::verify`] compares the sums, since that reads everything.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::atomic::AtomicFile;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::quote::quoted;
use crate::safetensors::{Entry, Header, MAX_DIMS};
use crate::small::{open_regular, read_small};

/// The manifest's name in its folder.
pub const MANIFEST: &str = "bundle.json";
/// The file of all tensors but the routed experts'.
pub const RESIDENT: &str = "resident.safetensors";
/// Bytes of a page. Data sections, experts and strides are whole pages, as direct reads need them.
pub const PAGE: u64 = 4096;
/// Bytes that a manifest may have: thousands of layers.
const MAX_MANIFEST: u64 = 16 << 20;

/// The name of the file with layer `layer`'s experts.
pub fn experts_name(layer: usize) -> String {
    format!("experts-{layer:02}.safetensors")
}

/// Whether a file of that name can only be a bundle's.
pub(crate) fn is_of_a_bundle(name: &str) -> bool {
    let layer = name.strip_prefix("experts-").and_then(|rest| rest.strip_suffix(".safetensors"));
    name == RESIDENT || layer.is_some_and(|layer| layer.len() >= 2 && layer.bytes().all(|b| b.is_ascii_digit()))
}

/// The checked contents of `bundle.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// 1
    pub version: u32,
    /// Every file of weights.
    pub files: BTreeMap<String, FileEntry>,
    /// By layer number.
    pub experts: BTreeMap<usize, ExpertLayer>,
}

/// A file of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Bytes of the file.
    pub bytes: u64,
    /// XXH3 (64 bits) of the whole file, in hexadecimal.
    pub xxh3: String,
}

/// Where the experts of a layer are: expert e has bytes `base + e * stride ..` of `file`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertLayer {
    /// Name of the file.
    pub file: String,
    /// From the file's beginning; a multiple of [`PAGE`].
    pub base: u64,
    /// Bytes from one expert to the next; a multiple of [`PAGE`].
    pub stride: u64,
    /// How many experts there are.
    pub count: usize,
    /// In order of offset, without gaps. The rest of the stride is padding.
    pub parts: Vec<BundlePart>,
}

/// One array of an expert.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BundlePart {
    /// Such as `gate_proj.scales`.
    pub name: String,
    /// As in a safetensors header.
    pub dtype: String,
    /// Dimensions, the outermost first.
    pub shape: Vec<usize>,
    /// From the expert's first byte.
    pub offset: u64,
    /// Bytes of the array.
    pub bytes: u64,
}

impl ExpertLayer {
    /// Bytes of an expert without padding.
    pub fn used(&self) -> u64 {
        self.parts.last().map_or(0, |p| p.offset + p.bytes)
    }

    /// Compares the header of this layer's file with the manifest. Returns what differs.
    fn compare(&self, layer: usize, header: &Header) -> Result<(), String> {
        let padded = self.used() < self.stride;
        let each = self.parts.len() + usize::from(padded);
        if self.count.checked_mul(each) != Some(header.tensors.len()) {
            let found = header.tensors.len();
            return Err(format!("{found} tensors in the file, of {} experts with {each} each", self.count));
        }
        // Both are in the order of their bytes, so one pass suffices and no name is looked up.
        let mut module = None;
        for (i, tensor) in header.tensors.iter().enumerate() {
            let (expert, part) = (i / each, self.parts.get(i % each));
            let start = self.base + expert as u64 * self.stride;
            let (leaf, offset, bytes) = match part {
                Some(p) => (p.name.as_str(), p.offset, p.bytes),
                None => ("padding", self.used(), self.stride - self.used()),
            };
            let lies = start + offset..start + offset + bytes;
            let same = |p: &BundlePart| tensor.dtype.name() == p.dtype && tensor.shape == p.shape;
            let name = expert_of(tensor, leaf).filter(|(_, number)| *number == expert);
            let Some((of, _)) = name.filter(|_| tensor.range == lies && part.is_none_or(same)) else {
                let Entry { name, dtype, shape, range } = tensor;
                return Err(format!(
                    "tensor {}, {dtype} {shape:?} at {}, is not part {} of expert {expert} at {}",
                    quoted(name),
                    range.start,
                    quoted(leaf),
                    lies.start
                ));
            };
            if *module.get_or_insert(of) != of || !is_in_layer(of, layer) {
                return Err(format!("tensor {} is not of layer {layer}", quoted(&tensor.name)));
            }
        }
        Ok(())
    }
}

/// Splits a tensor's name, `MODULE.NUMBER.LEAF`: what precedes the expert's number, and the number.
fn expert_of<'a>(tensor: &'a Entry, leaf: &str) -> Option<(&'a str, usize)> {
    let (module, number) = tensor.name.strip_suffix(leaf)?.strip_suffix('.')?.rsplit_once('.')?;
    Some((module, number.parse().ok()?))
}

/// Whether a module's name has `layers.LAYER` in it.
fn is_in_layer(module: &str, layer: usize) -> bool {
    let mut words = module.split('.');
    words.any(|w| w == "layers") && words.next().and_then(|n| n.parse().ok()) == Some(layer)
}

impl Manifest {
    /// Reads and checks the manifest of `folder`; `None` where there is none.
    ///
    /// # Errors
    /// A manifest that is malformed or contradicts itself. The files are compared with it one by one: [`compare`](Manifest::compare).
    pub fn read(folder: &Path) -> Result<Option<Manifest>, Error> {
        let path = folder.join(MANIFEST);
        let bad = |why: String| Error::BadManifest { path: path.clone(), why };
        let text = match read_small(&path, MAX_MANIFEST) {
            Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        Manifest::parse(&text).map(Some).map_err(bad)
    }

    /// Checks the text of a manifest, its files unseen.
    ///
    /// # Errors
    /// What is wrong with it, in one clause.
    pub fn parse(text: &[u8]) -> Result<Manifest, String> {
        // The parser's message contains the wrong value, which may be long.
        let malformed = |e: serde_json::Error| {
            format!("malformed manifest: {}", e.to_string().chars().take(200).collect::<String>())
        };
        let manifest: Manifest = serde_json::from_slice(text).map_err(malformed)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Compares what the manifest says of file `name` with the file: `len` bytes that begin with `header`.
    ///
    /// # Errors
    /// [`Error::BadManifest`] says what differs.
    pub(crate) fn compare(&self, folder: &Path, name: &str, len: u64, header: &Header) -> Result<(), Error> {
        let bad = |why: String| Error::BadManifest { path: folder.join(MANIFEST), why };
        let Some(entry) = self.files.get(name) else { return Err(bad(format!("{name} is not listed"))) };
        if len != entry.bytes {
            return Err(bad(format!("{name} has {len} bytes instead of {}", entry.bytes)));
        }
        match self.experts.iter().find(|(_, e)| e.file == name) {
            Some((layer, experts)) => experts.compare(*layer, header).map_err(|why| bad(format!("{name}: {why}"))),
            None => Ok(()),
        }
    }

    /// An error if it contradicts itself; the files are not looked at.
    fn check(&self) -> Result<(), String> {
        if self.version != 1 {
            return Err(format!("version {} is not known (1 is)", self.version));
        }
        for name in self.files.keys() {
            // No path out of the folder, and no control characters for a terminal.
            if !is_of_a_bundle(name) {
                return Err(format!("{} is not the file name of a part of a bundle", quoted(name)));
            }
        }
        // Every file is of a kind that is checked against its header.
        if !self.files.contains_key(RESIDENT) {
            return Err(format!("{RESIDENT} is not listed"));
        }
        let mut of_layers: BTreeSet<&str> = self.files.keys().map(String::as_str).filter(|n| *n != RESIDENT).collect();
        for (layer, e) in &self.experts {
            let at = format!("layer {layer}");
            if self.files.contains_key(&e.file) && !of_layers.remove(e.file.as_str()) {
                return Err(format!("{at}: {} has other weights already", quoted(&e.file)));
            }
            let file =
                self.files.get(&e.file).ok_or_else(|| format!("{at}: file {} is not listed", quoted(&e.file)))?;
            if !e.base.is_multiple_of(PAGE) || !e.stride.is_multiple_of(PAGE) || e.stride == 0 {
                return Err(format!("{at}: base {} and stride {} are not whole pages", e.base, e.stride));
            }
            let end = (e.count as u64).checked_mul(e.stride).and_then(|n| n.checked_add(e.base));
            if e.count == 0 || end.is_none_or(|end| end > file.bytes) {
                return Err(format!("{at}: {} experts do not fit the {} bytes of {}", e.count, file.bytes, e.file));
            }
            let mut offset = 0u64;
            for p in &e.parts {
                if p.shape.len() > MAX_DIMS {
                    return Err(format!("{at}: part {} has more than {MAX_DIMS} dimensions", quoted(&p.name)));
                }
                let dtype =
                    Dtype::from_name(&p.dtype).ok_or_else(|| format!("{at}: unknown type {}", quoted(&p.dtype)))?;
                let size = p.shape.iter().try_fold(dtype.size() as u64, |n, &d| n.checked_mul(d as u64));
                if size != Some(p.bytes) || p.bytes == 0 || p.offset != offset {
                    return Err(format!("{at}: part {} is not {} {:?} at {offset}", quoted(&p.name), p.dtype, p.shape));
                }
                offset = offset.checked_add(p.bytes).ok_or_else(|| format!("{at}: parts overflow"))?;
            }
            if e.parts.is_empty() || offset > e.stride {
                return Err(format!("{at}: parts of {offset} bytes do not fit a stride of {}", e.stride));
            }
        }
        match of_layers.first() {
            Some(name) => Err(format!("{} belongs to no layer", quoted(name))),
            None => Ok(()),
        }
    }

    /// As it stands in its file.
    pub fn to_json(&self) -> Vec<u8> {
        let mut json = serde_json::to_vec_pretty(self).expect("strings and numbers are always JSON");
        json.push(b'\n');
        json
    }

    /// Writes it into `folder`, whole or not at all.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let mut file = AtomicFile::create(&folder.join(MANIFEST))?;
        file.write_all(&self.to_json())?;
        file.commit()
    }

    /// Reads every file of `folder` and compares; `each` hears of the bytes that were read.
    ///
    /// # Errors
    /// [`Error::Damaged`] names the first file that differs.
    pub fn verify(&self, folder: &Path, mut each: impl FnMut(u64)) -> Result<(), Error> {
        for (name, entry) in &self.files {
            let path = folder.join(name);
            let found = xxh3_of(&path, &mut each)?;
            if found != entry.xxh3 {
                return Err(Error::Damaged { path, found, expected: entry.xxh3.clone() });
            }
        }
        Ok(())
    }
}

/// XXH3 (64 bits) of a file, in hexadecimal; `each` hears of the bytes that were read.
pub fn xxh3_of(path: &Path, each: &mut impl FnMut(u64)) -> Result<String, Error> {
    let mut file = open_regular(path)?;
    let (mut hash, mut piece) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(format!("{:016x}", hash.digest())),
            Ok(n) => {
                hash.update(&piece[..n]);
                each(n as u64);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::io(path, "read")(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn manifest() -> Manifest {
        let part = |name: &str, dtype: &str, shape: &[usize], offset, bytes| BundlePart {
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.to_vec(),
            offset,
            bytes,
        };
        let layer = ExpertLayer {
            file: experts_name(3),
            base: 4096,
            stride: 8192,
            count: 2,
            parts: vec![
                part("gate_proj.weight", "U32", &[16, 64], 0, 4096),
                part("gate_proj.scales", "BF16", &[16], 4096, 32),
            ],
        };
        let entry = FileEntry { bytes: 3 * 8192, xxh3: String::new() };
        let resident = FileEntry { bytes: 8, xxh3: String::new() };
        Manifest {
            version: 1,
            files: BTreeMap::from([(experts_name(3), entry), (RESIDENT.to_owned(), resident)]),
            experts: BTreeMap::from([(3, layer)]),
        }
    }

    #[test]
    fn what_was_written_is_read_and_damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Manifest::read(folder.path()).unwrap().is_none());
        let path = folder.path().join(experts_name(3));
        fs::write(&path, vec![7; 3 * 8192]).unwrap();
        fs::write(folder.path().join(RESIDENT), [7; 8]).unwrap();
        let mut m = manifest();
        for (name, entry) in &mut m.files {
            entry.xxh3 = xxh3_of(&folder.path().join(name), &mut |_| {}).unwrap();
        }
        m.write(folder.path()).unwrap();
        assert_eq!(Manifest::read(folder.path()).unwrap().unwrap(), m);
        m.verify(folder.path(), |_| {}).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[9999] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = m.verify(folder.path(), |_| {}).unwrap_err().to_string();
        assert!(error.contains("experts-03.safetensors") && error.contains("damaged"), "{error}");
    }

    #[test]
    fn a_bundles_files_are_known_by_name() {
        for name in [RESIDENT, "experts-00.safetensors", "experts-117.safetensors"] {
            assert!(is_of_a_bundle(name), "{name}");
        }
        for name in ["model.safetensors", "experts-.safetensors", "experts-x1.safetensors", "experts-00.json"] {
            assert!(!is_of_a_bundle(name), "{name}");
        }
        assert!(is_in_layer("model.layers.3.mlp.experts", 3));
        assert!(!is_in_layer("model.layers.33.mlp.experts", 3) && !is_in_layer("model.experts", 3));
    }

    #[test]
    fn contradictions_are_errors() {
        type Change = fn(&mut Manifest);
        let wrong: [(Change, &str); 15] = [
            (|m| m.version = 2, "version 2"),
            (|m| m.experts.get_mut(&3).unwrap().stride = 100, "whole pages"),
            (|m| m.experts.get_mut(&3).unwrap().base = 1, "whole pages"),
            (|m| m.experts.get_mut(&3).unwrap().count = 3, "do not fit"),
            (|m| m.experts.get_mut(&3).unwrap().count = usize::MAX, "do not fit"),
            (|m| m.experts.get_mut(&3).unwrap().file = "x".into(), "not listed"),
            (|m| m.experts.get_mut(&3).unwrap().parts[1].offset = 4000, "gate_proj.scales"),
            (|m| m.experts.get_mut(&3).unwrap().parts[0].shape = vec![usize::MAX, 3], "gate_proj.weight"),
            (|m| drop(m.files.insert("../x".into(), FileEntry { bytes: 0, xxh3: String::new() })), "file name"),
            (|m| drop(m.files.insert("\x1b[2J".into(), FileEntry { bytes: 0, xxh3: String::new() })), "\\u{1b}[2J"),
            (|m| drop(m.files.insert(experts_name(9), FileEntry { bytes: 0, xxh3: String::new() })), "no layer"),
            (|m| m.experts.get_mut(&3).unwrap().parts[0].shape = vec![1; 100_000], "64 dimensions"),
            (|m| drop(m.files.remove(RESIDENT)), RESIDENT),
            (|m| drop(m.experts.insert(4, m.experts[&3].clone())), "already"),
            (
                |m| {
                    (m.experts.get_mut(&3).unwrap().parts[0].shape[0], m.experts.get_mut(&3).unwrap().parts[0].bytes) =
                        (0, 0)
                },
                "gate_proj.weight",
            ),
        ];
        manifest().check().unwrap();
        for (change, why) in wrong {
            let mut m = manifest();
            change(&mut m);
            let error = m.check().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
