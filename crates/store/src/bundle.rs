//! A bundle: what `sluice pack` writes. A folder of ordinary safetensors files in which each expert is one run of bytes: `resident.safetensors`, and
//! `experts-LL.safetensors` for each layer with experts, whose data section starts on a 4 KiB boundary and holds expert after expert at a fixed
//! stride of whole 4 KiB pages, the parts of an expert in a fixed order, padding as a tensor of its own. The manifest, `bundle.json`, says so in
//! a few kilobytes, that a reader may find an expert without parsing megabytes of headers; and it has each file's length and XXH3.
//!
//! A manifest comes from strangers like any header: whoever holds a [`Manifest`] may read experts by it without another look.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::atomic::AtomicFile;
use crate::dtype::Dtype;
use crate::error::{Error, quoted};
use crate::small::read_small;

/// The manifest's name in its folder.
pub const MANIFEST: &str = "bundle.json";
/// The file of all tensors but the routed experts'.
pub const RESIDENT: &str = "resident.safetensors";
/// Data sections, experts and their strides are whole pages of so many bytes, as direct reads want them.
pub const PAGE: u64 = 4096;
/// Bytes that a manifest may have: thousands of layers.
const MAX_MANIFEST: u64 = 16 << 20;

/// The name of the file with layer `layer`'s experts.
pub fn experts_name(layer: usize) -> String {
    format!("experts-{layer:02}.safetensors")
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

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileEntry {
    pub bytes: u64,
    /// XXH3 (64 bits) of the whole file, in hexadecimal.
    pub xxh3: String,
}

/// Where the experts of a layer lie: expert e has bytes `base + e * stride ..` of `file`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertLayer {
    pub file: String,
    /// From the file's beginning; a multiple of [`PAGE`].
    pub base: u64,
    /// Bytes from one expert to the next; a multiple of [`PAGE`].
    pub stride: u64,
    pub count: usize,
    /// In order of offset, without gaps; what is left of the stride is padding.
    pub parts: Vec<Part>,
}

/// One array of an expert.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Such as `gate_proj.scales`.
    pub name: String,
    /// As in a safetensors header.
    pub dtype: String,
    pub shape: Vec<usize>,
    /// From the expert's first byte.
    pub offset: u64,
    pub bytes: u64,
}

impl ExpertLayer {
    /// Bytes of an expert without padding.
    pub fn used(&self) -> u64 {
        self.parts.last().map_or(0, |p| p.offset + p.bytes)
    }
}

impl Manifest {
    /// Reads and checks the manifest of `folder`; `None` where there is none.
    ///
    /// # Errors
    /// A manifest that contradicts itself or its files' lengths.
    pub fn read(folder: &Path) -> Result<Option<Manifest>, Error> {
        let path = folder.join(MANIFEST);
        let bad = |why: String| Error::BadManifest { path: path.clone(), why };
        let text = match read_small(&path, MAX_MANIFEST) {
            Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        let manifest = Manifest::parse(&text).map_err(bad)?;
        for (name, entry) in &manifest.files {
            let file = folder.join(name);
            let len = fs::metadata(&file).map_err(Error::io(&file, "open"))?.len();
            if len != entry.bytes {
                return Err(bad(format!("{name} has {len} bytes instead of {}", entry.bytes)));
            }
        }
        Ok(Some(manifest))
    }

    /// Checks the text of a manifest, its files unseen; the error says what is wrong.
    pub fn parse(text: &[u8]) -> Result<Manifest, String> {
        let manifest: Manifest = serde_json::from_slice(text).map_err(|e| format!("malformed manifest: {e}"))?;
        manifest.check().map(|()| manifest)
    }

    /// Says what is wrong with it, the files unseen.
    fn check(&self) -> Result<(), String> {
        if self.version != 1 {
            return Err(format!("version {} is not known (1 is)", self.version));
        }
        for name in self.files.keys() {
            if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
                return Err(format!("{} is not a file name in this folder", quoted(name)));
            }
        }
        for (layer, e) in &self.experts {
            let at = format!("layer {layer}");
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
                let dtype =
                    Dtype::from_name(&p.dtype).ok_or_else(|| format!("{at}: unknown type {}", quoted(&p.dtype)))?;
                let size = p.shape.iter().try_fold(dtype.size() as u64, |n, &d| n.checked_mul(d as u64));
                if size != Some(p.bytes) || p.offset != offset {
                    return Err(format!("{at}: part {} is not {} {:?} at {offset}", quoted(&p.name), p.dtype, p.shape));
                }
                offset = offset.checked_add(p.bytes).ok_or_else(|| format!("{at}: parts overflow"))?;
            }
            if e.parts.is_empty() || offset > e.stride {
                return Err(format!("{at}: parts of {offset} bytes do not fit a stride of {}", e.stride));
            }
        }
        Ok(())
    }

    /// Writes it into `folder`, whole or not at all.
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let mut json = serde_json::to_vec_pretty(self).expect("strings and numbers are always JSON");
        json.push(b'\n');
        let mut file = AtomicFile::create(&folder.join(MANIFEST))?;
        file.write_all(&json)?;
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
    let mut file = File::open(path).map_err(Error::io(path, "open"))?;
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
    use super::*;

    fn manifest() -> Manifest {
        let part = |name: &str, dtype: &str, shape: &[usize], offset, bytes| Part {
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
        Manifest {
            version: 1,
            files: BTreeMap::from([(experts_name(3), entry)]),
            experts: BTreeMap::from([(3, layer)]),
        }
    }

    #[test]
    fn what_was_written_is_read_and_damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Manifest::read(folder.path()).unwrap().is_none());
        let path = folder.path().join(experts_name(3));
        fs::write(&path, vec![7; 3 * 8192]).unwrap();
        let mut m = manifest();
        m.files.get_mut(&experts_name(3)).unwrap().xxh3 = xxh3_of(&path, &mut |_| {}).unwrap();
        m.write(folder.path()).unwrap();
        assert_eq!(Manifest::read(folder.path()).unwrap().unwrap(), m);
        m.verify(folder.path(), |_| {}).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[9999] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = m.verify(folder.path(), |_| {}).unwrap_err().to_string();
        assert!(error.contains("experts-03.safetensors") && error.contains("damaged"), "{error}");
        fs::write(&path, &bytes[1..]).unwrap();
        let error = Manifest::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("24575 bytes instead of 24576"), "{error}");
    }

    #[test]
    fn contradictions_are_errors() {
        type Change = fn(&mut Manifest);
        let wrong: [(Change, &str); 9] = [
            (|m| m.version = 2, "version 2"),
            (|m| m.experts.get_mut(&3).unwrap().stride = 100, "whole pages"),
            (|m| m.experts.get_mut(&3).unwrap().base = 1, "whole pages"),
            (|m| m.experts.get_mut(&3).unwrap().count = 3, "do not fit"),
            (|m| m.experts.get_mut(&3).unwrap().count = usize::MAX, "do not fit"),
            (|m| m.experts.get_mut(&3).unwrap().file = "x".into(), "not listed"),
            (|m| m.experts.get_mut(&3).unwrap().parts[1].offset = 4000, "gate_proj.scales"),
            (|m| m.experts.get_mut(&3).unwrap().parts[0].shape = vec![usize::MAX, 3], "gate_proj.weight"),
            (|m| drop(m.files.insert("../x".into(), FileEntry { bytes: 0, xxh3: String::new() })), "file name"),
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
