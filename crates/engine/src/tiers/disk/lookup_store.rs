//! The lookup thread's dealings with the store that replicas share. They have threads of their own, since a store may take a second to say that it has nothing.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use sluice_cache::block_hash;
use sluice_cache::disk::{Label, ReadPart};
use sluice_cache::remote::{FindInStore, WantedObject};

use super::lookup::{Found, FoundPrefix, Lookup, PrefixPart, PrefixQuery};

/// Reads what a store has: called with the flag that ends it, and with what takes each part. Returns the bytes.
pub(super) type Fetch = Box<dyn FnOnce(&Arc<AtomicBool>, &mut dyn FnMut(usize, ReadPart)) -> u64 + Send>;

impl Lookup {
    /// Whether the store may have more of a prompt than what was found.
    pub(super) fn may_ask_store(&self, q: &PrefixQuery, found: &Found) -> bool {
        let best = found.prefix.as_ref().map_or(q.usable, |found| found.to);
        q.asks_store
            && best + q.min_tokens.max(self.shape.block_tokens) <= q.tokens.len()
            && self.remote.as_ref().is_some_and(|remote| remote.is_readable())
    }

    /// Looks into the store, on another thread, and replies with the better of the two prefixes.
    pub(super) fn ask_store(self: Arc<Self>, query: PrefixQuery, found: Found, reply: Sender<FoundPrefix>) {
        let work = move || {
            let best = self.better_in_store(&query, found);
            // The receiver may be gone.
            best.into_iter().for_each(|found| _ = reply.send(found));
        };
        // Without a thread the sender is dropped, as if nothing was found.
        let _ = thread::Builder::new().name("prompt-lookup".into()).spawn(work);
    }

    fn better_in_store(&self, q: &PrefixQuery, found: Found) -> Option<FoundPrefix> {
        let Found { prefix, reach } = found;
        let remote = self.remote.as_ref()?;
        let n = self.shape.block_tokens;
        let best = prefix.as_ref().map_or(q.usable, |found| found.to);
        let mut path = vec![q.root];
        path.extend(q.tokens.chunks_exact(n).scan(q.root, |before, block| {
            *before = block_hash(&self.secret, before, block);
            Some(*before)
        }));
        let groups = self.shape.windows.iter().copied().zip(self.shape.block_bytes.iter().map(|b| *b as u64));
        let stored = remote.find(&FindInStore {
            secret: self.secret,
            model: self.model(),
            path: &path,
            tokens: &q.tokens,
            block_tokens: n,
            groups: groups.collect(),
            state_bytes: self.shape.state_bytes as u64,
            from: reach,
            least: (best + q.min_tokens).div_ceil(n),
        });
        let both = match stored.is_empty() {
            true => None,
            false => self.find(q, &stored).map_err(|e| self.shared.fail(e)).ok().and_then(|found| found.prefix),
        };
        let better = both.filter(|both| both.to >= best + q.min_tokens);
        remote.count_lookup(better.is_some());
        better.or(prefix)
    }

    /// Prepares to read the parts with these numbers from the store; `None` if there are none.
    pub(super) fn prepare_fetch(
        &self,
        numbers: Vec<usize>,
        parts: &[PrefixPart],
        tokens: &[u32],
        patience: Duration,
    ) -> Option<Fetch> {
        let remote = self.remote.clone().filter(|_| !numbers.is_empty())?;
        let wanted = numbers.iter().map(|i| {
            let Label { part, bytes, model, hash, before, position, tokens } = self.label_of(&parts[*i], tokens);
            let label = Label { part, bytes, model, hash, before, position, tokens: &[] };
            WantedObject { label, tokens: tokens.to_vec() }
        });
        let (wanted, lookups) = (wanted.collect::<Vec<_>>(), self.lookups.clone());
        Some(Box::new(move |is_over, take| {
            remote.fetch(&lookups, wanted, patience, is_over, |i, part| take(numbers[i], part))
        }))
    }
}
