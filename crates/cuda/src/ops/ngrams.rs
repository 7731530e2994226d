//! Embeddings of n-grams on their way to residual streams: gates, a short convolution, and their sum.

use anyhow::Result;
use sluice_backend::{MOST_STREAMS, NOT_KEPT, NgramLayer};

use crate::device::memory::Scratch;
use crate::kernels::Kernel;
use crate::ops::context::Context;
use crate::ops::recurrent::Convolution;
use crate::parameters::{self as p, number};

/// Threads of a block.
const THREADS: u32 = 256;

/// Bytes of scratch of a step of so many tokens.
pub fn scratch_bytes(layer: &NgramLayer, tokens: usize) -> usize {
    3 * 4 * tokens * layer.streams.cols
}

/// What gates let through, the same normed, and that convolved: `[tokens, streams * hidden]` each.
#[derive(Default)]
pub struct NgramScratch {
    gated: Scratch,
    normed: Scratch,
    convolved: Scratch,
}

impl NgramScratch {
    pub fn bytes(&self) -> usize {
        self.gated.bytes() + self.normed.bytes() + self.convolved.bytes()
    }

    /// Runs a layer.
    pub fn run(&mut self, context: &Context, layer: &NgramLayer) -> Result<()> {
        let (gpu, inputs) = (&context.gpu, &context.inputs);
        let (tokens, all, hidden) = (inputs.tokens().len(), layer.streams.cols, layer.value.cols);
        let count = all / hidden;
        assert!(all == count * hidden && (1..=MOST_STREAMS).contains(&count), "{:?} of {hidden}", layer.streams);
        let of_streams = [layer.keys, layer.queries, layer.streams];
        assert!(of_streams.iter().all(|t| t.rows >= tokens && t.cols == all), "{tokens} tokens of {all}");
        assert!(layer.value.rows >= tokens && layer.norm.weight.cols == all && layer.conv.cols == all, "{layer:?}");
        let states = context.states.expect("a model with recurrent layers has a pool of states");
        let end = layer.state_at + layer.state_len();
        assert!(end <= states.cols, "elements {}..{end} in states of {}", layer.state_at, states.cols);
        assert!((0..inputs.sequences()).all(|s| inputs.state(s) < states.rows), "a state that is not there");
        let kept = inputs.kept().unwrap_or_default();
        assert!(kept.iter().all(|row| *row == NOT_KEPT || (*row as usize) < states.rows), "a state is kept nowhere");
        if tokens == 0 {
            return Ok(());
        }
        let bytes = 4 * tokens * all;
        let gated = self.gated.reserve(gpu, bytes)?;
        let normed = self.normed.reserve(gpu, bytes)?;
        let convolved = self.convolved.reserve(gpu, bytes)?;
        let parameters = p::Ngrams {
            keys: context.place(layer.keys),
            queries: context.place(layer.queries),
            value: context.place(layer.value),
            streams: context.place(layer.streams),
            norm: context.norm(&layer.norm),
            gated,
            normed,
            convolved,
            rows: number(tokens),
            hidden: number(hidden),
            count: number(count),
            scale: (1.0 / (hidden as f64).sqrt()) as f32,
        };
        let convolution = Convolution {
            x: p::Tensor::dense(normed, all),
            weights: layer.conv,
            bias: None,
            windows: states.columns(layer.state_at..end),
        };
        let parts = [number(tokens), number(all.div_ceil(4 * THREADS as usize)), 1];
        // SAFETY: tensors and states were checked; the scratch was just reserved.
        unsafe {
            gpu.launch(Kernel::NGRAM_GATE, [number(tokens), number(count), 1], THREADS, 0, &parameters)?;
            convolution.run(context, convolved)?;
            gpu.launch(Kernel::NGRAM_ADD, parts, THREADS, 0, &parameters)?;
        }
        Ok(())
    }
}
