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

mod expert;

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use sluice_backend::{
    Activations, AttentionMode, Backend, Caches, Capacity, KvType, MemoryClass, Resources, SequenceInput, StepInputs,
    Tensor, Wanted,
};
use sluice_cpu::Cpu;
use sluice_engine::text::Tokenizer;
use sluice_kernels::Isa;
use sluice_model::{Decoder, Description, ExpertActivation, ModelSource, ModelTensors, MoeDescription};
use sluice_store::read_small;

use crate::conversion::ConversionUnit;
use crate::input::Input;
use crate::ordered::ordered;
use crate::watch::{Stopped, Watch};
use expert::{ENOUGH, Expert, Outputs, Packed, Seen, Takers};

/// Bytes that the text may have: a hundred times what one reads of it.
pub const MAX_TEXT: u64 = 256 << 20;
/// Tokens of a window: read from an empty context, as `eval ppl` does.
const WINDOW: usize = 512;
/// Tokens of a cache block, and blocks of a window.
const BLOCK: usize = 32;
const BLOCKS: usize = WINDOW / BLOCK;

/// Quantises routed experts by what they see when the model reads a text.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The file with the text.
    pub text: PathBuf,
    /// Tokens of it to read.
    pub tokens: usize,
    /// Where compiled tokenizers are kept.
    pub tokenizer_cache: Option<PathBuf>,
}

/// How to calibrate.
pub struct Settings<'a> {
    pub calibration: &'a Calibration,
    pub threads: usize,
    pub isa: Isa,
    pub watch: &'a dyn Watch,
}

/// Both models, as far as they have read the text.
pub struct Calibrator<'a> {
    watch: &'a dyn Watch,
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

impl<'a> Calibrator<'a> {
    /// # Errors
    /// A text that cannot be read or has less than a window's tokens; a model that cannot be loaded.
    pub fn open(source: &dyn ModelSource, tensors: &ModelTensors, settings: Settings<'a>) -> Result<Calibrator<'a>> {
        // 1. the text
        let Calibration { text, tokens: wanted, tokenizer_cache } = settings.calibration;
        let name = || text.display().to_string();
        let bytes = read_small(text, MAX_TEXT)?;
        let text = std::str::from_utf8(&bytes).with_context(name)?;
        let tokens = Tokenizer::load(source, tokenizer_cache.as_deref())?.encode(text, false)?;
        let windows: Vec<Vec<u32>> =
            tokens.chunks_exact(WINDOW).take(wanted.div_ceil(WINDOW)).map(<[u32]>::to_vec).collect();
        ensure!(
            !windows.is_empty(),
            "{}: {} tokens, too short for a calibration (at least {WINDOW})",
            name(),
            tokens.len()
        );

        // 2. the model, one sequence of one window
        // For mixers and shared experts; what routed experts are fitted to is computed in f32. Far quicker, and no worse (docs/experiments.md).
        let mut backend = Cpu::new(settings.isa, settings.threads, Activations::Int8)?;
        let options =
            sluice_model::Options { max_tokens: WINDOW, context: Some(WINDOW), ..sluice_model::Options::default() };
        let loaded = sluice_model::load(tensors, &mut backend, &options)?;
        let model = loaded.description;
        ensure!(model.experts().is_some(), "--calibration is for routed experts, and this model has none");
        let is_plain =
            |moe: &MoeDescription| moe.activation == ExpertActivation::SwiGlu && !moe.biased && moe.latent.is_none();
        ensure!(
            model.moe_layers().all(is_plain),
            "--calibration is for experts with a plain SwiGLU and without biases"
        );
        for group in model.groups() {
            let pool = backend.alloc_kv(group.layout(KvType::F32, AttentionMode::F32, BLOCK), BLOCKS)?;
            backend.commit_kv(&pool, BLOCKS)?;
        }
        if model.state_len() > 0 {
            backend.alloc_states(1, model.state_len())?;
        }
        let normed = backend.alloc(MemoryClass::Scratch, WINDOW, model.hidden)?;
        let mut all = Calibrator {
            watch: settings.watch,
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
            ensure!(!self.watch.is_stopped(), Stopped);
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
        stacks: &[&ConversionUnit],
        input: &Input,
        threads: usize,
        mut put: impl FnMut(usize, Vec<Packed>) -> Result<()>,
    ) -> Result<Option<String>> {
        self.reach(layer)?;
        let stacks = three(layer, stacks)?;
        let seen = self.both(true)?;
        let (isa, hidden, count, watch) = (self.isa, self.hidden(), seen.takers.len(), self.watch);
        let work = |e: &usize| {
            // An expert may take seconds, and several are in the queue.
            ensure!(!watch.is_stopped(), Stopped);
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
        stacks: &[&ConversionUnit],
        input: &Input,
        threads: usize,
        stored: impl Fn(usize) -> Result<Vec<Vec<f32>>> + Sync,
    ) -> Result<()> {
        self.reach(layer)?;
        let stacks = three(layer, stacks)?;
        let seen = self.both(true)?;
        let (isa, hidden, count, watch) = (self.isa, self.hidden(), seen.takers.len(), self.watch);
        let work = |e: &usize| {
            let expert = Expert { isa, seen: &seen, hidden, number: *e };
            let (old, new) = (expert.weights(input, stacks)?, stored(*e)?);
            ensure!(new.len() == 3, "{} projections, not three", new.len());
            let rows = |h: &[f32], takers: &[Takers]| expert.rows(h, takers[*e].iter().map(|t| t.0 as usize));
            let (packed, plain) = (rows(&seen.h, &seen.takers), rows(&seen.original, &seen.original_takers));
            Ok(Outputs { packed: expert.output(&new, &packed), plain: expert.output(&old, &plain) })
        };
        ordered(threads, 0..count, work, |e, outputs| {
            ensure!(!watch.is_stopped(), Stopped);
            self.add(&seen, e, &outputs);
            Ok(())
        })
    }
}

/// Gate, up and down.
fn three<'a>(layer: usize, stacks: &[&'a ConversionUnit]) -> Result<[&'a ConversionUnit; 3]> {
    let found: Result<[&ConversionUnit; 3], _> = stacks.to_vec().try_into();
    found.map_err(|all| anyhow!("layer {layer}: {} projections, not three", all.len()))
}
