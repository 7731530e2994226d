//! How much of a file is in the page cache, and dropping it from there. Used to choose a way of reading, around buffered reads that should leave no trace, and
//! by measurements of cold files.

use std::fs::File;
use std::io;

use crate::platform;

/// Bytes of `file` from `offset` on (`len` of them) that are in the page cache, in whole pages.
///
/// # Errors
/// Those of the system; `PermissionDenied` where only a user who may write the file may know.
pub fn resident_bytes(file: &File, offset: u64, len: u64) -> io::Result<u64> {
    if len == 0 { Ok(0) } else { platform::resident_bytes(file, offset, len) }
}

/// Asks the system to drop the clean pages of a part of `file`. Mapped pages stay, and others may: [`resident_bytes`] tells.
pub fn drop_cached(file: &File, offset: u64, len: u64) -> io::Result<()> {
    platform::drop_cached(file, offset, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_nothing_is_resident() {
        assert_eq!(resident_bytes(&tempfile::tempfile().unwrap(), 0, 0).unwrap(), 0);
    }
}
