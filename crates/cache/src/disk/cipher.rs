//! Encryption at rest: the file with the key, and what it makes of slots. AES-256-GCM of ring, which is kept by the people of rustls: on one core 6.9 GB/s
//! of a 2 MB slot, where RustCrypto's aes-gcm gave 1.4, its chacha20poly1305 1.6, and aws-lc-rs 10.2 with eight times the source to build.
//!
//! A nonce must never be used twice with one key. Here a key belongs to a session, from one opening of the folder to its end: it is derived from a random
//! 128-bit number that is drawn when the folder is opened, and the nonce is a count of the slots that this session has sealed.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use sluice_store::open_regular;

use super::Error;
use super::slot::TAIL;

/// The tag of AES-GCM.
const TAG: usize = 16;
/// Sessions whose keys are remembered.
const REMEMBERED: usize = 1024;
const MAGIC: [u8; 8] = *b"SLUICEKX";

/// The key of an encrypted cache, as a file gives it.
#[derive(Clone)]
pub struct FileKey([u8; 32]);

impl fmt::Debug for FileKey {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("FileKey")
    }
}

impl FileKey {
    /// Reads a key: 32 bytes, or 64 hexadecimal digits, from a file that only its owner may read.
    ///
    /// # Errors
    /// A file that is none, or that others may read; the system's.
    pub fn read(path: &Path) -> Result<FileKey, Error> {
        let failed = |cause| Error::KeyFile { path: path.to_owned(), cause };
        let refused = |why: &str| failed(io::Error::new(io::ErrorKind::InvalidData, why.to_owned()));
        let file = open_regular(path).map_err(|e| match e {
            sluice_store::Error::Io { cause, .. } => failed(cause),
            _ => refused("not a regular file"),
        })?;
        if file.metadata().map_err(failed)?.permissions().mode() & 0o077 != 0 {
            return Err(refused("others may read it: chmod 600 it"));
        }
        let mut bytes = Vec::new();
        file.take(100).read_to_end(&mut bytes).map_err(failed)?;
        FileKey::parse(&bytes).ok_or_else(|| refused("a key is 32 bytes, or 64 hexadecimal digits"))
    }

    /// A key from what its file holds.
    pub fn parse(bytes: &[u8]) -> Option<FileKey> {
        if let Ok(key) = bytes.try_into() {
            return Some(FileKey(key));
        }
        let digits = bytes.trim_ascii();
        let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
        let mut key = [0; 32];
        if digits.len() != 2 * key.len() {
            return None;
        }
        for (byte, pair) in key.iter_mut().zip(digits.chunks(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(FileKey(key))
    }

    /// A key of its own for one purpose, told apart by `salt`.
    fn derive(&self, purpose: &str, salt: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(purpose);
        hasher.update(&self.0).update(salt);
        *hasher.finalize().as_bytes()
    }

    /// Seals an installation's secret. `salt` is drawn for this: the key that it gives is used once.
    pub(super) fn seal_secret(&self, salt: &[u8; 16], secret: &mut [u8; 32]) -> [u8; TAG] {
        let key = key_of(&self.derive("sluice prompt cache 1: the secret", salt));
        let tag = key.seal_in_place_separate_tag(nonce(0), Aad::empty(), secret).expect("a short message");
        tag.as_ref().try_into().expect("the length of a tag")
    }

    /// The secret, if it was sealed with this key.
    pub(super) fn open_secret(&self, salt: &[u8; 16], sealed: &[u8; 32 + TAG]) -> Option<[u8; 32]> {
        let key = key_of(&self.derive("sluice prompt cache 1: the secret", salt));
        let mut sealed = *sealed;
        key.open_in_place(nonce(0), Aad::empty(), &mut sealed).ok()?.as_ref().try_into().ok()
    }
}

fn key_of(bytes: &[u8; 32]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, bytes).expect("the length of a key"))
}

fn nonce(count: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&count.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Seals and opens the slots of one folder.
pub(crate) struct Cipher {
    root: [u8; 32],
    session: [u8; 16],
    sealed: AtomicU64,
    keys: Mutex<HashMap<[u8; 16], Arc<LessSafeKey>>>,
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Cipher")
    }
}

impl Cipher {
    /// `session` is drawn for this.
    pub fn new(key: &FileKey, secret: &[u8; 32], session: [u8; 16]) -> Cipher {
        let root = key.derive("sluice prompt cache 1: slots", secret);
        Cipher { root, session, sealed: AtomicU64::new(0), keys: Mutex::default() }
    }

    fn key(&self, session: &[u8; 16]) -> Arc<LessSafeKey> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if keys.len() > REMEMBERED {
            keys.clear();
        }
        let key = keys.entry(*session);
        Arc::clone(key.or_insert_with(|| Arc::new(key_of(blake3::keyed_hash(&self.root, session).as_bytes()))))
    }

    /// Encrypts all of a slot but its last [`TAIL`] bytes. These get magic and count (8 bytes each), session and tag (16 each), and zeros.
    pub fn seal(&self, slot: &mut [u8]) {
        let count = self.sealed.fetch_add(1, Ordering::Relaxed);
        let (body, tail) = slot.split_at_mut(slot.len() - TAIL);
        tail.fill(0);
        tail[..8].copy_from_slice(&MAGIC);
        tail[8..16].copy_from_slice(&count.to_le_bytes());
        tail[16..32].copy_from_slice(&self.session);
        let key = self.key(&self.session);
        let tag = key.seal_in_place_separate_tag(nonce(count), Aad::from(&tail[..32]), body);
        tail[32..48].copy_from_slice(tag.expect("a slot is no longer than what AES-GCM takes").as_ref());
    }

    /// Decrypts a slot in place; its end is zeros again. Returns false, and leaves undefined contents, if it was not sealed with this key or has changed since.
    pub fn open(&self, slot: &mut [u8]) -> bool {
        let Some(body) = slot.len().checked_sub(TAIL) else { return false };
        let mut tail = [0; TAIL];
        tail.copy_from_slice(&slot[body..]);
        if tail[..8] != MAGIC || tail[48..] != [0; 16] {
            return false;
        }
        let session = tail[16..32].try_into().expect("16 bytes");
        let count = u64::from_le_bytes(tail[8..16].try_into().expect("8 bytes"));
        // The tag follows what is encrypted.
        slot[body..body + TAG].copy_from_slice(&tail[32..48]);
        let sealed = &mut slot[..body + TAG];
        let opened = self.key(&session).open_in_place(nonce(count), Aad::from(&tail[..32]), sealed).is_ok();
        slot[body..].fill(0);
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};

    #[test]
    fn a_slot_opens_with_its_key_and_as_it_was_sealed_only() {
        let plain: Vec<u8> = (0..8192 - TAIL).map(|i| i as u8).chain([0; TAIL]).collect();
        let cipher = Cipher::new(&FileKey([1; 32]), &[2; 32], [3; 16]);
        let mut sealed = [plain.clone(), plain.clone()];
        sealed.iter_mut().for_each(|s| cipher.seal(s));
        assert_ne!(sealed[0], sealed[1], "one nonce for two slots");
        // Another session has the key too.
        let later = Cipher::new(&FileKey([1; 32]), &[2; 32], [4; 16]);
        for slot in &sealed {
            let mut opened = slot.clone();
            assert!(later.open(&mut opened) && opened == plain);
        }
        for other in [(5, 2), (1, 5)].map(|(key, secret)| Cipher::new(&FileKey([key; 32]), &[secret; 32], [3; 16])) {
            assert!(!other.open(&mut sealed[0].clone()));
        }
        let mut random = fastrand::Rng::with_seed(1);
        for bit in (0..200).map(|_| random.usize(..8 * plain.len())).chain(8 * (plain.len() - TAIL)..8 * plain.len()) {
            let mut bad = sealed[0].clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!cipher.open(&mut bad), "bit {bit}");
        }
        assert!(!cipher.open(&mut []) && !cipher.open(&mut [0; 4096]));
    }

    #[test]
    fn a_key_is_32_bytes_or_its_digits_and_nobody_else_may_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let read = |bytes: &[u8], mode| {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            FileKey::read(&path).map(|key| key.0).map_err(|e| std::error::Error::source(&e).unwrap().to_string())
        };
        assert_eq!(read(&[10; 32], 0o600), Ok([10; 32]));
        assert_eq!(read(&[b'a'; 64], 0o600), Ok([0xaa; 32]));
        assert_eq!(read(format!("{}\n", "0F".repeat(32)).as_bytes(), 0o400), Ok([15; 32]));
        for bad in [&b""[..], &[7; 31], &[7; 33], &[b'g'; 64], &[b'a'; 63], &[b'a'; 200]] {
            assert!(read(bad, 0o600).unwrap_err().contains("a key is 32 bytes"));
        }
        assert!(read(&[10; 32], 0o640).unwrap_err().contains("chmod 600"));
        assert!(matches!(FileKey::read(folder.path()), Err(Error::KeyFile { .. })));
    }
}
