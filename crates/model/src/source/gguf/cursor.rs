//! Reading a header's fields in order, never beyond the file and never more than a header may have.

use std::io::Read;

/// Bytes that a header may have, metadata and tensor table together. Vocabularies of 262,144 tokens take about 10 MB.
pub const MAX_HEADER: u64 = 256 << 20;

/// Reads little-endian fields. What goes wrong is said without the field's name, which the caller knows.
pub struct Cursor<R> {
    from: R,
    /// Bytes read so far.
    at: u64,
    /// Where the file ends, or the longest header.
    end: u64,
    /// Bytes of the file.
    len: u64,
}

impl<R: Read> Cursor<R> {
    /// The fields of a file of `len` bytes, from its beginning.
    pub fn new(from: R, len: u64) -> Cursor<R> {
        Cursor { from, at: 0, end: len.min(MAX_HEADER), len }
    }

    /// Bytes read so far: the offset of the next field.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Checks that `count` things of at least `size` bytes each may follow.
    pub fn expect(&self, count: u64, size: u64, what: &str) -> Result<(), String> {
        match count.checked_mul(size) {
            Some(bytes) if bytes <= self.end - self.at => Ok(()),
            _ if self.end < self.len => {
                Err(format!("{count} {what} at offset {} reach beyond the longest header, {MAX_HEADER} bytes", self.at))
            }
            _ => Err(format!("{count} {what} at offset {} reach beyond the end of the file, {}", self.at, self.len)),
        }
    }

    /// The next `count` bytes. Memory is taken as they come.
    pub fn bytes(&mut self, count: u64) -> Result<Vec<u8>, String> {
        self.expect(count, 1, "bytes")?;
        let mut bytes = Vec::with_capacity(count.min(1 << 20) as usize);
        self.append(count, &mut bytes)?;
        Ok(bytes)
    }

    /// Appends the next `count` bytes.
    pub fn append(&mut self, count: u64, to: &mut Vec<u8>) -> Result<(), String> {
        self.expect(count, 1, "bytes")?;
        let read = (&mut self.from).take(count).read_to_end(to).map_err(|e| format!("cannot read: {e}"))?;
        self.at += read as u64;
        if read as u64 == count { Ok(()) } else { Err(format!("the file ends at offset {}", self.at)) }
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.expect(N as u64, 1, "bytes")?;
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(|e| format!("cannot read at offset {}: {e}", self.at))?;
        self.at += N as u64;
        Ok(bytes)
    }

    pub fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }
}
