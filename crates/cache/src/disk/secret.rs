//! The secret of an installation: hashes of prompts are keyed with it, so that they say nothing to others. In an encrypted cache it is sealed.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

use xxhash_rust::xxh3::xxh3_64;

use super::Error;
use super::cipher::FileKey;
use super::storage::Storage;

pub(super) const SECRET: &str = "secret";

const MAGIC: [u8; 8] = *b"SLUICEPC";
const VERSION: u32 = 1;
const PLAIN: u32 = 0;
const SEALED: u32 = 1;
/// Magic, version, kind, salt, secret, tag, sum.
const BYTES: usize = 8 + 4 + 4 + 16 + 32 + 16 + 8;

/// The file, and the secret in it.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretFile {
    bytes: [u8; BYTES],
    secret: [u8; 32],
}

impl fmt::Debug for SecretFile {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("SecretFile")
    }
}

impl SecretFile {
    /// Its length.
    pub const BYTES: usize = BYTES;

    /// Reads what another folder's file holds.
    ///
    /// # Errors
    /// The wrong key, or none where one is needed; [`Error::DamagedSecret`] for what is no such file.
    pub fn open(bytes: &[u8], key: Option<&FileKey>) -> Result<SecretFile, Error> {
        let bytes: [u8; BYTES] = bytes.try_into().map_err(|_| Error::DamagedSecret)?;
        match parse(&bytes, key) {
            Found::Secret(secret) => Ok(SecretFile { bytes, secret }),
            Found::Missing | Found::Damaged => Err(Error::DamagedSecret),
            Found::KeyWanted => Err(Error::KeyWanted),
            Found::NotSealed => Err(Error::NotEncrypted),
            Found::WrongKey => Err(Error::WrongKey),
        }
    }

    /// What the file holds: the secret in the clear, unless it is sealed.
    pub fn bytes(&self) -> &[u8; BYTES] {
        &self.bytes
    }

    /// The secret.
    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }

    /// Whether another file has the same secret.
    pub fn is_same(&self, other: &SecretFile) -> bool {
        self.secret == other.secret
    }
}

/// What the file has.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Secret([u8; 32]),
    /// Nothing, or not what was written.
    Missing,
    Damaged,
    /// Sealed, and no key was given.
    KeyWanted,
    /// Not sealed, and a key was given.
    NotSealed,
    WrongKey,
}

/// Bytes that nobody can guess.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads the secret.
pub(super) fn read(storage: &dyn Storage, key: Option<&FileKey>) -> io::Result<Found> {
    let file = match storage.open(SECRET, false) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Found::Missing),
        Err(e) => return Err(e),
    };
    let mut bytes = [0; BYTES];
    if file.size()? != BYTES as u64 {
        return Ok(Found::Damaged);
    }
    file.read_at(0, &mut bytes)?;
    Ok(parse(&bytes, key))
}

pub(super) fn parse(bytes: &[u8; BYTES], key: Option<&FileKey>) -> Found {
    let (body, sum) = bytes.split_at(BYTES - 8);
    let number = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().expect("four bytes"));
    if body[..8] != MAGIC || number(8) != VERSION || *sum != xxh3_64(body).to_le_bytes() {
        return Found::Damaged;
    }
    match (number(12), key) {
        (PLAIN, None) => Found::Secret(body[32..64].try_into().expect("32 bytes")),
        (PLAIN, Some(_)) => Found::NotSealed,
        (SEALED, None) => Found::KeyWanted,
        (SEALED, Some(key)) => {
            let (salt, sealed) = (body[16..32].try_into(), body[32..].try_into());
            key.open_secret(&salt.expect("16 bytes"), &sealed.expect("48 bytes")).map_or(Found::WrongKey, Found::Secret)
        }
        _ => Found::Damaged,
    }
}

/// Draws a secret and makes it durable.
pub(super) fn make(storage: &dyn Storage, key: Option<&FileKey>) -> io::Result<[u8; 32]> {
    let (secret, salt) = (random::<32>()?, random::<16>()?);
    let mut bytes = Vec::with_capacity(BYTES);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(if key.is_some() { SEALED } else { PLAIN }.to_le_bytes());
    bytes.extend(salt);
    let mut shown = secret;
    let tag = key.map_or([0; 16], |key| key.seal_secret(&salt, &mut shown));
    bytes.extend(shown);
    bytes.extend(tag);
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    write(storage, &bytes)?;
    Ok(secret)
}

/// Makes a secret durable: all bytes of the file.
pub(super) fn write(storage: &dyn Storage, bytes: &[u8]) -> io::Result<()> {
    let file = storage.open(SECRET, true)?;
    file.set_len(BYTES as u64)?;
    file.write_at(0, bytes)?;
    file.sync()?;
    storage.sync_names()
}

/// All bytes of the file.
pub(super) fn read_bytes(storage: &dyn Storage) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    storage.open(SECRET, false)?.read_at(0, &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::Folder;
    use super::*;

    /// A folder, and what is done to the secret in it behind the cache's back.
    struct Disk(tempfile::TempDir, Folder);

    impl Disk {
        fn new() -> Disk {
            let dir = tempfile::tempdir().unwrap();
            let folder = Folder::open(dir.path()).unwrap();
            Disk(dir, folder)
        }

        fn damage(&self, change: impl FnOnce(&mut Vec<u8>)) {
            let path = self.0.path().join(SECRET);
            let mut bytes = std::fs::read(&path).unwrap();
            change(&mut bytes);
            std::fs::write(&path, &bytes).unwrap();
        }
    }

    #[test]
    fn a_secret_is_the_same_each_time_and_a_damaged_one_is_none() {
        let key = FileKey::parse(&[1; 32]);
        for key in [None, key.as_ref()] {
            let disk = Disk::new();
            assert_eq!(read(&disk.1, key).unwrap(), Found::Missing);
            let secret = make(&disk.1, key).unwrap();
            assert_eq!(read(&disk.1, key).unwrap(), Found::Secret(secret));
            let whole: [u8; BYTES] = std::fs::read(disk.0.path().join(SECRET)).unwrap().try_into().unwrap();
            assert_eq!(parse(&whole, key), Found::Secret(secret));
            for bit in 0..8 * BYTES {
                let mut bytes = whole;
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(parse(&bytes, key), Found::Damaged, "bit {bit}");
            }
            disk.damage(|bytes| bytes.truncate(BYTES - 1));
            assert_eq!(read(&disk.1, key).unwrap(), Found::Damaged);
        }
    }

    #[test]
    fn the_wrong_key_is_told_from_damage_and_a_sealed_secret_is_not_shown() {
        let disk = Disk::new();
        let (key, other) = (FileKey::parse(&[1; 32]), FileKey::parse(&[2; 32]));
        let secret = make(&disk.1, key.as_ref()).unwrap();
        assert_eq!(read(&disk.1, other.as_ref()).unwrap(), Found::WrongKey);
        assert_eq!(read(&disk.1, None).unwrap(), Found::KeyWanted);
        disk.damage(|bytes| assert!(!bytes.windows(32).any(|w| w == secret)));
        let disk = Disk::new();
        make(&disk.1, None).unwrap();
        assert_eq!(read(&disk.1, key.as_ref()).unwrap(), Found::NotSealed);
    }
}
