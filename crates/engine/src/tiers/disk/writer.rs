//! The thread that owns the folder. It writes blocks in batches. An error of the disk ends the cache and nothing else.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::Result;
use sluice_cache::BlockHash;
use sluice_cache::disk::{DiskCache, Error, FileKey, Key, Lookups, NewEntry, STATE, Session, Settings};
use sluice_cache::remote::{JoinError, Remote, SharedSecret};

use super::options::PromptCacheOptions;
use super::shared::Shared;

/// A batch is written when it has this many bytes, or when no command came for `PAUSE`. An empty batch waits for `IDLE`.
const BATCH: u64 = 8 << 20;
const PAUSE: Duration = Duration::from_millis(20);
const IDLE: Duration = Duration::from_secs(5);

/// A node to be written, with its bytes.
pub(crate) struct OutgoingNode {
    pub hash: BlockHash,
    pub before: BlockHash,
    pub position: u32,
    pub tokens: Vec<u32>,
    pub parts: Vec<(u32, Vec<u8>)>,
    pub bytes: u64,
}

/// Called with a session that got its name; `None` if it could not.
pub(crate) type OnNamed = Box<dyn FnOnce(Option<Session>) + Send>;

/// What the writer is told to do.
pub(crate) enum WriterCommand {
    /// Writes a node, with the next batch.
    Store(OutgoingNode),
    /// Marks nodes as recently used.
    Touch(Vec<BlockHash>),
    /// Writes the batch, then answers.
    Flush(Sender<()>),
    /// Writes the batch, then gives a name to the chain that ends here.
    NameSession(String, BlockHash, OnNamed),
    /// Removes a name of this root. Answers whether there was one.
    RemoveSession(BlockHash, String, Sender<bool>),
    /// Reads are over, so that counts and damaged entries can be updated.
    ReadsDone,
    /// The model's fingerprint is known.
    SetFingerprint(u64),
    /// Writes the batch and ends.
    Close,
}

/// Owns the folder and its index.
pub(crate) struct Writer {
    cache: DiskCache,
    /// Name and path of the model's folder, for people.
    model_folder: (String, String),
    shared: Arc<Shared>,
    /// What replicas share.
    remote: Option<Arc<Remote>>,
    batch: Vec<OutgoingNode>,
    /// Bytes of the batch.
    batched: u64,
}

/// An opened folder.
pub(crate) struct OpenedFolder {
    pub writer: Writer,
    pub lookups: Lookups,
    /// The key of block hashes.
    pub secret: [u8; 32],
    pub quota: u64,
    pub remote: Option<Arc<Remote>>,
}

/// Opens a folder whose entries other replicas share, with the store's secret. A store that does not answer is joined later.
///
/// # Errors
/// A folder that cannot be used; a store's secret that this key does not open.
fn open_shared(folder: &Path, settings: Settings, remote: Arc<Remote>) -> Result<(DiskCache, Option<Arc<Remote>>)> {
    let key = settings.key.as_ref();
    // 1. The secret that is there, which this folder takes
    let shared = match remote.secret(key) {
        Ok(SharedSecret::Some(file)) => Some(file),
        Ok(SharedSecret::None) | Err(JoinError::Store(_)) => None,
        Err(JoinError::Secret(e)) => return Err(anyhow::Error::new(e).context(remote.url().to_owned())),
    };
    let is_there = shared.is_some();
    let mut cache = DiskCache::open_folder(folder, Settings { shared_secret: shared, ..settings.clone() })?;
    let mut own = cache.secret_file(key)?;
    // 2. Or this folder's, which others take
    if !is_there && let Ok(SharedSecret::Some(file)) = remote.offer_secret(&own, key) {
        if !file.is_same(&own) {
            // Another replica was faster.
            drop(cache);
            cache = DiskCache::open_folder(folder, Settings { shared_secret: Some(file.clone()), ..settings.clone() })?;
            own = file;
        }
        remote.set_joined();
    } else if is_there {
        remote.set_joined();
    }
    remote.start_uploads(cache.lookups(), own, settings.key);
    Ok((cache, Some(remote)))
}

impl Writer {
    /// Opens the folder, for the model in `model_folder`.
    ///
    /// # Errors
    /// A folder that cannot be used, or that another process uses.
    pub fn open(options: &PromptCacheOptions, model_folder: &Path, shared: Arc<Shared>) -> Result<OpenedFolder> {
        let key = options.key_file.as_deref().map(FileKey::read).transpose()?;
        let settings = Settings { quota: options.quota, daily_limit: options.daily_limit, key, shared_secret: None };
        let (cache, remote) = match &options.store {
            Some(store) => open_shared(&options.folder, settings, Arc::new(Remote::new(Arc::clone(store))))?,
            None => (DiskCache::open_folder(&options.folder, settings)?, None),
        };
        if let Some(why) = cache.cleared() {
            shared.note(format!("{}: the prompt cache begins anew: {why}", shared.folder));
        }
        let (lookups, secret, quota) = (cache.lookups(), cache.secret(), cache.quota());
        let path = model_folder.canonicalize().unwrap_or_else(|_| model_folder.to_owned());
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let model_folder = (name, path.to_string_lossy().into_owned());
        let mut writer = Writer { cache, model_folder, shared, remote: remote.clone(), batch: Vec::new(), batched: 0 };
        writer.update_counts();
        Ok(OpenedFolder { writer, lookups, secret, quota, remote })
    }

    /// From now on entries of this model are written and looked up.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn set_fingerprint(&mut self, model: u64) -> Result<(), Error> {
        self.cache.note_model(model, &self.model_folder.0, &self.model_folder.1)?;
        self.remote.iter().for_each(|remote| remote.note_model(model, &self.model_folder.0));
        self.shared.set_fingerprint(model);
        Ok(())
    }

    /// Handles commands until [`WriterCommand::Close`].
    pub fn run(mut self, received: &Receiver<WriterCommand>) {
        // Those who wait until the batch is written.
        let mut flushed: Vec<Sender<()>> = Vec::new();
        loop {
            let pause = if self.batch.is_empty() && flushed.is_empty() { IDLE } else { PAUSE };
            let done = match received.recv_timeout(pause) {
                Ok(WriterCommand::Store(node)) => {
                    self.batched += node.bytes;
                    self.batch.push(node);
                    if self.batched >= BATCH { self.write() } else { Ok(()) }
                }
                Ok(WriterCommand::ReadsDone) => Ok(()),
                Ok(WriterCommand::SetFingerprint(model)) => self.set_fingerprint(model),
                Ok(WriterCommand::Touch(path)) => self.touch(&path),
                Ok(WriterCommand::Flush(reply)) => {
                    flushed.push(reply);
                    self.write()
                }
                Ok(WriterCommand::NameSession(name, end, on_named)) => {
                    let model = self.model();
                    let named = self.write().and_then(|()| self.cache.name_session(model, &name, end));
                    named.map(on_named)
                }
                Ok(WriterCommand::RemoveSession(root, name, reply)) => {
                    self.cache.forget_session(self.model(), root, &name).map(|existed| _ = reply.send(existed))
                }
                Err(RecvTimeoutError::Timeout) => self.write(),
                Ok(WriterCommand::Close) | Err(RecvTimeoutError::Disconnected) => {
                    let last = self.write();
                    self.check(last);
                    return;
                }
            };
            self.check(done);
            self.update_counts();
            flushed.drain(..).for_each(|reply| _ = reply.send(()));
        }
    }

    /// Senders of commands check that it is known.
    fn model(&self) -> u64 {
        self.shared.fingerprint().expect("nothing is written for a model that is not known")
    }

    /// After an error the folder is not used any more.
    fn check(&mut self, done: Result<(), Error>) {
        if let Err(e) = done {
            self.shared.fail(e);
        }
        if !self.shared.is_ok() {
            self.batch.clear();
        }
    }

    fn update_counts(&mut self) {
        self.shared.extend_notes(self.cache.notes());
        let counts = self.cache.counts();
        let set = |n: &AtomicU64, value: u64| n.store(value, Ordering::Relaxed);
        set(&self.shared.bytes, self.cache.bytes());
        set(&self.shared.entries, self.cache.len());
        set(&self.shared.stored, counts.stored);
        set(&self.shared.written, counts.written);
        set(&self.shared.refused, counts.refused);
    }

    /// Writes the batch.
    fn write(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() || !self.shared.is_ok() {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        let bytes = std::mem::take(&mut self.batched);
        let done = self.store(&batch);
        self.shared.queued.fetch_sub(bytes, Ordering::Relaxed);
        done
    }

    fn store(&mut self, batch: &[OutgoingNode]) -> Result<(), Error> {
        // 1. Remove entries that were stored without the state that they have now
        let mut replaced = Vec::new();
        for new in batch.iter().filter(|new| new.parts.iter().any(|(part, _)| *part == STATE)) {
            let key = (self.model(), new.hash);
            if self.cache.find(&key)?.is_some_and(|entry| !entry.has_state()) {
                replaced.push(key);
            }
        }
        self.cache.remove(&replaced)?;
        // 2. Store the batch
        let parts: Vec<Vec<(u32, &[u8])>> =
            batch.iter().map(|new| new.parts.iter().map(|(part, bytes)| (*part, &bytes[..])).collect()).collect();
        let news = batch.iter().zip(&parts).map(|(new, parts)| NewEntry {
            hash: new.hash,
            before: new.before,
            position: new.position,
            tokens: &new.tokens,
            parts,
        });
        let stored = self.cache.store(self.model(), &news.collect::<Vec<_>>())?;
        if let Some(remote) = &self.remote {
            let model = self.model();
            remote.offer(batch[..stored.present].iter().map(|new| (model, new.hash)));
        }
        Ok(())
    }

    fn touch(&mut self, path: &[BlockHash]) -> Result<(), Error> {
        let model = self.model();
        let keys: Vec<Key> = path.iter().map(|hash| (model, *hash)).collect();
        // What an earlier run did not come to store, or what has expired there since.
        self.remote.iter().for_each(|remote| remote.offer(keys.iter().copied()));
        self.cache.touch(&keys)
    }
}
