//! The prompt cache on disk, as the engine uses it: what is copied out of the caches in memory and handed to a thread that writes it, and what a prompt finds
//! there and takes up instead of computing it. No step ever waits for the disk: what there is no room to write is dropped and counted, and a sequence whose
//! prefix is being read stays in the queue while others go on.

mod costs;
mod fingerprint;
mod lookup;
mod prefetch;
mod restore;
mod saving;
mod sessions;
mod sums;
mod writer;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sluice_backend::KvLayout;
use sluice_cache::disk::{Error, READING};
use sluice_cache::{BlockHash, Group};
use sluice_store::LoadProgress;

use costs::Costs;
pub(crate) use fingerprint::{Choices, Identity};
use lookup::{Ask, Found, Lookup, Query};
use prefetch::Prefetch;
pub(crate) use restore::{Restore, begin, settled};
pub(crate) use saving::Saving;
use sessions::{Inner, Naming};
pub use sessions::{LoadedSession, ReadAhead, Saved, Session, Sessions};
use writer::{Command, Opened, Shared, Writer, size};

/// A prompt cache on disk that was asked for.
#[derive(Clone, Debug)]
pub struct PromptCacheOptions {
    pub folder: PathBuf,
    /// Bytes that all of its files together may have; `None`: a twentieth of what is free on its disk.
    pub quota: Option<u64>,
    /// Bytes that are written in a day at most (UTC).
    pub daily_limit: Option<u64>,
    /// Prefixes of fewer tokens are neither written nor looked for.
    pub fewest: usize,
    /// A file whose bytes everything is encrypted with.
    pub key_file: Option<PathBuf>,
    /// Where sums of weights are remembered, so that a start reads nothing of these to know whose the cache's entries are.
    pub sums: Option<PathBuf>,
    /// Weights of no more bytes than these are summed at the start where they are not remembered; more of them beside the engine, which serves without this cache
    /// meanwhile.
    pub at_once: u64,
}

impl PromptCacheOptions {
    /// What [`PromptCacheOptions::at_once`] should be: some hundredths of a second.
    pub const AT_ONCE: u64 = 64 << 20;
}

/// What is in the cache, and what came of it since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptCacheStatus {
    pub folder: PathBuf,
    pub quota: u64,
    /// Bytes of its files, and entries: blocks of tokens, of all models.
    pub bytes: u64,
    pub entries: u64,
    /// Entries that were written, and their bytes.
    pub stored: u64,
    pub written_bytes: u64,
    /// Entries that were not written, since so much was waiting to be.
    pub dropped: u64,
    /// Bytes that were read for prompts.
    pub read_bytes: u64,
    /// Tokens of prompts that were read before anybody asked.
    pub prefetched: u64,
    /// Entries that were not what had been written, or could not be read: computed instead.
    pub wrong: u64,
    /// Prefixes that were there and not read, since computing them was quicker.
    pub skipped_slow: u64,
    /// Bytes of weights that are summed, and of all that must be before anything is written or read; `None` once they are.
    pub summing: Option<(u64, u64)>,
    /// Why nothing is written or read any more.
    pub broken: Option<String>,
}

/// What a cache group or a state takes, so that what has another size is not believed.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub block_tokens: usize,
    pub windows: Vec<Option<usize>>,
    /// Bytes of a block of each group, and of a state: 0 for a model without.
    pub block_bytes: Vec<usize>,
    pub state_bytes: usize,
}

impl Shape {
    pub fn new(groups: &[Group], layouts: &[KvLayout], state_len: usize) -> Shape {
        Shape {
            block_tokens: groups.first().map_or(32, |g| g.block_tokens),
            windows: groups.iter().map(|g| g.window).collect(),
            block_bytes: layouts.iter().map(KvLayout::block_bytes).collect(),
            state_bytes: state_len * size_of::<f32>(),
        }
    }

    /// Of each group, the first block that a query behind `to` tokens sees.
    pub fn first_blocks(&self, to: usize) -> impl Iterator<Item = usize> {
        self.windows.iter().map(move |w| w.map_or(0, |w| (to + 1).saturating_sub(w)) / self.block_tokens)
    }
}

/// Bytes that wait to be written at most.
pub(crate) const WAITING: u64 = 16 << 20;
/// The index, and the slot that is being written.
const INDEX: u64 = 4 << 20;

/// At the end weights of which no more bytes than these are left to sum are waited for, and so long.
const NEARLY: u64 = 4 << 30;
const PATIENCE: Duration = Duration::from_secs(6);
const PAUSE: Duration = Duration::from_millis(5);

/// Bytes that all of it comes to hold, for a model with states of `state` bytes. One of these may be larger than all else: one that is copied out is there as numbers and
/// as bytes while another is written, and one that is read waits to be taken.
pub(crate) fn memory(state: u64) -> u64 {
    WAITING + READING as u64 + INDEX + 5 * state
}

/// The flag that is to blame where a cache cannot be as it was asked for; `None` where the model can do without one.
pub(crate) fn to_blame(e: &anyhow::Error) -> Option<&'static str> {
    match e.downcast_ref::<Error>()? {
        Error::Quota { .. } => Some("--prompt-cache-bytes"),
        Error::KeyFile { .. } | Error::WrongKey | Error::KeyWanted | Error::NotEncrypted => {
            Some("--prompt-cache-key-file")
        }
        Error::NotACache { .. } | Error::NoCache { .. } => Some("--prompt-cache"),
        Error::LittleFree { .. }
        | Error::Io { .. }
        | Error::Folder { .. }
        | Error::InUse { .. }
        | Error::Index(_)
        | Error::Disabled => None,
    }
}

/// The engine's side of the cache.
pub(crate) struct PromptCache {
    commands: Sender<Command>,
    keeper: Option<JoinHandle<()>>,
    asks: Sender<Ask>,
    finder: Option<JoinHandle<()>>,
    /// Sums the model's weights, where that was not done before.
    sums: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
    options: PromptCacheOptions,
    quota: u64,
    pub shape: Shape,
    pub costs: Costs,
    pub saving: Saving,
    prefetch: Prefetch,
    /// For those who know it by [`Sessions`].
    inner: Arc<Inner>,
    /// Sessions that are being saved.
    namings: VecDeque<Naming>,
    dropped: u64,
    too_dear: u64,
    warned: bool,
}

impl PromptCache {
    /// Opens the folder, for the model with this identity in the folder `of`. What of it is not summed yet is summed once `load` is over.
    ///
    /// # Errors
    /// A folder that cannot be used, or that another process uses; weights that cannot be read, or have changed.
    pub fn open(
        options: &PromptCacheOptions,
        mut identity: Identity,
        of: &Path,
        load: LoadProgress,
        shape: Shape,
    ) -> Result<(PromptCache, [u8; 32])> {
        let shared = Arc::new(Shared::of(&options.folder));
        let Opened { mut keeper, lookups, secret, quota } = Writer::open(options, of, Arc::clone(&shared))?;
        if identity.unsummed() <= options.at_once {
            identity.sum(false, &mut |_| true)?;
        }
        let model = identity.fingerprint();
        if let Some(model) = model {
            keeper.know(model)?;
        }
        let (commands, received) = channel();
        let inner = Inner { lookups: lookups.clone(), commands: commands.clone(), shared: Arc::clone(&shared) };
        let prefetch = Prefetch::new(lookups.clone());
        let finder =
            Lookup { lookups, secret, shape: shape.clone(), shared: Arc::clone(&shared), keeper: commands.clone() };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.into()).spawn(work).context("a thread of the prompt cache")
        };
        let keeper = spawn("prompt-cache", Box::new(move || keeper.run(&received)))?;
        let (asks, asked) = channel();
        let finder = spawn("prompt-lookups", Box::new(move || finder.run(&asked)))?;
        let sums = match model {
            Some(_) => None,
            None => {
                shared.note(format!(
                    "prompt cache: {} of the model are summed in the background, once; until then it is neither read nor written",
                    size(identity.unsummed())
                ));
                Some(sums::begin(identity, load, Arc::clone(&shared), commands.clone())?)
            }
        };
        let cache = PromptCache {
            commands,
            keeper: Some(keeper),
            asks,
            finder: Some(finder),
            sums,
            shared,
            options: options.clone(),
            quota,
            shape,
            costs: Costs::default(),
            saving: Saving::default(),
            prefetch,
            inner: Arc::new(inner),
            namings: VecDeque::new(),
            dropped: 0,
            too_dear: 0,
            warned: false,
        };
        Ok((cache, secret))
    }

    pub fn status(&self) -> PromptCacheStatus {
        let s = &self.shared;
        let of = |n: &std::sync::atomic::AtomicU64| n.load(Ordering::Relaxed);
        PromptCacheStatus {
            folder: self.options.folder.clone(),
            quota: self.quota,
            bytes: of(&s.bytes),
            entries: of(&s.entries),
            stored: of(&s.stored),
            written_bytes: of(&s.written),
            dropped: self.dropped + of(&s.refused),
            read_bytes: of(&s.read),
            prefetched: self.prefetch.tokens(),
            wrong: of(&s.wrong),
            skipped_slow: self.too_dear,
            summing: s.summing(),
            broken: s.broken(),
        }
    }

    /// What went wrong for good, once; and what was lost, a line each.
    pub fn take_warnings(&mut self) -> Vec<String> {
        let mut lines = self.shared.take_notes();
        if !self.warned
            && let Some(why) = self.shared.broken()
        {
            self.warned = true;
            lines.push(format!("{why}: going on without the prompt cache"));
        }
        lines
    }

    /// Prefixes of fewer tokens are neither written nor looked for.
    pub fn min_tokens(&self) -> usize {
        self.options.fewest
    }

    fn send(&self, command: Command) -> bool {
        self.shared.is_ready() && self.commands.send(command).is_ok()
    }

    /// Asks what there is of a prompt.
    fn ask(&self, query: Query) -> Option<Receiver<Found>> {
        let (tell, told) = channel();
        let sent = self.shared.is_ready() && self.asks.send(Ask::Find(query, tell)).is_ok();
        sent.then_some(told)
    }

    /// A sequence goes on from entries that are kept here too: they are the last to be evicted.
    pub fn touch(&self, path: Vec<BlockHash>) {
        if !path.is_empty() {
            self.send(Command::Touch(path));
        }
    }

    /// Before the end: sums that need little more time are waited for, so that what was computed can be written.
    pub fn wait_for_sums(&self) {
        let until = Instant::now() + PATIENCE;
        while let Some((summed, all)) = self.shared.summing() {
            if all - summed > NEARLY || Instant::now() >= until {
                let (summed, all) = (size(summed), size(all));
                let line =
                    format!("prompt cache: nothing was written: {summed} of {all} of the model are summed so far");
                return self.shared.note(line);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Waits until all that was handed over is written, or cannot be.
    pub fn flush(&self) {
        let (tell, told) = channel();
        if self.send(Command::Flush(tell)) {
            while self.shared.is_well() && !matches!(told.recv_timeout(Duration::from_millis(50)), Ok(())) {
                if self.keeper.as_ref().is_none_or(JoinHandle::is_finished) {
                    return;
                }
            }
        }
    }
}

impl Drop for PromptCache {
    fn drop(&mut self) {
        // The thread that writes is the last to use the folder, and leaves it as one that came to its end.
        self.prefetch.end();
        self.shared.end();
        if let Some(sums) = self.sums.take() {
            let _ = sums.join();
        }
        let _ = self.asks.send(Ask::Close);
        if let Some(finder) = self.finder.take() {
            let _ = finder.join();
        }
        let _ = self.commands.send(Command::Close);
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}
