//! Quantising experts by what they see: the model reads a text, layer by layer, and each expert's own inputs say which errors matter.
//!
//! Two residual streams go through the layers side by side: that of the unquantised model, and that of the model as it is packed so far. An expert with weights W gets
//! the input x in the first and x' in the second; what it should put out is W x, whatever its input has become. So its new weights V lower
//! `sum of c |W x - V x'|^2` over the tokens that it takes: with `H = sum of c x' x'^T` the best V without quantisation is `W + W M H^-1`,
//! `M = sum of c (x - x') x'^T`, and `sluice_kernels::descent` quantises that under H. (The correction is that of asymmetric calibration, Li et al. 2025,
//! arXiv:2504.02692.) The down projection is treated alike, with what the quantised gate and up projections make of x'.
//!
//! A token counts c = (w / r)^2: the router's weight w multiplies the expert's output, and r is the root mean square of the residual stream that it is added to, by
//! which the next layer's norm divides.
//!
//! Memory: three activations for each token of the text, and for each thread a few matrices of one expert.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use sluice_backend::{Activations, Backend, Batch, Cpu, KvType, MemoryClass, SequenceSlice};
use sluice_kernels::Isa;
use sluice_kernels::dense::{product, transpose};
use sluice_kernels::descent::{self, Params};
use sluice_kernels::elementwise::swiglu_in_place;
use sluice_model::{Caches, Config, Decoder};
use sluice_store::Checkpoint;

use crate::{interrupt, load};

use super::Interrupted;
use super::ordered::ordered;
use super::plan::{Treatment, Unit};
use super::quantize::{Error, squares, values};
use super::write::{Input, matrix};

/// Tokens of a window: read from an empty context, as `eval ppl` does.
const WINDOW: usize = 512;
/// Tokens of a cache block.
const BLOCK: usize = 32;
/// Tokens that an expert must have seen; where it saw fewer, tokens of others stand in.
const ENOUGH: usize = 512;
/// What a stand-in counts beside a token of the expert's own.
const STAND_IN: f32 = 0.1;
/// Added to H's diagonal, in parts of its mean: what the text did not show is not free.
const DAMPING: f32 = 0.01;
/// Steps of conjugate gradients towards the best weights without quantisation; H is damped, so few are enough.
const STEPS: usize = 12;
/// Visits of the descent to each group, and passes over it at each.
const SWEEPS: usize = 6;
const ROUNDS: usize = 2;

/// How to calibrate.
pub struct Settings<'a> {
    pub text: &'a Path,
    pub tokens: usize,
    pub threads: usize,
    pub isa: Isa,
}

/// Both models, as far as they have read the text.
pub struct Calibrator {
    backend: Cpu,
    decoder: Decoder,
    caches: Caches,
    windows: Vec<Vec<u32>>,
    isa: Isa,
    /// The layer that comes next.
    next: usize,
    /// The residual stream before it, in the unquantised model and in the packed one: `[tokens, hidden]`.
    plain: Vec<f32>,
    packed: Vec<f32>,
}

/// What the experts of a layer see.
#[derive(Default)]
struct Seen {
    /// Their inputs, normed: `[tokens, hidden]`.
    h: Vec<f32>,
    /// What a token's error counts before the router's weight: 1 / mean square of its residual stream.
    importance: Vec<f32>,
    /// Their inputs in the unquantised model.
    original: Vec<f32>,
    /// Of each expert: tokens and the router's weights.
    takers: Vec<Vec<(u32, f32)>>,
}

/// The parts (q, scales, biases) of one projection and their error.
type Packed = (Vec<Vec<u8>>, Error);

impl Calibrator {
    /// # Errors
    /// A text that cannot be read or has less than a window's tokens; a model that cannot be loaded.
    pub fn open(checkpoint: &Checkpoint, config: &Config, settings: Settings) -> Result<Calibrator> {
        // 1. the text
        let name = || settings.text.display().to_string();
        let text = std::fs::read_to_string(settings.text).with_context(name)?;
        let tokens = load::tokenizer(checkpoint.folder())?.encode(&text, false)?;
        let windows: Vec<Vec<u32>> =
            tokens.chunks_exact(WINDOW).take(settings.tokens.div_ceil(WINDOW)).map(<[u32]>::to_vec).collect();
        ensure!(
            !windows.is_empty(),
            "{}: {} tokens, too short for a calibration (at least {WINDOW})",
            name(),
            tokens.len()
        );

        // 2. the model, one sequence of one window
        let mut backend = Cpu::new(settings.isa, settings.threads, Activations::F32)?;
        let options = sluice_model::Options { max_tokens: WINDOW, context: Some(WINDOW), experts_per_token: None };
        let decoder = sluice_model::load(checkpoint, config, &mut backend, &options)?.decoder;
        let spec = &decoder.spec;
        ensure!(spec.experts.is_some(), "--calibration is for routed experts, and this model has none");
        let blocks = WINDOW.div_ceil(BLOCK);
        let pool = |g: &sluice_model::CacheGroup| g.layout(KvType::F32, BLOCK);
        let kv = spec.groups.iter().map(|g| backend.alloc_kv(pool(g), blocks)).collect::<Result<_>>()?;
        let states = match spec.state_len {
            0 => None,
            len => Some(backend.alloc(MemoryClass::State, 1, len)?),
        };
        let mut all = Calibrator {
            backend,
            caches: Caches { kv, states },
            decoder,
            windows,
            isa: settings.isa,
            next: 0,
            plain: Vec::new(),
            packed: Vec::new(),
        };

        // 3. before the first layer
        let len = WINDOW * all.hidden();
        all.plain = vec![0.0; all.windows.len() * len];
        for w in 0..all.windows.len() {
            let batch = all.batch(w);
            all.decoder.embed(&mut all.backend, &batch);
            let x = all.decoder.scratch.x.first_rows(WINDOW);
            all.backend.download(x, &mut all.plain[w * len..(w + 1) * len]);
        }
        all.packed = all.plain.clone();
        Ok(all)
    }

    fn hidden(&self) -> usize {
        self.decoder.scratch.x.cols
    }

    /// A window as a sequence of its own.
    fn batch(&self, window: usize) -> Batch {
        let tokens = self.windows[window].clone();
        let groups = self.caches.kv.len();
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let tables = vec![(0..tokens.len().div_ceil(BLOCK) as u32).collect(); groups];
        Batch {
            slots: vec![positions.iter().map(|&p| p as u64).collect(); groups],
            sequences: vec![SequenceSlice { rows: 0..tokens.len(), position: 0, tables, state_slot: 0 }],
            tokens,
            positions,
        }
    }

    /// Takes the windows of a residual stream through the next layer of the unquantised model. Says what its experts see, where it has some.
    fn advance(&mut self, stream: &mut [f32]) -> Result<Seen> {
        let (layer, hidden) = (self.next, self.hidden());
        let len = WINDOW * hidden;
        let experts = self.decoder.spec.experts.map_or(0, |(count, _)| count);
        let mut seen = Seen { h: vec![0.0; stream.len()], takers: vec![Vec::new(); experts], ..Seen::default() };
        for (w, stream) in stream.chunks_exact_mut(len).enumerate() {
            ensure!(!interrupt::pressed(), Interrupted);
            let batch = self.batch(w);
            if let Some(states) = self.caches.states {
                self.backend.zero(states);
            }
            let (x, normed) =
                (self.decoder.scratch.x.first_rows(WINDOW), self.decoder.scratch.normed.first_rows(WINDOW));
            self.backend.upload(stream, x);
            self.decoder.mix(layer, &mut self.backend, &batch, &self.caches);
            self.backend.download(x, stream);
            let square = |row: &[f32]| row.iter().map(|v| v * v).sum::<f32>() / hidden as f32;
            seen.importance.extend(stream.chunks_exact(hidden).map(|row| 1.0 / square(row).max(f32::MIN_POSITIVE)));
            self.decoder.routing.experts.clear();
            self.decoder.feed_forward(layer, &mut self.backend, WINDOW);
            self.backend.download(normed, &mut seen.h[w * len..(w + 1) * len]);
            let routing = &self.decoder.routing;
            for (i, (&e, &weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
                seen.takers[e as usize].push(((w * WINDOW + i / routing.k) as u32, weight));
            }
            self.backend.download(x, stream);
        }
        Ok(seen)
    }

    /// Takes both streams through the next layer, the packed one with the unquantised experts for now.
    fn both(&mut self) -> Result<Seen> {
        let mut plain = std::mem::take(&mut self.plain);
        let original = self.advance(&mut plain)?.h;
        self.plain = plain;
        let mut packed = std::mem::take(&mut self.packed);
        let seen = self.advance(&mut packed)?;
        self.packed = packed;
        self.next += 1;
        Ok(Seen { original, ..seen })
    }

    /// Goes on to `layer` by layers that are not packed with a calibration (they have no experts, or keep theirs).
    fn reach(&mut self, layer: usize) -> Result<()> {
        ensure!(self.next <= layer, "layer {layer} comes after layer {}", self.next);
        while self.next < layer {
            self.both()?;
        }
        Ok(())
    }

    /// Quantises the experts of `layer`, whose gate, up and down projections are `stacks`; each expert's parts go to `put`, in order. Returns what the user
    /// should know.
    pub fn layer(
        &mut self,
        layer: usize,
        stacks: &[&Unit],
        input: &Input,
        threads: usize,
        mut put: impl FnMut(usize, Vec<Packed>) -> Result<()>,
    ) -> Result<Option<String>> {
        self.reach(layer)?;
        let stacks = three(layer, stacks)?;
        let seen = self.both()?;
        let (isa, hidden, count) = (self.isa, self.hidden(), seen.takers.len());
        let work = |e: &usize| Expert { isa, seen: &seen, hidden, number: *e }.quantize(input, stacks);
        let mut few = Vec::new();
        ordered(threads, 0..count, work, |e, (parts, difference)| {
            add(&mut self.packed, &seen.takers[e], &difference, hidden);
            let own = seen.takers[e].len();
            if own < ENOUGH {
                few.push(own);
            }
            put(e, parts)
        })?;
        few.sort();
        Ok(few.first().map(|least| {
            let others = "others' stood in for them";
            let number = few.len();
            format!("layer {layer}: {number} of {count} experts saw fewer than {ENOUGH} tokens (the least: {least}), {others}")
        }))
    }

    /// Takes the streams through a layer that was packed before; `stored` reads the new values of an expert's three projections.
    pub fn again(
        &mut self,
        layer: usize,
        stacks: &[&Unit],
        input: &Input,
        threads: usize,
        stored: impl Fn(usize) -> Result<Vec<Vec<f32>>> + Sync,
    ) -> Result<()> {
        self.reach(layer)?;
        let stacks = three(layer, stacks)?;
        let seen = self.both()?;
        let (isa, hidden, count) = (self.isa, self.hidden(), seen.takers.len());
        let work = |e: &usize| {
            let expert = Expert { isa, seen: &seen, hidden, number: *e };
            let (old, new) = (expert.weights(input, stacks)?, stored(*e)?);
            ensure!(new.len() == 3, "{} projections, not three", new.len());
            let x = expert.own_inputs();
            let inner = expert.inner(&new[0], &new[1], &x);
            Ok(expert.difference(&old, &new[2], &x, &inner))
        };
        ordered(threads, 0..count, work, |e, difference: Vec<f32>| {
            ensure!(!interrupt::pressed(), Interrupted);
            add(&mut self.packed, &seen.takers[e], &difference, hidden);
            Ok(())
        })
    }
}

/// Gate, up and down.
fn three<'a>(layer: usize, stacks: &[&'a Unit]) -> Result<[&'a Unit; 3]> {
    let found: Result<[&Unit; 3], _> = stacks.to_vec().try_into();
    found.map_err(|all| anyhow!("layer {layer}: {} projections, not three", all.len()))
}

/// `stream[t] += weight * rows[i]` for each taker.
fn add(stream: &mut [f32], takers: &[(u32, f32)], rows: &[f32], hidden: usize) {
    for (&(t, weight), row) in takers.iter().zip(rows.chunks_exact(hidden)) {
        let to = &mut stream[t as usize * hidden..][..hidden];
        to.iter_mut().zip(row).for_each(|(to, v)| *to += weight * v);
    }
}

/// One expert and its inputs.
struct Expert<'a> {
    isa: Isa,
    seen: &'a Seen,
    hidden: usize,
    number: usize,
}

/// What an expert is given.
struct Inputs {
    /// `[tokens, hidden]`, in the packed model and in the unquantised one.
    x: Vec<f32>,
    original: Vec<f32>,
    /// `[tokens]`
    importance: Vec<f32>,
}

impl Expert<'_> {
    /// Its parts, and what they add to its outputs for its own tokens.
    fn quantize(&self, input: &Input, units: [&Unit; 3]) -> Result<(Vec<Packed>, Vec<f32>)> {
        let (isa, hidden) = (self.isa, self.hidden);
        let old = self.weights(input, units)?;
        let width = old[0].len() / hidden;
        // 1. gate and up
        let Inputs { x, original, importance } = self.inputs();
        let h = moments(isa, &x, hidden, &importance);
        let m = mismatch(isa, &x, &original, hidden, &importance);
        let (gate, new_gate) = self.projection(units[0], &old[0], &h, &m)?;
        let (up, new_up) = self.projection(units[1], &old[1], &h, &m)?;
        drop((h, m));
        // 2. down, by what gate and up make of their inputs now, and made of them
        let inner = self.inner(&new_gate, &new_up, &x);
        let original = self.inner(&old[0], &old[1], &original);
        let h = moments(isa, &inner, width, &importance);
        let m = mismatch(isa, &inner, &original, width, &importance);
        let (down, new_down) = self.projection(units[2], &old[2], &h, &m)?;
        // 3. what that changes
        let own = self.seen.takers[self.number].len();
        let difference = self.difference(&old, &new_down, &x[..own * hidden], &inner[..own * width]);
        Ok((vec![gate, up, down], difference))
    }

    /// `down(inner(x))`, new less old, `[tokens, hidden]`; `inner` is the new one.
    fn difference(&self, old: &[Vec<f32>], new_down: &[f32], x: &[f32], inner: &[f32]) -> Vec<f32> {
        let (tokens, width) = (x.len() / self.hidden, old[0].len() / self.hidden);
        let (mut new, mut before) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        if tokens > 0 {
            product(self.isa, new_down, inner, width, &mut new);
            product(self.isa, &old[2], &self.inner(&old[0], &old[1], x), width, &mut before);
        }
        new.iter_mut().zip(&before).for_each(|(new, old)| *new -= old);
        new
    }

    /// `silu(gate x) * up x`, `[tokens, width]`.
    fn inner(&self, gate: &[f32], up: &[f32], x: &[f32]) -> Vec<f32> {
        let (tokens, width) = (x.len() / self.hidden, gate.len() / self.hidden);
        let (mut g, mut u) = (vec![0.0; tokens * width], vec![0.0; tokens * width]);
        product(self.isa, gate, x, self.hidden, &mut g);
        product(self.isa, up, x, self.hidden, &mut u);
        swiglu_in_place(self.isa, &mut g, &u);
        g
    }

    /// The weights of its projections, `[rows, cols]` each.
    fn weights(&self, input: &Input, units: [&Unit; 3]) -> Result<Vec<Vec<f32>>> {
        let of_unit = |unit: &Unit| {
            let count = unit.stack.as_ref().map_or(1, |s| s.count);
            let rows = unit.source.all_rows() / count;
            let parts = input.read(&unit.source, self.number * rows..(self.number + 1) * rows)?;
            let name = || format!("tensor {:?}, expert {}", unit.source.name, self.number);
            values(self.isa, &matrix(&unit.source, &parts)?).with_context(name)
        };
        units.into_iter().map(of_unit).collect()
    }

    /// The inputs of its own tokens.
    fn own_inputs(&self) -> Vec<f32> {
        let row = |t: u32| &self.seen.h[t as usize * self.hidden..][..self.hidden];
        self.seen.takers[self.number].iter().flat_map(|&(t, _)| row(t)).copied().collect()
    }

    /// Inputs, its own tokens' first, and what each of them counts.
    fn inputs(&self) -> Inputs {
        let (seen, hidden) = (self.seen, self.hidden);
        let own = &seen.takers[self.number];
        let mut all = Inputs { x: Vec::new(), original: Vec::new(), importance: Vec::new() };
        let mut take = |t: usize, weight: f32| {
            let at = t * hidden..(t + 1) * hidden;
            all.x.extend_from_slice(&seen.h[at.clone()]);
            all.original.extend_from_slice(&seen.original[at]);
            all.importance.push(weight * weight * seen.importance[t]);
        };
        own.iter().for_each(|&(t, weight)| take(t as usize, weight));
        if own.len() < ENOUGH {
            let tokens = seen.importance.len();
            let wanted = (ENOUGH - own.len()).min(tokens);
            let mean = match own.len() {
                0 => 1.0,
                n => own.iter().map(|(_, w)| w * w).sum::<f32>() / n as f32,
            };
            (0..wanted).for_each(|i| take(i * tokens / wanted, (STAND_IN * mean).sqrt()));
        }
        all
    }

    /// Quantises one projection for inputs of moments `h` whose mismatch is `m`; returns its parts and its new values.
    fn projection(&self, unit: &Unit, w: &[f32], h: &[f32], m: &[f32]) -> Result<(Packed, Vec<f32>)> {
        let Treatment::Quantize { bits, group, float } = unit.treatment else {
            bail!("tensor {:?} is not to be quantised", unit.source.name)
        };
        let params = Params { bits, group: group as usize, scale: float, sweeps: SWEEPS, rounds: ROUNDS };
        let best = corrected(self.isa, w, h, m, unit.source.cols);
        let found = descent::quantize(self.isa, &best, unit.source.cols, h, params);
        let new = found.values(group as usize);
        let (weight, error) = squares(w, &new);
        let (q, scales, biases) = found.pack(bits, float);
        let error = Error { count: w.len() as u64, weight, error };
        Ok(((vec![q, scales, biases], error), new))
    }
}

/// Tokens whose columns are made at a time: they stay in cache while all pairs of them are multiplied.
const PIECE: usize = 1024;

/// `sum of importance b a^T` over tokens, `a, b: [tokens, cols]`; importance is made to sum to one.
fn gram(isa: Isa, a: &[f32], b: &[f32], cols: usize, importance: &[f32]) -> Vec<f32> {
    let all = importance.iter().map(|&i| i as f64).sum::<f64>().max(f64::MIN_POSITIVE);
    let (mut sum, mut part) = (vec![0.0; cols * cols], vec![0.0; cols * cols]);
    let (mut scaled, mut a_columns, mut b_columns) = (Vec::new(), Vec::new(), Vec::new());
    let pieces = a.chunks(PIECE * cols).zip(b.chunks(PIECE * cols)).zip(importance.chunks(PIECE));
    for ((a, b), importance) in pieces {
        for (x, columns) in [(a, &mut a_columns), (b, &mut b_columns)] {
            scaled.clear();
            for (row, i) in x.chunks_exact(cols).zip(importance) {
                let root = (*i as f64 / all).sqrt() as f32;
                scaled.extend(row.iter().map(|v| v * root));
            }
            transpose(&scaled, cols, columns);
        }
        product(isa, &a_columns, &b_columns, importance.len(), &mut part);
        sum.iter_mut().zip(&part).for_each(|(sum, part)| *sum += part);
    }
    sum
}

/// `sum of importance x x^T` over the rows of `x: [tokens, cols]`, damped.
fn moments(isa: Isa, x: &[f32], cols: usize, importance: &[f32]) -> Vec<f32> {
    let mut h = gram(isa, x, x, cols, importance);
    let mean = (0..cols).map(|i| h[i * cols + i]).sum::<f32>() / cols as f32;
    // A diagonal of zeros would leave nothing to divide by.
    let floor = (DAMPING * mean).max(1e-20);
    (0..cols).for_each(|i| h[i * cols + i] += floor);
    h
}

/// `sum of importance x (original - x)^T`, `[cols, cols]`: the transpose of M.
fn mismatch(isa: Isa, x: &[f32], original: &[f32], cols: usize, importance: &[f32]) -> Vec<f32> {
    let off: Vec<f32> = original.iter().zip(x).map(|(o, x)| o - x).collect();
    gram(isa, &off, x, cols, importance)
}

/// `w + w M H^-1`, `m` the transpose of M, by conjugate gradients, row by row.
fn corrected(isa: Isa, w: &[f32], h: &[f32], m: &[f32], cols: usize) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>();
    let mut w = w.to_vec();
    let mut rest = vec![0.0; w.len()];
    product(isa, m, &w, cols, &mut rest);
    let mut direction = rest.clone();
    let mut image = vec![0.0; w.len()];
    let mut squares: Vec<f64> = rest.chunks_exact(cols).map(|r| dot(r, r)).collect();
    for _ in 0..STEPS {
        product(isa, h, &direction, cols, &mut image);
        for (i, square) in squares.iter_mut().enumerate() {
            let at = i * cols..(i + 1) * cols;
            let (w, rest) = (&mut w[at.clone()], &mut rest[at.clone()]);
            let (direction, image) = (&mut direction[at.clone()], &image[at]);
            let curvature = dot(direction, image);
            if curvature <= 0.0 || *square <= 0.0 {
                continue;
            }
            let step = (*square / curvature) as f32;
            w.iter_mut().zip(&*direction).for_each(|(w, d)| *w += step * d);
            rest.iter_mut().zip(image).for_each(|(r, v)| *r -= step * v);
            let new = dot(rest, rest);
            let turn = (new / *square) as f32;
            direction.iter_mut().zip(&*rest).for_each(|(d, r)| *d = r + turn * *d);
            *square = new;
        }
    }
    w
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs that hang together, and others that are off from them in a direction of their own.
    fn inputs(tokens: usize, cols: usize) -> (Vec<f32>, Vec<f32>) {
        let value = |i: usize| ((i * 7919 + i * i % 104_729) % 1009) as f32 / 504.5 - 1.0;
        let x: Vec<f32> = (0..tokens * cols).map(|i| value(i) + value(i / cols + 13)).collect();
        let off = x.iter().enumerate().map(|(i, v)| v + 0.3 * value(i / cols + 13) * value(i % cols + 77)).collect();
        (x, off)
    }

    #[test]
    fn correction_brings_outputs_of_changed_inputs_back() {
        let (tokens, cols, rows) = (300, 64, 5);
        let (original, x) = inputs(tokens, cols);
        let importance: Vec<f32> = (0..tokens).map(|t| 1.0 + (t % 3) as f32).collect();
        let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 31) % 17) as f32 / 17.0 - 0.5).collect();
        let isa = Isa::GENERIC;
        let h = moments(isa, &x, cols, &importance);
        let v = corrected(isa, &w, &h, &mismatch(isa, &x, &original, cols, &importance), cols);
        let error = |v: &[f32]| -> f64 {
            let (mut wanted, mut got) = (vec![0.0; rows * tokens], vec![0.0; rows * tokens]);
            product(isa, &w, &original, cols, &mut wanted);
            product(isa, v, &x, cols, &mut got);
            let each = wanted.iter().zip(&got).enumerate();
            each.map(|(i, (a, b))| ((a - b) * (a - b) * importance[i / rows]) as f64).sum()
        };
        assert!(error(&v) < 0.2 * error(&w), "{} of {}", error(&v), error(&w));
        // The same inputs ask for nothing.
        let same = corrected(isa, &w, &h, &mismatch(isa, &x, &x, cols, &importance), cols);
        assert_eq!(same, w);
    }

    #[test]
    fn few_tokens_are_filled_up_with_others_that_count_less() {
        let (x, original) = inputs(1000, 8);
        let takers = vec![vec![(3, 0.5), (500, 0.25)], vec![], (0..600).map(|t| (t, 0.1)).collect()];
        let seen = Seen { h: x.clone(), original, importance: vec![1.0; 1000], takers };
        let inputs = |number| Expert { isa: Isa::GENERIC, seen: &seen, hidden: 8, number }.inputs();
        let few = inputs(0);
        assert_eq!((few.importance.len(), &few.x[..8], &few.x[8..16]), (ENOUGH, &x[24..32], &x[4000..4008]));
        assert_eq!(few.importance[..2], [0.25, 0.0625]);
        assert!(few.importance[2..].iter().all(|&i| i < 0.0625));
        assert_eq!((inputs(1).importance.len(), inputs(2).importance.len()), (ENOUGH, 600));
    }
}
