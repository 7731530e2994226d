//! Checksums as the hub has them: SHA-256 for large files, git's SHA-1 for the others. They are also the names of blobs.

use std::fs::File;
use std::io::Read;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// A checksum that a file must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    kind: Kind,
    hex: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sha256,
    /// Of `blob LENGTH\0` and the file.
    Git,
}

impl Digest {
    /// The checksum in an entity tag; `None` for other tags.
    pub fn of_etag(etag: &str) -> Option<Digest> {
        let hex = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
        let kind = match hex.len() {
            64 => Kind::Sha256,
            40 => Kind::Git,
            _ => return None,
        };
        let is_hex = hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        is_hex.then(|| Digest { kind, hex: hex.to_owned() })
    }

    /// In hexadecimal: the name of the blob.
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// What messages call it.
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::Sha256 => "SHA-256",
            Kind::Git => "git SHA-1",
        }
    }

    /// Begins the sum of a file of `size` bytes.
    pub fn sum(&self, size: u64) -> Sum {
        Sum(match self.kind {
            Kind::Sha256 => Context::new(&SHA256),
            Kind::Git => {
                let mut sum = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                sum.update(format!("blob {size}\0").as_bytes());
                sum
            }
        })
    }

    /// The sum of these bytes.
    pub fn sum_of(&self, bytes: &[u8]) -> String {
        let mut sum = self.sum(bytes.len() as u64);
        sum.update(bytes);
        sum.finish()
    }

    /// The sum of a file; `each` hears how many bytes were read.
    pub fn sum_of_file(&self, file: &mut File, mut each: impl FnMut(u64)) -> std::io::Result<String> {
        let mut sum = self.sum(file.metadata()?.len());
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(sum.finish()),
                n => {
                    sum.update(&buffer[..n]);
                    each(n as u64);
                }
            }
        }
    }
}

/// A sum of bytes so far.
#[derive(Clone)]
pub struct Sum(Context);

impl Sum {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The sum in hexadecimal.
    pub fn finish(self) -> String {
        self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sums_are_the_known_ones() {
        let sha256 = Digest::of_etag("\"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\"").unwrap();
        assert_eq!(sha256.sum_of(b"abc"), sha256.hex());
        // `printf 'test content\n' | git hash-object --stdin`, of the git book.
        let git = Digest::of_etag("W/\"d670460b4b4aece5915caf5c68d12f560a9fe3e4\"").unwrap();
        assert_eq!(git.sum_of(b"test content\n"), git.hex());
        for other in ["", "\"abc\"", "5d41402abc4b2a76b9719d911017c592", &"G".repeat(40), &"A".repeat(64)] {
            assert_eq!(Digest::of_etag(other), None, "{other}");
        }
    }
}
