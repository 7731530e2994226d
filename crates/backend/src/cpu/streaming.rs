//! Experts that are read from disk when tokens want them: those that are ready are computed while the others are being read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use sluice_experts::{ExpertPool, FetchId, Next, no_faster};
use sluice_store::{Bytes, Error, host_memory};

use super::experts::{self, Carry, GatedFfn, Grouping, Operand, SharedDown};
use super::matmul::{self, Encoded, ExecContext};
use super::memory::{Place, Weight};
use super::mixture::StreamedLayer;
use crate::{ExpertOptions, Experts, Failed, Lookahead, Routing, Streamed};

/// Bytes of experts' outputs that are kept until all experts of a layer are there, at most.
pub const MOST_OUTPUTS: usize = 16 << 20;
/// Guesses that there is room for from the beginning.
const GUESSES: usize = 256;
/// Experts of the next layer that are read ahead while many tokens go through this one.
const AHEAD_IN_ORDER: usize = 64;
/// How many more are guessed for a layer once the layer before it is done.
const MORE_LATE: usize = 2;
/// Experts that go through a round together when they come in order.
const WAVE: usize = 8;

pub struct Streaming {
    pub store: ExpertPool,
    /// What the present layer has asked for.
    fetch: Option<FetchId>,
    lookahead: Trial,
    /// How the present fetch is computed: experts as they come, and their outputs kept until all are there; or they are taken in ascending order,
    /// and only sums are kept.
    as_they_come: bool,
    /// The present layer wants nearly all of its experts, and so will the next: a guess would say no more.
    nearly_all: bool,
    /// Some of what the present layer asked for was not in memory.
    reads: bool,
    /// Experts that are guessed for the next layer.
    ahead: usize,
    /// Kept between steps, so that nothing is allocated.
    wave: Vec<GatedFfn>,
    positions: Vec<usize>,
    downs: Vec<(Operand, std::ops::Range<usize>, usize)>,
    /// By position in the grouping: computed.
    done: Vec<bool>,
    /// Outputs of experts, or sums that are carried from wave to wave.
    floats: Vec<f32>,
    guessed: Vec<u32>,
    likeliest: Vec<(f32, u32)>,
    /// By expert of the next layer: guessed for any token.
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
            as_they_come: true,
            nearly_all: false,
            reads: false,
            ahead: options.ahead,
            wave: Vec::with_capacity(WAVE),
            positions: Vec::with_capacity(most),
            downs: Vec::with_capacity(WAVE),
            done: Vec::with_capacity(most),
            floats: Vec::new(),
            guessed: Vec::with_capacity((options.ahead + MORE_LATE).max(AHEAD_IN_ORDER)),
            likeliest: Vec::with_capacity(GUESSES),
            named: Vec::with_capacity(most),
            failed_rows: Vec::new(),
            error: None,
            last_step: None,
        })
    }

    /// Begins to read what the tokens of a layer want of its `count` experts, whose outputs have `width` elements.
    pub fn fetch(&mut self, layer: usize, grouping: &Grouping, count: usize, width: usize) {
        // Where most are wanted, which comes first makes no difference to the disk, and most of the next layer's will be wanted too, so that they can be read
        // ahead in order. Else those that are there are not kept waiting for those that are not, as long as there is room for what they give.
        let wanted = grouping.wanted.len();
        self.as_they_come = wanted * 4 <= count * 3 && keeps_outputs(grouping.order.len(), width);
        self.nearly_all = wanted * 8 > count * 7;
        if layer == 0 {
            let now = Instant::now();
            if self.as_they_come
                && let Some(before) = self.last_step
            {
                self.lookahead.step(now - before);
            }
            self.last_step = self.as_they_come.then_some(now);
        }
        self.fetch = Some(self.store.fetch(layer, &grouping.wanted, &grouping.tokens, !self.as_they_come));
        self.reads = self.store.is_reading();
    }

    fn fetched(&self) -> FetchId {
        self.fetch.expect("experts are asked for before they are used")
    }

    fn next(&mut self, wait: bool) -> Next {
        self.store.next(self.fetched(), wait)
    }

    pub fn as_they_come(&self) -> bool {
        self.as_they_come
    }

    /// Whether experts of the next layer are to be read ahead.
    pub fn looks_ahead(&self) -> bool {
        // In order, where none of this layer's is read, all of the next layer's are probably there too, and a guess costs a router's work for many tokens.
        if self.as_they_come { self.lookahead.is_on() } else { self.reads && self.lookahead.mode != Lookahead::Off }
    }

    /// Whether the next layer's router is to be applied to find out which.
    pub fn guesses(&self) -> bool {
        self.looks_ahead() && (self.as_they_come || !self.nearly_all)
    }

    /// Has experts of the next layer, of `count`, read while nothing else is: those that `guess` holds for the likeliest, or, in order, the first that it names
    /// or of all.
    pub fn look_ahead(&mut self, layer: usize, count: usize, guess: &Routing, late: bool) {
        self.guessed.clear();
        if self.as_they_come {
            // The likeliest alone: a wrong guess delays the reads that are needed.
            let most = if late { self.ahead + MORE_LATE } else { self.ahead };
            self.likeliest.clear();
            self.likeliest.extend(guess.weights.iter().copied().zip(guess.experts.iter().copied()));
            self.likeliest.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for &(_, expert) in &self.likeliest {
                if self.guessed.len() < most && !self.guessed.contains(&expert) {
                    self.guessed.push(expert);
                }
            }
        } else {
            let most = (self.store.slots().0 / 4).min(AHEAD_IN_ORDER);
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

    /// Room for what [`Streaming::run`] keeps of so many pairs of token and expert, whichever way it goes and even if all is there by chance.
    pub fn reserve(&mut self, pairs: usize, tokens: usize, width: usize) {
        let rows = if keeps_outputs(pairs, width) { pairs + tokens } else { tokens };
        matmul::part(&mut self.floats, rows * width);
    }

    /// Whether all that was fetched is in memory; then the grouping's units are where they were read to. If not, what was handed over so far is in
    /// `positions`, and what has failed is noted.
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

    /// Notes that the expert at position `i` of what was fetched cannot be read: its tokens' rows are lost.
    fn fail(&mut self, grouping: &Grouping, i: usize) {
        let error = self.store.take_error(self.fetched(), i);
        self.error.get_or_insert(error);
        let unit = &grouping.units[i];
        self.failed_rows.extend_from_slice(&grouping.order[unit.from..unit.from + unit.tokens]);
    }

    /// Which rows of the step were lost, ascending, and why; `None` if none was.
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

/// Steps in a row that each setting is measured for, and how many then use the faster one.
const TRIED: u32 = 8;
const KEPT: u32 = 128;

/// Whether to look ahead, decided by measurement: some steps without, some with, then many with the faster setting.
struct Trial {
    mode: Lookahead,
    on: bool,
    /// Steps left in this phase; the first two measure.
    left: u32,
    phase: u8,
    times: [Vec<Duration>; 2],
}

impl Trial {
    fn new(mode: Lookahead) -> Trial {
        let times = [(); 2].map(|()| Vec::with_capacity(TRIED as usize));
        Trial { mode, on: mode == Lookahead::On, left: TRIED, phase: 0, times }
    }

    fn is_on(&self) -> bool {
        self.on
    }

    /// A step has taken so long.
    fn step(&mut self, time: Duration) {
        if self.mode != Lookahead::Auto {
            return;
        }
        if self.phase < 2 {
            self.times[usize::from(self.phase)].push(time);
        }
        self.left -= 1;
        if self.left > 0 {
            return;
        }
        self.phase = (self.phase + 1) % 3;
        self.left = if self.phase == 2 { KEPT } else { TRIED };
        self.on = match self.phase {
            0 => false,
            1 => true,
            _ => {
                let [without, with] = &mut self.times;
                without.sort_unstable();
                with.sort_unstable();
                let better = with[with.len() / 2] < without[without.len() / 2];
                without.clear();
                with.clear();
                better
            }
        };
    }
}

/// Whether outputs of so many pairs of token and expert, of `width` elements, may be kept.
fn keeps_outputs(pairs: usize, width: usize) -> bool {
    pairs * width * size_of::<f32>() <= MOST_OUTPUTS
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
        let StreamedLayer { x, needs, counting, shared, residual } = layer;
        let (pairs, tokens, width) = (grouping.order.len(), residual.rows, residual.cols);
        let in_order = !self.as_they_come;
        let mut floats = std::mem::take(&mut self.floats);
        let kept = if in_order { tokens } else { pairs + tokens };
        let place = Place::of_slice(matmul::part(&mut floats, kept * width), width);
        // 1. What waits for no expert
        if let (false, Some((down, hidden, _))) = (in_order, shared) {
            self.downs.clear();
            self.downs.push((down, 0..tokens, pairs));
            experts::down(context.again(), &self.downs, &counting[..tokens], hidden, place);
        }
        // 2. Experts, in waves of those that are there; some were handed over already
        let mut handed = 0;
        let mut first = true;
        loop {
            let from = handed;
            let over = self.gather(grouping, &mut handed);
            if !self.wave.is_empty() {
                experts::gate_up(context.again(), &mut self.wave, &grouping.order, x, needs, hidden);
                let rows = &counting[..pairs];
                if in_order {
                    let carry = Some(Carry { sums: place, first, last: false });
                    experts::down_and_add(context.again(), &self.wave, grouping, rows, hidden, None, carry, residual);
                } else {
                    self.downs.clear();
                    self.downs.extend(self.wave.iter().map(|u| (u.down, u.from..u.from + u.tokens, u.from)));
                    experts::down(context.again(), &self.downs, rows, hidden, place);
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
            let tokens = &counting[..tokens];
            let shared = shared.map(|(down, hidden, gate)| SharedDown { down, hidden, gate, tokens });
            let carry = Some(Carry { sums: place, first, last: true });
            experts::down_and_add(context, &[], grouping, &counting[..pairs], hidden, shared, carry, residual);
        } else {
            let units = grouping.units.iter().zip(&self.done).filter(|(_, done)| **done).map(|(unit, _)| *unit);
            experts::add(context, units, grouping, place, shared.map(|(.., gate)| gate), residual);
        }
        self.floats = floats;
    }

    /// Fills a wave with experts that are there, waiting for one if none is, from position `handed` of those that were handed over on. Whether they were the
    /// last.
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
