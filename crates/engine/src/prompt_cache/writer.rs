//! The thread that owns the folder: it writes what it is handed, in batches. What goes wrong with the disk ends the cache and nothing else.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::Result;
use sluice_cache::BlockHash;
use sluice_cache::disk::{DiskCache, Error, FileKey, Key, Lookups, NewEntry, STATE, Session, Settings};

use super::PromptCacheOptions;

/// A batch is written when it has so many bytes, or when nothing came for so long.
const BATCH: u64 = 8 << 20;
const PAUSE: Duration = Duration::from_millis(20);
const IDLE: Duration = Duration::from_secs(5);

/// A node that is to be kept, with its bytes.
pub(crate) struct Outgoing {
    pub hash: BlockHash,
    pub before: BlockHash,
    pub position: u32,
    pub tokens: Vec<u32>,
    pub parts: Vec<(u32, Vec<u8>)>,
    pub bytes: u64,
}

/// Who wants to know what was named, if it could be.
pub(crate) type Told = Box<dyn FnOnce(Option<Session>) + Send>;

pub(crate) enum Command {
    Store(Outgoing),
    Touch(Vec<BlockHash>),
    Flush(Sender<()>),
    /// Gives the chain with this end a name, once what was handed over is written.
    Name(String, BlockHash, Told),
    /// Takes a name away: whether there was one.
    Forget(BlockHash, String, Sender<bool>),
    /// Somebody has read what was wanted: what was wrong with it is to be settled.
    ReadOver,
    /// All that decides the model's bits is known: its fingerprint.
    Know(u64),
    Close,
}

/// What both sides know.
#[derive(Default)]
pub(crate) struct Shared {
    folder: String,
    /// The model's fingerprint. Before it is known nothing is written or looked for.
    model: OnceLock<u64>,
    /// Bytes of weights that are summed, of those that must be.
    pub summed: AtomicU64,
    pub to_sum: AtomicU64,
    ends: AtomicBool,
    /// Bytes that wait to be written.
    pub waiting: AtomicU64,
    pub bytes: AtomicU64,
    pub entries: AtomicU64,
    pub stored: AtomicU64,
    pub written: AtomicU64,
    pub refused: AtomicU64,
    pub read: AtomicU64,
    pub wrong: AtomicU64,
    sick: AtomicBool,
    broken: Mutex<Option<String>>,
    notes: Mutex<Vec<String>>,
}

/// Bytes, for people.
pub(super) fn size(bytes: u64) -> String {
    if bytes < 1_000_000_000 {
        format!("{:.1} MB", bytes as f64 / 1e6)
    } else {
        format!("{:.1} GB", bytes as f64 / 1e9)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn of(folder: &Path) -> Shared {
        Shared { folder: folder.display().to_string(), ..Shared::default() }
    }

    pub fn is_well(&self) -> bool {
        !self.sick.load(Ordering::Relaxed)
    }

    pub fn model(&self) -> Option<u64> {
        self.model.get().copied()
    }

    /// Whether anything can be written or looked for.
    pub fn is_ready(&self) -> bool {
        self.is_well() && self.model().is_some()
    }

    /// Bytes of weights that are summed, and of those that must be before anything is written or looked for; `None` once they are.
    pub fn summing(&self) -> Option<(u64, u64)> {
        let [summed, all] = [&self.summed, &self.to_sum].map(|n| n.load(Ordering::Relaxed));
        (self.is_well() && self.model().is_none()).then_some((summed.min(all), all))
    }

    /// Why nothing can be written or looked for.
    pub fn why_not_ready(&self) -> Option<String> {
        match self.summing() {
            Some((summed, all)) => Some(format!(
                "the prompt cache is not in use yet: {} of {} of the model are summed",
                size(summed),
                size(all)
            )),
            None => (!self.is_well()).then(|| "the prompt cache is not in use any more".to_owned()),
        }
    }

    /// Nobody waits for sums any more.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    pub fn ends(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    pub fn note(&self, line: String) {
        lock(&self.notes).push(line);
    }

    pub fn broken(&self) -> Option<String> {
        lock(&self.broken).clone()
    }

    /// After an error nothing is asked of the folder any more.
    pub fn fail(&self, e: Error) {
        self.give_up(format!("{}: {:#}", self.folder, anyhow::Error::new(e)));
    }

    /// For this reason, too.
    pub fn give_up(&self, why: String) {
        *lock(&self.broken) = Some(why);
        self.sick.store(true, Ordering::Relaxed);
    }

    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.notes))
    }
}

pub(crate) struct Writer {
    cache: DiskCache,
    /// Name and path of the model's folder, for people.
    of: (String, String),
    shared: Arc<Shared>,
    batch: Vec<Outgoing>,
    batched: u64,
}

/// What an opened folder gives to others.
pub(crate) struct Opened {
    pub keeper: Writer,
    pub lookups: Lookups,
    pub secret: [u8; 32],
    pub quota: u64,
}

impl Writer {
    /// # Errors
    /// A folder that cannot be used, or that another process uses.
    pub fn open(options: &PromptCacheOptions, of: &Path, shared: Arc<Shared>) -> Result<Opened> {
        let key = options.key_file.as_deref().map(FileKey::read).transpose()?;
        let settings = Settings { quota: options.quota, daily_limit: options.daily_limit, key };
        let cache = DiskCache::open_folder(&options.folder, settings)?;
        if let Some(why) = cache.cleared() {
            shared.note(format!("{}: the prompt cache begins anew: {why}", shared.folder));
        }
        let (lookups, secret, quota) = (cache.lookups(), cache.secret(), cache.quota());
        let real = of.canonicalize().unwrap_or_else(|_| of.to_owned());
        let name = real.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let of = (name, real.to_string_lossy().into_owned());
        let mut keeper = Writer { cache, of, shared, batch: Vec::new(), batched: 0 };
        keeper.count();
        Ok(Opened { keeper, lookups, secret, quota })
    }

    /// From here on entries are written and looked for: they are this model's.
    pub fn know(&mut self, model: u64) -> Result<(), Error> {
        self.cache.note_model(model, &self.of.0, &self.of.1)?;
        let _ = self.shared.model.set(model);
        Ok(())
    }

    /// Until it is told to close.
    pub fn run(mut self, received: &Receiver<Command>) {
        // Who waits until all is written.
        let mut flushed: Vec<Sender<()>> = Vec::new();
        loop {
            let pause = if self.batch.is_empty() && flushed.is_empty() { IDLE } else { PAUSE };
            let done = match received.recv_timeout(pause) {
                Ok(Command::Store(outgoing)) => {
                    self.batched += outgoing.bytes;
                    self.batch.push(outgoing);
                    if self.batched >= BATCH { self.write() } else { Ok(()) }
                }
                Ok(Command::ReadOver) => Ok(()),
                Ok(Command::Know(model)) => self.know(model),
                Ok(Command::Touch(path)) => self.touch(&path),
                Ok(Command::Flush(tell)) => {
                    flushed.push(tell);
                    self.write()
                }
                Ok(Command::Name(name, end, told)) => {
                    let model = self.model();
                    let named = self.write().and_then(|()| self.cache.name_session(model, &name, end));
                    named.map(told)
                }
                Ok(Command::Forget(root, name, tell)) => {
                    self.cache.forget_session(self.model(), root, &name).map(|there| _ = tell.send(there))
                }
                Err(RecvTimeoutError::Timeout) => self.write(),
                Ok(Command::Close) | Err(RecvTimeoutError::Disconnected) => {
                    let last = self.write();
                    self.judge(last);
                    return;
                }
            };
            self.judge(done);
            self.count();
            flushed.drain(..).for_each(|tell| _ = tell.send(()));
        }
    }

    /// Who sends something for the folder has seen that it is known.
    fn model(&self) -> u64 {
        self.shared.model().expect("nothing is written for a model that is not known")
    }

    /// After an error nothing is asked of the folder any more.
    fn judge(&mut self, done: Result<(), Error>) {
        if let Err(e) = done {
            self.shared.fail(e);
        }
        if !self.shared.is_well() {
            self.batch.clear();
        }
    }

    fn count(&mut self) {
        lock(&self.shared.notes).extend(self.cache.notes());
        let counts = self.cache.counts();
        let set = |n: &AtomicU64, value: u64| n.store(value, Ordering::Relaxed);
        set(&self.shared.bytes, self.cache.bytes());
        set(&self.shared.entries, self.cache.len());
        set(&self.shared.stored, counts.stored);
        set(&self.shared.written, counts.written);
        set(&self.shared.refused, counts.refused);
    }

    /// Writes what waits.
    fn write(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() || !self.shared.is_well() {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        let bytes = std::mem::take(&mut self.batched);
        let done = self.store(&batch);
        self.shared.waiting.fetch_sub(bytes, Ordering::Relaxed);
        done
    }

    fn store(&mut self, batch: &[Outgoing]) -> Result<(), Error> {
        // 1. An entry that was stored without its state makes room for one with it
        let mut replaced = Vec::new();
        for new in batch.iter().filter(|new| new.parts.iter().any(|(part, _)| *part == STATE)) {
            let key = (self.model(), new.hash);
            if self.cache.find(&key)?.is_some_and(|entry| !entry.has_state()) {
                replaced.push(key);
            }
        }
        self.cache.remove(&replaced)?;
        // 2. All of them
        let parts: Vec<Vec<(u32, &[u8])>> =
            batch.iter().map(|new| new.parts.iter().map(|(part, bytes)| (*part, &bytes[..])).collect()).collect();
        let news = batch.iter().zip(&parts).map(|(new, parts)| NewEntry {
            hash: new.hash,
            before: new.before,
            position: new.position,
            tokens: &new.tokens,
            parts,
        });
        self.cache.store(self.model(), &news.collect::<Vec<_>>())?;
        Ok(())
    }

    fn touch(&mut self, path: &[BlockHash]) -> Result<(), Error> {
        let model = self.model();
        let keys: Vec<Key> = path.iter().map(|hash| (model, *hash)).collect();
        self.cache.touch(&keys)
    }
}
