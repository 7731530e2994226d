//! The chunks of a load that are not there yet, and in which order they are read.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, MutexGuard};
use std::thread::JoinHandle;

use super::delivery::Buffers;
use super::options::LoadMode;
use super::sink::Reader;
use super::source::{PENDING, READY, Source};
use crate::arriving::LOOK_AGAIN;
use crate::bytes::Bytes;
use crate::error::Error;

/// Waits a short while: nobody tells when bytes arrive.
pub(super) fn look_again<'a>(settled: &Condvar, pending: MutexGuard<'a, Pending>) -> MutexGuard<'a, Pending> {
    settled.wait_timeout(pending, LOOK_AGAIN).unwrap_or_else(|e| e.into_inner()).0
}

/// (Source, chunk)
pub(super) type ChunkId = (usize, usize);

/// Chunks that are looked at for one that has arrived.
const LOOKED_AT: usize = 64;

/// What there is to read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Choice {
    Read(ChunkId),
    /// Nothing yet: bytes are still arriving.
    Arriving,
    Nothing,
}

/// Chunks that are not there yet, and the readers that run.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// By kind of reader.
    pub lanes: [Lane; 2],
    /// Chunks that somebody waits for: these are read first.
    pub urgent: VecDeque<ChunkId>,
    /// Chunks that readers are working on.
    pub lent: usize,
    /// The readers' threads.
    pub running: Vec<JoinHandle<()>>,
    /// By source and chunk: whether it was asked for at the start and is not there yet.
    pub wanted: Vec<Vec<bool>>,
    /// By source and chunk: whether it is to be delivered, and has not been yet.
    pub to_deliver: Vec<Vec<bool>>,
    /// The buffers that deliveries go through.
    pub buffers: Buffers,
}

/// What one kind of reader reads.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub order: Vec<ChunkId>,
    /// Position in `order` of the next chunk.
    pub next: usize,
    /// Readers that run.
    pub readers: usize,
}

/// The kind of reader for files that are read in this mode.
fn reader_of(mode: LoadMode) -> Reader {
    if mode == LoadMode::Direct { Reader::Direct } else { Reader::Threads }
}

impl Pending {
    /// Puts the chunks that hold parts of these views into the lanes, and returns those that are there already.
    pub fn ask_for<'a>(&mut self, sources: &[Arc<Source>], order: impl IntoIterator<Item = &'a Bytes>) -> Vec<ChunkId> {
        let chunks = |s: &Arc<Source>| s.chunks(&(0..s.file.len as usize)).len();
        self.wanted = sources.iter().map(|s| vec![false; chunks(s)]).collect();
        let mut ready = Vec::new();
        for bytes in order {
            let Some((source, range)) = bytes.source() else { continue };
            let Some(number) = sources.iter().position(|s| Arc::ptr_eq(s, source)) else { continue };
            for chunk in source.chunks(&range) {
                if !std::mem::replace(&mut self.wanted[number][chunk], true) {
                    match source.state(chunk) {
                        READY => ready.push((number, chunk)),
                        _ => self.lanes[reader_of(source.mode) as usize].order.push((number, chunk)),
                    }
                }
            }
        }
        ready
    }

    /// Has what was asked for delivered, except chunks that are there already, and those of which a part stays: these are read to their places, and what is wanted
    /// of them is handed over from there. Returns how many others there are.
    pub fn deliver_all_but(&mut self, sources: &[Arc<Source>], ready: &[ChunkId], stays: &[&Bytes]) -> usize {
        self.to_deliver = self.wanted.clone();
        let chunks = |bytes: &&Bytes| {
            let (source, range) = bytes.source()?;
            let number = sources.iter().position(|s| Arc::ptr_eq(s, source))?;
            Some(source.chunks(&range).map(move |chunk| (number, chunk)))
        };
        let here: Vec<ChunkId> = stays.iter().filter_map(chunks).flatten().chain(ready.iter().copied()).collect();
        here.iter().for_each(|(number, chunk)| self.to_deliver[*number][*chunk] = false);
        let is_used_here = |number: usize| here.iter().any(|(of, _)| *of == number);
        let elsewhere = sources.iter().enumerate().filter(|(number, _)| !is_used_here(*number));
        elsewhere.for_each(|(_, source)| source.set_delivered(true));
        self.to_deliver.iter().flatten().filter(|chunk| **chunk).count()
    }

    /// The next chunk for a kind of reader whose bytes are in its file. It stays in its lane. `any`: chunks may be read in another order than that which was asked
    /// for, where those before them are still arriving.
    ///
    /// # Errors
    /// Bytes that will never be in their file.
    pub fn choose(&mut self, sources: &[Arc<Source>], reader: Reader, any: bool) -> Result<Choice, Error> {
        let Some(first) = self.peek(sources, reader) else { return Ok(Choice::Nothing) };
        let arrived = |&(source, chunk): &ChunkId| sources[source].has_arrived(chunk);
        if arrived(&first)? {
            return Ok(Choice::Read(first));
        }
        let lane = &self.lanes[reader as usize];
        let urgent = self.urgent.iter().filter(|(source, _)| reader_of(sources[*source].mode) == reader);
        let pending = |&&(source, chunk): &&ChunkId| sources[source].state(chunk) == PENDING;
        let asked = lane.order[lane.next.min(lane.order.len())..].iter().filter(pending);
        for id in urgent.chain(asked).take(if any { LOOKED_AT } else { 0 }) {
            if arrived(id)? {
                return Ok(Choice::Read(*id));
            }
        }
        Ok(Choice::Arriving)
    }

    /// The next chunk for a kind of reader. It stays in its lane.
    pub fn peek(&mut self, sources: &[Arc<Source>], reader: Reader) -> Option<ChunkId> {
        let pending = |&(source, chunk): &ChunkId| sources[source].state(chunk) == PENDING;
        self.urgent.retain(pending);
        let urgent = self.urgent.iter().find(|(source, _)| reader_of(sources[*source].mode) == reader);
        if let Some(place) = urgent {
            return Some(*place);
        }
        let lane = &mut self.lanes[reader as usize];
        while lane.order.get(lane.next).is_some_and(|p| !pending(p)) {
            lane.next += 1;
        }
        lane.order.get(lane.next).copied()
    }
}
