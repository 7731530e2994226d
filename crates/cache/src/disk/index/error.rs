//! Errors of the database, whose file anybody may have changed.

use std::io;

use sluice_store::catch_panic;

/// Anything that goes wrong with it.
pub type Error = Box<redb::Error>;

/// Whether an error means that the file is no index, rather than that the disk did not do what it was asked for.
pub fn is_broken(e: &redb::Error) -> bool {
    match e {
        redb::Error::Io(e) => {
            [io::ErrorKind::InvalidData, io::ErrorKind::UnexpectedEof, io::ErrorKind::FileTooLarge].contains(&e.kind())
        }
        redb::Error::PreviousIo | redb::Error::LockPoisoned(_) => false,
        _ => true,
    }
}

pub fn own(e: impl Into<redb::Error>) -> Error {
    Box::new(e.into())
}

/// Runs `what`. The database may panic if its bytes were changed behind its back: that counts as a file that is no
/// index.
pub fn guarded<T>(what: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_panic(what)
        .unwrap_or_else(|_| Err(own(redb::StorageError::Corrupted("its pages contradict each other".into()))))
}
