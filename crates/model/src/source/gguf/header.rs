//! The header of one file: version, metadata, and the table of tensors, checked once and completely. Whoever holds a [`Header`] may slice the file by it
//! without another look.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::cursor::Cursor;
use super::metadata::{Metadata, Value, read_key, read_string, read_value};
use super::tensor_type::TensorType;

/// What a file begins with.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Versions that are read.
const VERSIONS: Range<u32> = 2..4;

/// Dimensions that a tensor may have, as in ggml.
const MAX_DIMS: u32 = 4;

/// Bytes of a tensor's name.
const MAX_NAME: usize = 1024;

/// Bytes that a key, its type and a value take at least.
const LEAST_ENTRY: u64 = 8 + 4 + 1;

/// Bytes that an entry of the tensor table takes at least: lengths of the name and of the shape, type, offset.
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// A checked header.
#[derive(Clone, Debug)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Values by key.
    pub metadata: Metadata,
    /// In the order of their bytes in the file.
    pub tensors: Vec<TensorInfo>,
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub kind: TensorType,
    /// Dimensions, the outermost first; the last is contiguous. Files have them the other way round.
    pub shape: Vec<usize>,
    /// Its bytes in the file, counted from its beginning.
    pub range: Range<u64>,
}

impl Header {
    /// Reads the header of `file`, which has `len` bytes. `path` is for messages.
    ///
    /// # Errors
    /// What is wrong, with the path and the key or tensor.
    pub fn read(mut file: &File, len: u64, path: &Path) -> Result<Header> {
        file.seek(SeekFrom::Start(0)).with_context(|| format!("{}: cannot read", path.display()))?;
        Header::from_reader(BufReader::with_capacity(1 << 16, file), len, path)
    }

    /// The header of a whole file in memory.
    ///
    /// # Errors
    /// As for [`Header::read`].
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Header> {
        Header::from_reader(bytes, bytes.len() as u64, path)
    }

    /// The header of a file of `len` bytes, read from its beginning on.
    ///
    /// # Errors
    /// As for [`Header::read`].
    pub fn from_reader(from: impl Read, len: u64, path: &Path) -> Result<Header> {
        let at = path.display();
        let mut cursor = Cursor::new(from, len);
        let plain = |why: String| anyhow!("{at}: {why}");

        // 1. what it is
        let magic: [u8; 4] = cursor.array().map_err(plain)?;
        ensure!(magic == MAGIC, "{at}: not a GGUF file: it begins with {:?}", magic.escape_ascii().to_string());
        let version = cursor.u32().map_err(plain)?;
        if !VERSIONS.contains(&version) {
            ensure!(
                !VERSIONS.contains(&version.swap_bytes()),
                "{at}: a big-endian GGUF file, which is not supported (little-endian ones are)"
            );
            bail!("{at}: GGUF version {version} is not supported (2 and 3 are)");
        }
        let tensors = cursor.u64().map_err(plain)?;
        let entries = cursor.u64().map_err(plain)?;
        cursor.expect(entries, LEAST_ENTRY, "keys").map_err(plain)?;
        cursor.expect(tensors, LEAST_TENSOR, "tensors").map_err(plain)?;

        // 2. metadata
        let mut metadata = Metadata::new(path);
        for _ in 0..entries {
            let key = read_key(&mut cursor).map_err(plain)?;
            let value = read_value(&mut cursor).map_err(|why| anyhow!("{at}: key {key:?}: {why}"))?;
            metadata.insert(&key, value)?;
        }
        let alignment = alignment(&metadata)?;

        // 3. the table, with offsets that count from the data section, which begins after the table
        let mut table = Vec::new();
        let mut names = HashMap::new();
        for number in 0..tensors {
            let raw = RawTensor::read(&mut cursor).map_err(|why| anyhow!("{at}: tensor number {number}: {why}"))?;
            if let Some(first) = names.insert(raw.name.clone(), number) {
                bail!("{at}: tensor {:?} is there twice, as number {first} and {number}", raw.name);
            }
            table.push(raw);
        }
        let start = cursor.position().checked_next_multiple_of(alignment);
        let start = start.ok_or_else(|| anyhow!("{at}: an alignment of {alignment} bytes"))?;

        // 4. where each lies
        let placed =
            |raw: RawTensor| raw.place(start, len).map_err(|(name, why)| anyhow!("{at}: tensor {name:?}: {why}"));
        let mut tensors = table.into_iter().map(placed).collect::<Result<Vec<_>>>()?;
        tensors.sort_by_key(|t| (t.range.start, t.range.end));
        for pair in tensors.windows(2) {
            let [before, after] = pair else { continue };
            ensure!(
                before.range.end <= after.range.start,
                "{at}: tensor {:?} at offset {} lies inside tensor {:?}",
                after.name,
                after.range.start,
                before.name
            );
        }
        Ok(Header { version, metadata, tensors })
    }
}

/// The multiple at which the data section begins.
fn alignment(metadata: &Metadata) -> Result<u64> {
    const KEY: &str = "general.alignment";
    const DEFAULT: u64 = 32;
    let alignment = match metadata.get(KEY) {
        None => return Ok(DEFAULT),
        Some(Value::Unsigned(alignment)) => *alignment,
        Some(_) => return Err(metadata.wrong(KEY, "is not a whole number of an unsigned type")),
    };
    if alignment.is_power_of_two() && alignment <= u64::from(u32::MAX) {
        return Ok(alignment);
    }
    Err(metadata.wrong(KEY, &format!("is {alignment}, not a power of two")))
}

/// An entry of the table as it is written.
struct RawTensor {
    name: String,
    /// The contiguous dimension first.
    dims: Vec<u64>,
    kind: u32,
    /// From the beginning of the data section.
    offset: u64,
}

impl RawTensor {
    fn read<R: Read>(cursor: &mut Cursor<R>) -> Result<RawTensor, String> {
        let name = String::from_utf8(read_string(cursor)?).map_err(|e| format!("a name that is no UTF-8: {e}"))?;
        if name.len() > MAX_NAME {
            return Err(format!("a name of {} bytes; they have at most {MAX_NAME}", name.len()));
        }
        let count = cursor.u32().map_err(|why| format!("{name:?}: {why}"))?;
        if count > MAX_DIMS {
            return Err(format!("{name:?}: {count} dimensions; tensors have at most {MAX_DIMS}"));
        }
        let dims = (0..count).map(|_| cursor.u64()).collect::<Result<_, _>>();
        let dims = dims.map_err(|why| format!("{name:?}: {why}"))?;
        let kind = cursor.u32().map_err(|why| format!("{name:?}: {why}"))?;
        let offset = cursor.u64().map_err(|why| format!("{name:?}: {why}"))?;
        Ok(RawTensor { name, dims, kind, offset })
    }

    /// Checked against a file of `len` bytes whose data section begins at `start`. The error is a name and a reason.
    fn place(self, start: u64, len: u64) -> Result<TensorInfo, (String, String)> {
        let RawTensor { name, dims, kind: id, offset } = self;
        let fail = |why: String| Err((name.clone(), why));
        let Some(kind) = TensorType::of(id) else { return fail(format!("unknown type {id}")) };
        let shape: Option<Vec<usize>> =
            dims.iter().rev().map(|&n| usize::try_from(n).ok().filter(|&n| n > 0)).collect();
        let Some(shape) = shape else { return fail(format!("dimensions {dims:?}: each must be at least 1")) };
        let columns = shape.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(kind.elements) {
            let (kind, block) = (kind.name, kind.elements);
            return fail(format!("rows of {columns} elements are not whole blocks of {kind}, which have {block}"));
        }
        let rows = shape.iter().rev().skip(1).try_fold(1usize, |n, &size| n.checked_mul(size));
        let bytes = kind.row_bytes(columns).and_then(|row| row.checked_mul(rows?));
        let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok()).filter(|&n| n <= i64::MAX as u64);
        let Some(bytes) = bytes else { return fail(format!("the size of {shape:?} overflows")) };
        let from = start.checked_add(offset);
        match from.zip(from.and_then(|from| from.checked_add(bytes))) {
            Some((from, to)) if to <= len => Ok(TensorInfo { name, kind, shape, range: from..to }),
            Some((from, to)) => fail(format!("bytes {from}..{to} reach beyond the end of the file, {len}")),
            None => fail(format!("offset {offset} overflows")),
        }
    }
}
