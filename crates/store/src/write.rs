//! Writing a safetensors file tensor by tensor, in bounded memory: the plan fixes the header, then the bytes stream through.

use std::collections::BTreeMap;
use std::path::Path;

use crate::atomic::{AtomicFile, check_space};
use crate::dtype::Dtype;
use crate::error::{Error, quoted};
use crate::safetensors::{Header, HeaderError, MAX_HEADER};

/// What a tensor of a file to be written will be.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorPlan {
    pub name: String,
    pub dtype: Dtype,
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
    /// The tensor whose bytes are due, and how many of them have come.
    current: usize,
    written: u64,
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
        let refuse = |problem| Error::Header { path: path.to_owned(), problem };
        let (json, data_len) = header(plan, metadata).map_err(refuse)?;
        let file_len = data_len.checked_add(8 + json.len() as u64);
        let file_len = file_len.ok_or_else(|| refuse(HeaderError::Json { why: "the file's size overflows".into() }))?;
        // Our own reader is the judge of names and shapes.
        Header::parse(&json, file_len).map_err(refuse)?;
        check_space(path, file_len)?;

        let mut file = AtomicFile::create(path)?;
        file.expect(file_len);
        file.write_all(&(json.len() as u64).to_le_bytes())?;
        file.write_all(&json)?;
        let size = |t: &TensorPlan| t.size().expect("checked with the header");
        let tensors = plan.iter().map(|t| (t.name.clone(), size(t))).collect();
        Ok(Writer { file, tensors, current: 0, written: 0 })
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

    /// Checks that every tensor is complete, syncs the file, renames it to its place and makes the name durable.
    pub fn finish(self) -> Result<(), Error> {
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

/// The JSON of a header, padded with spaces, and the length of the data section it describes.
fn header(plan: &[TensorPlan], metadata: &BTreeMap<String, String>) -> Result<(Vec<u8>, u64), HeaderError> {
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
    json.resize(json.len().next_multiple_of(8), b' ');
    match json.len() as u64 {
        header if header > MAX_HEADER => Err(HeaderError::TooLarge { header }),
        _ => Ok((json, end)),
    }
}
