//! Experts that are read from disk when tokens want them: which are ready is computed while the others are on their way.

use std::time::{Duration, Instant};

use anyhow::Result;
use sluice_kernels::matmul::Encoding;
use sluice_kernels::route;
use sluice_store::experts::{ExpertStats, ExpertStore, Next};
use sluice_store::{Bytes, Error};

use super::experts::{self, Carry, Operand, Plan, Unit};
use super::matmul::{self, Needs};
use super::memory::{Place, Weight};
use super::{Cpu, crew};
use crate::{Activations, ExpertOptions, Experts, Foresight, NextMixture, Tensor};

/// Whether the experts of the next layer are guessed and read ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lookahead {
    #[default]
    Off,
    On,
    /// Tried now and then, and kept while tokens come faster with it.
    Auto,
}

/// What streamed experts took, and how they are read.
#[derive(Clone, Debug)]
pub struct Streamed {
    pub stats: ExpertStats,
    /// Such as "io_uring, direct".
    pub reader: &'static str,
    /// What reading fell back on.
    pub notes: Vec<String>,
    /// Experts that there is room for, and experts of all layers.
    pub slots: (usize, usize),
    /// Bytes of all experts on disk.
    pub file_bytes: u64,
    /// Whether look-ahead is on just now.
    pub looks_ahead: bool,
}

impl Streamed {
    /// Adds what came later.
    pub fn add(&mut self, later: &Streamed) {
        self.stats.add(&later.stats);
        self.looks_ahead = later.looks_ahead;
        self.notes.clone_from(&later.notes);
    }
}

/// Pairs of token and expert up to which outputs are kept until all experts are there; beyond, experts are taken in order.
pub const FEW_PAIRS: usize = 256;
/// Experts of the next layer that are read ahead while many tokens go through this one.
const AHEAD_IN_ORDER: usize = 64;
/// Guesses more for a layer once the layer before it is done.
const MORE_LATE: usize = 2;
/// Experts that go through a round together when they come in order.
const WAVE: usize = 8;

pub struct Streaming {
    pub store: ExpertStore,
    lookahead: Trial,
    /// Experts that are guessed for the next layer.
    ahead: usize,
    /// Kept between steps, so that nothing is allocated.
    wave: Vec<Unit>,
    positions: Vec<usize>,
    downs: Vec<(Operand, std::ops::Range<usize>, usize)>,
    /// By position in the plan: computed.
    done: Vec<bool>,
    /// Outputs of experts, or sums that are carried from wave to wave.
    floats: Vec<f32>,
    guessed: Vec<u32>,
    likeliest: Vec<(f32, u32)>,
    /// Rows whose experts could not be read, and why the first of them could not.
    failed_rows: Vec<u32>,
    error: Option<Error>,
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
        let store = ExpertStore::open(sources, k, options)?;
        for layer in layers {
            for expert in 0..layer.count {
                experts::operands(layer, expert).iter().for_each(|o| weights[o.weight].streamed = true);
            }
        }
        let most = layers.iter().map(|l| l.count).max().unwrap_or(0);
        Ok(Streaming {
            store,
            lookahead: Trial::new(lookahead),
            ahead: options.ahead,
            wave: Vec::with_capacity(WAVE),
            positions: Vec::with_capacity(most),
            downs: Vec::with_capacity(WAVE),
            done: Vec::with_capacity(most),
            floats: Vec::new(),
            guessed: Vec::with_capacity((options.ahead + MORE_LATE).max(AHEAD_IN_ORDER)),
            likeliest: Vec::with_capacity(FEW_PAIRS),
            failed_rows: Vec::new(),
            error: None,
            last_step: None,
        })
    }

    pub fn fetch(&mut self, layer: usize, plan: &Plan) {
        let few = plan.order.len() <= FEW_PAIRS;
        if layer == 0 {
            let now = Instant::now();
            if few && let Some(before) = self.last_step {
                self.lookahead.step(now - before);
            }
            self.last_step = few.then_some(now);
        }
        self.store.fetch(layer, &plan.wanted, &plan.tokens, !few);
    }

    /// Room for what [`Cpu::run_streamed`] keeps of this plan, even if all is there by chance and none of it is needed this time.
    pub fn reserve(&mut self, plan: &Plan, tokens: usize, width: usize) {
        matmul::part(&mut self.floats, kept_rows(plan, tokens) * width);
    }

    /// Whether all that was fetched is in memory; then the plan's units are where they were read to. If not, what was handed over so far is in
    /// `positions`, and what has failed is noted.
    pub fn all_there(&mut self, plan: &mut Plan) -> bool {
        let count = plan.units.len();
        self.positions.clear();
        self.done.clear();
        self.done.resize(count, false);
        while self.positions.len() < count {
            match self.store.next(false) {
                Next::Expert(i) => {
                    self.positions.push(i);
                    plan.units[i] = self.read_to(i, plan.units[i]);
                }
                Next::Failed(i) => {
                    self.fail(plan, i);
                    return false;
                }
                Next::Later | Next::Over => return false,
            }
        }
        true
    }

    /// The unit at position `i` in the memory that it was read to.
    fn read_to(&self, i: usize, unit: Unit) -> Unit {
        // SAFETY: the expert was handed over, and is released only when the rounds with its unit are over; the plan is filled anew before its
        // units are used again.
        unsafe { unit.read_to(|array| self.store.array(i, array)) }
    }

    pub fn release_all(&mut self, plan: &Plan) {
        (0..plan.units.len()).for_each(|i| self.store.release(i));
    }

    /// Notes that the expert at position `i` of what was fetched cannot be read: its tokens' rows are lost.
    fn fail(&mut self, plan: &Plan, i: usize) {
        let error = self.store.take_error(i);
        self.error.get_or_insert(error);
        let unit = &plan.units[i];
        self.failed_rows.extend_from_slice(&plan.order[unit.from..unit.from + unit.tokens]);
    }

    /// Which rows of the step were lost, ascending, and why; `None` if none was.
    pub fn take_failure(&mut self) -> Option<(Vec<u32>, Error)> {
        let error = self.error.take()?;
        let mut rows = std::mem::take(&mut self.failed_rows);
        rows.sort_unstable();
        rows.dedup();
        Some((rows, error))
    }

    pub fn take(&mut self) -> Streamed {
        Streamed {
            stats: self.store.take_stats(),
            reader: self.store.reader(),
            notes: self.store.notes().to_vec(),
            slots: self.store.slots(),
            file_bytes: self.store.file_bytes(),
            looks_ahead: self.lookahead.is_on(),
        }
    }

    pub fn scratch_bytes(&self) -> usize {
        4 * (self.floats.len() + self.guessed.len())
            + 8 * self.likeliest.len()
            + self.wave.capacity() * size_of::<Unit>()
    }
}

/// Steps in a row of which one way of going on is judged, and how many follow the better one.
const TRIED: u32 = 8;
const KEPT: u32 = 128;

/// Whether to look ahead, found out by trying: some steps without, some with, then many in the faster way.
struct Trial {
    mode: Lookahead,
    on: bool,
    /// Steps left in this phase; in the first two, times are gathered.
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

/// Rows of sums (in order) or outputs (of experts as they come, and of the shared one) that are kept while a layer's experts are read.
fn kept_rows(plan: &Plan, tokens: usize) -> usize {
    let pairs = plan.order.len();
    if pairs > FEW_PAIRS { tokens } else { pairs + tokens }
}

impl Cpu {
    /// Computes experts as they are read: `residual += ..` as the rounds without reading give it.
    pub(super) fn run_streamed(
        &mut self,
        s: &mut Streaming,
        plan: &mut Plan,
        needs: Needs,
        shared_down: Option<Operand>,
        gate: Option<Place>,
        residual: Place,
    ) {
        let (pairs, tokens, width) = (plan.order.len(), residual.rows, residual.cols);
        let in_order = pairs > FEW_PAIRS;
        let mut floats = std::mem::take(&mut s.floats);
        let place = Place::of_slice(matmul::part(&mut floats, kept_rows(plan, tokens) * width), width);
        // 1. What waits for no expert
        if let (false, Some(down)) = (in_order, shared_down) {
            s.downs.clear();
            s.downs.push((down, 0..tokens, pairs));
            experts::down(crew!(self), &s.downs, &self.counting[..tokens], &self.shared_hidden, place);
        }
        // 2. Experts, in waves of those that are there; some were handed over already
        let mut handed = 0;
        let mut first = true;
        loop {
            s.wave.clear();
            let from = handed;
            let mut over = false;
            loop {
                if handed < s.positions.len() {
                    let i = s.positions[handed];
                    s.wave.push(plan.units[i]);
                    handed += 1;
                } else {
                    match s.store.next(s.wave.is_empty()) {
                        Next::Expert(i) => {
                            plan.units[i] = s.read_to(i, plan.units[i]);
                            s.positions.push(i);
                            continue;
                        }
                        Next::Failed(i) => s.fail(plan, i),
                        Next::Later => break,
                        Next::Over => {
                            over = true;
                            break;
                        }
                    }
                }
                if s.wave.len() == WAVE {
                    break;
                }
            }
            if !s.wave.is_empty() {
                experts::gate_up(crew!(self), &mut s.wave, &plan.order, &self.encoded, needs, &mut self.hidden);
                let rows = &self.counting[..pairs];
                if in_order {
                    let carry = Some(Carry { sums: place, first, last: false });
                    experts::down_and_add(crew!(self), &s.wave, plan, rows, &self.hidden, None, carry, residual);
                } else {
                    s.downs.clear();
                    s.downs.extend(s.wave.iter().map(|u| (u.down, u.from..u.from + u.tokens, u.from)));
                    experts::down(crew!(self), &s.downs, rows, &self.hidden, place);
                }
                first = false;
                for &i in &s.positions[from..handed] {
                    s.done[i] = true;
                    s.store.release(i);
                }
            }
            if over {
                break;
            }
        }
        // 3. Sums
        if in_order {
            let shared = shared_down.map(|down| experts::SharedDown {
                down,
                hidden: &self.shared_hidden,
                gate,
                tokens: &self.counting[..tokens],
            });
            let carry = Some(Carry { sums: place, first, last: true });
            let rows = &self.counting[..pairs];
            experts::down_and_add(crew!(self), &[], plan, rows, &self.hidden, shared, carry, residual);
        } else {
            let units = plan.units.iter().zip(&s.done).filter(|(_, done)| **done).map(|(unit, _)| *unit);
            experts::add(crew!(self), units, plan, place, shared_down.map(|_| gate), residual);
        }
        s.floats = floats;
    }

    /// See [`crate::Backend::foresee`].
    pub(super) fn run_foresee(&mut self, x: Tensor, next: NextMixture, sight: Foresight) {
        let few = x.rows * next.scoring.k() <= FEW_PAIRS;
        let ahead = |s: &Streaming| if few { s.lookahead.is_on() } else { s.lookahead.mode != Lookahead::Off };
        let ahead = self.streaming.as_ref().is_some_and(ahead);
        // What is recorded is the early guess; of many tokens all is known early.
        if sight == Foresight::Late && (self.routed.is_some() || !few || !ahead) {
            return;
        }
        if self.routed.is_some() || ahead && few {
            self.guess(x, &next);
        }
        let Some(s) = self.streaming.as_mut().filter(|_| ahead) else { return };
        s.guessed.clear();
        if few {
            // The likeliest alone: what is read in vain is waited for.
            let most = if sight == Foresight::Early { s.ahead } else { s.ahead + MORE_LATE };
            s.likeliest.clear();
            s.likeliest.extend(self.guess.weights.iter().copied().zip(self.guess.experts.iter().copied()));
            s.likeliest.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for &(_, expert) in &s.likeliest {
                if s.guessed.len() < most && !s.guessed.contains(&expert) {
                    s.guessed.push(expert);
                }
            }
        } else {
            // So many tokens want nearly all experts: the first of them are read while this layer ends and the next one's tokens are mixed.
            s.guessed.extend(0..(s.store.slots().0 / 4).min(next.experts.count).min(AHEAD_IN_ORDER) as u32);
        }
        s.store.foresee(next.experts.layer, &s.guessed);
    }

    /// What the router of the next mixture would choose if `x` came to it as it is.
    fn guess(&mut self, x: Tensor, next: &NextMixture) {
        let NextMixture { norm, router, scoring, experts } = *next;
        let (tokens, count, k) = (x.rows, router.rows.len(), scoring.k());
        let x = self.place(x);
        self.encode(x, Some(norm), Needs::of([Encoding::F32]));
        self.wait_for([router]);
        let mut guess = std::mem::take(&mut self.guess);
        let out = Place::of_slice(matmul::part(&mut guess.logits, tokens * count), count);
        self.job(router, out, false);
        self.run_jobs(Activations::F32, tokens);
        guess.experts.resize(tokens * k, 0);
        guess.weights.resize(tokens * k, 0.0);
        let chosen = guess.experts.chunks_exact_mut(k).zip(guess.weights.chunks_exact_mut(k));
        for (t, (ids, weights)) in chosen.enumerate() {
            // SAFETY: the jobs are done; nobody else uses the logits now.
            let logits = unsafe { out.get_mut(t, 0..count) };
            route::route(self.isa, scoring, logits, ids, weights);
        }
        guess.layer = Some(experts.layer);
        self.guess = guess;
    }
}

/// What a router would have chosen ahead of its time.
#[derive(Default)]
pub struct Guess {
    pub layer: Option<usize>,
    /// `[tokens, k]` each
    pub experts: Vec<u32>,
    weights: Vec<f32>,
    logits: Vec<f32>,
}

impl Guess {
    pub fn bytes(&self) -> usize {
        4 * (self.experts.len() + self.weights.len() + self.logits.len())
    }
}
