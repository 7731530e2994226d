//! Quantising experts by what they see: the model reads a text, layer by layer, and each expert's own inputs say which errors matter.
//!
//! Two residual streams go through the layers side by side: that of the unquantised model, and that of the model as it is packed so far. An expert with weights W gets
//! the input x in the first and x' in the second; what it should put out is W x, whatever its input has become. So its new weights V lower
//! `sum of c |W x - V x'|^2` over the tokens that it takes, which `sluice_kernels::quantize::descent` does, given `H = sum of c x' x'^T` and the pull
//! `sum of c (W x - W x') x'^T`. (The target is that of asymmetric calibration, Li et al. 2025, arXiv:2504.02692.) The down projection is treated alike, with what
//! the quantised gate and up projections make of x'.
//!
//! A token counts c = (w / r)^2: the router's weight w multiplies the expert's output, and r is the root mean square of the residual stream that it is added to, by
//! which the next layer's norm divides.
//!
//! An expert's weights are read once in a layer: all its tokens of the whole text go through it together, those of the unquantised model with them.
//!
//! Memory: four activations for each token of the text, and for each thread a few matrices of one expert.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use sluice_backend::{
    Activations, Backend, Capacity, Cpu, KvType, MemoryClass, SequenceInput, StepInputs, Tensor, Wanted,
};
use sluice_kernels::Isa;
use sluice_kernels::dense::{self, Buffer, Panels, RIGHT, product};
use sluice_kernels::elementwise::swiglu_in_place;
use sluice_kernels::quantize::descent::{self, Params};
use sluice_model::{Config, Decoder, Description};
use sluice_store::Checkpoint;

use crate::{interrupt, load};

use super::Interrupted;
use super::ordered::ordered;
use super::plan::{Treatment, Unit};
use super::quantize::{Error, squares, values};
use super::write::{Input, matrix};

/// Tokens of a window: read from an empty context, as `eval ppl` does.
const WINDOW: usize = 512;
/// Tokens of a cache block, and blocks of a window.
const BLOCK: usize = 32;
const BLOCKS: usize = WINDOW / BLOCK;
/// Tokens that an expert must have seen; where it saw fewer, tokens of others stand in.
const ENOUGH: usize = 512;
/// What a stand-in counts beside a token of the expert's own.
const STAND_IN: f32 = 0.1;
/// Added to H's diagonal, in parts of its mean: what the text did not show is not free.
const DAMPING: f32 = 0.01;
/// Visits of the descent to each group, and passes over it at each.
const SWEEPS: usize = 2;
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
    model: Description,
    decoder: Decoder,
    /// What routed experts are given: `[WINDOW, hidden]`.
    normed: Tensor,
    windows: Vec<Vec<u32>>,
    isa: Isa,
    /// The layer that comes next.
    next: usize,
    /// The residual stream before it, in the unquantised model and in the packed one: `[tokens, hidden]`.
    plain: Vec<f32>,
    packed: Vec<f32>,
}

/// What the experts of a layer see.
struct Seen {
    /// Their inputs, normed: `[tokens, hidden]`.
    h: Vec<f32>,
    /// What a token's error counts before the router's weight: 1 / mean square of its residual stream.
    importance: Vec<f32>,
    /// Their inputs in the unquantised model.
    original: Vec<f32>,
    /// Of each expert: tokens, ascending, and the router's weights.
    takers: Vec<Takers>,
    /// Those of the unquantised model.
    original_takers: Vec<Takers>,
}

type Takers = Vec<(u32, f32)>;

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
        // For mixers and shared experts; what routed experts are fitted to is computed in f32. Far quicker, and no worse (docs/experiments.md).
        let mut backend = Cpu::new(settings.isa, settings.threads, Activations::Int8)?;
        let options = sluice_model::Options { max_tokens: WINDOW, context: Some(WINDOW), experts_per_token: None };
        let loaded = sluice_model::load(checkpoint, config, &mut backend, &options)?;
        let model = loaded.description;
        ensure!(model.experts().is_some(), "--calibration is for routed experts, and this model has none");
        for group in model.groups() {
            let pool = backend.alloc_kv(group.layout(KvType::F32, BLOCK), BLOCKS)?;
            backend.commit_kv(&pool, BLOCKS)?;
        }
        if model.state_len() > 0 {
            backend.alloc_states(1, model.state_len())?;
        }
        let normed = backend.alloc(MemoryClass::Scratch, WINDOW, model.hidden)?;
        let mut all = Calibrator {
            backend,
            model,
            decoder: loaded.decoder,
            normed,
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
            let inputs = all.inputs(w);
            all.backend.begin(&inputs);
            all.decoder.embed(&mut all.backend, &inputs);
            all.backend.end();
            let x = all.decoder.residual().first_rows(WINDOW);
            all.backend.download(x, &mut all.plain[w * len..(w + 1) * len]);
        }
        all.packed = all.plain.clone();
        Ok(all)
    }

    fn hidden(&self) -> usize {
        self.model.hidden
    }

    /// A window as a sequence of its own.
    fn inputs(&self, window: usize) -> StepInputs {
        let groups = self.model.groups().len();
        let mut inputs =
            StepInputs::new(&vec![BLOCK; groups], Capacity { tokens: WINDOW, sequences: 1, blocks: BLOCKS });
        let tables: Vec<Vec<u32>> = vec![(0..BLOCKS as u32).collect(); groups];
        let tokens = &self.windows[window];
        inputs.push(&SequenceInput { tokens, position: 0, state: 0, tables: &tables, wanted: Wanted::None });
        inputs
    }

    /// Takes the windows of a residual stream through the next layer of the unquantised model, its routed experts left out where `but_experts` says so. Says what
    /// they see, where it has some: inputs, importance and takers.
    fn advance(&mut self, stream: &mut [f32], but_experts: bool) -> Result<(Vec<f32>, Vec<f32>, Vec<Takers>)> {
        let (layer, hidden) = (self.next, self.hidden());
        let len = WINDOW * hidden;
        let experts = self.model.experts().map_or(0, |(count, _)| count);
        let mut h = vec![0.0; if but_experts { stream.len() } else { 0 }];
        let (mut importance, mut takers) = (Vec::new(), vec![Takers::new(); experts]);
        for (w, stream) in stream.chunks_exact_mut(len).enumerate() {
            ensure!(!interrupt::pressed(), Interrupted);
            let inputs = self.inputs(w);
            if self.model.state_len() > 0 {
                self.backend.zero_state(0);
            }
            let x = self.decoder.residual().first_rows(WINDOW);
            self.backend.upload(stream, x);
            self.backend.begin(&inputs);
            self.decoder.mix(layer, &mut self.backend, WINDOW);
            if but_experts {
                self.backend.download(x, stream);
                let square = |row: &[f32]| row.iter().map(|v| v * v).sum::<f32>() / hidden as f32;
                importance.extend(stream.chunks_exact(hidden).map(|row| 1.0 / square(row).max(f32::MIN_POSITIVE)));
                let (backend, normed) = (&mut self.backend, self.normed);
                let routing = self.decoder.feed_forward_but_experts(layer, backend, WINDOW, normed);
                self.backend.download(normed, &mut h[w * len..(w + 1) * len]);
                let routing = routing.unwrap_or_default();
                for (i, (&e, &weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
                    takers[e as usize].push(((w * WINDOW + i / routing.k) as u32, weight));
                }
            } else {
                self.decoder.feed_forward(layer, &mut self.backend, WINDOW);
            }
            self.backend.end();
            self.backend.download(x, stream);
        }
        Ok((h, importance, takers))
    }

    /// Takes both streams through the next layer.
    fn both(&mut self, but_experts: bool) -> Result<Seen> {
        let mut plain = std::mem::take(&mut self.plain);
        let (original, _, original_takers) = self.advance(&mut plain, but_experts)?;
        self.plain = plain;
        let mut packed = std::mem::take(&mut self.packed);
        let (h, importance, takers) = self.advance(&mut packed, but_experts)?;
        self.packed = packed;
        self.next += 1;
        Ok(Seen { h, importance, original, takers, original_takers })
    }

    /// Goes on to `layer` by layers that are not packed with a calibration (they have no experts, or keep theirs).
    fn reach(&mut self, layer: usize) -> Result<()> {
        ensure!(self.next <= layer, "layer {layer} comes after layer {}", self.next);
        while self.next < layer {
            self.both(false)?;
        }
        Ok(())
    }

    /// Adds an expert's outputs to both streams.
    fn add(&mut self, seen: &Seen, expert: usize, outputs: &Outputs) {
        let hidden = self.hidden();
        let streams = [
            (&mut self.packed, &seen.takers, &outputs.packed),
            (&mut self.plain, &seen.original_takers, &outputs.plain),
        ];
        for (stream, takers, rows) in streams {
            for (&(t, weight), row) in takers[expert].iter().zip(rows.chunks_exact(hidden)) {
                let to = &mut stream[t as usize * hidden..][..hidden];
                to.iter_mut().zip(row).for_each(|(to, v)| *to += weight * v);
            }
        }
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
        let seen = self.both(true)?;
        let (isa, hidden, count) = (self.isa, self.hidden(), seen.takers.len());
        let work = |e: &usize| {
            // An expert may take seconds, and several are in the queue.
            ensure!(!interrupt::pressed(), Interrupted);
            Expert { isa, seen: &seen, hidden, number: *e }.quantize(input, stacks)
        };
        let mut few = Vec::new();
        ordered(threads, 0..count, work, |e, (parts, outputs)| {
            self.add(&seen, e, &outputs);
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
        let seen = self.both(true)?;
        let (isa, hidden, count) = (self.isa, self.hidden(), seen.takers.len());
        let work = |e: &usize| {
            let expert = Expert { isa, seen: &seen, hidden, number: *e };
            let (old, new) = (expert.weights(input, stacks)?, stored(*e)?);
            ensure!(new.len() == 3, "{} projections, not three", new.len());
            let rows = |h: &[f32], takers: &[Takers]| expert.rows(h, takers[*e].iter().map(|t| t.0 as usize));
            let (packed, plain) = (rows(&seen.h, &seen.takers), rows(&seen.original, &seen.original_takers));
            Ok(Outputs { packed: expert.output(&new, &packed), plain: expert.output(&old, &plain) })
        };
        ordered(threads, 0..count, work, |e, outputs| {
            ensure!(!interrupt::pressed(), Interrupted);
            self.add(&seen, e, &outputs);
            Ok(())
        })
    }
}

/// What an expert puts out for its takers: `[takers, hidden]`, quantised in the packed model, as it was in the plain one.
struct Outputs {
    packed: Vec<f32>,
    plain: Vec<f32>,
}

/// Gate, up and down.
fn three<'a>(layer: usize, stacks: &[&'a Unit]) -> Result<[&'a Unit; 3]> {
    let found: Result<[&Unit; 3], _> = stacks.to_vec().try_into();
    found.map_err(|all| anyhow!("layer {layer}: {} projections, not three", all.len()))
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
    /// In the packed model, its own takers' first: `[tokens, hidden]`.
    x: Buffer,
    /// `[tokens]`, of a sum of one.
    importance: Vec<f32>,
    /// In the unquantised model, those of the same tokens first.
    original: Buffer,
    /// Which of them each taker of the unquantised model has.
    original_rows: Vec<usize>,
}

impl Expert<'_> {
    /// Its parts, and what it then puts out.
    fn quantize(&self, input: &Input, units: [&Unit; 3]) -> Result<(Vec<Packed>, Outputs)> {
        let (isa, hidden) = (self.isa, self.hidden);
        let old = self.weights(input, units)?;
        let width = old[0].len() / hidden;
        let own = self.seen.takers[self.number].len();
        let Inputs { x, importance, original, original_rows } = self.inputs();
        let tokens = importance.len();
        // 1. gate and up
        let (now, before) = (Panels::of_rows(&x, hidden), Panels::of_rows(&original, hidden));
        let h = damped(isa, &x, hidden, &importance);
        let columns = Panels::of_columns(&x, hidden, &importance);
        let project = |i: usize| -> Result<_> {
            let w = Panels::of_rows(&old[i], hidden);
            let wanted = product(isa, &w, &before);
            let pull = pull(isa, &wanted[..tokens * width], product(isa, &w, &now), width, &columns);
            let (part, new) = self.projection(units[i], &old[i], &h, &pull)?;
            Ok((part, product(isa, &Panels::of_rows(&new, hidden), &now), wanted))
        };
        let (gate_part, mut inner, mut original_inner) = project(0)?;
        let (up_part, up, original_up) = project(1)?;
        swiglu_in_place(isa, &mut inner, &up);
        swiglu_in_place(isa, &mut original_inner, &original_up);
        drop((h, columns, now, before, up, original_up));
        // 2. down, by what gate and up make of their inputs now, and made of them
        let w = Panels::of_rows(&old[2], width);
        let outputs = product(isa, &w, &Panels::of_rows(&original_inner, width));
        let now = Panels::of_rows(&inner, width);
        let columns = Panels::of_columns(&inner, width, &importance);
        let pull = pull(isa, &outputs[..tokens * hidden], product(isa, &w, &now), hidden, &columns);
        let h = damped(isa, &inner, width, &importance);
        let (down_part, new) = self.projection(units[2], &old[2], &h, &pull)?;
        // 3. what comes of it, as memory that other threads may have
        let packed = product(isa, &Panels::of_rows(&new, width), &now)[..own * hidden].to_vec();
        let plain = original_rows.iter().flat_map(|r| &outputs[r * hidden..(r + 1) * hidden]).copied().collect();
        Ok((vec![gate_part, up_part, down_part], Outputs { packed, plain }))
    }

    /// `down(silu(gate x) * up x)`, `[tokens, hidden]`.
    fn output(&self, weights: &[Vec<f32>], x: &[f32]) -> Vec<f32> {
        let x = Panels::of_rows(x, self.hidden);
        let [mut gate, up] = [0, 1].map(|i| product(self.isa, &Panels::of_rows(&weights[i], self.hidden), &x));
        swiglu_in_place(self.isa, &mut gate, &up);
        let width = weights[0].len() / self.hidden;
        product(self.isa, &Panels::of_rows(&weights[2], width), &Panels::of_rows(&gate, width)).to_vec()
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

    /// Some tokens' inputs in one of the models.
    fn rows(&self, h: &[f32], tokens: impl ExactSizeIterator<Item = usize>) -> Buffer {
        let mut rows = Buffer::zeros(tokens.len() * self.hidden);
        for (row, t) in rows.chunks_exact_mut(self.hidden).zip(tokens) {
            row.copy_from_slice(&h[t * self.hidden..][..self.hidden]);
        }
        rows
    }

    /// Inputs, and what each token counts.
    fn inputs(&self) -> Inputs {
        let seen = self.seen;
        let own = &seen.takers[self.number];
        // 1. its own, and stand-ins where they are few
        let mut tokens: Vec<(usize, f32)> = own.iter().map(|&(t, weight)| (t as usize, weight)).collect();
        if own.len() < ENOUGH {
            let all = seen.importance.len();
            let wanted = (ENOUGH - own.len()).min(all);
            let mean = match own.len() {
                0 => 1.0,
                n => own.iter().map(|(_, w)| w * w).sum::<f32>() / n as f32,
            };
            tokens.extend((0..wanted).map(|i| (i * all / wanted, (STAND_IN * mean).sqrt())));
        }
        let mut importance: Vec<f32> = tokens.iter().map(|&(t, weight)| weight * weight * seen.importance[t]).collect();
        let sum = importance.iter().map(|&i| i as f64).sum::<f64>().max(f64::MIN_POSITIVE);
        importance.iter_mut().for_each(|i| *i = (*i as f64 / sum) as f32);
        // 2. whoever takes it in the unquantised model alone
        let mut originals: Vec<usize> = tokens.iter().map(|t| t.0).collect();
        let mut original_rows = Vec::new();
        for &(t, _) in &seen.original_takers[self.number] {
            let row = own.binary_search_by_key(&t, |own| own.0).unwrap_or(originals.len());
            if row == originals.len() {
                originals.push(t as usize);
            }
            original_rows.push(row);
        }
        Inputs {
            x: self.rows(&seen.h, tokens.iter().map(|t| t.0)),
            importance,
            original: self.rows(&seen.original, originals.into_iter()),
            original_rows,
        }
    }

    /// Quantises one projection for inputs of moments `h` and a pull; returns its parts and its new values.
    fn projection(&self, unit: &Unit, w: &[f32], h: &[f32], pull: &[f32]) -> Result<(Packed, Vec<f32>)> {
        let Treatment::Quantize { bits, group, float } = unit.treatment else {
            bail!("tensor {:?} is not to be quantised", unit.source.name)
        };
        let params = Params { bits, group: group as usize, scale: float, sweeps: SWEEPS, rounds: ROUNDS };
        let found = descent::quantize(self.isa, w, unit.source.cols, h, pull, params);
        let new = found.values(group as usize);
        let (weight, error) = squares(w, &new);
        let (q, scales, biases) = found.pack(bits, float);
        let error = Error { count: w.len() as u64, weight, error };
        Ok(((vec![q, scales, biases], error), new))
    }
}

/// `sum of importance x x^T` over the rows of `x: [tokens, cols]`, damped.
fn damped(isa: Isa, x: &[f32], cols: usize, importance: &[f32]) -> Buffer {
    let mut h = dense::moments(isa, x, cols, importance);
    let mean = (0..cols).map(|i| h[i * cols + i]).sum::<f32>() / cols as f32;
    // A diagonal of zeros would leave nothing to divide by.
    let floor = (DAMPING * mean).max(1e-20);
    (0..cols).for_each(|i| h[i * cols + i] += floor);
    h
}

/// `sum of (wanted - got) x^T` over tokens, `wanted, got: [tokens, rows]` and `x` the columns of the inputs, each times its importance: `[cols, rows]`.
fn pull(isa: Isa, wanted: &[f32], mut got: Buffer, rows: usize, x: &Panels<RIGHT>) -> Buffer {
    got.iter_mut().zip(wanted).for_each(|(got, wanted)| *got = wanted - *got);
    product(isa, &Panels::of_columns(&got, rows, &vec![1.0; x.depth]), x)
}

#[cfg(test)]
mod tests {
    use sluice_kernels::matmul::Float;

    use super::*;

    /// Inputs that hang together, and others that are off from them in a direction of their own.
    fn inputs(tokens: usize, cols: usize) -> (Vec<f32>, Vec<f32>) {
        let value = |i: usize| ((i * 7919 + i * i % 104_729) % 1009) as f32 / 504.5 - 1.0;
        let x: Vec<f32> = (0..tokens * cols).map(|i| value(i) + value(i / cols + 13)).collect();
        let off = x.iter().enumerate().map(|(i, v)| v + 0.3 * value(i / cols + 13) * value(i % cols + 77)).collect();
        (x, off)
    }

    #[test]
    fn a_pull_brings_outputs_of_changed_inputs_back() {
        let (tokens, cols, rows) = (300, 64, 5);
        let (original, x) = inputs(tokens, cols);
        let importance: Vec<f32> = (0..tokens).map(|t| (1.0 + (t % 3) as f32) / 600.0).collect();
        let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 31) % 17) as f32 / 17.0 - 0.5).collect();
        let isa = Isa::GENERIC;
        let outputs = |w: &[f32], x: &[f32]| product(isa, &Panels::of_rows(w, cols), &Panels::of_rows(x, cols));
        let h = damped(isa, &x, cols, &importance);
        let columns = Panels::of_columns(&x, cols, &importance);
        let quantized = |original: &[f32]| {
            let pull = pull(isa, &outputs(&w, original), outputs(&w, &x), rows, &columns);
            let p = Params { bits: 8, group: 64, scale: Float::F32, sweeps: 20, rounds: 2 };
            descent::quantize(isa, &w, cols, &h, &pull, p).values(64)
        };
        let error = |v: &[f32]| -> f64 {
            let (wanted, got) = (outputs(&w, &original), outputs(v, &x));
            let each = wanted.iter().zip(&got[..]).enumerate();
            each.map(|(i, (a, b))| ((a - b) * (a - b) * importance[i / rows]) as f64).sum()
        };
        let (pulled, left) = (error(&quantized(&original)), error(&quantized(&x)));
        assert!(pulled < 0.2 * left, "{pulled} of {left}");
        // The same inputs ask for nothing: what is left is the error of eight bits.
        assert!((left / error(&w) - 1.0).abs() < 0.02, "{left}, {}", error(&w));
    }

    #[test]
    fn few_tokens_are_filled_up_with_others_that_count_less() {
        let (x, original) = inputs(1000, 8);
        let takers = vec![vec![(3, 0.5), (500, 0.25)], vec![], (0..600).map(|t| (t, 0.1)).collect()];
        let original_takers = vec![vec![(2, 0.5), (500, 0.5)], vec![(9, 0.5)], vec![]];
        let seen =
            Seen { h: x.clone(), original: original.clone(), importance: vec![1.0; 1000], takers, original_takers };
        let inputs = |number| Expert { isa: Isa::GENERIC, seen: &seen, hidden: 8, number }.inputs();
        let few = inputs(0);
        assert_eq!((few.importance.len(), &few.x[..8], &few.x[8..16]), (ENOUGH, &x[24..32], &x[4000..4008]));
        assert_eq!(few.importance[0], 4.0 * few.importance[1]);
        assert!(few.importance[2..].iter().all(|&i| i < few.importance[1]));
        assert!((few.importance.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        // What the unquantised model gives it goes with the same tokens, and once more for the token that it alone sends here.
        assert_eq!(few.original_rows, [ENOUGH, 1]);
        assert_eq!((few.original.len(), &few.original[ENOUGH * 8..]), ((ENOUGH + 1) * 8, &original[16..24]));
        assert_eq!(few.original[8..16], original[4000..4008]);
        assert_eq!((inputs(1).importance.len(), inputs(2).importance.len()), (ENOUGH, 600));
    }
}
