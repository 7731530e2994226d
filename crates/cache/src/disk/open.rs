//! Opening a cache: who owns it, which of its files can be trusted, and what is evicted for a smaller quota.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use sluice_store::{Buffer, ReusedMemory, free_space};

use super::cipher::{Cipher, FileKey};
use super::error::io;
use super::folder::Folder;
use super::index::{self, Index, Key};
use super::lookups::Lookups;
use super::pages::{CLEAN, mark_bytes};
use super::reads::ReturnBox;
use super::secret::{self, Found, SECRET, SecretFile};
use super::slab::{OpenSlab, file_name};
use super::slot::PAGE;
use super::snapshot::Snapshot;
use super::storage::Storage;
use super::{Counts, DiskCache, Error};

/// The index may take this part of the quota.
const INDEX_PART: u64 = 16;
/// Bytes that the index may take at least, whatever the quota.
pub const LEAST_INDEX: u64 = 4 << 20;
/// Bytes of the index for each entry: its rows, and the copies that transactions make of pages.
const INDEX_ENTRY: u64 = 1 << 10;
/// Bytes of a slab, if a slot is not larger, and at most so many parts of the quota.
const SLAB: u64 = 64 << 20;
const SLAB_PART: u64 = 16;
/// A cache without a quota may take this part of the free disk.
const DISK_PART: u64 = 20;
/// For the small files.
const SMALL: u64 = 64 << 10;

/// How to open a cache.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Bytes that all files together never exceed; `None`: a twentieth of what is free on the disk and in the cache.
    pub quota: Option<u64>,
    /// Bytes written in a day (UTC).
    pub daily_limit: Option<u64>,
    /// Encrypted with this.
    pub key: Option<FileKey>,
    /// The secret that other folders have too. One that has another is cleared, unless it has sessions.
    pub shared_secret: Option<SecretFile>,
}

impl DiskCache {
    /// Opens the cache in a folder; it is made if it is missing.
    ///
    /// # Errors
    /// [`Error::InUse`] where another process has it; a folder of something else; another key than it was made with; a quota too small for
    /// anything; those of the files.
    pub fn open_folder(dir: &Path, settings: Settings) -> Result<DiskCache, Error> {
        let folder = Folder::open(dir)?;
        let storage: Arc<dyn Storage> = Arc::new(folder);
        match settings.quota {
            Some(_) => DiskCache::open(storage, settings),
            None => {
                let failed = |cause| Error::Folder { path: dir.to_owned(), doing: "look at", cause };
                let free = free_space(dir).map_err(failed)?;
                DiskCache::open_on_a_disk_with(storage, free, settings)
            }
        }
    }

    /// [`DiskCache::open`] with the default quota, on a disk with so many bytes free.
    fn open_on_a_disk_with(storage: Arc<dyn Storage>, free: u64, settings: Settings) -> Result<DiskCache, Error> {
        let own: u64 = storage.list().map_err(io("looking through"))?.iter().map(|(_, len)| len).sum();
        let quota = Some(free.saturating_add(own) / DISK_PART);
        DiskCache::open(storage, Settings { quota, ..settings }).map_err(|e| match e {
            Error::Quota { quota, least } => Error::LittleFree { quota, least },
            e => e,
        })
    }

    /// Opens an existing cache, to look at it or to tidy up, with the quota that it had.
    ///
    /// # Errors
    /// [`Error::NoCache`] where there is none; those of [`DiskCache::open_folder`].
    pub fn open_existing(dir: &Path, key: Option<FileKey>) -> Result<DiskCache, Error> {
        if !dir.join(SECRET).is_file() {
            return Err(Error::NoCache { path: dir.to_owned() });
        }
        let settings = Settings { quota: Some(u64::MAX), key, ..Settings::default() };
        let mut cache = DiskCache::open_folder(dir, settings)?;
        let quota = cache.attempt(|c| Ok(c.index.meta("quota")?))?;
        cache.quota = quota.unwrap_or(cache.quota);
        Ok(cache)
    }

    /// The cache in a folder that another process uses, as its index was made durable last. Uses since then are not counted, and slots cannot be read. What is changed is
    /// changed in memory.
    ///
    /// # Errors
    /// [`Error::NoCache`] where there is none; [`Error::InUse`] where its owner changes it too fast; those of [`DiskCache::open_folder`].
    pub fn look_at(dir: &Path, key: Option<FileKey>) -> Result<DiskCache, Error> {
        if !dir.join(SECRET).is_file() {
            return Err(Error::NoCache { path: dir.to_owned() });
        }
        let snapshot: Arc<dyn Storage> = Arc::new(Snapshot::take(dir, &Folder::look_at(dir))?);
        let settings = Settings { quota: Some(u64::MAX), key, ..Settings::default() };
        let mut cache = DiskCache::open_once(&snapshot, &settings)?;
        let quota = cache.attempt(|c| Ok(c.index.meta("quota")?))?;
        cache.quota = quota.unwrap_or(cache.quota);
        Ok(cache)
    }

    /// Opens the cache in `storage`, or begins a new one. `settings` must have a quota.
    ///
    /// # Errors
    /// Those of [`DiskCache::open_folder`].
    pub fn open(storage: Arc<dyn Storage>, settings: Settings) -> Result<DiskCache, Error> {
        match DiskCache::open_once(&storage, &settings) {
            // Without its index the other files mean nothing.
            Err(Error::Index(e)) if index::is_broken(&e) => {
                clear_entries(&*storage)?;
                let mut cache = DiskCache::open_once(&storage, &settings)?;
                cache.cleared = Some(e.to_string());
                Ok(cache)
            }
            opened => opened,
        }
    }

    fn open_once(storage: &Arc<dyn Storage>, settings: &Settings) -> Result<DiskCache, Error> {
        let quota = settings.quota.unwrap_or(0);
        let files = storage.list().map_err(io("looking through"))?;
        let size_of = |name: &str| files.iter().find(|(n, _)| n == name).map_or(0, |(_, len)| *len);
        // 1. Divide the quota. An index that was larger once does not shrink.
        let mut index_bytes = (quota / INDEX_PART).max(LEAST_INDEX).max(size_of(index::NAME));
        let least_slabs = 2 * PAGE as u64 * SLAB_PART;
        let around = |index: u64| SMALL + mark_bytes(index);
        let least = LEAST_INDEX + around(LEAST_INDEX) + least_slabs;
        if quota < least {
            return Err(Error::Quota { quota, least });
        }
        let mut cleared = None;
        if index_bytes + around(index_bytes) + least_slabs > quota {
            cleared = Some(format!("its index of {index_bytes} bytes is too large for a quota of {quota}"));
            index_bytes = (quota / INDEX_PART).max(LEAST_INDEX);
            clear(&**storage)?;
        }
        // 2. The secret, without which no hash means anything
        let found = secret::read(&**storage, settings.key.as_ref()).map_err(io("opening"))?;
        let shared = settings.shared_secret.as_ref();
        let secret = match found {
            Found::Secret(secret) => match shared.filter(|shared| shared.secret() != secret) {
                None => secret,
                Some(shared) => {
                    if size_of(index::NAME) > 0 {
                        if !Index::open(Arc::clone(storage), index_bytes)?.sessions()?.is_empty() {
                            return Err(Error::OtherSecret);
                        }
                        cleared = Some("it has another secret than the store".to_owned());
                    }
                    clear(&**storage)?;
                    secret::write(&**storage, shared.bytes()).map_err(io("beginning"))?;
                    shared.secret()
                }
            },
            Found::KeyWanted => return Err(Error::KeyWanted),
            Found::NotSealed => return Err(Error::NotEncrypted),
            Found::WrongKey => return Err(Error::WrongKey),
            Found::Missing | Found::Damaged => {
                if found == Found::Damaged || size_of(index::NAME) > 0 {
                    let why = if found == Found::Damaged { "damaged" } else { "gone" };
                    cleared.get_or_insert(format!("its secret is {why}"));
                    clear(&**storage)?;
                }
                match shared {
                    Some(shared) => secret::write(&**storage, shared.bytes()).map(|()| shared.secret()),
                    None => secret::make(&**storage, settings.key.as_ref()),
                }
                .map_err(io("beginning"))?
            }
        };
        let session = secret::random().map_err(io("opening"))?;
        let cipher = settings.key.as_ref().map(|key| Arc::new(Cipher::new(key, &secret, session)));
        // 3. The index
        let index = Arc::new(Index::open(Arc::clone(storage), index_bytes)?);
        let desk = ReturnBox::default();
        let memory = ReusedMemory::default();
        let lookups = Lookups {
            index: Arc::clone(&index),
            shared: Arc::default(),
            desk: Arc::clone(&desk),
            cipher: cipher.clone(),
            memory: memory.clone(),
            secret,
        };
        let slab_quota = quota - index_bytes - around(index_bytes);
        let mut cache = DiskCache {
            index,
            storage: Arc::clone(storage),
            slabs: Default::default(),
            next_slab: 0,
            quota,
            slab_quota,
            slab_bytes: SLAB.min(slab_quota / SLAB_PART),
            most_entries: index_bytes / 2 / INDEX_ENTRY,
            entries: 0,
            clock: 0,
            uses: HashMap::new(),
            model_hits: HashMap::new(),
            lookups,
            returned: desk,
            named: None,
            counts: Counts::default(),
            notes: Vec::new(),
            noted: HashSet::new(),
            secret,
            cipher,
            buffer: Buffer::zeroed(0).map_err(io("opening"))?,
            memory,
            daily_limit: settings.daily_limit,
            today: (0, 0),
            cleared,
            failed: false,
        };
        cache.attempt(|c| {
            c.open_slabs()?;
            c.shrink_to_quota()
        })?;
        Ok(cache)
    }

    /// Evicts and compacts until slabs fit a quota that is smaller than before.
    fn shrink_to_quota(&mut self) -> Result<(), Error> {
        while self.bytes() > self.slab_quota {
            if !self.free_empty_slab()? && !self.compact_one_slab(None, 1)? && self.evict(&HashSet::new())? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Opens the slabs that the index names. Files that it does not name were left by a crash and are removed.
    fn open_slabs(&mut self) -> Result<(), Error> {
        let known = self.index.slabs()?;
        let files = self.storage.list().map_err(io("looking through"))?;
        let mut orphans = false;
        for (name, _) in &files {
            let number = name.strip_suffix(".slab").and_then(|n| n.parse::<u32>().ok());
            if let Some(number) = number {
                self.next_slab = self.next_slab.max(number.saturating_add(1));
                if !known.iter().any(|(id, _)| *id == number) || *name != file_name(number) {
                    self.storage.remove(name).map_err(io("clearing"))?;
                    orphans = true;
                }
            }
        }
        if orphans {
            self.storage.sync_names().map_err(io("clearing"))?;
        }
        self.next_slab = self.next_slab.max(self.index.meta("next slab")?.unwrap_or(0) as u32);
        self.clock = self.index.meta("clock")?.unwrap_or(0);
        self.today = (self.index.meta("day")?.unwrap_or(0), self.index.meta("bytes of the day")?.unwrap_or(0));
        let mut lost = Vec::new();
        for (id, slab) in known {
            let whole = files.iter().any(|(name, found)| *name == file_name(id) && *found == slab.bytes());
            let file = self.storage.open(&file_name(id), false);
            match file {
                Ok(file) if whole => {
                    let slab = OpenSlab { file, slab, reserved: HashSet::new() };
                    self.publish_slab(id, &slab);
                    self.slabs.insert(id, slab);
                }
                // The file was cut or removed: its entries go with it.
                _ => lost.push(id),
            }
        }
        lost.into_iter().try_for_each(|id| self.drop_lost_slab(id))?;
        self.entries = self.index.len()?;
        Ok(())
    }

    fn drop_lost_slab(&mut self, id: u32) -> Result<(), Error> {
        let lost: Vec<Key> = (self.index.entries()?.into_iter())
            .filter(|(_, e)| e.parts.iter().any(|(.., place)| place.slab == id))
            .map(|(key, _)| key)
            .collect();
        let line = format!(
            "the prompt cache has lost a file: {} is gone or cut, {} entries with it",
            file_name(id),
            lost.len()
        );
        self.note(line);
        self.remove_entries(&lost)?;
        self.index.change(|c| c.remove_slab(id))?;
        let _ = self.storage.remove(&file_name(id));
        self.storage.sync_names().map_err(io("clearing"))
    }

    /// Removes all entries of a folder that no process uses, and its secret; needs no key.
    ///
    /// # Errors
    /// [`Error::NoCache`] where there is none; [`Error::InUse`] where a process has it; the system's.
    pub fn clear_folder(dir: &Path) -> Result<(), Error> {
        if !dir.join(SECRET).is_file() {
            return Err(Error::NoCache { path: dir.to_owned() });
        }
        clear(&Folder::open(dir)?)
    }
}

fn is_entries(name: &str) -> bool {
    name == index::NAME || name == CLEAN || name.ends_with(".slab")
}

/// The index goes first: without it, no slab is referred to.
fn clear_entries(storage: &dyn Storage) -> Result<(), Error> {
    let mut names: Vec<String> = storage.list().map_err(io("looking through"))?.into_iter().map(|f| f.0).collect();
    names.retain(|name| is_entries(name));
    names.sort_by_key(|name| name.ends_with(".slab"));
    names.iter().try_for_each(|name| storage.remove(name)).map_err(io("clearing"))?;
    storage.sync_names().map_err(io("clearing"))
}

fn clear(storage: &dyn Storage) -> Result<(), Error> {
    clear_entries(storage)?;
    match storage.remove(SECRET) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io("clearing")(e)),
        _ => storage.sync_names().map_err(io("clearing")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_with_little_room_is_not_the_fault_of_who_named_no_quota() {
        let folder = || {
            let dir = tempfile::tempdir().unwrap();
            let storage: Arc<dyn Storage> = Arc::new(Folder::open(dir.path()).unwrap());
            (dir, storage)
        };
        let open = |free| {
            let (_dir, storage) = folder();
            DiskCache::open_on_a_disk_with(storage, free, Settings::default())
        };
        let least = match open(1 << 20) {
            Err(Error::LittleFree { quota, least }) if quota == (1 << 20) / DISK_PART => least,
            other => panic!("{:?}", other.err()),
        };
        assert!(open(least * DISK_PART).is_ok());
        let settings = Settings { quota: Some(least - 1), ..Settings::default() };
        let (_dir, storage) = folder();
        let asked = DiskCache::open(storage, settings);
        assert!(matches!(asked, Err(Error::Quota { .. })));
    }
}
