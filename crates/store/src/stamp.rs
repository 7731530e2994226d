//! Tells whether a file has changed since it was looked at.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{SystemTime, UNIX_EPOCH};

/// The coarsest file times, in seconds (two on FAT). Two changes within this time may have the same stamp.
const COARSE: i64 = 3;

/// Metadata that change whenever a file's bytes do. No program can set the time of the last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// The stamp of a file, from its metadata.
    pub fn of(found: &Metadata) -> Stamp {
        Stamp {
            device: found.dev(),
            inode: found.ino(),
            len: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }

    /// The stamp of a file that is arriving, whose times change all the while.
    pub(crate) fn without_times(found: &Metadata) -> Stamp {
        Stamp { modified: (0, 0), changed: (0, 0), ..Stamp::of(found) }
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the file was changed so shortly before `now` that another change at `now` could leave the same stamp. A sum of a fresh file may be used while
    /// the file is open and watched, but must not be remembered. A clock that was set back makes files fresh, too.
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

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    fn stamp(path: &Path) -> Stamp {
        Stamp::of(&fs::metadata(path).unwrap())
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
