//! Sums over all bytes of a file.

use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::load::ReadFile;
use crate::platform;
use crate::stamp::Stamp;

/// Bytes that are read at once.
const PORTION: usize = 2 << 20;
/// XXH3 (128 bits) of all bytes of the file at `path`. The file must have this stamp before and after. Pages that were not cached are dropped again, and at
/// most a few megabytes are in flight. `goes_on` is called with the bytes of each portion; if it returns false, there is no sum.
///
/// # Errors
/// [`Error::Replaced`] for a file that has another stamp; what the system says.
pub fn sum_file(path: &Path, stamp: &Stamp, goes_on: &mut dyn FnMut(u64) -> bool) -> Result<Option<u128>, Error> {
    let file = ReadFile::open(path)?;
    // Writes through a map change the file's times only if the page was clean before, so pages are cleaned first.
    let _ = file.buffered.sync_data();
    let is_same = || {
        let found = file.buffered.metadata().map_err(Error::io(path, "look at"))?;
        if Stamp::of(&found) == *stamp { Ok(()) } else { Err(Error::Replaced { path: path.to_owned() }) }
    };
    is_same()?;
    file.read_nothing_ahead();
    let (mut hash, mut portion) = (Xxh3::new(), vec![0; PORTION.min(stamp.len() as usize)]);
    let mut at = 0;
    while at < stamp.len() {
        let n = PORTION.min((stamp.len() - at) as usize);
        // SAFETY: `portion` has at least `n` bytes, and is borrowed mutably.
        let read = unsafe { file.read_leaving_no_trace(portion[..n].as_mut_ptr(), at, n) };
        read.map_err(|(at, cause)| file.error(at, cause))?;
        hash.update(&portion[..n]);
        at += n as u64;
        if !goes_on(n as u64) {
            return Ok(None);
        }
    }
    is_same()?;
    Ok(Some(hash.digest128()))
}

/// Gives this thread the lowest priority for the processor and the disk.
pub fn lower_priority() {
    platform::lower_priority();
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Seek, SeekFrom, Write};

    use xxhash_rust::xxh3::xxh3_128;

    use super::*;

    fn stamp(path: &Path) -> Stamp {
        Stamp::of(&fs::metadata(path).unwrap())
    }

    fn sum(path: &Path, stamp: &Stamp) -> Result<Option<u128>, Error> {
        sum_file(path, stamp, &mut |_| true)
    }

    #[test]
    fn every_byte_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut bytes: Vec<u8> = (0..2 * PORTION + 77).map(|i| ((i * i) >> 3) as u8).collect();
        for len in [0, 1, PORTION - 1, PORTION, PORTION + 1, bytes.len()] {
            fs::write(&path, &bytes[..len]).unwrap();
            assert_eq!(sum(&path, &stamp(&path)).unwrap(), Some(xxh3_128(&bytes[..len])), "{len} bytes");
        }
        let all = sum(&path, &stamp(&path)).unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..20 {
            let at = random.usize(..bytes.len());
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            assert_ne!(sum(&path, &stamp(&path)).unwrap(), all, "byte {at}");
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn a_file_that_changes_meanwhile_has_no_sum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, vec![1; 3 * PORTION]).unwrap();
        let before = stamp(&path);
        // 1. While it is read: also what was read already
        let mut portions = 0;
        let changed = sum_file(&path, &before, &mut |_| {
            portions += 1;
            if portions == 2 {
                let mut file = File::options().write(true).open(&path).unwrap();
                // Clocks of files are coarse.
                while stamp(&path) == before {
                    file.seek(SeekFrom::Start(7)).unwrap();
                    file.write_all(&[2]).unwrap();
                }
            }
            true
        });
        assert!(matches!(changed, Err(Error::Replaced { .. })), "{changed:?}");
        // 2. Before
        assert!(matches!(sum(&path, &before), Err(Error::Replaced { .. })));
        // 3. A caller that wants no more gets none
        assert_eq!(sum_file(&path, &stamp(&path), &mut |_| false).unwrap(), None);
    }
}
