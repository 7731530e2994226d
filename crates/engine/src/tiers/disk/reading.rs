//! A prefix that is being read from disk, some parts at a time.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sluice_cache::{RestoreSpan, RestoreTarget};

use super::limits::MAX_QUEUED;
use super::lookup::{LookupCommand, PrefixPart, ReadReply};

/// A read under way.
pub(crate) struct DiskRead {
    pub wanted: RestoreSpan,
    /// Tokens of the entries.
    pub tokens: Arc<[u32]>,
    pub parts: Vec<PrefixPart>,
    /// The parts that are being read now.
    pub current: Range<usize>,
    /// Bytes that are requested at a time, at most; one part at least.
    pub batch_bytes: u64,
    /// How long the store may take.
    pub patience: Duration,
    pub commands: Sender<LookupCommand>,
    /// Tokens of the whole prefix.
    pub to: usize,
    /// Tokens of it that the caches had already.
    pub present: usize,
    /// Where each part goes: `[parts]`.
    pub targets: Vec<RestoreTarget>,
    /// Which parts have arrived: `[parts]`.
    pub filled: Vec<bool>,
    /// How many of `targets` have memory.
    pub committed: usize,
    pub replies: Mutex<Receiver<ReadReply>>,
    /// Time that copying bytes to their targets took.
    pub copy_time: Duration,
}

impl DiskRead {
    /// Requests the next parts. Returns whether there were any.
    pub fn request_next(&mut self) -> bool {
        let mut bytes = 0;
        let from = self.current.end;
        let fits = |part: &&PrefixPart| {
            bytes += part.bytes;
            bytes == part.bytes || bytes <= self.batch_bytes
        };
        let parts: Vec<PrefixPart> = self.parts[from..].iter().take_while(fits).cloned().collect();
        if parts.is_empty() {
            return false;
        }
        let largest = parts.iter().map(|p| p.bytes).max().unwrap_or(1).max(1);
        // Fewer than the buffers that parts are read to: so the reader can measure how long it waited for this side.
        let (reply, replies) = sync_channel((MAX_QUEUED / largest).clamp(2, 1024) as usize);
        (self.current, self.replies) = (from..from + parts.len(), Mutex::new(replies));
        self.commands.send(LookupCommand::Read(Arc::clone(&self.tokens), parts, self.patience, reply)).is_ok()
    }
}
