//! The engine's side of the disk tier.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sluice_cache::disk::Chain;
use sluice_cache::remote::Remote;
use sluice_cache::{BlockHash, EvictedNode, KvCache};
use sluice_store::LoadProgress;

use super::costs::RestoreCosts;
use super::fingerprint::ModelIdentity;
use super::lookup::{Lookup, LookupCommand};
use super::options::{PromptCacheOptions, PromptCacheStatus};
use super::outbox::Outbox;
use super::prefetch::Prefetch;
use super::restorer::Restorer;
use super::saving::Saving;
use super::sessions::{Saved, SessionAccess, SessionSaver, Sessions};
use super::shared::{Shared, size};
use super::summing;
use super::writer::{OpenedFolder, Writer, WriterCommand};
use crate::schedule::sequence::Sequence;
use crate::tiers::block_io::BlockIo;
use crate::tiers::shape::CacheShape;

/// At the end, weights of which at most this many bytes are left to sum are waited for, and this long.
const MAX_UNSUMMED: u64 = 4 << 30;
const SUM_PATIENCE: Duration = Duration::from_secs(6);
const SUM_PAUSE: Duration = Duration::from_millis(5);
/// At the end, what is still to be stored for other replicas is waited for this long.
const STORE_PATIENCE: Duration = Duration::from_secs(10);

/// The prompt cache of one engine.
pub(crate) struct DiskTier {
    options: PromptCacheOptions,
    quota: u64,
    /// What replicas share.
    remote: Option<Arc<Remote>>,
    threads: Threads,
    outbox: Outbox,
    saving: Saving,
    restorer: Restorer,
    prefetch: Prefetch,
    sessions: SessionSaver,
    /// Whether the user was told that the cache is broken.
    was_reported: bool,
}

/// Threads to join at the end.
struct Threads {
    writer: Option<JoinHandle<()>>,
    lookup: Option<JoinHandle<()>>,
    /// Sums the model's weights, if their sums are not remembered.
    summing: Option<JoinHandle<()>>,
}

/// Opening and closing.
impl DiskTier {
    /// Opens the cache for the model in `model_folder`. Weights that are not summed yet are summed once `load` is over. Also returns the key of block hashes.
    ///
    /// # Errors
    /// A folder that cannot be used, or that another process uses; weights that cannot be read, or have changed.
    pub fn open(
        options: &PromptCacheOptions,
        mut identity: ModelIdentity,
        model_folder: &Path,
        load: LoadProgress,
        shape: CacheShape,
    ) -> Result<(DiskTier, [u8; 32])> {
        let shared = Arc::new(Shared::new(&options.folder));
        let OpenedFolder { mut writer, lookups, secret, quota, remote } =
            Writer::open(options, model_folder, Arc::clone(&shared))?;
        if identity.unsummed() <= options.sum_at_start {
            identity.sum(false, &mut |_| true)?;
        }
        let model = identity.fingerprint();
        if let Some(model) = model {
            writer.set_fingerprint(model)?;
        }
        let (commands, received) = channel();
        let access =
            SessionAccess { lookups: lookups.clone(), commands: commands.clone(), shared: Arc::clone(&shared) };
        let prefetch = Prefetch::new(lookups.clone());
        let lookup = Lookup {
            lookups,
            secret,
            shape: shape.clone(),
            shared: Arc::clone(&shared),
            writer: commands.clone(),
            remote: remote.clone(),
        };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.into()).spawn(work).context("a thread of the prompt cache")
        };
        let writer = spawn("prompt-cache", Box::new(move || writer.run(&received)))?;
        let (lookup_commands, received) = channel();
        let lookup = spawn("prompt-lookups", Box::new(move || Arc::new(lookup).run(&received)))?;
        let summing = match model {
            Some(_) => None,
            None => {
                shared.note(format!(
                    "prompt cache: {} of the model are summed in the background, once; until then it is neither read nor written",
                    size(identity.unsummed())
                ));
                Some(summing::start(identity, load, Arc::clone(&shared), commands.clone())?)
            }
        };
        let tier = DiskTier {
            options: options.clone(),
            quota,
            remote,
            threads: Threads { writer: Some(writer), lookup: Some(lookup), summing },
            outbox: Outbox { commands, shared: Arc::clone(&shared), shape: shape.clone(), dropped: 0 },
            saving: Saving::default(),
            restorer: Restorer {
                commands: lookup_commands,
                shared,
                shape,
                costs: RestoreCosts::default(),
                min_tokens: options.min_tokens,
                skipped_slow: 0,
            },
            prefetch,
            sessions: SessionSaver::new(access, options.min_tokens),
            was_reported: false,
        };
        Ok((tier, secret))
    }

    /// PrefixOptions of fewer tokens are neither written nor looked up.
    pub fn min_tokens(&self) -> usize {
        self.options.min_tokens
    }

    /// Contents and counters.
    pub fn status(&self) -> PromptCacheStatus {
        let shared = &self.outbox.shared;
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        PromptCacheStatus {
            folder: self.options.folder.clone(),
            quota: self.quota,
            bytes: load(&shared.bytes),
            entries: load(&shared.entries),
            stored: load(&shared.stored),
            written_bytes: load(&shared.written),
            dropped: self.outbox.dropped + load(&shared.refused),
            read_bytes: load(&shared.read),
            prefetched: self.prefetch.tokens(),
            wrong: load(&shared.wrong),
            skipped_slow: self.restorer.skipped_slow,
            summing: shared.summing(),
            broken: shared.broken(),
            store: self.remote.as_ref().map(|remote| remote.status()),
        }
    }

    /// New messages: what was lost, and once, why the cache is not used any more.
    pub fn take_notes(&mut self) -> Vec<String> {
        let mut lines = self.outbox.shared.take_notes();
        lines.extend(self.remote.iter().flat_map(|remote| remote.take_notes()));
        if !self.was_reported
            && let Some(why) = self.outbox.shared.broken()
        {
            self.was_reported = true;
            lines.push(format!("{why}: going on without the prompt cache"));
        }
        lines
    }

    /// Waits for sums that need little more time, so that what was computed can be written. From now on [`DiskTier::save_unsaved`] saves everything that
    /// conversations hold.
    pub fn begin_last_flush(&mut self) {
        self.wait_for_sums();
        // Search everything again.
        (self.saving.is_stale, self.saving.is_last) = (true, true);
    }

    fn wait_for_sums(&self) {
        let shared = &self.outbox.shared;
        let until = Instant::now() + SUM_PATIENCE;
        while let Some((summed, all)) = shared.summing() {
            if all - summed > MAX_UNSUMMED || Instant::now() >= until {
                let (summed, all) = (size(summed), size(all));
                let line =
                    format!("prompt cache: nothing was written: {summed} of {all} of the model are summed so far");
                return shared.note(line);
            }
            thread::sleep(SUM_PAUSE);
        }
    }

    /// Waits until everything that was queued is written, or cannot be.
    pub fn end_last_flush(&mut self) {
        self.saving.is_last = false;
        let (reply, replies) = channel();
        if self.outbox.send(WriterCommand::Flush(reply)) {
            while self.outbox.shared.is_ok() && !matches!(replies.recv_timeout(Duration::from_millis(50)), Ok(())) {
                if self.threads.writer.as_ref().is_none_or(JoinHandle::is_finished) {
                    return;
                }
            }
        }
        self.remote.iter().for_each(|remote| remote.flush(STORE_PATIENCE));
    }
}

/// Writing. All queued block operations are applied before blocks are copied out.
impl DiskTier {
    /// Copies a node that is about to be overwritten.
    pub fn store_evicted(&mut self, node: &EvictedNode, io: &mut dyn BlockIo) {
        self.saving.store_evicted(node, &mut self.outbox, io);
    }

    /// Notes how long a step took that computed nothing but these tokens of prompts.
    pub fn note_computed(&mut self, tokens: usize, took: Duration) {
        self.restorer.costs.note_computed(tokens, took);
    }

    /// After a step of `took`: copies some of the nodes that were used again.
    pub fn after_step(&mut self, took: Duration, cache: &mut KvCache, io: &mut dyn BlockIo) {
        self.saving.after_step(took, cache, &mut self.outbox, io);
    }

    /// Copies a portion of what conversations hold. Returns whether there may be more.
    pub fn save_unsaved(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> bool {
        self.saving.save_unsaved(self.quota, cache, &mut self.outbox, io)
    }

    /// Marks entries as recently used, because a sequence has continued from them.
    pub fn touch(&self, path: Vec<BlockHash>) {
        if !path.is_empty() {
            self.outbox.send(WriterCommand::Touch(path));
        }
    }

    /// Names of saved conversations.
    pub fn sessions(&self) -> Sessions {
        self.sessions.sessions()
    }

    /// Saves a conversation under a name. [`DiskTier::save_sessions`] does the work.
    pub fn save_session(&mut self, name: String, cache: &mut KvCache, salt: &[u8], tokens: &[u32], done: Saved) {
        self.sessions.enqueue(name, cache, salt, tokens, done);
    }

    /// Whether sessions are being saved.
    pub fn is_saving_sessions(&self) -> bool {
        self.sessions.is_busy()
    }

    /// Copies a portion of the sessions that are being saved. Returns whether there is more.
    pub fn save_sessions(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> bool {
        self.sessions.copy_portion(cache, &mut self.outbox, io)
    }
}

/// Reading. All queued block operations are applied before blocks are filled.
impl DiskTier {
    /// Moves a sequence's restore forward. The first call that has to wait takes `patience`.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn poll_restore(
        &mut self,
        s: &mut Sequence,
        cache: &mut KvCache,
        io: &mut dyn BlockIo,
        patience: &mut Option<Duration>,
    ) -> Result<()> {
        self.restorer.poll(s, cache, io, patience)
    }

    /// Whether a prefix is being prefetched.
    pub fn is_prefetching(&self) -> bool {
        self.prefetch.is_reading()
    }

    /// Reads a portion of recently used prefixes. Returns whether there is more to do now.
    ///
    /// # Errors
    /// When there is no memory for blocks.
    pub fn prefetch(&mut self, cache: &mut KvCache, io: &mut dyn BlockIo) -> Result<bool> {
        self.prefetch.run_portion(&mut self.restorer, cache, io)
    }

    /// Makes this chain the next to be prefetched.
    pub fn read_ahead(&mut self, chain: Chain) {
        self.prefetch.request(chain);
    }

    /// Interrupts prefetching. Blocks that were read stay.
    pub fn interrupt_prefetch(&mut self, cache: &mut KvCache) {
        self.prefetch.interrupt(&mut self.restorer, cache);
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        // The writer ends last, so that it can mark the folder as cleanly closed.
        self.prefetch.end();
        self.outbox.shared.close();
        if let Some(summing) = self.threads.summing.take() {
            let _ = summing.join();
        }
        let _ = self.restorer.commands.send(LookupCommand::Close);
        if let Some(lookup) = self.threads.lookup.take() {
            let _ = lookup.join();
        }
        self.remote.iter().for_each(|remote| remote.close());
        let _ = self.outbox.commands.send(WriterCommand::Close);
        if let Some(writer) = self.threads.writer.take() {
            let _ = writer.join();
        }
    }
}
