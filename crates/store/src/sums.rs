//! Sums over all bytes of a file, and what tells a file that was summed once from one that has changed since.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::load::ReadFile;

/// Bytes that are read at once.
const PORTION: usize = 2 << 20;
/// Times of files may be as coarse as this, in seconds (two on FAT): a second change within it need not show.
const COARSE: i64 = 3;

/// What of a file's metadata changes whenever its bytes do. No program can set the time of its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub fn of(found: &Metadata) -> Stamp {
        Stamp {
            device: found.dev(),
            inode: found.ino(),
            len: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the file was changed so shortly before `now` that another change at `now` could leave the same stamp. A sum that was begun then is right for as
    /// long as somebody keeps the file open and looks at it, but must not be remembered. A clock that was set back makes files fresh, too.
    pub fn is_fresh(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |n| n.as_secs() as i64);
        let ago = |(seconds, _): (i64, i64)| now.saturating_sub(seconds);
        // A time of modification in the future was set by somebody; that of the last change cannot be.
        ago(self.changed) <= COARSE || (0..=COARSE).contains(&ago(self.modified))
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Stamp { device, inode, len, modified: (m, m_nanos), changed: (c, c_nanos) } = self;
        write!(f, "{device}:{inode}:{len}:{m}.{m_nanos}:{c}.{c_nanos}")
    }
}

/// XXH3 (128 bits) of all bytes of the file at `path`, which had this stamp and must still have it at the end. What was not in the page cache is not there
/// afterwards either, and no more than a few megabytes are on their way at any time. `goes_on` hears of the bytes of each portion; where it says no, there is no
/// sum.
///
/// # Errors
/// [`Error::Replaced`] for a file that has another stamp; what the system says.
pub fn sum_file(path: &Path, stamp: &Stamp, goes_on: &mut dyn FnMut(u64) -> bool) -> Result<Option<u128>, Error> {
    let file = ReadFile::open(path)?;
    // Who writes to a file through a map changes its times only with the first write after its pages are clean.
    let _ = rustix::fs::fdatasync(&file.buffered);
    let is_same = || {
        let found = file.buffered.metadata().map_err(Error::io(path, "look at"))?;
        if Stamp::of(&found) == *stamp { Ok(()) } else { Err(Error::Replaced { path: path.to_owned() }) }
    };
    is_same()?;
    file.read_nothing_ahead();
    let (mut hash, mut portion) = (Xxh3::new(), vec![0; PORTION.min(stamp.len as usize)]);
    let mut at = 0;
    while at < stamp.len {
        let n = PORTION.min((stamp.len - at) as usize);
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

/// From here on this thread computes and reads only where nobody else wants to, as far as the system can tell.
pub fn lower_priority() {
    // `IOPRIO_WHO_PROCESS`, of which 0 is the calling thread, and `IOPRIO_CLASS_IDLE`, as Linux numbers them.
    const WHO: libc::c_int = 1;
    const IDLE: libc::c_int = 3 << 13;
    // SAFETY: both take numbers and touch no memory. Where they are refused, the thread stays as it is.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
        libc::syscall(libc::SYS_ioprio_set, WHO, 0, IDLE);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::{Seek, SeekFrom, Write};
    use std::time::Duration;

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
        // 3. Who wants no more gets none
        assert_eq!(sum_file(&path, &stamp(&path), &mut |_| false).unwrap(), None);
    }

    #[test]
    fn a_stamp_is_believed_once_a_change_would_show() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, "x").unwrap();
        let seconds = Duration::from_secs;
        let now = SystemTime::now();
        let later = now + seconds(60);
        assert!(stamp(&path).is_fresh(now) && !stamp(&path).is_fresh(later));
        // Times that were set, to the past or the future, hide no change; a change after `now` does.
        let set = |time| File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        for time in [now - seconds(1000), now + seconds(1000)] {
            set(time);
            assert!(stamp(&path).is_fresh(now) && !stamp(&path).is_fresh(later));
        }
        // Where the time of change says nothing, that of modification does.
        set(later - seconds(1));
        assert!(stamp(&path).is_fresh(later));
        assert!(stamp(&path).is_fresh(now - seconds(1000)));
    }
}
