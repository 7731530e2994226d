//! Quantising experts by what they see: the model reads a text, and each expert's own inputs say which errors matter.
//!
//! For every token that an expert takes, its output is weighted by the router's weight w and added to a residual stream of root mean square r, which the next
//! layer's norm divides by: an error e of the output counts as (w e / r)^2. So the inputs x of the expert's gate and up projections have the moments
//! `H = sum of (w / r)^2 x x^T`, and those of its down projection likewise; `sluice_kernels::descent` lowers the error under H. The activations are the unquantised
//! model's, so a layer's result depends on no other layer's, and a packing may go on, or be divided by layers, anywhere.
//!
//! Memory: two activations for each token of the text, and for each thread a few matrices of one expert.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use sluice_backend::{Activations, Backend, Batch, Cpu, KvType, MemoryClass, SequenceSlice};
use sluice_kernels::Isa;
use sluice_kernels::dense::{product, transpose};
use sluice_kernels::descent::{self, Params};
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

/// How to calibrate.
pub struct Settings<'a> {
    pub text: &'a Path,
    pub tokens: usize,
    pub threads: usize,
    pub isa: Isa,
}

/// The unquantised model, as far as it has read the text.
pub struct Calibrator {
    backend: Cpu,
    decoder: Decoder,
    caches: Caches,
    windows: Vec<Vec<u32>>,
    isa: Isa,
    /// The layer that comes next, and the residual stream before it: `[tokens, hidden]`.
    next: usize,
    x: Vec<f32>,
    /// The same of the model as it is packed.
    y: Vec<f32>,
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
        ensure!(!windows.is_empty(), "{}: {} tokens, too short for a calibration (at least {WINDOW})", name(), tokens.len());

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
            x: Vec::new(),
            y: Vec::new(),
        };

        // 3. before the first layer
        for w in 0..all.windows.len() {
            let batch = all.batch(w);
            all.decoder.embed(&mut all.backend, &batch);
            all.store(w);
        }
        all.y = all.x.clone();
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

    /// Takes the residual stream of a window from the backend.
    fn store(&mut self, window: usize) {
        let len = WINDOW * self.hidden();
        self.x.resize(self.windows.len() * len, 0.0);
        let x = self.decoder.scratch.x.first_rows(WINDOW);
        self.backend.download(x, &mut self.x[window * len..(window + 1) * len]);
    }

    /// Takes all windows through the next layer.
    fn advance(&mut self, mut seen: Option<&mut Seen>) -> Result<()> {
        let (layer, hidden) = (self.next, self.hidden());
        let len = WINDOW * hidden;
        for w in 0..self.windows.len() {
            ensure!(!interrupt::pressed(), Interrupted);
            let batch = self.batch(w);
            if let Some(states) = self.caches.states {
                self.backend.zero(states);
            }
            let s = self.decoder.scratch;
            let x = s.x.first_rows(WINDOW);
            self.backend.upload(&self.x[w * len..(w + 1) * len], x);
            self.decoder.mix(layer, &mut self.backend, &batch, &self.caches);
            if let Some(seen) = &mut seen {
                self.store(w);
                let residual = self.x[w * len..(w + 1) * len].chunks_exact(hidden);
                let square = |row: &[f32]| row.iter().map(|v| v * v).sum::<f32>() / hidden as f32;
                seen.importance.extend(residual.map(|row| 1.0 / square(row).max(f32::MIN_POSITIVE)));
            }
            self.decoder.feed_forward(layer, &mut self.backend, WINDOW);
            if let Some(seen) = &mut seen {
                let from = seen.h.len();
                seen.h.resize(from + len, 0.0);
                self.backend.download(s.normed.first_rows(WINDOW), &mut seen.h[from..]);
                let routing = &self.decoder.routing;
                for (i, (&e, &weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
                    seen.takers[e as usize].push(((w * WINDOW + i / routing.k) as u32, weight));
                }
            }
            self.store(w);
        }
        self.next += 1;
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
        // 1. what its experts see
        let [gate, up, down] = stacks else { anyhow::bail!("layer {layer}: {} projections, not three", stacks.len()) };
        let count = gate.stack.as_ref().map_or(0, |s| s.count);
        ensure!(self.next <= layer, "layer {layer} comes after layer {}", self.next);
        while self.next < layer {
            self.advance(None)?;
        }
        let mut seen = Seen { takers: vec![Vec::new(); count], ..Seen::default() };
        // The unquantised model first, then the packed one, whose routing counts.
        let mut plain = Seen { takers: vec![Vec::new(); count], ..Seen::default() };
        self.advance(Some(&mut plain))?;
        if flag("CAL_SEQ") {
            std::mem::swap(&mut self.x, &mut self.y);
            self.next -= 1;
            self.advance(Some(&mut seen))?;
            std::mem::swap(&mut self.x, &mut self.y);
            seen.original = plain.h;
        } else {
            seen = plain;
        }

        // 2. each expert for itself
        let isa = self.isa;
        let (seen, hidden) = (&seen, self.hidden());
        let work = |e: &usize| Expert { isa, seen, hidden, number: *e }.quantize(input, [gate, up, down]);
        let mut few = Vec::new();
        let y = &mut self.y;
        ordered(threads, 0..count, work, |e, (parts, delta)| {
            for (&(t, w), d) in seen.takers[e].iter().zip(delta.chunks_exact(hidden)) {
                y[t as usize * hidden..][..hidden].iter_mut().zip(d).for_each(|(y, d)| *y += w * d);
            }
            let own = seen.takers[e].len();
            if own < ENOUGH {
                few.push(own);
            }
            put(e, parts)
        })?;
        few.sort();
        Ok(few.first().map(|least| {
            format!(
                "layer {layer}: {} of {count} experts saw fewer than {ENOUGH} tokens (the least: {least}), others' stood in for them",
                few.len()
            )
        }))
    }
}

/// One expert and its inputs.
struct Expert<'a> {
    isa: Isa,
    seen: &'a Seen,
    hidden: usize,
    number: usize,
}

impl Expert<'_> {
    fn quantize(&self, input: &Input, [gate, up, down]: [&Unit; 3]) -> Result<(Vec<Packed>, Vec<f32>)> {
        let isa = self.isa;
        let [gate_w, up_w, down_w] = [gate, up, down].map(|u| self.weights(input, u));
        let (gate_w, up_w, down_w) = (gate_w?, up_w?, down_w?);
        // 1. its tokens, and what they count
        let (x, x_orig, importance) = self.inputs();
        let alpha: f32 = std::env::var("CAL_ASYM").ok().and_then(|v| v.parse().ok()).unwrap_or(0.0);
        let h = moments(isa, &x, self.hidden, &importance);
        // 2. gate and up
        let cross = (!x_orig.is_empty() && alpha > 0.0).then(|| cross(isa, &x, &x_orig, self.hidden, &importance));
        let target = |w: &[f32], h: &[f32], cross: &Option<Vec<f32>>, cols| match cross {
            Some(c) => shifted(isa, w, h, c, cols, alpha),
            None => w.to_vec(),
        };
        let (gate_parts, gate_q) = self.projection(gate, &target(&gate_w, &h, &cross, self.hidden), &h)?;
        let (up_parts, up_q) = self.projection(up, &target(&up_w, &h, &cross, self.hidden), &h)?;
        drop(h);
        // 3. down, by what gate and up make of them
        let width = gate_w.len() / self.hidden;
        let inner = |gate: &[f32], up: &[f32], x: &[f32]| {
            let tokens = importance.len();
            let (mut g, mut u) = (vec![0.0; tokens * width], vec![0.0; tokens * width]);
            product(isa, gate, x, self.hidden, &mut g);
            product(isa, up, x, self.hidden, &mut u);
            g.iter_mut().zip(&u).for_each(|(g, u)| *g = *g / (1.0 + (-*g).exp()) * u);
            g
        };
        let orig = inner(&gate_w, &up_w, if x_orig.is_empty() { &x } else { &x_orig });
        let mid = inner(&gate_q, &up_q, &x);
        let used = if flag("CAL_ORIG") { &orig } else { &mid };
        let h = moments(isa, used, width, &importance);
        let alpha2: f32 = std::env::var("CAL_ASYM2").ok().and_then(|v| v.parse().ok()).unwrap_or(0.0);
        let target = if alpha2 > 0.0 { let c = self::cross(isa, &mid, &orig, width, &importance); shifted(isa, &down_w, &h, &c, width, alpha2) } else { down_w.clone() };
        let (down_parts, down_q) = self.projection(down, &target, &h)?;
        let mut delta = Vec::new();
        if flag("CAL_SEQ") {
            let n = self.seen.takers[self.number].len();
            let before = inner(&gate_w, &up_w, &x);
            let mut a = vec![0.0; n * self.hidden];
            let mut b = vec![0.0; n * self.hidden];
            product(isa, &down_q, &mid[..n * width], width, &mut a);
            product(isa, &down_w, &before[..n * width], width, &mut b);
            a.iter_mut().zip(&b).for_each(|(a, b)| *a -= b);
            delta = a;
        }
        Ok((vec![gate_parts, up_parts, down_parts], delta))
    }

    /// The weights of one projection, `[rows, cols]`.
    fn weights(&self, input: &Input, unit: &Unit) -> Result<Vec<f32>> {
        let count = unit.stack.as_ref().map_or(1, |s| s.count);
        let rows = unit.source.all_rows() / count;
        let parts = input.read(&unit.source, self.number * rows..(self.number + 1) * rows)?;
        let name = || format!("tensor {:?}, expert {}", unit.source.name, self.number);
        values(self.isa, &matrix(&unit.source, &parts)?).with_context(name)
    }

    /// Inputs `[tokens, hidden]` and what each of them counts.
    fn inputs(&self) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let (seen, hidden) = (self.seen, self.hidden);
        let own = &seen.takers[self.number];
        let (mut x, mut importance) = (Vec::with_capacity(own.len() * hidden), Vec::with_capacity(own.len()));
        let mut o = Vec::new();
        let nores = flag("CAL_NORESID");
        let mut take = |t: usize, weight: f32| {
            if !seen.original.is_empty() {
                o.extend_from_slice(&seen.original[t * hidden..(t + 1) * hidden]);
            }
            x.extend_from_slice(&seen.h[t * hidden..(t + 1) * hidden]);
            importance.push(weight * weight * if nores { 1.0 } else { seen.importance[t] });
        };
        own.iter().for_each(|&(t, weight)| take(t as usize, weight));
        if own.len() < ENOUGH {
            let all = seen.importance.len();
            let wanted = (ENOUGH - own.len()).min(all);
            let mean = match own.len() {
                0 => 1.0,
                n => own.iter().map(|(_, w)| w * w).sum::<f32>() / n as f32,
            };
            (0..wanted).for_each(|i| take(i * all / wanted, (STAND_IN * mean).sqrt()));
        }
        (x, o, importance)
    }

    /// Quantises one projection under H; returns its parts and its new values.
    fn projection(&self, unit: &Unit, w: &[f32], h: &[f32]) -> Result<(Packed, Vec<f32>)> {
        let Treatment::Quantize { bits, group, float } = unit.treatment else {
            anyhow::bail!("tensor {:?} is not to be quantised", unit.source.name)
        };
        let env = |n: &str, d: usize| std::env::var(n).ok().and_then(|v| v.parse().ok()).unwrap_or(d);
        let params = Params { bits, group: group as usize, scale: float, sweeps: env("CAL_SWEEPS", 6), rounds: env("CAL_ROUNDS", 2) };
        let found = descent::quantize(self.isa, w, unit.source.cols, h, None, params);
        let new = found.values(group as usize);
        let (weight, error) = squares(w, &new);
        let (q, scales, biases) = found.pack(bits, float);
        let error = Error { count: w.len() as u64, weight, error };
        Ok(((vec![q, scales, biases], error), new))
    }
}

/// `sum of importance x x^T` over the rows of `x: [tokens, cols]`, damped.
fn moments(isa: Isa, x: &[f32], cols: usize, importance: &[f32]) -> Vec<f32> {
    let all: f64 = importance.iter().map(|&i| i as f64).sum();
    let mut scaled = x.to_vec();
    for (row, i) in scaled.chunks_exact_mut(cols).zip(importance) {
        let root = (*i as f64 / all.max(f64::MIN_POSITIVE)).sqrt() as f32;
        row.iter_mut().for_each(|v| *v *= root);
    }
    let mut columns = Vec::new();
    transpose(&scaled, cols, &mut columns);
    drop(scaled);
    let mut h = vec![0.0; cols * cols];
    product(isa, &columns, &columns, importance.len(), &mut h);
    let mean = (0..cols).map(|i| h[i * cols + i]).sum::<f32>() / cols as f32;
    let damping = std::env::var("CAL_DAMP").ok().and_then(|v| v.parse().ok()).unwrap_or(DAMPING);
    let floor = (damping * mean).max(f32::MIN_POSITIVE * 1e10);
    (0..cols).for_each(|i| h[i * cols + i] += floor);
    h
}

fn flag(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

/// `sum of importance x (x' - x)^T` as `[cols of x, cols of x']`.
fn cross(isa: Isa, x: &[f32], target: &[f32], cols: usize, importance: &[f32]) -> Vec<f32> {
    let all: f64 = importance.iter().map(|&i| i as f64).sum();
    let mut a = x.to_vec();
    let mut b: Vec<f32> = target.iter().zip(x).map(|(t, x)| t - x).collect();
    for ((a, b), i) in a.chunks_exact_mut(cols).zip(b.chunks_exact_mut(cols)).zip(importance) {
        let root = (*i as f64 / all.max(f64::MIN_POSITIVE)).sqrt() as f32;
        a.iter_mut().for_each(|v| *v *= root);
        b.iter_mut().for_each(|v| *v *= root);
    }
    let (mut at, mut bt) = (Vec::new(), Vec::new());
    transpose(&a, cols, &mut at);
    transpose(&b, cols, &mut bt);
    let mut out = vec![0.0; cols * cols];
    product(isa, &bt, &at, importance.len(), &mut out);
    out
}

/// `w + alpha * w M H^-1`, M the transpose of `cross`, by conjugate gradients row by row.
fn shifted(isa: Isa, w: &[f32], h: &[f32], cross: &[f32], cols: usize, alpha: f32) -> Vec<f32> {
    let rows = w.len() / cols;
    let mut r = vec![0.0; w.len()];
    product(isa, cross, w, cols, &mut r);
    let mut d = vec![0.0; w.len()];
    let mut p = r.clone();
    let mut hp = vec![0.0; w.len()];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>();
    let mut rr: Vec<f64> = (0..rows).map(|i| dot(&r[i * cols..(i + 1) * cols], &r[i * cols..(i + 1) * cols])).collect();
    for _ in 0..12 {
        product(isa, h, &p, cols, &mut hp);
        for i in 0..rows {
            let at = i * cols..(i + 1) * cols;
            let php = dot(&p[at.clone()], &hp[at.clone()]);
            if php <= 0.0 || rr[i] <= 0.0 {
                continue;
            }
            let step = (rr[i] / php) as f32;
            for c in at.clone() {
                d[c] += step * p[c];
                r[c] -= step * hp[c];
            }
            let new = dot(&r[at.clone()], &r[at.clone()]);
            let beta = (new / rr[i]) as f32;
            rr[i] = new;
            for c in at {
                p[c] = r[c] + beta * p[c];
            }
        }
    }
    w.iter().zip(&d).map(|(w, d)| w + alpha * d).collect()
}
