//! Finding and reading entries while another thread writes. Both sides share a state, whose lock is never held while
//! the disk is at work. The index lets anybody read its last durable state.

use std::collections::{HashMap, HashSet, hash_map};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sluice_store::{Buffer, ReusedMemory};

use super::Error;
use super::cipher::Cipher;
use super::error::io;
use super::index::{Entry, Index, Key, Place, Session};
use super::reads::{self, READING, Reads, ReturnBox, SlotSource, WantedPart};
use super::slot::{self, Label, PAGE};
use super::storage::StoredFile;
use crate::prefix::{BlockHash, block_hash, root};

/// A slab as readers know it.
#[derive(Debug)]
pub(super) struct SlotFile {
    pub file: Arc<dyn StoredFile>,
    pub path: Option<PathBuf>,
    pub slot_bytes: u64,
    pub slots: usize,
}

/// What readers and the writer share: entries that are being read, entries that are to be removed, and the files of
/// slots.
#[derive(Debug, Default)]
pub(super) struct SharedState {
    /// Entries that are being read, and how often: they are not evicted.
    pub pins: HashMap<Key, usize>,
    /// Entries that are to be removed once they are not being read, or that are being evicted: nobody finds them any
    /// more.
    pub doomed: HashSet<Key>,
    pub files: HashMap<u32, SlotFile>,
}

impl SharedState {
    pub fn unpin(&mut self, key: &Key) {
        if let Some(n) = self.pins.get_mut(key) {
            *n -= 1;
            if *n == 0 {
                self.pins.remove(key);
            }
        }
    }
}

/// A path of entries from the beginning of a prompt, with its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The hash that the first entry follows.
    pub root: BlockHash,
    /// Tokens of all entries.
    pub tokens: Vec<u32>,
}

/// Finds and reads for any thread. The folder stays in use until all of these and their [`super::DiskCache`] are dropped.
#[derive(Clone)]
pub struct Lookups {
    pub(super) index: Arc<Index>,
    pub(super) shared: Arc<Mutex<SharedState>>,
    pub(super) desk: ReturnBox,
    pub(super) cipher: Option<Arc<Cipher>>,
    pub(super) memory: ReusedMemory,
    pub(super) secret: [u8; 32],
}

impl Lookups {
    pub(super) fn shared(&self) -> MutexGuard<'_, SharedState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates the memory that reads share, which takes milliseconds, before the first read has to wait for it.
    pub fn prepare(&self) {
        let _turn = self.memory.turn();
        // A read will report the error.
        let _ = self.memory.lend(READING);
    }

    /// Runs `what`. After an error of the index, the next start checks all of it.
    fn abandon_on_error<T>(&self, what: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let done = what();
        if done.is_err() {
            self.index.abandon();
        }
        done
    }

    /// Whether an entry is about to be removed, or was found damaged since the writer last looked.
    fn is_doomed(&self, key: &Key) -> bool {
        self.shared().doomed.contains(key) || reads::lock(&self.desk).wrong.contains(key)
    }

    /// Finds an entry.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn find(&self, key: &Key) -> Result<Option<Entry>, Error> {
        self.abandon_on_error(|| if self.is_doomed(key) { Ok(None) } else { Ok(self.index.entry(key)?) })
    }

    /// Entries that follow the one with the hash `before`: how many tokens each has, the most first, and its hash.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn following(&self, model: u64, before: BlockHash) -> Result<Vec<(u32, BlockHash)>, Error> {
        self.abandon_on_error(|| {
            let mut found = self.index.following(model, before)?;
            found.retain(|(_, hash)| !self.is_doomed(&(model, *hash)));
            Ok(found)
        })
    }

    /// The hash that the first entry of a prompt with this salt follows.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        root(&self.secret, salt)
    }

    /// Named chains of a model with this root, by name.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn sessions(&self, model: u64, root: BlockHash) -> Result<Vec<(String, Session)>, Error> {
        let all = self.abandon_on_error(|| Ok(self.index.sessions()?))?.into_iter();
        Ok(all.filter(|n| (n.model, n.root) == (model, root)).map(|n| (n.name, n.session)).collect())
    }

    /// The slot of a part, if the slab has such a slot.
    pub(super) fn source(&self, part_bytes: u64, place: Place) -> Option<SlotSource> {
        let common = self.shared();
        let SlotFile { file, path, slot_bytes, slots } = common.files.get(&place.slab)?;
        let fits = (place.slot as usize) < *slots && *slot_bytes == slot::slot_bytes(part_bytes);
        fits.then(|| SlotSource {
            file: Arc::clone(file),
            path: path.clone(),
            offset: u64::from(place.slot) * slot_bytes,
            len: *slot_bytes as usize,
        })
    }

    /// Prepares to read parts, on another thread while this cache is used on. Their entries are not evicted until that
    /// is over.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn reads(&self, wanted: &[(Label, Place)]) -> Result<Reads, Error> {
        let mut held = HashSet::new();
        let mut wants = Vec::with_capacity(wanted.len());
        // Parts of one entry are next to each other.
        let mut last: Option<(Key, Option<Entry>)> = None;
        for (label, place) in wanted {
            let key = (label.model, label.hash);
            if last.as_ref().is_none_or(|(k, _)| *k != key) {
                let holds = self.hold(&key, &mut held);
                let entry = self.abandon_on_error(|| if holds { Ok(self.index.entry(&key)?) } else { Ok(None) })?;
                last = Some((key, entry));
            }
            let entry = last.as_ref().and_then(|(_, entry)| entry.as_ref());
            let there = entry.is_some_and(|e| e.parts.contains(&(label.part, label.bytes, *place)));
            let from = self.source(label.bytes, *place).filter(|_| there);
            let Label { part, bytes, model, hash, before, position, tokens } = *label;
            let label = Label { part, bytes, model, hash, before, position, tokens: &[] };
            wants.push(WantedPart { label, tokens: tokens.to_vec(), from });
        }
        Ok(Reads::new(wants, self.cipher.clone(), held, Arc::clone(&self.desk), self.memory.clone()))
    }

    /// Pins an entry that is not about to be removed.
    pub(super) fn pin(&self, key: &Key) -> bool {
        let mut common = self.shared();
        let is_there = !common.doomed.contains(key);
        if is_there {
            *common.pins.entry(*key).or_default() += 1;
        }
        is_there
    }

    /// Pins an entry before it is looked up, so that what the index says stays true. Not an entry that is about to be
    /// removed.
    fn hold(&self, key: &Key, held: &mut HashSet<Key>) -> bool {
        let mut common = self.shared();
        if common.doomed.contains(key) {
            return false;
        }
        if held.insert(*key) {
            *common.pins.entry(*key).or_default() += 1;
        }
        true
    }

    /// The entries of a model that end chains, the most recently used first, among the `most` entries that were used
    /// last when the index was written.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn recent(&self, model: u64, most: usize) -> Result<Vec<Key>, Error> {
        let newest = self.abandon_on_error(|| Ok(self.index.newest(model, most)?))?;
        let mut befores = HashSet::with_capacity(newest.len());
        for hash in &newest {
            befores.extend(self.find(&(model, *hash))?.map(|entry| entry.before));
        }
        Ok(newest.into_iter().filter(|hash| !befores.contains(hash)).map(|hash| (model, hash)).collect())
    }

    /// The chain that ends with an entry, with its tokens as the slots have them. `None` if an entry is missing or
    /// does not match its hash. `known` remembers tokens, for chains that begin alike. `goes_on` is asked before each
    /// look at the disk.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn chain(
        &self,
        last: &Key,
        known: &mut HashMap<BlockHash, Vec<u32>>,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Option<Chain>, Error> {
        let mut path: Vec<BlockHash> = Vec::new();
        let (model, mut hash) = *last;
        let mut follows: Option<u32> = None;
        let root = loop {
            let key = (model, hash);
            let Some(entry) = self.find(&key)? else { return Ok(None) };
            // Positions must fall, so that a circle in an index that was tampered with comes to an end.
            let end = entry.position.checked_add(entry.tokens);
            if entry.tokens == 0 || follows.is_some_and(|next| end != Some(next)) || !goes_on() {
                return Ok(None);
            }
            if let hash_map::Entry::Vacant(unknown) = known.entry(hash) {
                let Some(tokens) = self.tokens_of(&key, &entry)? else { return Ok(None) };
                unknown.insert(tokens);
            }
            path.push(hash);
            follows = Some(entry.position);
            hash = entry.before;
            if entry.position == 0 {
                break hash;
            }
        };
        let tokens = path.iter().rev().flat_map(|hash| &known[hash]).copied().collect();
        Ok(Some(Chain { root, tokens }))
    }

    /// Whether the cache is encrypted: then a whole slot is read for the tokens of an entry, and not just a page.
    pub fn is_encrypted(&self) -> bool {
        self.cipher.is_some()
    }

    /// The tokens of an entry; `None` if they do not match its hash, which is keyed and chained. Only the last page of
    /// the slot is read for them, unless it is encrypted.
    ///
    /// # Errors
    /// When there is no memory to read to.
    pub fn tokens_of(&self, key: &Key, entry: &Entry) -> Result<Option<Vec<u32>>, Error> {
        let Some((_, bytes, place)) = entry.parts.iter().min_by_key(|(_, bytes, _)| *bytes) else { return Ok(None) };
        let Some(source) = self.source(*bytes, *place) else { return Ok(None) };
        let len = if self.cipher.is_some() { source.len } else { PAGE };
        let mut end = Buffer::zeroed(len).map_err(io("reading"))?;
        let read = source.file.read_at(source.offset + (source.len - len) as u64, &mut end);
        if read.is_err() || self.cipher.as_ref().is_some_and(|cipher| !cipher.open(&mut end)) {
            return Ok(None);
        }
        let tokens = slot::tokens_of(&end[len - PAGE..]);
        Ok(tokens.filter(|t| t.len() == entry.tokens as usize && block_hash(&self.secret, &entry.before, t) == key.1))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Condvar;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;
    use crate::disk::{DiskCache, FileKey, Folder, NewEntry, Order, Settings, Storage};

    const MODEL: u64 = 5;

    fn settings() -> Settings {
        Settings { quota: Some(64 << 20), ..Settings::default() }
    }

    /// Stores `blocks` blocks of 8 tokens as the engine would, and says their tokens.
    fn store(cache: &mut DiskCache, salt: u8, blocks: u32) -> Chain {
        let secret = cache.secret();
        let root = [salt; 16];
        let tokens: Vec<u32> = (0..8 * blocks).map(|i| 1000 * u32::from(salt) + i).collect();
        let mut before = root;
        for (i, block) in (0..).zip(tokens.chunks(8)) {
            let hash = block_hash(&secret, &before, block);
            let part = vec![salt; 10_000];
            let new = NewEntry { hash, before, position: 8 * i, tokens: block, parts: &[(0, &part)] };
            assert_eq!(cache.store(MODEL, &[new]).unwrap().new, 1);
            before = hash;
        }
        Chain { root, tokens }
    }

    fn path(secret: &[u8; 32], chain: &Chain) -> Vec<Key> {
        let mut before = chain.root;
        let next = chain.tokens.chunks(8).map(|block| {
            before = block_hash(secret, &before, block);
            (MODEL, before)
        });
        next.collect()
    }

    fn chains(lookups: &Lookups, most: usize) -> Vec<Chain> {
        let mut known = HashMap::new();
        let ends = lookups.recent(MODEL, most).unwrap();
        ends.iter().filter_map(|end| lookups.chain(end, &mut known, || true).unwrap()).collect()
    }

    #[test]
    fn chains_come_with_their_tokens_those_that_were_used_last_first() {
        for key in [None, FileKey::parse(&[7; 32])] {
            let dir = tempfile::tempdir().unwrap();
            let open = || DiskCache::open_folder(dir.path(), Settings { key: key.clone(), ..settings() }).unwrap();
            let mut cache = open();
            let stored: Vec<Chain> = (1..4).map(|salt| store(&mut cache, salt, 3 + u32::from(salt))).collect();
            let keys = path(&cache.secret(), &stored[0]);
            cache.touch(&keys).unwrap();
            drop(cache);
            let cache = open();
            let lookups = cache.lookups();
            let all = [&stored[0], &stored[2], &stored[1]].map(Clone::clone);
            assert_eq!(chains(&lookups, 100), all);
            // Of the second chain only its beginning is among the newest.
            let beginning = Chain { tokens: all[1].tokens[..8].to_vec(), ..all[1].clone() };
            assert_eq!(chains(&lookups, 5), [all[0].clone(), beginning]);
            assert_eq!(lookups.chain(&keys[3], &mut HashMap::new(), || false).unwrap(), None);
            assert!(lookups.recent(MODEL + 1, 100).unwrap().is_empty());
        }
    }

    #[test]
    fn a_token_that_was_changed_on_disk_is_no_chain() {
        let dir = tempfile::tempdir().unwrap();
        let mut cache = DiskCache::open_folder(dir.path(), settings()).unwrap();
        let chain = store(&mut cache, 1, 3);
        let keys = path(&cache.secret(), &chain);
        let (_, bytes, place) = cache.find(&keys[1]).unwrap().unwrap().parts[0];
        let source = cache.lookups.source(bytes, place).unwrap();
        let mut end = Buffer::zeroed(PAGE).unwrap();
        let at = source.offset + (source.len - PAGE) as u64;
        source.file.read_at(at, &mut end).unwrap();
        end[84] ^= 1;
        source.file.write_at(at, &end).unwrap();
        assert!(chains(&cache.lookups(), 100).is_empty());
    }

    /// Whether syncs go through, and how many wait for that.
    #[derive(Debug, Default)]
    struct Gate {
        closed: Mutex<bool>,
        opened: Condvar,
        waiting: AtomicUsize,
    }

    impl Gate {
        fn pass(&self) {
            let mut closed = self.closed.lock().unwrap();
            self.waiting.fetch_add(1, Ordering::SeqCst);
            while *closed {
                closed = self.opened.wait(closed).unwrap();
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }

        fn set(&self, closed: bool) {
            *self.closed.lock().unwrap() = closed;
            self.opened.notify_all();
        }
    }

    /// A folder on a disk whose syncs take as long as somebody likes.
    #[derive(Debug)]
    struct Slow(Arc<Folder>, Arc<Gate>);

    #[derive(Debug)]
    struct SlowFile(Arc<dyn StoredFile>, Arc<Gate>);

    impl Storage for Slow {
        fn open(&self, name: &str, create: bool) -> io::Result<Arc<dyn StoredFile>> {
            let file = self.0.open(name, create)?;
            Ok(Arc::new(SlowFile(file, Arc::clone(&self.1))))
        }
        fn list(&self) -> io::Result<Vec<(String, u64)>> {
            self.0.list()
        }
        fn remove(&self, name: &str) -> io::Result<()> {
            self.0.remove(name)
        }
        fn sync_names(&self) -> io::Result<()> {
            self.0.sync_names()
        }
    }

    impl StoredFile for SlowFile {
        fn size(&self) -> io::Result<u64> {
            self.0.size()
        }
        fn set_len(&self, len: u64) -> io::Result<()> {
            self.0.set_len(len)
        }
        fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.0.read_at(offset, out)
        }
        fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.0.write_at(offset, bytes)
        }
        fn sync(&self) -> io::Result<()> {
            self.1.pass();
            self.0.sync()
        }
    }

    #[test]
    fn who_looks_and_reads_does_not_wait_for_a_batch_that_is_being_written() {
        let dir = tempfile::tempdir().unwrap();
        let gate = Arc::new(Gate::default());
        let storage = Arc::new(Slow(Arc::new(Folder::open(dir.path()).unwrap()), Arc::clone(&gate)));
        let mut cache = DiskCache::open(storage, settings()).unwrap();
        let (lookups, secret) = (cache.lookups(), cache.secret());
        let chain = store(&mut cache, 1, 4);
        let keys = path(&secret, &chain);
        // At each sync on the way of a batch: of its slab, and those of its transactions.
        gate.set(true);
        let writer = thread::spawn(move || {
            store(&mut cache, 2, 2);
            cache
        });
        let mut looked = 0;
        while !writer.is_finished() {
            if gate.waiting.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
                continue;
            }
            let entries = keys.iter().map(|key| lookups.find(key).unwrap().unwrap()).collect::<Vec<_>>();
            let wanted = (keys.iter().zip(&entries).zip(chain.tokens.chunks(8))).map(|((key, entry), tokens)| {
                let (part, bytes, place) = entry.parts[0];
                let Entry { before, position, .. } = *entry;
                (Label { part, bytes, model: MODEL, hash: key.1, before, position, tokens }, place)
            });
            let reads = lookups.reads(&wanted.collect::<Vec<_>>()).unwrap();
            let mut right = 0;
            reads
                .for_each(Order::AsRequested, |_, part| right += usize::from(part.is_ok_and(|p| p[..] == [1; 10_000])));
            assert_eq!(right, 4);
            looked += 1;
            // One sync goes through.
            gate.set(false);
            while gate.waiting.load(Ordering::SeqCst) > 0 {
                thread::yield_now();
            }
            gate.set(true);
        }
        gate.set(false);
        assert!(looked > 0);
        let mut cache = writer.join().unwrap();
        assert_eq!(chains(&lookups, 100).len(), 2);
        cache.collect_returned();
        assert!(cache.common().pins.is_empty());
        assert_eq!(cache.inconsistencies().unwrap(), Vec::<String>::new());
    }
}
