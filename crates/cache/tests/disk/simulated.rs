//! A disk in memory that loses what was not synced: writes that come to it in any order, in part, or not at all.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use fastrand::Rng;

use sluice_cache::disk::{Storage, StoredFile};

/// Bytes that a disk writes whole or not at all.
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
enum Change {
    Write(u64, Vec<u8>),
    Len(u64),
}

#[derive(Clone, Debug, Default)]
struct Content {
    /// As it will be found after a crash.
    durable: Vec<u8>,
    /// As it is now.
    now: Vec<u8>,
    since: Vec<Change>,
}

#[derive(Debug, Default)]
struct State {
    files: Vec<Content>,
    /// Names now, and as they will be found.
    names: BTreeMap<String, usize>,
    durable: BTreeMap<String, usize>,
    /// What may still be done before the power goes; `None`: as much as one likes.
    left: Option<u64>,
    /// All lengths together at most, and the highest that there was.
    room: Option<u64>,
    peak: u64,
    /// Reads and their bytes.
    read: (u64, u64),
    /// Nothing can be read of files whose name ends like this.
    unreadable: Option<&'static str>,
}

impl State {
    /// # Errors
    /// When the power is gone.
    fn act(&mut self) -> io::Result<()> {
        match &mut self.left {
            Some(0) => Err(io::Error::other("the power is gone")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn total(&self) -> u64 {
        self.names.values().map(|i| self.files[*i].now.len() as u64).sum()
    }
}

fn apply(content: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Len(len) => content.resize(*len as usize, 0),
        Change::Write(offset, bytes) => {
            let (from, to) = (*offset as usize, *offset as usize + bytes.len());
            if content.len() < to {
                content.resize(to, 0);
            }
            content[from..to].copy_from_slice(bytes);
        }
    }
}

/// A disk; clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Simulated(Arc<Mutex<State>>);

impl Simulated {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The power goes after so many more operations that change something.
    pub fn lose_power_after(&self, operations: u64) {
        self.state().left = Some(operations);
    }

    /// There is room for so many bytes.
    pub fn with_room(&self, bytes: u64) {
        self.state().room = Some(bytes);
    }

    /// The most bytes that all files ever had together.
    pub fn peak(&self) -> u64 {
        self.state().peak
    }

    /// From here on the disk fails to read files whose name ends like this.
    pub fn fail_reads(&self, of: Option<&'static str>) {
        self.state().unreadable = of;
    }

    /// Reads so far, and their bytes.
    pub fn read(&self) -> (u64, u64) {
        self.state().read
    }

    /// The disk as it is found when the power is back.
    pub fn after_power_loss(&self, random: &mut Rng) -> Simulated {
        let state = self.state();
        let mut found = State::default();
        // 1. Of names that changed since they were synced, any may have done so
        let mut names = state.durable.clone();
        for name in state.durable.keys().chain(state.names.keys()) {
            if random.bool() {
                match state.names.get(name) {
                    Some(file) => names.insert(name.clone(), *file),
                    None => names.remove(name),
                };
            }
        }
        // 2. Of what was written, any part may be there
        for (name, file) in names {
            let Content { durable, since, .. } = &state.files[file];
            let mut content = durable.clone();
            let mut changes: Vec<&Change> = since.iter().collect();
            match random.u8(..3) {
                // In order, up to an instant.
                0 => changes.truncate(random.usize(..=changes.len())),
                // Any, in any order.
                1 => random.shuffle(&mut changes),
                _ => {}
            }
            for change in changes {
                match change {
                    Change::Write(offset, bytes) if random.bool() => {
                        // Sectors by themselves.
                        for (i, sector) in bytes.chunks(SECTOR).enumerate().filter(|_| random.u8(..4) > 0) {
                            apply(&mut content, &Change::Write(offset + (i * SECTOR) as u64, sector.to_vec()));
                        }
                    }
                    _ if random.u8(..4) > 0 => apply(&mut content, change),
                    _ => {}
                }
            }
            found.names.insert(name, found.files.len());
            found.files.push(Content { durable: content.clone(), now: content, since: Vec::new() });
        }
        found.durable = found.names.clone();
        found.peak = found.total();
        Simulated(Arc::new(Mutex::new(found)))
    }

    /// Changes bytes of a file behind everybody's back.
    pub fn damage(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let file = state.names[name];
        change(&mut state.files[file].now);
        state.files[file].durable = state.files[file].now.clone();
    }
}

impl Storage for Simulated {
    fn open(&self, name: &str, create: bool) -> io::Result<Arc<dyn StoredFile>> {
        let mut state = self.state();
        let file = match state.names.get(name) {
            Some(file) => *file,
            None if create => {
                state.act()?;
                let file = state.files.len();
                state.files.push(Content::default());
                state.names.insert(name.to_owned(), file);
                file
            }
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        Ok(Arc::new(Open { disk: self.clone(), file }))
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let state = self.state();
        Ok(state.names.iter().map(|(name, file)| (name.clone(), state.files[*file].now.len() as u64)).collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.state();
        state.act()?;
        state.names.remove(name).map(|_| ()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut state = self.state();
        state.act()?;
        state.durable = state.names.clone();
        Ok(())
    }
}

#[derive(Debug)]
struct Open {
    disk: Simulated,
    file: usize,
}

impl Open {
    fn change(&self, change: Change) -> io::Result<()> {
        let mut state = self.disk.state();
        state.act()?;
        let len = state.files[self.file].now.len() as u64;
        let new = match &change {
            Change::Len(new) => *new,
            Change::Write(offset, bytes) => len.max(offset + bytes.len() as u64),
        };
        if state.room.is_some_and(|room| state.total() - len + new > room) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let content = &mut state.files[self.file];
        apply(&mut content.now, &change);
        content.since.push(change);
        state.peak = state.peak.max(state.total());
        Ok(())
    }
}

impl StoredFile for Open {
    fn size(&self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.file].now.len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Change::Len(len))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        state.read = (state.read.0 + 1, state.read.1 + out.len() as u64);
        let name = state.names.iter().find(|(_, file)| **file == self.file).map(|(name, _)| name);
        if state.unreadable.is_some_and(|of| name.is_some_and(|name| name.ends_with(of))) {
            // EIO
            return Err(io::Error::from_raw_os_error(5));
        }
        let content = &state.files[self.file].now;
        let found = content.get(offset as usize..offset as usize + out.len());
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.change(Change::Write(offset, bytes.to_vec()))
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        state.act()?;
        let Content { durable, since, .. } = &mut state.files[self.file];
        // As `now` is; to copy all of it each time would take most of the tests' time.
        since.drain(..).for_each(|change| apply(durable, &change));
        Ok(())
    }
}
