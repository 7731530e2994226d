//! The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes. A header is untrusted, so it is checked here once and completely. The
//! ranges of a [`Header`] can be relied on.
//!
//! The rules are those of the reference implementation (<https://github.com/huggingface/safetensors>): a header of at most
//! 100 MB, no duplicate names, every tensor as long as its shape and dtype say, and the tensors covering the data section
//! exactly, without hole or overlap. Alignment is not required.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::dtype::Dtype;
use crate::error::Error;
pub use crate::header_error::{HeaderError, MAX_DIMS, MAX_HEADER};
use crate::quote::quoted;

/// A checked header.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// In the order of their bytes in the file.
    pub tensors: Vec<Entry>,
    /// `__metadata__`, empty if there is none.
    pub metadata: BTreeMap<String, String>,
}

/// One tensor of a header.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, the outermost first.
    pub shape: Vec<usize>,
    /// Bytes in the file, counted from its beginning.
    pub range: Range<u64>,
}

impl Header {
    /// Reads and checks the header of `file`, which has `len` bytes; `path` is for messages. Holds at most [`MAX_HEADER`]
    /// bytes of text at a time.
    pub fn read(file: &File, len: u64, path: &Path) -> Result<Header, Error> {
        let refuse = |problem| Error::Header { path: path.to_owned(), problem };
        let mut prefix = [0; 8];
        let prefix = &mut prefix[..len.min(8) as usize];
        file.read_exact_at(prefix, 0).map_err(Error::io(path, "read"))?;
        let mut json = vec![0; json_len(prefix, len).map_err(refuse)? as usize];
        file.read_exact_at(&mut json, 8).map_err(Error::io(path, "read"))?;
        Header::parse(&json, len).map_err(refuse)
    }

    /// Checks the header of a whole file in memory.
    pub fn from_bytes(file: &[u8]) -> Result<Header, HeaderError> {
        let len = file.len() as u64;
        let end = 8 + json_len(&file[..file.len().min(8)], len)? as usize;
        Header::parse(&file[8..end], len)
    }

    /// Checks `json`, the header without its 8 bytes of length, against a file of `file_len` bytes in all.
    pub fn parse(json: &[u8], file_len: u64) -> Result<Header, HeaderError> {
        let data_start = 8 + json.len() as u64;
        let data_len = file_len
            .checked_sub(data_start)
            .ok_or(HeaderError::HeaderBeyondFile { header: data_start - 8, len: file_len })?;
        if json.first() != Some(&b'{') {
            return Err(HeaderError::NotAnObject);
        }

        // 1. JSON to entries, each checked by itself
        let mut problem = None;
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let parsed = HeaderSeed { problem: &mut problem }.deserialize(&mut deserializer);
        let parsed = parsed.and_then(|header| deserializer.end().map(|()| header));
        let mut header = match (problem, parsed) {
            (Some(problem), _) => return Err(problem),
            (None, Err(e)) => return Err(HeaderError::Json { why: e.to_string() }),
            (None, Ok(header)) => header,
        };

        // 2. names
        let mut names = HashSet::with_capacity(header.tensors.len());
        if let Some(twice) = header.tensors.iter().find(|t| !names.insert(t.name.as_str())) {
            return Err(HeaderError::DuplicateName { tensor: twice.name.clone() });
        }

        // 3. coverage: in the order of their bytes, each tensor begins where the one before it ends
        header.tensors.sort_by_key(|t| (t.range.start, t.range.end));
        let mut previous_end = 0;
        for (i, t) in header.tensors.iter().enumerate() {
            let (start, end) = (t.range.start, t.range.end);
            let tensor = || t.name.clone();
            if start < previous_end {
                let other = header.tensors[i - 1].name.clone();
                return Err(HeaderError::Overlap { tensor: tensor(), other, start });
            }
            if start > previous_end {
                return Err(HeaderError::Hole { tensor: tensor(), start, previous_end });
            }
            if end > data_len {
                return Err(HeaderError::Truncated { tensor: tensor(), end, len: data_len });
            }
            previous_end = end;
        }
        if previous_end < data_len {
            return Err(HeaderError::TrailingBytes { extra: data_len - previous_end });
        }

        // Cannot overflow: every range lies within the file.
        for t in &mut header.tensors {
            t.range = data_start + t.range.start..data_start + t.range.end;
        }
        Ok(header)
    }
}

/// The length of the JSON, out of the first 8 bytes (fewer if the file has fewer) of a file of `file_len` bytes.
fn json_len(prefix: &[u8], file_len: u64) -> Result<u64, HeaderError> {
    let prefix: [u8; 8] = prefix.try_into().map_err(|_| HeaderError::TooShort { len: file_len })?;
    if &prefix == b"version " {
        return Err(HeaderError::LfsPointer);
    }
    let header = u64::from_le_bytes(prefix);
    if header > MAX_HEADER {
        return Err(HeaderError::TooLarge { header });
    }
    if header > file_len - 8 {
        return Err(HeaderError::HeaderBeyondFile { header, len: file_len });
    }
    Ok(header)
}

/// Reads the whole header in one pass. Typed errors go to `problem`, since JSON errors carry text only.
struct HeaderSeed<'a> {
    problem: &'a mut Option<HeaderError>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Header;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Header, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Header;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header { tensors: Vec::new(), metadata: BTreeMap::new() };
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                let parsed = match std::mem::replace(&mut metadata_seen, true) {
                    true => Err(A::Error::custom("occurs twice")),
                    false => map.next_value_seed(MetadataSeed),
                };
                header.metadata = parsed.inspect_err(|e| {
                    *self.problem = Some(HeaderError::Metadata { why: e.to_string() });
                })?;
            } else {
                let raw = match map.next_value_seed(EntrySeed) {
                    Ok(raw) => raw,
                    Err(e) => {
                        *self.problem = Some(HeaderError::Entry { tensor: name, why: e.to_string() });
                        return Err(e);
                    }
                };
                match raw.check(name) {
                    Ok(entry) => header.tensors.push(entry),
                    Err(problem) => {
                        *self.problem = Some(problem);
                        return Err(A::Error::custom("refused"));
                    }
                }
            }
        }
        Ok(header)
    }
}

/// A tensor's entry as written. `shape` is `None` when it has too many dimensions.
struct RawEntry {
    dtype: String,
    shape: Option<Vec<u64>>,
    offsets: [u64; 2],
}

impl RawEntry {
    /// Checks that need one entry only. The range still counts from the data section.
    fn check(self, tensor: String) -> Result<Entry, HeaderError> {
        let [start, end] = self.offsets;
        let Some(dtype) = Dtype::from_name(&self.dtype) else {
            return Err(HeaderError::UnknownDtype { tensor, dtype: self.dtype });
        };
        let Some(raw) = self.shape else { return Err(HeaderError::TooManyDims { tensor }) };
        // The reference multiplies dimension by dimension, so an overflow before a zero dimension is an error too.
        let size =
            raw.iter().try_fold(1, |n: u64, &d| n.checked_mul(d)).and_then(|n| n.checked_mul(dtype.size() as u64));
        let shape = raw.iter().map(|&d| usize::try_from(d).ok()).collect();
        let (Some(expected), Some(shape)): (_, Option<Vec<usize>>) = (size, shape) else {
            return Err(HeaderError::Overflow { tensor });
        };
        if end < start {
            return Err(HeaderError::Reversed { tensor, start, end });
        }
        if end - start != expected {
            return Err(HeaderError::WrongSize { tensor, dtype, shape, expected, start, end });
        }
        Ok(Entry { name: tensor, dtype, shape, range: start..end })
    }
}

struct EntrySeed;

impl<'de> DeserializeSeed<'de> for EntrySeed {
    type Value = RawEntry;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<RawEntry, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed {
    type Value = RawEntry;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEntry, A::Error> {
        #[derive(serde::Deserialize)]
        #[serde(field_identifier, rename_all = "snake_case")]
        enum Field {
            Dtype,
            Shape,
            DataOffsets,
            #[serde(other)]
            Other,
        }
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key()? {
            let twice = match field {
                Field::Dtype => dtype.replace(map.next_value()?).is_some(),
                Field::Shape => shape.replace(map.next_value_seed(ShapeSeed)?).is_some(),
                Field::DataOffsets => offsets.replace(map.next_value()?).is_some(),
                Field::Other => map.next_value::<IgnoredAny>().map(|_| false)?,
            };
            if twice {
                return Err(A::Error::custom("a field occurs twice"));
            }
        }
        Ok(RawEntry {
            dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
            shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
            offsets: offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
        })
    }
}

/// Reads a shape. Keeps at most [`MAX_DIMS`] sizes, so that a hostile header cannot take eight times its length.
struct ShapeSeed;

impl<'de> DeserializeSeed<'de> for ShapeSeed {
    type Value = Option<Vec<u64>>;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed {
    type Value = Option<Vec<u64>>;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut shape = Vec::with_capacity(4);
        let mut fits = true;
        while let Some(dim) = seq.next_element()? {
            fits = shape.len() < MAX_DIMS;
            if fits {
                shape.push(dim);
            }
        }
        Ok(fits.then_some(shape))
    }
}

struct MetadataSeed;

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = BTreeMap<String, String>;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = BTreeMap<String, String>;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of strings")
    }

    /// The reference takes `null` for no metadata.
    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            if metadata.contains_key(&key) {
                return Err(A::Error::custom(format!("key {} occurs twice", quoted(&key))));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }
}
