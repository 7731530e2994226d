//! The file of the index, page by page. Each page that is read is compared with the checksum of what was written, also
//! by an earlier run that ended cleanly. So the database never follows a page that was changed behind its back, and
//! after a clean end nothing has to be checked.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::StorageBackend;
use xxhash_rust::xxh3::xxh3_64;

use super::slot::PAGE;
use super::storage::{Storage, StoredFile};

/// The checksums, as left by a run that ended cleanly. There is no such file while the index is being changed.
pub(super) const CLEAN: &str = "clean";
const MAGIC: [u8; 8] = *b"SLUICECL";

/// Bytes of an index that are read ahead when it is opened.
const AHEAD: u64 = 16 << 20;

/// Bytes of that file, for an index of `index` bytes.
pub(super) fn mark_bytes(index: u64) -> u64 {
    24 + 8 * index.div_ceil(PAGE as u64)
}

#[derive(Debug)]
pub(super) struct Pages {
    storage: Arc<dyn Storage>,
    file: Arc<dyn StoredFile>,
    /// Bytes that the file may have, at most.
    most: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By page: its checksum, if it is known.
    sums: Vec<Option<u64>>,
    /// The file with the checksums exists.
    marked: bool,
    failed: bool,
}

impl State {
    fn forget(&mut self, offset: u64, len: usize) {
        let pages = offset as usize / PAGE..(offset as usize + len).div_ceil(PAGE);
        self.sums.iter_mut().take(pages.end).skip(pages.start).for_each(|sum| *sum = None);
    }
}

impl Pages {
    pub fn open(storage: Arc<dyn Storage>, name: &str, most: u64) -> io::Result<Pages> {
        let file = storage.open(name, true)?;
        let len = file.size()?;
        // Otherwise the first look-up would wait for the disk at every page.
        file.will_need(len.min(AHEAD));
        let (sums, marked) = match storage.open(CLEAN, false) {
            // A mark that cannot be read counts as none. It is removed before anything changes.
            Ok(mark) => (read_mark(&*mark, len).ok().flatten(), true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => (None, false),
            Err(e) => return Err(e),
        };
        let pages = (len as usize).div_ceil(PAGE);
        let known = sums.map_or(vec![None; pages], |sums| sums.into_iter().map(Some).collect());
        let state = State { sums: known, marked, failed: false };
        Ok(Pages { storage, file, most, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the checksums of all pages are known from a run that ended cleanly.
    pub fn is_clean(&self) -> bool {
        let state = self.state();
        state.marked && !state.sums.is_empty() && state.sums.iter().all(Option::is_some)
    }

    /// Makes the next run check the whole index.
    pub fn abandon(&self) -> io::Result<()> {
        self.state().failed = true;
        self.unmarked().map(drop)
    }

    fn unmarked(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        if state.marked {
            match self.storage.remove(CLEAN) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => self.storage.sync_names()?,
            }
            state.marked = false;
        }
        Ok(state)
    }

    /// Writes the file of checksums, at the end and if nothing has failed.
    pub fn mark(&self) -> io::Result<()> {
        let mut state = self.state();
        if state.failed || state.marked {
            return Ok(());
        }
        let len = self.file.size()?;
        state.sums.resize((len as usize).div_ceil(PAGE), None);
        let mut bytes = Vec::with_capacity(mark_bytes(len) as usize);
        bytes.extend(MAGIC);
        bytes.extend(len.to_le_bytes());
        let mut page = [0; PAGE];
        for (i, sum) in state.sums.iter().enumerate() {
            let from = (i * PAGE) as u64;
            let page = &mut page[..(len - from).min(PAGE as u64) as usize];
            let sum = match sum {
                Some(sum) => *sum,
                None => {
                    self.file.read_at(from, page)?;
                    xxh3_64(page)
                }
            };
            bytes.extend(sum.to_le_bytes());
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        self.file.sync()?;
        let mark = self.storage.open(CLEAN, true)?;
        mark.set_len(bytes.len() as u64)?;
        mark.write_at(0, &bytes)?;
        mark.sync()?;
        self.storage.sync_names()?;
        state.marked = true;
        Ok(())
    }

    fn noting<T>(&self, done: io::Result<T>) -> io::Result<T> {
        if done.is_err() {
            self.state().failed = true;
        }
        done
    }

    /// Reads whole pages into `out` and compares their checksums.
    fn read_pages(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, out)?;
        let state = self.state();
        for (i, page) in (offset as usize / PAGE..).zip(out.chunks(PAGE)) {
            if state.sums.get(i).copied().flatten().is_some_and(|sum| sum != xxh3_64(page)) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("page {i} is not what was written")));
            }
        }
        Ok(())
    }
}

/// The checksums, if they are those of a file of `len` bytes.
fn read_mark(mark: &dyn StoredFile, len: u64) -> io::Result<Option<Vec<u64>>> {
    if mark.size()? != mark_bytes(len) {
        return Ok(None);
    }
    let mut bytes = vec![0; mark_bytes(len) as usize];
    mark.read_at(0, &mut bytes)?;
    let (body, sum) = bytes.split_at(bytes.len() - 8);
    let right = body[..8] == MAGIC && body[8..16] == len.to_le_bytes() && *sum == xxh3_64(body).to_le_bytes();
    let sums = body[16..].chunks_exact(8).map(|s| u64::from_le_bytes(s.try_into().expect("8 bytes")));
    Ok(right.then(|| sums.collect()))
}

/// The pages as the database's backend.
#[derive(Debug)]
pub(super) struct Backend(pub Arc<Pages>);

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.0.file.size()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let page = PAGE as u64;
        let end = offset.checked_add(out.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let whole = offset.is_multiple_of(page) && end.is_multiple_of(page);
        let done = if whole {
            self.0.read_pages(offset, out)
        } else {
            let from = offset / page * page;
            let to = end.next_multiple_of(page).min(self.0.file.size()?).max(end);
            let mut pages = vec![0; (to - from) as usize];
            self.0.read_pages(from, &mut pages).map(|()| {
                let at = (offset - from) as usize;
                out.copy_from_slice(&pages[at..at + out.len()]);
            })
        };
        self.0.noting(done)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len > self.0.most && len > self.0.file.size()? {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the index may grow no more"));
        }
        let set = self.0.unmarked().and_then(|mut state| {
            // The last page may be cut, or extended.
            state.sums.truncate((len as usize) / PAGE);
            let known = (self.0.file.size()? as usize) / PAGE;
            state.sums.truncate(known);
            state.sums.resize((len as usize).div_ceil(PAGE), None);
            self.0.file.set_len(len)
        });
        self.0.noting(set)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.noting(self.0.file.sync())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let written = self.0.unmarked().and_then(|mut state| {
            state.forget(offset, data.len());
            if (offset as usize).is_multiple_of(PAGE) {
                for (i, page) in (offset as usize / PAGE..).zip(data.chunks_exact(PAGE)) {
                    if let Some(sum) = state.sums.get_mut(i) {
                        *sum = Some(xxh3_64(page));
                    }
                }
            }
            self.0.file.write_at(offset, data)
        });
        self.0.noting(written)
    }
}
