//! A shared, read-only run of bytes. It keeps its owner alive: a mapped file, or memory that a file was copied to.

use std::fmt;
use std::io;
use std::ops::{Bound, Deref, Range, RangeBounds};
use std::sync::Arc;

use crate::arriving::{self, Arriving};
use crate::load::{LoadError, Source};
use crate::map::{Buffer, Map};

/// A view of bytes, cheap to clone and to slice, never copied. Its alignment is that of the tensor in its file, so it may be any.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<Owner>,
    range: Range<usize>,
}

enum Owner {
    /// A file's pages: clean, the kernel may drop and reread them.
    /// Also who brings its bytes, if it is arriving.
    Mapped(Map, Option<Arc<dyn Arriving>>),
    /// Page-aligned anonymous memory.
    Copied(Map),
    Vec(Vec<u8>),
    /// A file that is being loaded: a part of it may not be there yet.
    Loaded(Arc<Source>),
}

impl Owner {
    fn len(&self) -> usize {
        match self {
            Owner::Mapped(map, _) | Owner::Copied(map) => map.len(),
            Owner::Vec(bytes) => bytes.len(),
            Owner::Loaded(source) => source.file.len as usize,
        }
    }
}

impl Bytes {
    fn whole(owner: Owner) -> Bytes {
        let range = 0..owner.len();
        Bytes { owner: Arc::new(owner), range }
    }

    pub(crate) fn mapped(map: Map, arriving: Option<Arc<dyn Arriving>>) -> Bytes {
        Bytes::whole(Owner::Mapped(map, arriving))
    }

    /// A part of a file that is being loaded.
    pub(crate) fn loaded(source: &Arc<Source>, range: Range<usize>) -> Bytes {
        Bytes { owner: Arc::new(Owner::Loaded(Arc::clone(source))), range }
    }

    /// The file that this is a part of, and which, if it is being loaded.
    pub(crate) fn source(&self) -> Option<(&Arc<Source>, Range<usize>)> {
        match &*self.owner {
            Owner::Loaded(source) => Some((source, self.range.clone())),
            _ => None,
        }
    }

    /// Bytes in the view, whether they are there or not.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether the view has no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Where the bytes are, or will be once they are there. Does not wait for them. In the memory of a whole file, mapped or read, they are as far from the start of
    /// a page as in the file.
    pub fn address(&self) -> *const u8 {
        let start = match &*self.owner {
            Owner::Mapped(map, _) | Owner::Copied(map) => map.start().cast_const(),
            Owner::Vec(bytes) => bytes.as_ptr(),
            Owner::Loaded(source) => source.memory().start().cast_const(),
        };
        start.wrapping_add(self.range.start)
    }

    /// Whether the view can be read without waiting.
    pub fn is_ready(&self) -> bool {
        self.source().is_none_or(|(source, range)| source.is_ready(&range))
    }

    /// Waits until the view can be read, and moves it to the front of the queue. Dereferencing the view does the same. A part that cannot be read becomes
    /// zeros: see [`crate::load::Loading::check`].
    pub fn wait(&self) {
        if let Some((source, range)) = self.source() {
            source.wait(&range);
        }
    }

    /// Copies the view to `into`, which has the same length. Does not wait for the load: missing bytes are read at once. Meant for a few bytes.
    ///
    /// # Errors
    /// Those of the disk, which also end the load.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn read_now(&self, into: &mut [u8]) -> Result<(), LoadError> {
        match self.source() {
            Some((source, range)) => source.read_now(range, into),
            None => {
                into.copy_from_slice(self);
                Ok(())
            }
        }
    }

    /// The part of this view in `range` (bytes, relative to the view), sharing the same owner.
    ///
    /// # Panics
    /// When the range is reversed or reaches beyond the view, like a slice's.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Bytes {
        let start = match range.start_bound() {
            Bound::Included(&n) => n,
            Bound::Excluded(&n) => n.checked_add(1).expect("start of range overflows"),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&n) => n.checked_add(1).expect("end of range overflows"),
            Bound::Excluded(&n) => n,
            Bound::Unbounded => self.range.len(),
        };
        assert!(start <= end && end <= self.range.len(), "{start}..{end} lies outside {} bytes", self.range.len());
        Bytes { owner: Arc::clone(&self.owner), range: self.range.start + start..self.range.start + end }
    }

    /// Whether these are pages of a file (counted as mapped weights) and not a copy in anonymous memory.
    pub fn is_mapped(&self) -> bool {
        match &*self.owner {
            Owner::Mapped(..) => true,
            Owner::Loaded(source) => source.is_mapped(),
            Owner::Copied(_) | Owner::Vec(_) => false,
        }
    }

    /// Whether these are bytes of a file, mapped or read, and not made in memory.
    pub fn is_of_file(&self) -> bool {
        matches!(&*self.owner, Owner::Mapped(..) | Owner::Loaded(_))
    }

    /// Whether a load brings these bytes, or has brought them.
    pub fn belongs_to_load(&self) -> bool {
        self.source().is_some()
    }

    /// Starts reading a mapped view from disk in the background and returns at once; nothing to do for a copy.
    pub fn will_need(&self) -> io::Result<()> {
        match &*self.owner {
            Owner::Mapped(map, _) => map.will_need(self.range.clone()),
            Owner::Loaded(source) if source.is_mapped() => source.memory().will_need(self.range.clone()),
            Owner::Loaded(_) => Ok(()),
            Owner::Copied(_) | Owner::Vec(_) => Ok(()),
        }
    }

    /// Brings a mapped view into memory and into the page table, so that no page fault is left for its reader; nothing to do
    /// for a copy. Returns when done. Kernels before 5.14 read ahead instead. Several threads may populate parts of a file
    /// at once.
    ///
    /// # Errors
    /// The disk's, and EFAULT where the file has been truncated since it was mapped.
    pub fn populate(&self) -> io::Result<()> {
        match &*self.owner {
            Owner::Mapped(map, _) => map.populate(self.range.clone()),
            Owner::Loaded(source) if source.is_mapped() => source.memory().populate(self.range.clone()),
            Owner::Loaded(_) => Ok(()),
            Owner::Copied(_) | Owner::Vec(_) => Ok(()),
        }
    }

    /// Takes a mapped view out of this process's page table, so that it no longer counts as its memory until it is
    /// read again. Nothing to do for a copy.
    ///
    /// # Errors
    /// The kernel's.
    pub fn leave(&self) -> io::Result<()> {
        match &*self.owner {
            Owner::Mapped(map, _) => map.leave(self.range.clone()),
            Owner::Loaded(source) if source.is_mapped() => source.memory().leave(self.range.clone()),
            Owner::Loaded(_) | Owner::Copied(_) | Owner::Vec(_) => Ok(()),
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &*self.owner {
            Owner::Mapped(map, arriving) => {
                if let Some(arriving) = arriving {
                    // If it never comes, that is the error of every check of the file.
                    let _ = arriving::wait(&**arriving, &(self.range.start as u64..self.range.end as u64));
                }
                // SAFETY: maps of files are read-only.
                unsafe { map.slice(self.range.clone()) }
            }
            // SAFETY: a buffer that was turned into bytes has no writer any more.
            Owner::Copied(map) => unsafe { map.slice(self.range.clone()) },
            Owner::Vec(bytes) => &bytes[self.range.clone()],
            Owner::Loaded(source) => source.bytes(self.range.clone()),
        }
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes::whole(Owner::Vec(bytes))
    }
}

impl From<Buffer> for Bytes {
    fn from(buffer: Buffer) -> Bytes {
        Bytes::whole(Owner::Copied(buffer.into_map()))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let owner = if self.is_mapped() { "mapped" } else { "copied" };
        write!(f, "Bytes({} {owner} bytes)", self.range.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_of_a_slice_is_relative_to_it() {
        let bytes = Bytes::from((0u8..100).collect::<Vec<_>>());
        let part = bytes.slice(10..50).slice(5..=7);
        assert_eq!(&*part, &[15, 16, 17]);
        assert_eq!(part.slice(..).len(), 3);
        assert_eq!(part.address(), part.as_ptr());
        assert!(part.slice(3..).is_empty());
    }

    #[test]
    #[should_panic(expected = "lies outside 40 bytes")]
    fn a_slice_never_reaches_beyond_its_view() {
        Bytes::from(vec![0; 100]).slice(10..50).slice(0..41);
    }

    #[test]
    fn a_buffer_is_page_aligned_and_counts_as_copied() {
        let mut buffer = Buffer::zeroed(5000).unwrap();
        buffer[4999] = 7;
        let bytes = Bytes::from(buffer);
        assert_eq!(bytes.as_ptr() as usize % 4096, 0);
        assert_eq!((bytes[0], bytes[4999]), (0, 7));
        assert!(!bytes.is_mapped());
        bytes.leave().unwrap();
        assert_eq!(bytes[4999], 7);
        assert!(Bytes::from(Buffer::zeroed(0).unwrap()).is_empty());
    }

    #[test]
    fn a_buffer_prefers_a_node_that_there_is() {
        let buffer = Buffer::large(5 << 20).unwrap();
        if let Err(e) = buffer.prefer_node(0) {
            println!("SKIPPED: the kernel does not let this process choose its memory: {e}");
            return;
        }
        let (mut mode, no_nodes, of_address) = (0i32, 0usize, 2usize);
        let at = buffer.as_ptr().wrapping_add(3 << 20);
        // SAFETY: the kernel writes a number, and looks an address of this process up.
        let done = unsafe { libc::syscall(libc::SYS_get_mempolicy, &mut mode, no_nodes, 0usize, at, of_address) };
        assert_eq!((done, mode), (0, libc::MPOL_PREFERRED));
        for node in [1023, 1 << 20] {
            assert!(buffer.prefer_node(node).is_err(), "{node}");
        }
        Buffer::zeroed(0).unwrap().prefer_node(0).unwrap();
    }

    #[test]
    fn a_view_outlives_the_file_and_populates() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &[3; 10_000]).unwrap();
        let view = Bytes::mapped(Map::file(&file, 10_000).unwrap(), None).slice(4097..9001);
        drop(file);
        view.will_need().unwrap();
        view.populate().unwrap();
        view.slice(0..0).populate().unwrap();
        assert!(view.is_mapped() && view.iter().all(|&b| b == 3));
        // What was left is read again from the map.
        view.leave().unwrap();
        assert!(view.iter().all(|&b| b == 3));
    }

    #[test]
    fn a_file_truncated_under_its_map_fails_to_populate() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let view = Bytes::mapped(Map::file(&file, 1 << 20).unwrap(), None);
        file.set_len(4096).unwrap();
        view.populate().unwrap_err();
    }
}
