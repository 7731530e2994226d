//! Experts that are read from disk when tokens want them. Those in memory are computed while the others are read.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use sluice_experts::{ExpertPool, FetchId, Next, no_faster};
use sluice_store::{Bytes, Error, host_memory};

use super::experts::{self, Carry, DownProjection, GatedFfn, Grouping, Operand, SharedDown};
use super::trial::Trial;
use crate::encoded::{Encoded, Needs};
use crate::exec::ExecContext;
use crate::memory::{Place, Weight, part};
use sluice_backend::{ExpertOptions, Experts, Failed, Lookahead, Routing, Streamed};

/// The inputs of streamed experts, and where their sum goes.
pub struct StreamedLayer<'a> {
    pub x: &'a Encoded,
    /// `x` has a row for each pair of a token and an expert.
    pub is_gathered: bool,
    pub needs: Needs,
    pub identity_rows: &'a [u32],
    /// Down projection of the shared expert, its hidden activations and its gates.
    pub shared: Option<(Operand, &'a Encoded, Option<Place>)>,
    pub residual: Place,
}

/// The most bytes of experts' outputs that are kept until all experts of a layer have been read.
pub const MAX_KEPT_BYTES: usize = 16 << 20;
/// Initial capacity for predictions.
const GUESSES: usize = 256;
/// The most experts of the next layer that are prefetched during a layer with many tokens.
const MAX_PREFETCH_IN_ORDER: usize = 64;
/// How many more are predicted for a layer once the layer before it is done.
const EXTRA_LATE: usize = 2;
/// The most experts of a wave.
const WAVE: usize = 8;

pub struct Streaming {
    pub store: ExpertPool,
    /// The current layer's request.
    fetch: Option<FetchId>,
    lookahead: Trial,
    /// Experts of the current request are computed in the order in which they are read, and their outputs kept until all are computed. Otherwise they are
    /// computed in ascending order, and only sums are kept.
    out_of_order: bool,
    /// The current layer wants nearly all of its experts. The next one probably will too, so that a prediction adds nothing.
    nearly_all: bool,
    /// Some experts of the current request were not in memory.
    reads: bool,
    /// How many experts are predicted for the next layer.
    ahead: usize,
    /// Kept between steps, so that nothing is allocated.
    wave: Vec<GatedFfn>,
    positions: Vec<usize>,
    downs: Vec<DownProjection>,
    /// By position in the grouping: computed.
    done: Vec<bool>,
    /// Outputs of experts, or sums that are carried from wave to wave.
    floats: Vec<f32>,
    guessed: Vec<u32>,
    likeliest: Vec<(f32, u32)>,
    /// By expert of the next layer: whether it is predicted for any token.
    named: Vec<bool>,
    /// Rows whose experts could not be read, and why the first of them could not.
    failed_rows: Vec<u32>,
    error: Option<Arc<Error>>,
    last_step: Option<Instant>,
}

impl Streaming {
    pub fn open(
        weights: &mut [Weight],
        layers: &[&Experts],
        k: usize,
        options: &ExpertOptions,
        lookahead: Lookahead,
    ) -> Result<Streaming> {
        let arrays = |experts: &Experts, e: usize| -> Vec<Bytes> {
            experts::operands(experts, e).iter().flat_map(|o| o.bytes(weights)).collect()
        };
        let sources = layers.iter().map(|l| (0..l.count).map(|e| arrays(l, e)));
        let store = ExpertPool::open(sources, k, options, &mut host_memory, &no_faster)?;
        for layer in layers {
            for expert in 0..layer.count {
                experts::operands(layer, expert).iter().for_each(|o| weights[o.weight].streamed = true);
            }
        }
        let most = layers.iter().map(|l| l.count).max().unwrap_or(0);
        Ok(Streaming {
            store,
            fetch: None,
            lookahead: Trial::new(lookahead),
            out_of_order: true,
            nearly_all: false,
            reads: false,
            ahead: options.ahead,
            wave: Vec::with_capacity(WAVE),
            positions: Vec::with_capacity(most),
            downs: Vec::with_capacity(WAVE),
            done: Vec::with_capacity(most),
            floats: Vec::new(),
            guessed: Vec::with_capacity((options.ahead + EXTRA_LATE).max(MAX_PREFETCH_IN_ORDER)),
            likeliest: Vec::with_capacity(GUESSES),
            named: Vec::with_capacity(most),
            failed_rows: Vec::new(),
            error: None,
            last_step: None,
        })
    }

    /// Starts to read the experts that the tokens of a layer want, of its `count`. Their outputs have `width` elements.
    pub fn fetch(&mut self, layer: usize, grouping: &Grouping, count: usize, width: usize) {
        // If most are wanted, the disk is busy in any order, and most of the next layer's will be wanted too, so that they can be prefetched
        // in order. Otherwise experts in memory do not wait for those on disk, as long as there is room for their outputs.
        let wanted = grouping.wanted.len();
        self.out_of_order = wanted * 4 <= count * 3 && keeps_outputs(grouping.order.len(), width);
        self.nearly_all = wanted * 8 > count * 7;
        if layer == 0 {
            let now = Instant::now();
            if self.out_of_order
                && let Some(before) = self.last_step
            {
                self.lookahead.step(now - before);
            }
            self.last_step = self.out_of_order.then_some(now);
        }
        self.fetch = Some(self.store.fetch(layer, &grouping.wanted, &grouping.tokens, !self.out_of_order));
        self.reads = self.store.is_reading();
    }

    fn fetched(&self) -> FetchId {
        self.fetch.expect("experts are asked for before they are used")
    }

    fn next(&mut self, wait: bool) -> Next {
        self.store.next(self.fetched(), wait)
    }

    pub fn out_of_order(&self) -> bool {
        self.out_of_order
    }

    /// Whether experts of the next layer are to be prefetched.
    pub fn looks_ahead(&self) -> bool {
        // In order, if this layer reads none, the next layer's are probably all in memory too, and a prediction costs a router's work for many tokens.
        if self.out_of_order { self.lookahead.is_on() } else { self.reads && self.lookahead.mode != Lookahead::Off }
    }

    /// Whether the next layer's router is to predict them.
    pub fn predicts(&self) -> bool {
        self.looks_ahead() && (self.out_of_order || !self.nearly_all)
    }

    /// Prefetches experts of the next layer, of `count`, when nothing else is read: the likeliest of `guess`, or, in order, the first that it names
    /// or the first of all.
    pub fn look_ahead(&mut self, layer: usize, count: usize, guess: &Routing, late: bool) {
        self.guessed.clear();
        if self.out_of_order {
            // Only the likeliest: a wrong prediction delays the reads that are needed.
            let most = if late { self.ahead + EXTRA_LATE } else { self.ahead };
            self.likeliest.clear();
            self.likeliest.extend(guess.weights.iter().copied().zip(guess.experts.iter().copied()));
            self.likeliest.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for &(_, expert) in &self.likeliest {
                if self.guessed.len() < most && !self.guessed.contains(&expert) {
                    self.guessed.push(expert);
                }
            }
        } else {
            let most = (self.store.slots().0 / 4).min(MAX_PREFETCH_IN_ORDER);
            self.named.clear();
            self.named.resize(count, self.nearly_all);
            if !self.nearly_all {
                guess.experts.iter().for_each(|e| self.named[*e as usize] = true);
            }
            let named = self.named.iter().zip(0..).filter(|(named, _)| **named);
            self.guessed.extend(named.map(|(_, expert)| expert).take(most));
        }
        self.store.predict(layer, &self.guessed);
    }

    /// Reserves what [`Streaming::run`] needs for so many pairs of token and expert in either order, even if no expert has to be read.
    pub fn reserve(&mut self, pairs: usize, tokens: usize, width: usize) {
        let rows = if keeps_outputs(pairs, width) { pairs + tokens } else { tokens };
        part(&mut self.floats, rows * width);
    }

    /// Whether all requested experts are in memory. Then the grouping's units point to them. If not, `positions` has those that the store handed over so far,
    /// and a failure is recorded.
    pub fn all_there(&mut self, grouping: &mut Grouping) -> bool {
        let count = grouping.units.len();
        self.positions.clear();
        self.done.clear();
        self.done.resize(count, false);
        while self.positions.len() < count {
            match self.next(false) {
                Next::Expert(i) => {
                    self.positions.push(i);
                    grouping.units[i] = self.read_to(i, grouping.units[i]);
                }
                Next::Failed(i) => {
                    self.fail(grouping, i);
                    return false;
                }
                Next::Later | Next::Over => return false,
            }
        }
        true
    }

    /// The unit at position `i` in the memory that it was read to.
    fn read_to(&self, i: usize, unit: GatedFfn) -> GatedFfn {
        // SAFETY: the expert was handed over, and is released only when the rounds with its unit are over; the grouping is filled again before its
        // units are used again.
        unsafe { unit.read_to(|array| self.store.array(self.fetched(), i, array)) }
    }

    pub fn release_all(&mut self, grouping: &Grouping) {
        (0..grouping.units.len()).for_each(|i| self.store.release(self.fetched(), i));
    }

    /// Records that the expert at position `i` of the request cannot be read: its tokens' rows are lost.
    fn fail(&mut self, grouping: &Grouping, i: usize) {
        let error = self.store.take_error(self.fetched(), i);
        self.error.get_or_insert(error);
        let unit = &grouping.units[i];
        self.failed_rows.extend_from_slice(&grouping.order[unit.from..unit.from + unit.tokens]);
    }

    /// The lost rows of the step, ascending, and the first error. `None` if no row was lost.
    pub fn take_failure(&mut self) -> Option<Failed> {
        let error = self.error.take()?;
        let mut rows = std::mem::take(&mut self.failed_rows);
        rows.sort_unstable();
        rows.dedup();
        Some(Failed { rows, why: Arc::new(error.into()) })
    }

    pub fn take(&mut self) -> Streamed {
        Streamed {
            stats: self.store.take_stats(),
            reader: self.store.reader(),
            notes: self.store.notes().to_vec(),
            slots: self.store.slots(),
            device_slots: None,
            file_bytes: self.store.file_bytes(),
            looks_ahead: self.lookahead.is_on(),
        }
    }

    pub fn scratch_bytes(&self) -> usize {
        4 * (self.floats.len() + self.guessed.len())
            + 8 * self.likeliest.len()
            + self.wave.capacity() * size_of::<GatedFfn>()
    }
}

/// Whether outputs of so many pairs of token and expert, of `width` elements, may be kept.
fn keeps_outputs(pairs: usize, width: usize) -> bool {
    pairs * width * size_of::<f32>() <= MAX_KEPT_BYTES
}

impl Streaming {
    /// Computes experts as they are read: `residual += ..`, with the same bits as if all were in memory. Begins with those that [`Streaming::all_there`] was handed.
    pub fn run(
        &mut self,
        mut context: ExecContext,
        grouping: &mut Grouping,
        layer: StreamedLayer,
        hidden: &mut Encoded,
    ) {
        let StreamedLayer { x, is_gathered, needs, identity_rows, shared, residual } = layer;
        let (pairs, tokens, width) = (grouping.order.len(), residual.rows, residual.cols);
        let in_order = !self.out_of_order;
        let mut floats = std::mem::take(&mut self.floats);
        let kept = if in_order { tokens } else { pairs + tokens };
        let place = Place::of_slice(part(&mut floats, kept * width), width);
        // 1. The shared expert, which waits for no read
        if let (false, Some((down, hidden, _))) = (in_order, shared) {
            self.downs.clear();
            self.downs.push(DownProjection { operand: down, rows: 0..tokens, to: pairs, bias: None });
            experts::down(context.reborrow(), &self.downs, &identity_rows[..tokens], hidden, place);
        }
        // 2. Routed experts, in waves of those in memory; some were handed over already
        let mut handed = 0;
        let mut first = true;
        loop {
            let from = handed;
            let over = self.gather(grouping, &mut handed);
            if !self.wave.is_empty() {
                let rows = &identity_rows[..pairs];
                let inputs = if is_gathered { rows } else { &grouping.order };
                experts::gate_up(context.reborrow(), &mut self.wave, inputs, x, needs, hidden);
                if in_order {
                    let carry = Some(Carry { sums: place, first, last: false });
                    experts::down_and_add(
                        context.reborrow(),
                        &self.wave,
                        grouping,
                        rows,
                        hidden,
                        None,
                        carry,
                        residual,
                    );
                } else {
                    self.downs.clear();
                    self.downs.extend(self.wave.iter().map(GatedFfn::down_projection));
                    experts::down(context.reborrow(), &self.downs, rows, hidden, place);
                }
                first = false;
                for &i in &self.positions[from..handed] {
                    self.done[i] = true;
                    self.store.release(self.fetched(), i);
                }
            }
            if over {
                break;
            }
        }
        // 3. Sums
        if in_order {
            let tokens = &identity_rows[..tokens];
            let shared = shared.map(|(down, hidden, gate)| SharedDown { down, hidden, gate, tokens });
            let carry = Some(Carry { sums: place, first, last: true });
            experts::down_and_add(context, &[], grouping, &identity_rows[..pairs], hidden, shared, carry, residual);
        } else {
            let units = grouping.units.iter().zip(&self.done).filter(|(_, done)| **done).map(|(unit, _)| *unit);
            experts::add(context, units, grouping, place, shared.map(|(.., gate)| gate), residual);
        }
        self.floats = floats;
    }

    /// Fills a wave with experts that are in memory, from index `handed` of those that the store handed over. Waits for one if there is none. Returns whether they
    /// were the last.
    fn gather(&mut self, grouping: &mut Grouping, handed: &mut usize) -> bool {
        self.wave.clear();
        while self.wave.len() < WAVE {
            if *handed < self.positions.len() {
                self.wave.push(grouping.units[self.positions[*handed]]);
                *handed += 1;
                continue;
            }
            match self.next(self.wave.is_empty()) {
                Next::Expert(i) => {
                    grouping.units[i] = self.read_to(i, grouping.units[i]);
                    self.positions.push(i);
                }
                Next::Failed(i) => self.fail(grouping, i),
                Next::Later => return false,
                Next::Over => return true,
            }
        }
        false
    }
}
