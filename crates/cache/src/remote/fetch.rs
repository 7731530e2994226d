//! Reading objects for a sequence that waits for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::calls::{Bound, End};
use super::handle::{Remote, add};
use super::names::PartName;
use super::store::StoreError;
use crate::disk::{Label, Lookups, ReadPart, slot_bytes};

/// Objects that are asked for at once, at most.
const CALLS: usize = 16;
/// The bytes that they may have together, unless there are two.
pub const FETCHING: u64 = 32 << 20;
/// A read is given up if nothing arrives for this long.
const STALL: Duration = Duration::from_secs(3);
const TURN_PAUSE: Duration = Duration::from_millis(2);

/// An object to be read.
#[derive(Clone, Debug)]
pub struct WantedObject {
    /// What it must hold; its tokens are `tokens`.
    pub label: Label<'static>,
    /// The entry's tokens.
    pub tokens: Vec<u32>,
}

impl WantedObject {
    fn name(&self) -> PartName {
        let Label { part, model, hash, before, .. } = self.label;
        PartName { model, before, hash, tokens: self.tokens.len() as u32, part }
    }
}

impl Remote {
    /// Reads objects, several at once, and hands those that are right to `take`, in any order, with their numbers. Ends after `patience`, when nothing arrives for three
    /// seconds, or when `cancelled` is set. One sequence reads at a time. Returns the bytes that were read.
    pub fn fetch(
        self: &Arc<Self>,
        lookups: &Lookups,
        wanted: Vec<WantedObject>,
        patience: Duration,
        cancelled: &Arc<AtomicBool>,
        mut take: impl FnMut(usize, ReadPart),
    ) -> u64 {
        let bound = Bound { until: Instant::now() + patience, stall: STALL };
        // 1. Wait for the turn
        let _turn = loop {
            if let Ok(turn) = self.fetching.try_lock() {
                break turn;
            }
            if Instant::now() >= bound.until || cancelled.load(Ordering::Relaxed) || !self.is_readable() {
                add(&self.counters.given_up, 1);
                return 0;
            }
            thread::sleep(TURN_PAUSE);
        };
        // 2. Read and check
        let largest = wanted.iter().map(|w| slot_bytes(w.label.bytes)).max().unwrap_or(1).max(1);
        let calls = (FETCHING / largest).clamp(2, CALLS as u64) as usize;
        let names: Vec<PartName> = wanted.iter().map(WantedObject::name).collect();
        let (cipher, is_over) = (lookups.cipher(), Arc::clone(cancelled));
        let get =
            move |remote: &Remote, wanted: WantedObject, patience| -> Result<Option<Option<ReadPart>>, StoreError> {
                if is_over.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                let size = slot_bytes(wanted.label.bytes);
                let got = match remote.store.get(&wanted.name().name(), size, patience) {
                    // It is longer than it was.
                    Err(StoreError::TooLarge(_)) => Ok(Some(Vec::new())),
                    got => got,
                };
                remote.after_read(&got);
                let label = Label { tokens: &wanted.tokens, ..wanted.label };
                Ok(got?.map(|slot| ReadPart::checked(cipher.as_deref(), &label, slot)))
            };
        let mut bytes = 0;
        let end = self.each(wanted, calls, bound, get, |i, part| {
            match part {
                Ok(Some(Some(part))) => {
                    add(&self.counters.read, 1);
                    add(&self.counters.read_bytes, part.len() as u64);
                    bytes += part.len() as u64;
                    self.note_present(&names[i]);
                    take(i, part);
                }
                Ok(Some(None)) => self.note_wrong(&names[i]),
                Ok(None) => self.note_gone(&names[i]),
                Err(_) => {}
            }
            !cancelled.load(Ordering::Relaxed) && self.reads.is_on()
        });
        if end == End::Late {
            self.after_read::<()>(&Err(StoreError::Timeout));
            add(&self.counters.given_up, 1);
        }
        bytes
    }
}
