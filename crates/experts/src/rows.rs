//! Tables of which a step reads a row for each of its tokens, such as embeddings for each layer: they stay on disk, and the rows that are used come to a cache of
//! bounded size. Which rows a step needs is known before it begins, so they are read while it computes its first layer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sluice_store::load::ALIGNMENT;
use sluice_store::requests::{Completion, ReadFaults, ReadQueue, ReadRequest, RequestOptions, Requests, StreamedFiles};
use sluice_store::{Bytes, Error, Memory, host_memory};

/// How rows are read and kept.
#[derive(Clone, Debug)]
pub struct RowOptions {
    /// Bytes of the cache. It has [`RowTable::LEAST`] rows at least, and no more than the table.
    pub budget: u64,
    /// Past the page cache, where the file system allows.
    pub direct: bool,
    /// Whether reads go through io_uring, where the system has it.
    pub io_uring: bool,
    /// Faults that a test injects into reads.
    pub faults: Option<Arc<dyn ReadFaults>>,
}

impl Default for RowOptions {
    fn default() -> RowOptions {
        RowOptions { budget: u64::MAX, direct: true, io_uring: true, faults: None }
    }
}

/// What was read since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowStats {
    /// Rows that steps wanted.
    pub wanted: u64,
    /// Rows that were read.
    pub read: u64,
    /// Bytes of them, in whole pages.
    pub bytes: u64,
    /// Time that steps waited for reads.
    pub waited: Duration,
}

impl std::ops::Add for RowStats {
    type Output = RowStats;

    fn add(self, other: RowStats) -> RowStats {
        RowStats {
            wanted: self.wanted + other.wanted,
            read: self.read + other.read,
            bytes: self.bytes + other.bytes,
            waited: self.waited + other.waited,
        }
    }
}

/// The rows of one plane in their file, and the place of one of them in a slot.
#[derive(Clone, Debug)]
struct PlaneRows {
    file: u32,
    /// Where row 0 begins in the file.
    offset: u64,
    row_bytes: usize,
    /// Where this plane's part of a row lies in a slot: a multiple of [`ALIGNMENT`].
    at: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Nothing,
    /// A row, of which some requests are in flight.
    Arriving {
        row: u32,
        pending: u32,
    },
    Row(u32),
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    content: Content,
    /// It was used since the clock's hand last came by.
    used: bool,
    /// The current step has not taken it yet.
    held: bool,
}

/// Bytes that describe a slot: itself, and its row's entry in a table that is half full at worst.
const ENTRY_BYTES: usize = size_of::<Slot>() + 24;

/// A table's parts on disk, each a run of rows.
#[derive(Debug)]
struct Parts {
    /// The planes of each.
    planes: Vec<Vec<PlaneRows>>,
    /// Rows of every part but the last.
    rows: usize,
}

impl Parts {
    /// The planes that have a row, and its number there.
    fn find(&self, row: u32) -> (&[PlaneRows], u64) {
        let row = row as usize;
        (&self.planes[row / self.rows], (row % self.rows) as u64)
    }
}

/// A table on disk, and its cache.
pub struct RowTable {
    parts: Parts,
    queue: Box<dyn ReadQueue>,
    /// Declared behind the queue, so that it is dropped after it: until then reads may write here.
    memory: Box<dyn Memory>,
    slot_bytes: usize,
    slots: Vec<Slot>,
    slot_of: HashMap<u32, u32>,
    /// The clock's hand: the search for a slot goes on here.
    hand: usize,
    /// Rows of the step, and their indices that were not handed out yet.
    step: Vec<u32>,
    left: Vec<u32>,
    /// The wave: (index in `step`, slot).
    wave: Vec<(u32, u32)>,
    failed: Vec<(u32, Arc<Error>)>,
    /// Kept between steps, so that a step allocates nothing.
    complete: Vec<Completion>,
    stats: RowStats,
}

impl RowTable {
    /// The fewest rows that a cache has.
    pub const LEAST: usize = 64;
    const DEPTH: usize = 256;
    const THREADS: usize = 8;

    /// Bytes that a row takes in a cache, with planes of so many bytes in a row.
    pub fn slot_bytes(row_bytes: impl Iterator<Item = usize>) -> usize {
        row_bytes.map(|bytes| (bytes + ALIGNMENT - 1).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Rows of the cache for a table of `rows` rows within a budget.
    fn slots_within(slot_bytes: usize, rows: usize, budget: u64) -> usize {
        let most = usize::try_from(budget / slot_bytes as u64).unwrap_or(usize::MAX);
        most.max(RowTable::LEAST).min(rows.max(1))
    }

    /// Bytes that the cache of such a table takes, with what describes it.
    pub fn bytes_of(row_bytes: impl Iterator<Item = usize>, rows: usize, budget: u64) -> usize {
        let slot_bytes = RowTable::slot_bytes(row_bytes).max(ALIGNMENT);
        RowTable::slots_within(slot_bytes, rows, budget) * (slot_bytes + ENTRY_BYTES)
    }

    /// A table of `rows` rows whose planes are views of files that are being loaded.
    ///
    /// # Errors
    /// Without memory, or when no thread can be started.
    pub fn open(planes: &[Bytes], rows: usize, options: &RowOptions) -> std::io::Result<RowTable> {
        RowTable::open_parts(std::iter::once((planes, rows)), options)
    }

    /// The same of a table in parts: the planes and the rows of each. All but the last have as many rows.
    ///
    /// # Errors
    /// As for [`RowTable::open`].
    pub fn open_parts<'a>(
        parts: impl Iterator<Item = (&'a [Bytes], usize)>,
        options: &RowOptions,
    ) -> std::io::Result<RowTable> {
        let mut files = StreamedFiles::default();
        let (mut all, mut rows, mut of_part) = (Vec::new(), 0, None);
        for (planes, count) in parts {
            let mut at = 0;
            let mut locate = |bytes: &Bytes| {
                let (file, range) = files.locate(bytes);
                let row_bytes = bytes.len() / count.max(1);
                let plane = PlaneRows { file, offset: range.start, row_bytes, at };
                at += RowTable::slot_bytes(std::iter::once(row_bytes));
                plane
            };
            all.push(planes.iter().map(&mut locate).collect());
            rows += count;
            of_part.get_or_insert(count);
        }
        let parts = Parts { planes: all, rows: of_part.unwrap_or(0).max(1) };
        let how = RequestOptions {
            direct: options.direct,
            depth: RowTable::DEPTH,
            io_uring: options.io_uring,
            threads: RowTable::THREADS,
            faults: options.faults.clone(),
        };
        let queue = Requests::new(files, &how)?;
        RowTable::with_queue(parts, rows, options.budget, Box::new(queue))
    }

    fn with_queue(parts: Parts, rows: usize, budget: u64, queue: Box<dyn ReadQueue>) -> std::io::Result<RowTable> {
        let of_row = parts
            .planes
            .iter()
            .flatten()
            .map(|plane| plane.at + RowTable::slot_bytes(std::iter::once(plane.row_bytes)));
        let slot_bytes = of_row.max().unwrap_or(0).max(ALIGNMENT);
        let count = RowTable::slots_within(slot_bytes, rows, budget);
        let memory = host_memory(count * slot_bytes)?;
        let none = Slot { content: Content::Nothing, used: false, held: false };
        Ok(RowTable {
            parts,
            queue,
            memory,
            slot_bytes,
            slots: vec![none; count],
            slot_of: HashMap::with_capacity(count),
            hand: 0,
            step: Vec::new(),
            left: Vec::new(),
            wave: Vec::new(),
            failed: Vec::new(),
            complete: Vec::new(),
            stats: RowStats::default(),
        })
    }

    /// Bytes of the cache and what describes it.
    pub fn bytes(&self) -> usize {
        self.slots.len() * (self.slot_bytes + ENTRY_BYTES)
    }

    /// Rows that the cache has room for.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// What was read since the start.
    pub fn stats(&self) -> RowStats {
        self.stats
    }

    /// What reading fell back on, a clause each.
    pub fn notes(&self) -> &[String] {
        self.queue.notes()
    }

    /// Begins a step that wants these rows, and starts to read those that the cache lacks, as many as it has room for. Returns at once.
    pub fn begin(&mut self, rows: &[u32]) {
        self.slots.iter_mut().for_each(|slot| slot.held = false);
        self.step.clear();
        self.step.extend_from_slice(rows);
        self.left.clear();
        self.left.extend(0..self.step.len() as u32);
        self.wave.clear();
        self.failed.clear();
        self.stats.wanted += self.step.len() as u64;
        // Mark the rows that are there first, so that none of them is evicted for another.
        for row in &self.step {
            if let Some(slot) = self.slot_of.get(row) {
                let slot = &mut self.slots[*slot as usize];
                (slot.held, slot.used) = (true, true);
            }
        }
        self.request();
    }

    /// Starts reads of the missing rows that are left, while there are slots for them.
    fn request(&mut self) {
        for at in 0..self.left.len() {
            let row = self.step[self.left[at] as usize];
            if self.slot_of.contains_key(&row) {
                continue;
            }
            let Some(slot) = self.free_slot() else { break };
            self.read(row, slot);
        }
        self.queue.submit();
    }

    /// A slot that the step does not need: the one that was not used for longest, more or less (a clock).
    fn free_slot(&mut self) -> Option<usize> {
        for _ in 0..2 * self.slots.len() {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = &mut self.slots[at];
            if slot.held || matches!(slot.content, Content::Arriving { .. }) {
                continue;
            }
            if std::mem::take(&mut slot.used) {
                continue;
            }
            if let Content::Row(row) = slot.content {
                self.slot_of.remove(&row);
                slot.content = Content::Nothing;
            }
            return Some(at);
        }
        None
    }

    fn read(&mut self, row: u32, at: usize) {
        let mut pending = 0;
        let (planes, number) = self.parts.find(row);
        for plane in planes {
            let pages = pages_of(plane, number);
            let len = (pages.end - pages.start) as usize;
            if len == 0 {
                continue;
            }
            // SAFETY: inside the slot, which nobody reads or lends again until its requests are back; the memory outlives the queue.
            unsafe {
                let memory = self.memory.start().add(at * self.slot_bytes + plane.at);
                self.queue.push(ReadRequest { file: plane.file, offset: pages.start, len, memory, tag: at as u32 });
            }
            self.stats.bytes += len as u64;
            pending += 1;
        }
        let content = if pending > 0 { Content::Arriving { row, pending } } else { Content::Row(row) };
        self.slots[at] = Slot { content, used: true, held: true };
        self.slot_of.insert(row, at as u32);
        self.stats.read += 1;
    }

    /// Takes down which reads are over; with `wait` one at least.
    fn reap(&mut self, wait: bool) {
        let mut complete = std::mem::take(&mut self.complete);
        self.queue.reap(wait, &mut |done| complete.push(done));
        for done in complete.drain(..) {
            let slot = &mut self.slots[done.tag as usize];
            let Content::Arriving { row, pending } = &mut slot.content else { continue };
            let (row, pending) = (*row, {
                *pending -= 1;
                *pending
            });
            if let Some(error) = done.error {
                // All places of the step that want it fail; the next step reads it again.
                let error = Arc::new(error);
                let (step, failed) = (&self.step, &mut self.failed);
                self.left.retain(|place| {
                    let fails = step[*place as usize] == row;
                    if fails {
                        failed.push((*place, Arc::clone(&error)));
                    }
                    !fails
                });
                self.slot_of.remove(&row);
            }
            if pending == 0 {
                let is_whole = self.slot_of.get(&row) == Some(&done.tag);
                slot.content = if is_whole { Content::Row(row) } else { Content::Nothing };
                slot.held &= is_whole;
            }
        }
        self.complete = complete;
    }

    /// Brings the next rows of the step: [`RowTable::wave`] then has those that are there. Waits if none is. Returns whether there are any.
    pub fn next_wave(&mut self) -> bool {
        // 1. what was handed out makes room
        for (_, slot) in self.wave.drain(..) {
            self.slots[slot as usize].held = false;
        }
        while !self.left.is_empty() {
            self.reap(false);
            self.request();
            // 2. every place whose row is there
            let RowTable { left, wave, slots, slot_of, step, .. } = self;
            left.retain(|place| {
                let slot = slot_of.get(&step[*place as usize]).copied();
                let there = slot.filter(|slot| matches!(slots[*slot as usize].content, Content::Row(_)));
                wave.extend(there.map(|slot| (*place, slot)));
                there.is_none()
            });
            if !self.wave.is_empty() {
                return true;
            }
            // 3. none is: some are on their way, since a cache has more slots than a wave holds
            if !self.left.is_empty() {
                let since = Instant::now();
                self.reap(true);
                self.stats.waited += since.elapsed();
            }
        }
        false
    }

    /// Places of the step whose rows are in the cache now, until [`RowTable::next_wave`] or [`RowTable::begin`].
    pub fn wave(&self) -> Wave<'_> {
        let RowTable { parts, memory, slot_bytes, slots, step, wave, .. } = self;
        Wave { parts, memory: &**memory, slot_bytes: *slot_bytes, slots, step, wave }
    }

    /// Places of the step whose rows cannot be read, and why. Known once there are no more waves.
    pub fn failed(&self) -> &[(u32, Arc<Error>)] {
        &self.failed
    }
}

/// Rows of a step that are in the cache.
#[derive(Clone, Copy)]
pub struct Wave<'a> {
    parts: &'a Parts,
    memory: &'a dyn Memory,
    slot_bytes: usize,
    slots: &'a [Slot],
    step: &'a [u32],
    wave: &'a [(u32, u32)],
}

impl<'a> Wave<'a> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.wave.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.wave.is_empty()
    }

    /// The place in the step of the row with this number in the wave, and the planes of it.
    pub fn row(self, number: usize) -> (usize, impl Iterator<Item = &'a [u8]>) {
        let (place, slot) = self.wave[number];
        let row = self.step[place as usize];
        assert_eq!(self.slots[slot as usize].content, Content::Row(row), "a slot of this wave");
        let (planes, number) = self.parts.find(row);
        let planes = planes.iter().map(move |plane| {
            let skipped = (plane.offset + number * plane.row_bytes as u64) as usize % ALIGNMENT;
            let at = slot as usize * self.slot_bytes + plane.at + skipped;
            // SAFETY: inside the slot, whose reads are over; none begins while the table is borrowed.
            unsafe { std::slice::from_raw_parts(self.memory.start().add(at), plane.row_bytes) }
        });
        (place as usize, planes)
    }
}

/// From the page where a row begins to its end.
fn pages_of(plane: &PlaneRows, row: u64) -> Range<u64> {
    let start = plane.offset + row * plane.row_bytes as u64;
    start / ALIGNMENT as u64 * ALIGNMENT as u64..start + plane.row_bytes as u64
}

#[cfg(test)]
mod tests;
