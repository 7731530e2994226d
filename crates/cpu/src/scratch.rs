//! Plans the scratch memory of steps before any is allocated. [`ScratchPlanner`] implements operations that compute nothing and
//! record how far each would grow each of the CPU's buffers.
//!
//! It must grow buffers exactly as the operations do. A test in `engine/tests/engine/budget.rs` compares the two on models of every kind.

use sluice_kernels::attention;
use sluice_kernels::format::{ActivationFormat, Activations};
use sluice_kernels::int11_tiles::{self, TokenTile};
use sluice_kernels::{Isa, int11, latent};

use crate::encoded::{GROUP, Needs};
use crate::matmul::{MAX_TASK_ROWS, SMALL, block_rows};
use crate::memory::Weight;
use crate::moe::MAX_KEPT_BYTES;
use crate::moe::experts::{ADDED, GatedFfn, gate_up_block};
use crate::{Cpu, attention as tasks};
use sluice_backend::{
    AttentionLayer, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Elementwise, ExpertMatrix, HeadRows,
    IndexLayer, KvLayout, LatentKeys, LatentLayer, Linear, MatrixId, Mlp, Moe, MoeId, NgramLayer, NgramTable, Norm,
    Operations, Projection, Routing, SelectLayer, StateSpaceLayer, StepInputs, StepScratch, StreamLayer, Tensor,
};

/// Elements of activations in each encoding.
#[derive(Default)]
struct EncodedSize {
    f32: usize,
    bf16: usize,
    int8: usize,
    /// Of integers of 11 bits, their groups and their rows too.
    int11: [usize; 3],
    tiles: usize,
}

impl EncodedSize {
    fn reset(&mut self, isa: Isa, rows: usize, cols: usize, needs: Needs) {
        let n = rows * cols;
        for (size, needed) in [(&mut self.f32, needs.f32), (&mut self.bf16, needs.bf16), (&mut self.int8, needs.int8)] {
            *size = (*size).max(if needed { n } else { 0 });
        }
        if needs.int11 {
            self.f32 = self.f32.max(n);
            let of = [n, rows * cols.div_ceil(int11::GROUP), rows];
            self.int11 = std::array::from_fn(|i| self.int11[i].max(of[i]));
            if int11_tiles::are_wanted(isa, rows) {
                self.tiles = self.tiles.max(int11_tiles::count(rows, cols));
            }
        }
    }

    fn bytes(&self) -> usize {
        let [n, groups, rows] = self.int11;
        let int11 = 2 * n + 4 * (n / int11::HALF + groups) + 8 * rows;
        4 * self.f32 + 2 * self.bf16 + self.int8 + 8 * (self.int8 / GROUP) + int11 + self.tiles * size_of::<TokenTile>()
    }
}

/// The CPU's buffers, in elements unless said otherwise.
#[derive(Default)]
struct Sizes {
    encoded: EncodedSize,
    hidden: EncodedSize,
    /// Those of mixtures and of their shared experts.
    moe_encoded: EncodedSize,
    moe_gathered: EncodedSize,
    moe_hidden: EncodedSize,
    shared_hidden: EncodedSize,
    /// Those of latent attention, and its queries, results and lists of rows.
    latents: EncodedSize,
    latent_rows: usize,
    normed: usize,
    logits: usize,
    /// For each thread: bytes of the kernels' scratch; elements of each of two tiles, of a row, and of other floats.
    kernel: usize,
    tile: usize,
    row: usize,
    floats: usize,
    identity_rows: usize,
    moe_identity_rows: usize,
    router_logits: usize,
    shared_gates: usize,
    /// Sums or outputs that are kept while experts are read, and predictions.
    kept: usize,
    guess: usize,
    /// From here on in bytes.
    grouping: usize,
    attention: usize,
    delta: usize,
    state_spaces: usize,
    channel_deltas: usize,
    index: usize,
    compressed: usize,
    ngrams: usize,
    per_128_positions: usize,
    index_per_128_positions: usize,
}

fn grow(size: &mut usize, to: usize) {
    *size = (*size).max(to);
}

impl Sizes {
    fn bytes(&self, threads: usize) -> usize {
        let worker = self.kernel.next_multiple_of(64) + 4 * (2 * self.tile + self.row + self.floats);
        let encoded = [
            &self.encoded,
            &self.hidden,
            &self.moe_encoded,
            &self.moe_gathered,
            &self.moe_hidden,
            &self.shared_hidden,
            &self.latents,
        ];
        let encoded: usize = encoded.iter().map(|e| e.bytes()).sum();
        let lists = self.identity_rows + self.moe_identity_rows + self.router_logits + self.shared_gates;
        let lists = lists + self.latent_rows + self.kept + self.guess + self.normed + self.logits;
        encoded
            + threads * worker
            + 4 * lists
            + self.grouping
            + self.attention
            + self.delta
            + self.state_spaces
            + self.channel_deltas
            + self.index
            + self.compressed
            + self.ngrams
    }
}

/// Operations that only measure their scratch.
pub(super) struct ScratchPlanner<'a> {
    isa: Isa,
    mode: Activations,
    threads: usize,
    weights: &'a [Weight],
    moes: Vec<(&'a Moe, Option<&'a Moe>)>,
    layouts: &'a [KvLayout],
    /// Bytes of a position's angles, in all tables.
    angles: usize,
    /// Tokens of the step.
    tokens: usize,
    sequences: usize,
    wanted: usize,
    streamed: bool,
    sizes: Sizes,
}

impl<'a> ScratchPlanner<'a> {
    /// For a step with these inputs on `cpu`. `streamed`: experts are read from disk.
    pub fn new(cpu: &'a Cpu, layouts: &'a [KvLayout], inputs: &StepInputs, streamed: bool) -> ScratchPlanner<'a> {
        ScratchPlanner {
            isa: cpu.isa,
            mode: cpu.mode,
            threads: cpu.pool.threads(),
            weights: &cpu.weights,
            moes: cpu.mixture.registered(),
            layouts,
            angles: cpu.rotary.iter().map(|t| 8 * t.frequencies.inv_freq.len()).sum(),
            tokens: inputs.tokens().len(),
            sequences: inputs.sequences(),
            wanted: inputs.wanted().len(),
            streamed,
            sizes: Sizes::default(),
        }
    }

    /// The scratch of the step.
    pub fn scratch(&self) -> StepScratch {
        StepScratch {
            fixed: self.sizes.bytes(self.threads),
            per_128_positions: self.sizes.per_128_positions + self.sizes.index_per_128_positions,
        }
    }
}

/// A weight matrix, and how many of its rows are used.
fn used(linear: &Linear) -> (usize, usize) {
    (linear.matrix.number(), linear.rows.len())
}

/// The matrices of one projection of all experts.
fn matrices(matrix: &ExpertMatrix) -> &[MatrixId] {
    match matrix {
        ExpertMatrix::Stacked { matrix, .. } => std::slice::from_ref(matrix),
        ExpertMatrix::Single(all) => all,
    }
}

impl ScratchPlanner<'_> {
    fn encoding(&self, matrix: MatrixId) -> ActivationFormat {
        self.weights[matrix.number()].format().activation_format(self.mode)
    }

    fn encode(&mut self, rows: usize, cols: usize, needs: Needs) {
        self.sizes.encoded.reset(self.isa, rows, cols, needs);
        grow(&mut self.sizes.row, cols);
    }

    fn kernel(&mut self, weight: usize, rows: usize, tokens: usize, mode: Activations) {
        grow(&mut self.sizes.kernel, self.weights[weight].scratch_bytes(rows, tokens, mode));
    }

    /// As `matmul::run_products` of matrices with `cols` columns.
    fn products(
        &mut self,
        mode: Activations,
        products: impl Iterator<Item = (usize, usize)> + Clone,
        cols: usize,
        tokens: usize,
    ) {
        grow(&mut self.sizes.identity_rows, tokens);
        let all: usize = products.clone().map(|(_, rows)| rows).sum();
        let block = block_rows(all, self.threads);
        // With so few tokens one thread does it all.
        let few = (SMALL / (all * cols).max(1)).min(tokens);
        for (weight, rows) in products {
            for (n, tokens) in [(block.min(rows), tokens), (rows, few)] {
                grow(&mut self.sizes.tile, tokens * n);
                self.kernel(weight, n, tokens, mode);
            }
        }
    }

    /// As `experts::gate_up` of `elements` hidden activations, `intermediate` in a unit, each of `each` rows of the matrices.
    fn gate_up(
        &mut self,
        weights: impl Iterator<Item = MatrixId>,
        (elements, intermediate, each): (usize, usize, usize),
        tokens: usize,
    ) {
        let block = gate_up_block(elements, each, self.threads).min(intermediate);
        grow(&mut self.sizes.tile, tokens * each * block);
        weights.for_each(|w| self.kernel(w.number(), each * block, tokens, self.mode));
    }

    /// As `experts::dense_gate_up`.
    fn dense_gate_up(&mut self, mlp: &Mlp, tokens: usize, hidden: fn(&mut Sizes) -> &mut EncodedSize) {
        let needs = Needs::of([self.encoding(mlp.down.matrix)]);
        hidden(&mut self.sizes).reset(self.isa, tokens, mlp.gate.rows.len(), needs);
        let width = mlp.gate.rows.len();
        self.gate_up([mlp.gate.matrix, mlp.up.matrix].into_iter(), (width, width, 1), tokens);
    }
}

impl ScratchPlanner<'_> {
    /// As `moe::run::choose` of so many tokens.
    fn choose(&mut self, moe: &Moe, tokens: usize) {
        let hidden = self.weights[moe.router.matrix.number()].cols();
        self.sizes.moe_encoded.reset(self.isa, tokens, hidden, Needs::of([ActivationFormat::F32]));
        grow(&mut self.sizes.row, hidden);
        grow(&mut self.sizes.router_logits, tokens * moe.router.rows.len());
        self.products(Activations::F32, std::iter::once(used(&moe.router)), hidden, tokens);
        grow(&mut self.sizes.moe_identity_rows, tokens);
    }

    /// As `HostMixture::run`.
    fn moe(&mut self, moe: &Moe, next: Option<&Moe>, tokens: usize, width: usize) {
        let k = moe.scoring.k();
        let (pairs, intermediate, hidden) = (tokens * k, moe.experts.intermediate(), moe.experts.hidden());
        let (last, inputs) = moe.experts.parts.split_last().expect("an expert has projections");
        let first = || inputs.iter().flat_map(|part| matrices(&part.matrix)).copied();
        let downs = || matrices(&last.matrix).iter().copied();
        grow(&mut self.sizes.normed, tokens * self.weights[moe.router.matrix.number()].cols());
        self.choose(moe, tokens);
        let mut lists = 2 * pairs;
        if let Some(next) = next.filter(|_| self.streamed) {
            // Whether a step predicts depends on how many experts its routers choose.
            self.choose(next, tokens);
            lists += 2 * tokens * next.scoring.k();
        }
        // 1. encoded inputs and hidden activations
        let mut needs = Needs::of(first().map(|m| self.encoding(m)));
        let shared = moe.shared.as_ref();
        if let Some(s) = shared {
            [&s.mlp.gate, &s.mlp.up].iter().for_each(|l| needs.add(self.encoding(l.matrix)));
            needs.f32 |= s.gate.is_some();
        }
        self.sizes.moe_encoded.reset(self.isa, tokens, hidden, needs);
        let ordered = moe.experts.order.is_some();
        if ordered {
            self.sizes.moe_gathered.reset(self.isa, pairs, hidden, needs);
            grow(&mut self.sizes.row, hidden);
        }
        if let Some(s) = shared {
            if let Some(gate) = &s.gate {
                grow(&mut self.sizes.shared_gates, tokens);
                self.products(Activations::F32, std::iter::once(used(gate)), hidden, tokens);
            }
            self.dense_gate_up(&s.mlp, tokens, |s| &mut s.shared_hidden);
        }
        grow(&mut self.sizes.moe_identity_rows, tokens.max(pairs));
        let hidden_needs = Needs::of(downs().map(|m| self.encoding(m)));
        self.sizes.moe_hidden.reset(self.isa, pairs, intermediate, hidden_needs);
        // 2. both rounds, with every expert in use
        let all_downs = || downs().chain(shared.map(|s| s.mlp.down.matrix));
        let each = moe.experts.parts[0].matrix.step();
        let most = if ordered { pairs } else { tokens };
        self.gate_up(first(), (moe.experts.count * intermediate, intermediate, each), most);
        let block = block_rows(width, self.threads).min(width);
        all_downs().for_each(|m| self.kernel(m.number(), block, tokens, self.mode));
        grow(&mut self.sizes.tile, tokens * block);
        grow(&mut self.sizes.floats, tokens * block);
        // 3. what streamed experts need in addition
        if self.streamed {
            let most = MAX_TASK_ROWS.min(width.max(each * intermediate));
            first().chain(all_downs()).for_each(|m| self.kernel(m.number(), most, tokens, self.mode));
            grow(&mut self.sizes.tile, tokens * most);
            grow(&mut self.sizes.floats, (tokens * most).max(ADDED.min(width)));
            // For this step, or for the longest one whose outputs are kept.
            let outputs = (MAX_KEPT_BYTES / (4 * width)).min(pairs);
            grow(&mut self.sizes.kept, tokens.max(outputs + outputs / k.max(1)) * width);
        }
        let count = moe.experts.count.min(pairs);
        grow(&mut self.sizes.guess, lists);
        grow(&mut self.sizes.grouping, count * (size_of::<GatedFfn>() + 8) + 4 * (2 * pairs + moe.experts.count));
    }
}

impl Operations for ScratchPlanner<'_> {
    /// Rows are copied in place.
    fn embed(&mut self, _: MatrixId, _: Tensor) {}

    fn project(&mut self, x: Tensor, _: Option<Norm>, projections: &[Projection]) {
        let needs = Needs::of(projections.iter().map(|p| self.encoding(p.linear.matrix)));
        self.encode(x.rows, x.cols, needs);
        self.products(self.mode, projections.iter().map(|p| used(&p.linear)), x.cols, x.rows);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, _: Tensor) {
        self.encode(x.rows, x.cols, Needs::of([self.encoding(linear.matrix)]));
        self.products(self.mode, std::iter::once(used(linear)), x.cols, x.rows);
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        let layout = self.layouts[layer.group];
        let KvLayout { k_dim, v_dim, kv_heads, .. } = layout;
        let (tokens, sequences) = (self.tokens, self.sequences);
        let group = layer.heads / kv_heads;
        let queries = (tasks::ROWS.end() / group).max(1).min(tokens);
        let scratch = attention::scratch_len(&tasks::kv_shape(&layout, layer.layer), group, queries);
        grow(&mut self.sizes.floats, scratch);
        let q = if layer.gated { 4 * tokens * layer.heads * k_dim } else { 0 };
        // Single tokens of few sequences are split by partitions, each of which leaves a part.
        let part = if self.threads > 1 && kv_heads < 2 * self.threads { 4 * group * (v_dim + 2) } else { 0 };
        let deal = sequences * tasks::SEQUENCE_BYTES + tokens * tasks::TOKEN_BYTES;
        grow(&mut self.sizes.per_128_positions, kv_heads * part + tasks::PARTITION_BYTES + 128 * self.angles);
        grow(&mut self.sizes.attention, q + kv_heads * sequences * part + deal);
    }

    fn latent_attention(&mut self, layer: &LatentLayer) {
        let shape = tasks::shape_of_latents(&self.layouts[layer.group], layer.layer, layer.rotated());
        let (tokens, heads, dim, rank) = (self.tokens, layer.heads, shape.k_dim, layer.rank);
        let rows = tasks::most_rows(heads, tokens);
        grow(&mut self.sizes.latent_rows, rows * (dim + rank + 1));
        grow(&mut self.sizes.row, dim);
        // Shorter steps take more heads at a time, and may come to a few more rows.
        let most = (*tasks::ROWS.end()).max(heads).min(heads * tokens);
        grow(&mut self.sizes.floats, attention::scratch_len(&shape, 1, most).max(latent::scratch_len(rank)));
        let part = if self.threads > 1 { 4 * heads * (rank + 2) } else { 0 };
        let deal = self.sequences * tasks::SEQUENCE_BYTES + tokens * tasks::TOKEN_BYTES;
        grow(&mut self.sizes.per_128_positions, part + tasks::PARTITION_BYTES + 128 * self.angles);
        grow(&mut self.sizes.attention, self.sequences * part + deal);
        let mut product = |rows_of: HeadRows, cols: usize| {
            self.sizes.latents.reset(self.isa, rows, cols, Needs::of([self.encoding(rows_of.matrix)]));
            // With more heads at a time a task has more rows, of fewer tokens.
            for (tokens, n) in [(tokens, tasks::heads_at_once(heads, tokens)), ((rows / heads).min(tokens), heads)] {
                let block = tasks::product_rows(n, rows_of.rows, self.threads);
                grow(&mut self.sizes.tile, tokens * block);
                self.kernel(rows_of.matrix.number(), block, tokens, self.mode);
            }
        };
        if let LatentKeys::Columns(keys) = layer.keys {
            product(keys, layer.plain());
        }
        product(layer.values, rank);
    }

    fn index(&mut self, layer: &IndexLayer) {
        grow(&mut self.sizes.row, layer.dim());
        let (scores, keys) = tasks::index_sizes(self.tokens, self.threads, 128);
        grow(&mut self.sizes.index_per_128_positions, 4 * scores + 8 * keys);
        grow(&mut self.sizes.index, 4 * self.tokens * layer.most_seen());
    }

    fn compress(&mut self, layer: &CompressLayer) {
        grow(&mut self.sizes.row, 2 * layer.dim());
    }

    fn select(&mut self, layer: &SelectLayer) {
        let (scores, keys) = tasks::index_sizes(self.tokens, self.threads, 128);
        grow(&mut self.sizes.index_per_128_positions, 4 * scores + 8 * keys);
        grow(&mut self.sizes.index, 4 * self.tokens * layer.top);
    }

    fn compressed_attention(&mut self, layer: &CompressedLayer) {
        let shape = tasks::kv_shape(&self.layouts[layer.rows.group], layer.rows.layer);
        let (dim, heads) = (layer.dim(), layer.heads.min(tasks::HEADS));
        grow(&mut self.sizes.floats, attention::scratch_len(&shape, heads, 1));
        let part = 4 * self.threads * heads * (dim + 2);
        // Of entries there is a partition for each 128, or as many as are selected.
        let most = layer.entries.map_or(0, |of| of.top.unwrap_or(0));
        let all = layer.entries.filter(|of| of.top.is_none());
        grow(&mut self.sizes.compressed, part * (tasks::most_parts(layer, 0) + most.div_ceil(128) + 1));
        let growing = all.map_or(0, |of| part.div_ceil(of.rate));
        grow(&mut self.sizes.per_128_positions, growing + 128 * self.angles);
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        let shape = layer.shape;
        grow(&mut self.sizes.delta, 4 * self.tokens * (shape.channels() + 2 * shape.value_heads));
    }

    fn channel_delta(&mut self, layer: &ChannelDeltaLayer) {
        let shape = layer.shape;
        let columns = shape.channels() + shape.value_heads * (shape.key_dim + 1);
        grow(&mut self.sizes.channel_deltas, 4 * self.tokens * columns);
    }

    fn state_space(&mut self, layer: &StateSpaceLayer) {
        let shape = layer.shape;
        grow(&mut self.sizes.state_spaces, 4 * self.tokens * (shape.channels() + 2 * shape.heads));
    }

    fn collapse(&mut self, layer: &StreamLayer) {
        let cols = layer.streams.cols;
        self.encode(self.tokens, cols, Needs::of([ActivationFormat::F32]));
        self.products(Activations::F32, std::iter::once(used(&layer.mix)), cols, self.tokens);
    }

    fn embed_ngrams(&mut self, _: &NgramTable, _: Tensor) {}

    fn add_ngrams(&mut self, layer: &NgramLayer) {
        grow(&mut self.sizes.ngrams, 3 * 4 * self.tokens * layer.streams.cols);
    }

    fn mlp(&mut self, x: Tensor, _: Norm, mlp: &Mlp, _: Tensor) {
        let needs = Needs::of([mlp.gate.matrix, mlp.up.matrix].map(|m| self.encoding(m)));
        self.encode(x.rows, x.cols, needs);
        grow(&mut self.sizes.identity_rows, x.rows);
        self.dense_gate_up(mlp, x.rows, |s| &mut s.hidden);
        self.products(self.mode, std::iter::once(used(&mlp.down)), mlp.gate.rows.len(), x.rows);
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        let (moe, next) = self.moes[moe.number()];
        ScratchPlanner::moe(self, moe, next, x.rows, residual.cols);
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, _: Tensor, residual: Tensor) -> Routing {
        self.mixture(x, moe, residual);
        Routing::default()
    }

    fn elementwise(&mut self, operation: &Elementwise) {
        if let Elementwise::SplitPairs { head, .. } = operation {
            grow(&mut self.sizes.row, *head);
        }
    }

    fn logits(&mut self, x: Tensor, _: Option<Norm>, head: MatrixId, _: Option<f32>) {
        let rows = self.wanted;
        self.encode(rows, x.cols, Needs::of([self.encoding(head)]));
        let vocabulary = self.weights[head.number()].rows();
        grow(&mut self.sizes.logits, rows * vocabulary);
        self.products(self.mode, std::iter::once((head.number(), vocabulary)), x.cols, rows);
    }
}
