//! Writing a safetensors file in bounded memory: the plan fixes the header, then the tensors' bytes come, in order as a stream or each at its place.

use std::collections::BTreeMap;
use std::path::Path;

use crate::atomic::{AtomicFile, check_space};
use crate::dtype::Dtype;
use crate::error::Error;
use crate::quote::quoted;
use crate::safetensors::{Header, HeaderError, MAX_HEADER};

/// A tensor of a file to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorPlan {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, the outermost first.
    pub shape: Vec<usize>,
}

impl TensorPlan {
    /// Bytes of the tensor; `None` when that overflows.
    pub fn size(&self) -> Option<u64> {
        let dims = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64));
        dims?.checked_mul(self.dtype.size() as u64)
    }
}

/// A safetensors file being written. It takes its name when [`finish`](Writer::finish)ed; dropped before that, it leaves nothing.
#[derive(Debug)]
pub struct Writer {
    file: AtomicFile,
    /// Name and size in bytes, in file order.
    tensors: Vec<(String, u64)>,
    /// The tensor whose bytes come next, and how many of them have come.
    current: usize,
    written: u64,
    /// Bytes before the data section.
    data_start: u64,
    data_len: u64,
    /// Bytes of the data section that were written by offset.
    placed: u64,
}

impl Writer {
    /// Writes the header of a file for `plan`, whose order is that of the bytes. The data section starts at a multiple of
    /// 8 bytes, as in the reference implementation; tensors lie without gaps, so a plan that goes from wide to narrow
    /// dtypes keeps each of them aligned.
    ///
    /// # Errors
    /// A plan that no reader would accept (a name twice, too many dimensions, a size that overflows), a disk too full for
    /// the whole file, and what creating a file may meet.
    pub fn create(path: &Path, plan: &[TensorPlan], metadata: &BTreeMap<String, String>) -> Result<Writer, Error> {
        Writer::aligned(path, plan, metadata, 8)
    }

    /// The length of the file that [`aligned`](Writer::aligned) makes from the same arguments.
    ///
    /// # Errors
    /// A plan whose size overflows, or whose header is larger than a reader would accept.
    pub fn file_len(
        plan: &[TensorPlan],
        metadata: &BTreeMap<String, String>,
        align: usize,
    ) -> Result<u64, HeaderError> {
        let (json, data_len) = header(plan, metadata, align)?;
        whole_len(&json, data_len)
    }

    /// As [`create`](Writer::create), with a data section that starts at a multiple of `align` bytes (itself a multiple of 8).
    pub fn aligned(
        path: &Path,
        plan: &[TensorPlan],
        metadata: &BTreeMap<String, String>,
        align: usize,
    ) -> Result<Writer, Error> {
        assert!(align > 0 && align.is_multiple_of(8), "an alignment of {align} bytes");
        let refuse = |problem| Error::Header { path: path.to_owned(), problem };
        let (json, data_len) = header(plan, metadata, align).map_err(refuse)?;
        let file_len = whole_len(&json, data_len).map_err(refuse)?;
        // Names and shapes are checked by our own reader.
        Header::parse(&json, file_len).map_err(refuse)?;
        check_space(path, file_len)?;

        let mut file = AtomicFile::create(path)?;
        file.expect(file_len);
        file.write_all(&(json.len() as u64).to_le_bytes())?;
        file.write_all(&json)?;
        let size = |t: &TensorPlan| t.size().expect("checked with the header");
        let tensors = plan.iter().map(|t| (t.name.clone(), size(t))).collect();
        let data_start = 8 + json.len() as u64;
        Ok(Writer { file, tensors, current: 0, written: 0, data_start, data_len, placed: 0 })
    }

    /// Appends bytes of `tensor`: all of it or the next part, each tensor complete before the next one of the plan begins.
    /// An empty tensor needs no call.
    ///
    /// # Errors
    /// A tensor out of turn, more bytes than it has, and what writing may meet; after the latter the file cannot be finished.
    pub fn append(&mut self, tensor: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.file.path();
        let complete = |(name, size): &(String, u64), written| written == *size && name != tensor;
        while self.tensors.get(self.current).is_some_and(|t| complete(t, self.written)) {
            (self.current, self.written) = (self.current + 1, 0);
        }
        let due = self.tensors.get(self.current);
        let Some((_, size)) = due.filter(|(name, _)| name == tensor) else {
            let expected = due.map_or("nothing more".to_owned(), |(name, _)| quoted(name));
            return Err(Error::OutOfOrder { path: path.to_owned(), tensor: tensor.to_owned(), expected });
        };
        if bytes.len() as u64 > size - self.written {
            return Err(Error::TooManyBytes { path: path.to_owned(), tensor: tensor.to_owned(), size: *size });
        }
        self.file.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Where the data section starts in the file.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Writes bytes at `offset` of the data section, in any order. Every byte must be written once, and none by [`append`](Writer::append):
    /// [`finish`](Writer::finish) counts them.
    ///
    /// # Errors
    /// Bytes beyond the last tensor, and what writing may meet; after the latter the file cannot be finished.
    pub fn write_at(&mut self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        let (path, len) = (self.file.path(), bytes.len() as u64);
        if offset.checked_add(len).is_none_or(|end| end > self.data_len) {
            return Err(Error::BeyondData { path: path.to_owned(), offset, len, data_len: self.data_len });
        }
        self.file.write_at(bytes, self.data_start + offset)?;
        self.placed += len;
        Ok(())
    }

    /// Checks that every tensor is complete, syncs the file, renames it to its place and makes the name durable.
    pub fn finish(self) -> Result<(), Error> {
        if self.placed > 0 {
            if self.placed != self.data_len {
                let path = self.file.path().to_owned();
                return Err(Error::Unfilled { path, written: self.placed, data_len: self.data_len });
            }
            return self.file.commit();
        }
        let mut written = self.written;
        for (name, size) in &self.tensors[self.current.min(self.tensors.len())..] {
            let missing = size - std::mem::take(&mut written);
            if missing > 0 {
                let path = self.file.path().to_owned();
                return Err(Error::Incomplete { path, tensor: name.clone(), missing, size: *size });
            }
        }
        self.file.commit()
    }
}

/// Bytes of a file with this header in front of so many bytes of data.
fn whole_len(json: &[u8], data_len: u64) -> Result<u64, HeaderError> {
    let len = data_len.checked_add(8 + json.len() as u64);
    len.ok_or_else(|| HeaderError::Json { why: "the file's size overflows".into() })
}

/// The JSON of a header, padded with spaces so that the data begins at a multiple of `align`, and the length of the data section it describes.
fn header(
    plan: &[TensorPlan],
    metadata: &BTreeMap<String, String>,
    align: usize,
) -> Result<(Vec<u8>, u64), HeaderError> {
    let text = |s: &str| serde_json::to_string(s).expect("a string is always JSON");
    let mut json = String::from("{");
    if !metadata.is_empty() {
        json += "\"__metadata__\":";
        json += &serde_json::to_string(metadata).expect("strings are always JSON");
    }
    let mut end = 0u64;
    for tensor in plan {
        let start = end;
        let overflow = || HeaderError::Overflow { tensor: tensor.name.clone() };
        end = tensor.size().and_then(|size| start.checked_add(size)).ok_or_else(overflow)?;
        if json.len() > 1 {
            json.push(',');
        }
        let shape: Vec<String> = tensor.shape.iter().map(|d| d.to_string()).collect();
        json += &format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{start},{end}]}}",
            text(&tensor.name),
            tensor.dtype,
            shape.join(",")
        );
    }
    json.push('}');
    let mut json = json.into_bytes();
    json.resize((8 + json.len()).next_multiple_of(align) - 8, b' ');
    match json.len() as u64 {
        header if header > MAX_HEADER => Err(HeaderError::TooLarge { header }),
        _ => Ok((json, end)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;

    fn plan() -> Vec<TensorPlan> {
        let tensor = |name: &str, n: usize| TensorPlan { name: name.into(), dtype: Dtype::U8, shape: vec![n] };
        vec![tensor("a", 5), tensor("b", 0), tensor("c", 9000)]
    }

    #[test]
    fn bytes_at_their_places_make_an_aligned_file() {
        for align in [8, 64, 4096] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model.safetensors");
            let mut writer = Writer::aligned(&path, &plan(), &BTreeMap::new(), align).unwrap();
            assert!(writer.data_start().is_multiple_of(align as u64));
            let start = writer.data_start();
            writer.write_at(&[3; 9000], 5).unwrap();
            let beyond = writer.write_at(&[1; 6], 9000).unwrap_err().to_string();
            assert!(beyond.contains("model.safetensors") && beyond.contains("9000"), "{beyond}");
            writer.write_at(&[1; 5], 0).unwrap();
            writer.finish().unwrap();
            let back = Checkpoint::open(folder.path()).unwrap();
            assert_eq!(back.place("a").unwrap().1, start);
            assert!(back.tensor("c").unwrap().bytes.iter().all(|b| *b == 3));
            assert!(back.tensor("a").unwrap().bytes.iter().all(|b| *b == 1));
        }
    }

    #[test]
    fn what_was_not_written_is_missed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut writer = Writer::create(&path, &plan(), &BTreeMap::new()).unwrap();
        writer.write_at(&[3; 9000], 5).unwrap();
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("9000 of 9005"), "{error}");
        assert!(!path.exists());
    }
}
