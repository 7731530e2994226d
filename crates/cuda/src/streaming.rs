//! Experts that do not all stay on the device: in its memory, in locked memory of the host, and on disk, each in one of these, by the store's policy.
//!
//! When a step comes to a layer, the host looks at what the router chose: where the step is one token's, from beside what is enqueued already ([`answers`]), else before
//! the layer's experts are. Those experts that the device has are where they are; all others are copied from the
//! host's memory, as they come there, in a stream of their own, to buffers of which a layer's table says where they are. When the host next waits for the device, these
//! copies and all that was computed with them are done: then those that are worth it stay, each in the place of one that is copied back, and all other buffers may be
//! taken again; until they are, what lingers there is found and not copied once more. While many tokens go through a layer, those of the next layer's experts are copied that
//! as many are likely to want. A layer whose experts are all on the device to stay is not looked at.

mod answers;
mod buffers;

use std::cell::Cell;
use std::sync::Arc;

use anyhow::{Error, Result};
use sluice_backend::{Activations, ExpertOptions, Experts, Failed, Lookahead, Moe, Streamed};
use sluice_experts::simulate::MAX_PROMOTIONS;
use sluice_experts::{ExpertPool, ExpertStats, FetchId, Next, PinnedExpert, SlotClass};
use sluice_store::{Bytes, Memory as _};

use self::buffers::{Class, Demoting, Transient};
use crate::driver::{Address, Gpu};
use crate::expert_pool::{self, Division, EXPERT_ARRAYS, Rooms};
use crate::host_split::{Aside, Computes, Host, MOST_PAIRS, Sharing};
use crate::mailbox::Questions;
use crate::memory::Memory;
use crate::mixture::{Operand, operands};
use crate::streams::{Copies, Locked, Point};
use crate::tables::{Tables, bytes_of_layer};
use crate::weights::Weights;

/// Device memory that nobody was given stays free: for what the driver and graphs come to take.
pub const RESERVE: u64 = 512 << 20;
/// Experts of the next layer that are read ahead from disk while many tokens go through this one.
const AHEAD_FROM_DISK: usize = 64;
/// With so many pairs of token and expert for each expert on, what many tokens want says what as many will want next time.
const PAIRS_THAT_TELL: usize = 8;
/// What reads come in.
const PAGE: usize = 4096;
/// Experts that are moved to the device together while nobody wants anything.
const RISES_TO_ROOM: usize = 16;
struct Layer {
    experts: Experts,
    /// What many tokens wanted of it last.
    seen: Option<Seen>,
    /// All of its experts are on the device to stay, as its table there says.
    complete: bool,
}

/// What so many tokens wanted of a layer.
struct Seen {
    tokens: usize,
    /// By expert: how many of them wanted it.
    uses: Vec<u32>,
}

impl Seen {
    /// Whether of `tokens` tokens one at least is to be expected to want an expert; one that nobody wanted counts as if half a token had.
    fn is_likely(&self, expert: usize, tokens: usize) -> bool {
        (2 * self.uses[expert] as usize + 1) * tokens >= 2 * self.tokens
    }
}

/// What is asked for at a layer, until the host next waits.
struct Present {
    layer: usize,
    fetch: FetchId,
    /// Where tokens are many enough to tell what others want.
    tokens: Option<usize>,
    /// Most of its experts are wanted.
    nearly_all: bool,
    /// Positions that are not released, and what was borrowed to be copied ahead.
    held: Vec<usize>,
    borrowed: Vec<PinnedExpert>,
    passing: Vec<Transient>,
    /// What the host computes: positions, experts with their tokens, rows of x and the pairs that they are of.
    aside: Aside,
}

impl Present {
    /// Arrays of what the host computes, by their place in it, and all of their bytes.
    fn arrays_aside<'a>(&'a self, store: &'a ExpertPool) -> (impl Fn(usize, usize) -> &'a [u8], usize) {
        let array = |i: usize, n: usize| store.array(self.fetch, self.aside.held[i], n);
        let all = || (0..self.aside.held.len()).flat_map(|i| (0..EXPERT_ARRAYS).map(move |n| (i, n)));
        (array, all().map(|(i, n)| array(i, n).len()).sum())
    }
}

/// What a layer's tokens want.
struct Wanted {
    /// Ascending.
    experts: Vec<u32>,
    /// How many tokens want each.
    tokens: Vec<u32>,
}

impl Wanted {
    /// Of a layer of `count` experts, where these were chosen, some perhaps by several tokens.
    fn new(count: usize, chosen: &[u32]) -> Wanted {
        let mut tokens = vec![0u32; count];
        chosen.iter().for_each(|&e| tokens[e as usize] += 1);
        let experts: Vec<u32> = (0..count as u32).filter(|e| tokens[*e as usize] > 0).collect();
        let tokens = experts.iter().map(|e| tokens[*e as usize]).collect();
        Wanted { experts, tokens }
    }
}

pub struct Streaming {
    // Dropped first: what waits for the host ends, and these wait for what is under way.
    questions: Questions,
    up: Copies,
    down: Copies,
    store: ExpertPool,
    mode: Activations,
    classes: Vec<Class>,
    layers: Vec<Layer>,
    tables: Tables,
    uploaded: Point,
    present: Option<Present>,
    /// Copied before their layer has asked.
    ahead: Vec<(Transient, PinnedExpert)>,
    falling: Vec<Demoting>,
    /// Experts that have fallen, or passed, with their layers, and are still where the device may look for them.
    parting: Vec<(usize, Transient)>,
    /// The device has asked for nothing since it was idle: it may be told what has changed.
    is_idle: bool,
    /// Points that nobody uses.
    points: Vec<Point>,
    sharing: Option<Sharing>,
    reads_ahead: bool,
    is_locked: bool,
    stats: ExpertStats,
    /// Rows whose experts could not be read, and why the first of them could not.
    failed_rows: Vec<u32>,
    error: Option<Arc<sluice_store::Error>>,
}

/// Bytes of the tables that say where experts are.
fn bytes_of_tables<'a>(mixtures: impl Iterator<Item = &'a Moe>) -> u64 {
    mixtures.map(|moe| bytes_of_layer(moe.experts.count) as u64).sum()
}

/// Bytes that the experts of the widest layer take in buffers, at most, and the tables of all: what there has to be for any to be streamed.
pub fn least_bytes<'a>(weights: &Weights, mixtures: impl Iterator<Item = &'a Moe> + Clone) -> u64 {
    let tables = bytes_of_tables(mixtures.clone());
    let arrays = |o: Operand| weights.all[o.weight].bytes_per_array(o.rows);
    let expert = |experts: &Experts, e: usize| -> usize {
        operands(experts, e).into_iter().flat_map(arrays).filter(|n| *n > 0).map(|n| n + 2 * PAGE).sum()
    };
    let class = |experts: &Experts| SlotClass {
        bytes: (0..experts.count).map(|e| expert(experts, e)).max().unwrap_or(0),
        experts: experts.count,
        widest: experts.count,
    };
    let layer = |moe: &Moe| expert_pool::divide(&[class(&moe.experts)], 0).iter().map(Division::bytes).sum();
    // Sizes that are not alike have buffers of their own.
    let mut layers: Vec<u64> = mixtures.map(layer).collect();
    layers.sort_unstable_by(|a, b| b.cmp(a));
    layers.dedup_by(|a, b| *b - *a <= *b / 16);
    tables + layers.iter().sum::<u64>()
}

impl Streaming {
    pub fn open<'a>(
        gpu: &Gpu,
        weights: &mut Weights,
        mixtures: impl Iterator<Item = &'a Moe> + Clone,
        options: &ExpertOptions,
        (lookahead, mode, host): (Lookahead, Activations, Option<Host>),
        computes: &mut Option<Computes>,
    ) -> Result<Streaming> {
        let k = mixtures.clone().map(|m| m.scoring.k()).max().unwrap_or(0);
        let arrays = |experts: &Experts, e: usize| -> Vec<Bytes> {
            let of = |o: Operand| weights.all[o.weight].rows_bytes(o.row..o.row + o.rows);
            operands(experts, e).into_iter().flat_map(of).collect()
        };
        // 1. The host's side of it
        let left = || gpu.device.memory().map_or(0, |(free, _)| (free as u64).saturating_sub(RESERVE));
        let budget = options.device_budget.unwrap_or_else(left).saturating_sub(bytes_of_tables(mixtures.clone()));
        let faster = |classes: &[SlotClass]| expert_pool::divide(classes, budget).iter().map(|d| d.slots).collect();
        let is_locked = Cell::new(true);
        let mut lend = |bytes: usize| -> std::io::Result<Box<dyn sluice_store::Memory>> {
            let memory = Locked::new(&gpu.device, bytes)?;
            is_locked.set(is_locked.get() && (memory.is_locked || memory.is_empty()));
            Ok(Box::new(memory))
        };
        let sources = mixtures.clone().map(|m| (0..m.experts.count).map(|e| arrays(&m.experts, e)));
        let store = ExpertPool::open(sources, k, options, &mut lend, &faster)?;
        for moe in mixtures.clone() {
            for expert in 0..moe.experts.count {
                operands(&moe.experts, expert).iter().for_each(|o| weights.all[o.weight].elsewhere = true);
            }
        }
        let sharing = host.map(|host| Sharing::new(gpu, host, mode, weights, computes)).transpose()?;
        // 2. Buffers
        let class = |division: Division| -> Result<Class> {
            // The device multiplies with what lies there, too, where the host computes.
            let memory = Memory::zeroed(gpu, division.bytes() as usize, "experts")?;
            Ok(Class { memory, division, rooms: Rooms::new(&division), lingering: Vec::new() })
        };
        let classes =
            expert_pool::divide(&store.slot_classes(), budget).into_iter().map(class).collect::<Result<_>>()?;
        let layer = |moe: &Moe| Layer { experts: moe.experts.clone(), seen: None, complete: false };
        let for_host = mixtures.clone().map(|moe| moe.experts.hidden()).max().filter(|_| sharing.is_some());
        // While the device waits for the host, the driver must not have to load anything.
        gpu.device.load_kernels()?;
        let mut streaming = Streaming {
            questions: Questions::new(gpu, mixtures.clone().count(), for_host.unwrap_or(0))?,
            up: Copies::new(&gpu.device)?,
            down: Copies::new(&gpu.device)?,
            tables: Tables::new(gpu, mixtures.clone().map(|moe| moe.experts.count))?,
            uploaded: Point::new(gpu)?,
            store,
            mode,
            classes,
            layers: mixtures.map(layer).collect(),
            present: None,
            ahead: Vec::new(),
            falling: Vec::new(),
            parting: Vec::new(),
            is_idle: true,
            points: Vec::new(),
            sharing,
            reads_ahead: lookahead != Lookahead::Off,
            is_locked: is_locked.get(),
            stats: ExpertStats::default(),
            failed_rows: Vec::new(),
            error: None,
        };
        // Wherever a table says that an expert is, there is memory: one that the host computes, the device may compute too, from whatever is there.
        for layer in 0..streaming.layers.len() {
            for expert in 0..streaming.layers[layer].experts.count {
                let lie = streaming.lie(layer, expert);
                streaming.know(weights, layer, expert, 0, &lie);
            }
        }
        streaming.stats = ExpertStats::default();
        // Copies do not wait for what was filled with zeros.
        gpu.wait(gpu.quiet()?)?;
        Ok(streaming)
    }

    /// Where the host wants the normed input of so many tokens, to compute some of a layer's experts: room for so many bytes.
    pub fn input(&mut self, gpu: &Gpu, pairs: usize, bytes: usize) -> Result<Option<&mut [u8]>> {
        let sharing = self.sharing.as_mut().filter(|_| pairs <= MOST_PAIRS);
        sharing.map(|sharing| sharing.input(gpu, bytes)).transpose()
    }

    /// Where the table of a layer is on the device, if nobody has to look at what is chosen: all of its experts are there.
    pub fn complete(&self, layer: usize) -> Option<Address> {
        self.layers[layer].complete.then(|| self.tables.at(layer))
    }

    /// Has the experts copied to the device that tokens want and that it does not have; what the device does next waits for that. Where the table of their
    /// matrices is.
    pub fn fetch(&mut self, gpu: &Gpu, weights: &Weights, layer: usize, chosen: (usize, &[u32])) -> Result<Address> {
        if self.bring(weights, layer, chosen)? {
            self.uploaded.mark(&self.up)?;
            gpu.wait_for(&self.uploaded)?;
        }
        Ok(self.tables.at(layer))
    }

    /// The same without having anything wait; whether there is anything to wait for.
    fn bring(&mut self, weights: &Weights, layer: usize, (k, chosen): (usize, &[u32])) -> Result<bool> {
        assert!(self.present.is_none(), "the layer before is settled");
        // 1. What is wanted, and none of it on its way back
        let wanted = Wanted::new(self.layers[layer].experts.count, chosen);
        self.land_wanted(layer, &wanted)?;
        let Wanted { experts: wanted, tokens } = wanted;
        // 2. What was copied ahead, and what fell or passed and is still where it was
        let mut ahead = std::mem::take(&mut self.ahead);
        if ahead.iter().any(|(_, of)| of.layer != layer) {
            self.up.wait()?;
            for (passing, of) in ahead.extract_if(.., |(_, of)| of.layer != layer) {
                self.give_back(of.layer, passing.buffer);
                self.store.unpin(of);
            }
        }
        let mut passing: Vec<Transient> = ahead.iter().map(|(passing, _)| *passing).collect();
        passing.extend(self.found(layer, &wanted));
        self.part();
        if chosen.len() > MOST_PAIRS {
            // Most buffers are about to be wanted.
            for Class { rooms, lingering, .. } in &mut self.classes {
                lingering.drain(..).for_each(|(_, p)| rooms.give_back(p.buffer));
            }
        }
        // 3. Of what lies in memory a part is the host's: what is worth least. All else is on its way before anything is written down
        let mut waits = self.sharing.is_none() || chosen.len() > MOST_PAIRS;
        if !waits {
            ahead.extend(self.copy_at_once(weights, layer, &wanted, &mut passing)?);
        }
        // 4. One after the other as they come
        let fetch = self.store.fetch(layer, &wanted, &tokens, false);
        let mut held: Vec<usize> = Vec::with_capacity(wanted.len());
        let mut missing = Vec::new();
        loop {
            let next = match self.store.next(fetch, false) {
                // Where something is read that takes longest, and the host has nothing to win.
                Next::Later if !waits => {
                    waits = true;
                    for i in missing.drain(..) {
                        passing.push(self.copy(weights, layer, fetch, (i, wanted[i]))?);
                    }
                    continue;
                }
                Next::Later => {
                    // Slots may be what is missing.
                    self.up.wait()?;
                    held.drain(..).for_each(|i| self.store.release(fetch, i));
                    ahead.drain(..).for_each(|(_, of)| self.store.unpin(of));
                    self.store.next(fetch, true)
                }
                next => next,
            };
            match next {
                Next::Expert(i) => {
                    held.push(i);
                    let expert = wanted[i];
                    if self.store.fast_slot(fetch, i).is_none() && passing.iter().all(|p| p.expert != expert) {
                        match waits {
                            true => passing.push(self.copy(weights, layer, fetch, (i, expert))?),
                            false => missing.push(i),
                        }
                    }
                }
                Next::Failed(i) => {
                    self.error.get_or_insert(self.store.take_error(fetch, i));
                    let rows = chosen.chunks_exact(k).zip(0..).filter(|(row, _)| row.contains(&wanted[i]));
                    self.failed_rows.extend(rows.map(|(_, row)| row));
                    // No kernel computes it: what is left of these rows means nothing.
                    let gone = passing.iter().position(|p| p.expert == wanted[i]);
                    gone.into_iter().for_each(|at| self.give_back(layer, passing.swap_remove(at).buffer));
                    self.forget(weights, layer, wanted[i] as usize);
                }
                Next::Later => {}
                Next::Over => break,
            }
        }
        // What is left is the host's.
        let aside = Aside::new(missing, &wanted, (k, chosen));
        held.retain(|i| !aside.held.contains(i));
        // 5. What the device has to wait for
        let copies = self.tables.tell(&self.up)? || !passing.is_empty();
        let Layer { experts, seen, .. } = &mut self.layers[layer];
        let nearly_all = 4 * wanted.len() > 3 * experts.count;
        let of_step = (chosen.len() >= PAIRS_THAT_TELL * experts.count).then_some(chosen.len() / k);
        if let Some(of_step) = of_step {
            let mut uses = vec![0; experts.count];
            wanted.iter().zip(&tokens).for_each(|(expert, tokens)| uses[*expert as usize] = *tokens);
            *seen = Some(Seen { tokens: of_step, uses });
        }
        let borrowed = ahead.into_iter().map(|(_, of)| of).collect();
        self.present = Some(Present { layer, fetch, tokens: of_step, nearly_all, held, borrowed, passing, aside });
        Ok(copies)
    }

    /// Begins to copy those of a layer's experts that lie in memory here and are not the host's share, and keeps them where they are; nobody has asked for them yet.
    fn copy_at_once(
        &mut self,
        weights: &Weights,
        layer: usize,
        wanted: &[u32],
        passing: &mut Vec<Transient>,
    ) -> Result<Vec<(Transient, PinnedExpert)>> {
        let is_absent =
            |e: &u32| !self.store.is_in_fast_tier(layer, *e as usize) && passing.iter().all(|p| p.expert != *e);
        let absent: Vec<u32> = wanted.iter().copied().filter(is_absent).collect();
        let mut here: Vec<PinnedExpert> = absent.iter().filter_map(|e| self.store.pin(layer, *e as usize)).collect();
        // Where something is read that takes longest, and the host has nothing to win.
        if here.len() == absent.len() && !here.is_empty() {
            let worth = |of: &PinnedExpert| self.store.long_term_score(layer, of.expert);
            here.sort_by(|a, b| worth(b).total_cmp(&worth(a)).then(a.expert.cmp(&b.expert)));
            let bytes = self.lie(layer, here[0].expert).bytes();
            let share = self.sharing.as_ref().map_or(0, |s| s.share(here.len(), bytes));
            for of in here.split_off(here.len() - share) {
                self.store.unpin(of);
            }
        }
        let mut copied = Vec::with_capacity(here.len());
        for of in here {
            let (buffer, lie) = (self.take_buffer(layer)?, self.lie(layer, of.expert));
            for (from, to) in &lie.runs {
                let bytes = self.store.pinned_bytes(&of, from.clone());
                // SAFETY: a buffer that nobody else has; what is borrowed is given back once the copies are waited for.
                unsafe { self.up.write(self.buffer(layer, buffer) + *to as u64, bytes)? };
            }
            self.know(weights, layer, of.expert, buffer, &lie);
            let own = Transient { expert: of.expert as u32, buffer };
            passing.push(own);
            copied.push((own, of));
        }
        Ok(copied)
    }

    /// Begins to copy an expert that is handed over.
    fn copy(
        &mut self,
        weights: &Weights,
        layer: usize,
        fetch: FetchId,
        (i, expert): (usize, u32),
    ) -> Result<Transient> {
        let buffer = self.take_buffer(layer)?;
        let lie = self.lie(layer, expert as usize);
        for (from, to) in &lie.runs {
            let bytes = self.store.slot_bytes_at(fetch, i, from.clone());
            // SAFETY: a buffer that nobody else has; the slot is released once the copies are waited for.
            unsafe { self.up.write(self.buffer(layer, buffer) + *to as u64, bytes)? };
        }
        self.know(weights, layer, expert as usize, buffer, &lie);
        Ok(Transient { expert, buffer })
    }

    /// Computes the host's part of a layer of many tokens, whose outputs are at `outputs`, `[pairs, width]`: the device has enqueued what it makes of the same pairs.
    pub fn compute_aside(&mut self, gpu: &Gpu, outputs: Address) -> Result<()> {
        let (Some(sharing), Some(present)) = (&mut self.sharing, &self.present) else { return Ok(()) };
        let Aside { wanted, rows, pairs, .. } = &present.aside;
        if wanted.is_empty() {
            return Ok(());
        }
        let experts = &self.layers[present.layer].experts;
        let (array, bytes) = present.arrays_aside(&self.store);
        self.stats.computed_on_host += wanted.len() as u64;
        let out = sharing.compute_rows(gpu, experts, (wanted, rows), bytes, array)?;
        let row = size_of::<f32>() * experts.hidden();
        for (from, pair) in out.chunks_exact(row).zip(pairs) {
            // SAFETY: a row of the outputs; what is copied is written again only after the host has waited.
            unsafe { gpu.write_later(outputs + (pair * row) as u64, from)? };
        }
        Ok(())
    }

    /// Begins to copy what the next layer will want: what as many tokens are likely to; where none have been there, all, if most of what the present layer has is wanted.
    pub fn look_ahead(&mut self, weights: &Weights, next: usize) -> Result<()> {
        let Some(Present { tokens, nearly_all, .. }) = self.present else { return Ok(()) };
        let Layer { seen, complete, .. } = &self.layers[next];
        let is_likely: Vec<bool> = match (seen, tokens) {
            (Some(seen), Some(tokens)) => (0..seen.uses.len()).map(|e| seen.is_likely(e, tokens)).collect(),
            _ => vec![nearly_all; self.layers[next].experts.count],
        };
        if *complete || !self.ahead.is_empty() || !is_likely.contains(&true) {
            return Ok(());
        }
        let (count, class) = (self.layers[next].experts.count, self.store.class_of_layer(next));
        // The others' slots are for what is read.
        let most = self.classes[class].room().min(self.store.slots().0 / 4);
        let mut absent = Vec::new();
        for expert in (0..count).filter(|e| is_likely[*e]) {
            if !self.store.is_resident(next, expert) {
                absent.push(expert as u32);
            }
            if self.ahead.len() >= most {
                continue;
            }
            let Some(of) = self.store.pin(next, expert) else { continue };
            let (buffer, lie) = (self.take_buffer(next)?, self.lie(next, expert));
            for (from, to) in &lie.runs {
                let bytes = self.store.pinned_bytes(&of, from.clone());
                // SAFETY: a buffer that nobody else has; what is borrowed is given back once the copies are waited for.
                unsafe { self.up.write(self.buffer(next, buffer) + *to as u64, bytes)? };
            }
            self.know(weights, next, expert, buffer, &lie);
            self.stats.uploaded_ahead += 1;
            self.ahead.push((Transient { expert: expert as u32, buffer }, of));
        }
        if self.reads_ahead && !absent.is_empty() {
            absent.truncate((self.store.slots().0 / 4).min(AHEAD_FROM_DISK));
            self.store.predict(next, &absent);
        }
        Ok(())
    }

    /// The device has done all that was enqueued: what the layer that was fetched for last used is free, and what of it is worth it stays.
    pub fn settle(&mut self, gpu: &Gpu, weights: &Weights) -> Result<()> {
        self.is_idle = true;
        self.settle_layer(gpu, weights, false)?;
        self.land();
        self.part();
        Ok(self.tables.tell(&self.up).map(drop)?)
    }

    /// The same for the layer alone, where all copies to the device are done. `goes_on`: the device may still use what it was told of, but for what others are told now.
    fn settle_layer(&mut self, gpu: &Gpu, weights: &Weights, goes_on: bool) -> Result<()> {
        let Some(Present { layer, fetch, held, borrowed, mut passing, aside, .. }) = self.present.take() else {
            return Ok(());
        };
        held.into_iter().for_each(|i| self.store.release(fetch, i));
        borrowed.into_iter().for_each(|of| self.store.unpin(of));
        let class = self.store.class_of_layer(layer);
        let has_room = !goes_on || self.classes[class].room() > 0;
        // What the host has computed is in no buffer: one of it may rise, which is copied while the device goes on. Else what is wanted most might never come there.
        let Aside { held: mut by_host, wanted, .. } = aside;
        if goes_on && has_room {
            let worth = |i: &usize| self.store.long_term_score(layer, wanted[*i].expert);
            let best = (0..by_host.len()).max_by(|a, b| worth(a).total_cmp(&worth(b)));
            best.into_iter().for_each(|i| self.store.release(fetch, by_host.swap_remove(i)));
        }
        let mut falls = 0;
        // What falls keeps its buffer while the device goes on.
        while let Some(moved) = self.store.promote(layer, falls < MAX_PROMOTIONS && has_room) {
            let found = passing.iter().position(|p| p.expert as usize == moved.expert);
            let buffer = match found.map(|i| passing.swap_remove(i).buffer) {
                Some(buffer) => buffer,
                None => self.copy_up(weights, &moved)?,
            };
            let old = self.stay(&moved, buffer);
            match moved.demoted {
                None => {
                    self.give_back(layer, old);
                    self.store.finish_promotion(moved);
                }
                Some((of, expert)) => {
                    falls += 1;
                    self.tables.stay(of, expert, false);
                    let (lie, at) = (self.lie(of, expert), self.buffer(layer, old));
                    for (to, from) in &lie.runs {
                        let bytes = self.store.demoted_bytes_mut(&moved, to.clone());
                        // SAFETY: the expert is in its buffer, which nobody is given before the copy is done; nor is the slot.
                        unsafe { self.down.read(at + *from as u64, bytes)? };
                    }
                    let done = self.points.pop().map_or_else(|| Point::new(gpu), Ok)?;
                    done.mark(&self.down)?;
                    self.falling.push(Demoting { moved, buffer: old, done });
                }
            }
        }
        self.parting.extend(passing.into_iter().map(|p| (layer, p)));
        by_host.into_iter().for_each(|i| self.store.release(fetch, i));
        let complete = &mut self.layers[layer].complete;
        *complete = *complete || self.tables.is_told(layer) && self.store.is_layer_in_fast_tier(layer);
        Ok(())
    }

    /// Whether an expert could not be read in this step.
    pub fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// Which rows of the step were lost, ascending, and why; `None` if none was.
    pub fn take_failure(&mut self) -> Option<Failed> {
        let error = self.error.take()?;
        let mut rows = std::mem::take(&mut self.failed_rows);
        rows.sort_unstable();
        rows.dedup();
        Some(Failed { rows, why: Arc::new(Error::from(error)) })
    }

    /// Reads some experts that there is room for, or, once memory here has no more, moves some from there to the device, as far as that has room. The device is idle.
    /// Whether there may be more to do.
    pub fn fill(&mut self, weights: &Weights) -> Result<bool> {
        if self.store.warm_up() {
            return Ok(true);
        }
        for n in 0..RISES_TO_ROOM {
            let Some(moved) = self.store.promote_into_free_slot() else { return Ok(n > 0) };
            let buffer = self.copy_up(weights, &moved)?;
            let old = self.stay(&moved, buffer);
            self.give_back(moved.layer, old);
            self.store.finish_promotion(moved);
        }
        Ok(true)
    }

    pub fn take(&mut self) -> Streamed {
        let mut stats = std::mem::take(&mut self.stats);
        stats.add(&self.store.take_stats());
        Streamed {
            stats,
            reader: self.store.reader(),
            notes: self.notes(),
            slots: self.store.slots(),
            device_slots: Some(self.store.fast_slots()),
            file_bytes: self.store.file_bytes(),
            looks_ahead: false,
        }
    }

    pub fn notes(&self) -> Vec<String> {
        let slow = "the driver does not lock the memory for experts: copies of them to the device are slow";
        let slow = (!self.is_locked).then(|| slow.to_owned());
        self.store.notes().iter().cloned().chain(slow).collect()
    }

    pub fn host_bytes(&self) -> usize {
        self.store.bytes() + self.tables.bytes()
    }

    pub fn device_bytes(&self) -> usize {
        self.classes.iter().map(|c| c.memory.bytes).sum::<usize>() + self.tables.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_token_wanted_is_likely_for_as_many() {
        let seen = Seen { tokens: 1000, uses: vec![0, 1, 10, 1000] };
        let likely = |tokens| (0..4).map(|e| seen.is_likely(e, tokens)).collect::<Vec<_>>();
        assert_eq!(likely(1000), [false, true, true, true]);
        // Of many more, one may want what none of fewer wanted.
        assert_eq!(likely(2000), [true; 4]);
        assert_eq!(likely(100), [false, false, true, true]);
    }
}
