//! The files of a repository.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// What is in a file.
#[derive(Clone)]
pub enum Content {
    /// Bytes.
    Memory(Arc<Vec<u8>>),
    /// A file on disk.
    Disk(PathBuf),
}

impl Content {
    /// Bytes that look like weights: nothing repeats.
    pub fn random(seed: u64, size: usize) -> Content {
        let mut bytes = vec![0; size];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        bytes.into()
    }

    /// Its length.
    pub fn size(&self) -> u64 {
        match self {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Disk(path) => path.metadata().map_or(0, |m| m.len()),
        }
    }

    /// Reads bytes from `at` on into the buffer; returns how many.
    pub fn read(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        match self {
            Content::Memory(bytes) => {
                let rest = bytes.get(at as usize..).unwrap_or_default();
                let n = rest.len().min(buffer.len());
                buffer[..n].copy_from_slice(&rest[..n]);
                Ok(n)
            }
            Content::Disk(path) => File::open(path)?.read_at(buffer, at),
        }
    }

    /// All of it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.size() as usize];
        let mut at = 0;
        while at < bytes.len() {
            at += self.read(&mut bytes[at..], at as u64).expect("the file can be read");
        }
        bytes
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Content {
        Content::Memory(Arc::new(bytes))
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Content {
        text.as_bytes().to_vec().into()
    }
}

fn hex(context: Context) -> String {
    context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sum(mut context: Context, content: &Content) -> String {
    let (mut buffer, mut at) = (vec![0; 1 << 20], 0);
    loop {
        match content.read(&mut buffer, at).expect("the file can be read") {
            0 => return hex(context),
            n => {
                context.update(&buffer[..n]);
                at += n as u64;
            }
        }
    }
}

/// The checksum of a large file.
pub fn sha256(content: &Content) -> String {
    sum(Context::new(&SHA256), content)
}

/// The checksum of a small file, as git has it.
pub fn git_sha1(content: &Content) -> String {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {}\0", content.size()).as_bytes());
    sum(context, content)
}
