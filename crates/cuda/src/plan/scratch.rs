//! The scratch that steps need on the device, known before any is allocated: [`ScratchPlanner`] stands in for the device while a model runs a step. It launches nothing and
//! notes the largest size to which each operation would grow each buffer.

use sluice_backend::{
    Activations, AttentionLayer, CacheLayer, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, DeltaShape,
    Elementwise, ExpertKind, IndexLayer, KvLayout, LatentLayer, Linear, MatrixId, Mlp, Moe, MoeId, NgramLayer,
    NgramTable, Norm, Operations, Projection, Routing, SelectLayer, StateSpaceLayer, StepInputs, StepScratch,
    StreamLayer, Tensor,
};

use crate::kernels::{Exact, FLOATS, INT11_FLOAT_FORMATS, RECORDS};
use crate::moe::activate::needs_with_floats;
use crate::moe::experts::operands;
use crate::multi::partition::{OperationKey, PlannedOperation, matrices};
use crate::ops::activations::{GROUP, int11_bytes};
use crate::ops::attention::{MIN_PREFILL_TOKENS, part_bytes};
use crate::ops::context::Context;
use crate::ops::int11_floats::{self, WIDE};
use crate::ops::int11_records::{self, RecordForm};
use crate::ops::{index, int11, latent, latent_rows, ngrams, sampling};
use crate::weights::{Needs, Weight};

/// Bytes of activations in each encoding.
#[derive(Default)]
struct EncodedSize([usize; 4]);

impl EncodedSize {
    fn grow(&mut self, rows: usize, cols: usize, needs: Needs) {
        let n = rows * cols;
        let sizes = [
            (needs.f32, 4 * n),
            (needs.bf16, 2 * n),
            (needs.int8, n + 8 * (n / GROUP)),
            (needs.int11, int11_bytes(rows, cols).iter().sum()),
        ];
        for (size, (needed, bytes)) in self.0.iter_mut().zip(sizes) {
            *size = (*size).max(if needed { bytes } else { 0 });
        }
    }

    fn bytes(&self) -> usize {
        self.0.iter().sum()
    }
}

/// Bytes of the pieces in which address ranges get memory. The last piece of angles, and of keys and values, is not full.
const PIECE: usize = 2 << 20;

fn grow(size: &mut usize, to: usize) {
    *size = (*size).max(to);
}

/// A backend that only notes sizes.
pub struct ScratchPlanner<'a> {
    pub mode: Activations,
    /// What tensor cores take with integers of 11 bits; nothing is made for what they do not.
    exact: Exact,
    pub weights: &'a [Weight],
    pub moes: Vec<&'a Moe>,
    pub layouts: &'a [KvLayout],
    /// The step's shape.
    tokens: usize,
    sequences: usize,
    wanted: usize,
    encoded: EncodedSize,
    hidden: EncodedSize,
    moe_x: EncodedSize,
    moe_router_x: EncodedSize,
    moe_latent: EncodedSize,
    moe_hidden: EncodedSize,
    moe_gathered: EncodedSize,
    shared_hidden: EncodedSize,
    /// Bytes of one of two buffers.
    gates: usize,
    moe_gates: usize,
    /// Bytes of gates and ups that take turns.
    moe_both: usize,
    /// Bytes of inputs in experts' orders, before they are encoded.
    moe_ordered: usize,
    /// Bytes of routers' results, and of outputs of routed experts.
    choice: usize,
    outputs: usize,
    /// Bytes of sorted pairs and of the encodings of one token; of the shared expert.
    pairs: usize,
    shared: usize,
    delta: usize,
    /// Bytes of latent attention's scratch, and of results of a few partitions.
    latent: usize,
    latent_parts: usize,
    latent_encoded: EncodedSize,
    /// Bytes of what indexers select, and of the scores of 128 positions.
    index_slots: usize,
    index_scores: usize,
    /// The last operation that selected positions.
    index_at: usize,
    state_space: usize,
    ngrams: usize,
    logits: usize,
    /// Bytes of integers that are made of weights.
    slices: usize,
    per_128_positions: usize,
    /// The operations in order.
    pub operations: Vec<PlannedOperation>,
}

impl<'a> ScratchPlanner<'a> {
    pub fn new(
        context: &'a Context,
        moes: Vec<&'a Moe>,
        layouts: &'a [KvLayout],
        inputs: &StepInputs,
    ) -> ScratchPlanner<'a> {
        ScratchPlanner {
            mode: context.mode,
            exact: context.gpu.device.exact().unwrap_or_default(),
            weights: &context.weights.all,
            moes,
            layouts,
            tokens: inputs.tokens().len(),
            sequences: inputs.sequences(),
            wanted: inputs.wanted().len(),
            encoded: EncodedSize::default(),
            hidden: EncodedSize::default(),
            moe_x: EncodedSize::default(),
            moe_router_x: EncodedSize::default(),
            moe_latent: EncodedSize::default(),
            moe_hidden: EncodedSize::default(),
            moe_gathered: EncodedSize::default(),
            shared_hidden: EncodedSize::default(),
            gates: 0,
            moe_gates: 0,
            moe_both: 0,
            moe_ordered: 0,
            choice: 0,
            outputs: 0,
            pairs: 0,
            shared: 0,
            delta: 0,
            latent: 0,
            latent_parts: 0,
            latent_encoded: EncodedSize::default(),
            index_slots: 0,
            index_scores: 0,
            index_at: 0,
            state_space: 0,
            ngrams: 0,
            logits: 0,
            slices: 0,
            per_128_positions: 0,
            operations: Vec::new(),
        }
    }

    fn note(&mut self, key: OperationKey, linears: &[&Linear], out: Option<Tensor>) {
        let matrices = linears.iter().map(|linear| linear.matrix.number()).collect();
        self.operations.push(PlannedOperation { key, matrices, out: out.map(|t| t.buffer) });
    }

    /// The scratch of the step; `angles`: bytes of a position in each table of rotary angles.
    pub fn scratch(&self, angles: &[usize]) -> StepScratch {
        let of_mixtures = [
            &self.moe_x,
            &self.moe_router_x,
            &self.moe_latent,
            &self.moe_hidden,
            &self.moe_gathered,
            &self.shared_hidden,
        ];
        let encoded = [&self.encoded, &self.hidden, &self.latent_encoded].into_iter().chain(of_mixtures);
        let encoded: usize = encoded.map(EncodedSize::bytes).sum();
        let rest =
            self.moe_both + self.moe_ordered + self.choice + self.outputs + self.pairs + self.shared + self.delta;
        // Each of up to three inputs has room of its own for integers of weights.
        let rest = rest + self.state_space + self.ngrams + self.logits + 3 * self.slices;
        // Scores have room for up to eight times 128 positions more.
        let rest = rest + self.latent + self.latent_parts + self.index_slots + 8 * self.index_scores;
        // The arrays of tokens and sequences for each group. Block tables grow with the context.
        let step = (64 * self.tokens + (1 << 14)) * self.layouts.len().max(1);
        StepScratch {
            fixed: encoded
                + 2 * (self.gates + self.moe_gates)
                + rest
                + step
                + PIECE * (angles.len() + self.layouts.len()),
            per_128_positions: self.per_128_positions + self.index_scores + 128 * angles.iter().sum::<usize>(),
        }
    }

    /// Products of one input with so many tokens may have integers made of their weights first.
    fn split(&mut self, linears: &[&Linear], tokens: usize) {
        let matrices: Vec<_> = linears.iter().map(|l| (l.matrix, l.rows.len())).collect();
        self.split_rows(&matrices, tokens);
    }

    /// The same of so many rows of matrices.
    fn split_rows(&mut self, matrices: &[(MatrixId, usize)], tokens: usize) {
        let of = |matrix: MatrixId| &self.weights[matrix.number()];
        let rows = |counts: &dyn Fn(MatrixId) -> bool| {
            let counted = matrices.iter().filter(|(matrix, _)| counts(*matrix));
            counted.map(|(_, rows)| rows.next_multiple_of(WIDE)).sum()
        };
        let cols = matrices.iter().map(|(matrix, _)| of(*matrix).cols()).max().unwrap_or(0);
        let is_split = self.exact.wide[FLOATS] || self.exact.few[FLOATS];
        let floats = rows(&|matrix| is_split && INT11_FLOAT_FORMATS.contains(&of(matrix).kind(self.mode)));
        let mut most = int11_floats::scratch_bytes(floats, cols, tokens);
        let forms = matrices.iter().filter_map(|(matrix, _)| RecordForm::of(of(*matrix).form()));
        for form in forms.filter(|_| self.exact.wide[RECORDS]) {
            let alike = rows(&|matrix| RecordForm::of(of(matrix).form()) == Some(form));
            most = most.max(int11_records::scratch_bytes(form, alike, cols, tokens));
        }
        grow(&mut self.slices, most);
    }

    /// The same of a mixture's experts, where tensor cores do not take all of their weights as they lie in memory.
    fn split_experts(&mut self, moe: &Moe, pairs: usize) {
        let all = operands(&moe.experts, 0).map(|o| (&self.weights[o.weight], o.rows.div_ceil(WIDE)));
        let directly = |weight: &Weight| int11::takes_directly(weight.kind(self.mode), weight.groups());
        if !self.exact.wide[RECORDS] || all.iter().all(|(weight, _)| directly(weight)) {
            return;
        }
        let [(gate, gates), (_, ups), (down, downs)] = all;
        for (weight, tiles) in [(gate, gates + ups), (down, downs)] {
            let form = RecordForm::of(weight.form());
            let pairs = (pairs, moe.experts.count);
            let bytes = form.map_or(0, |form| int11_records::pair_scratch_bytes(form, tiles, weight.cols(), pairs));
            grow(&mut self.slices, bytes);
        }
    }

    /// What was selected for a layer stays where it was: no cut lies between.
    fn take_selection(&mut self, selected: bool) {
        if selected {
            self.operations[self.index_at..].iter_mut().for_each(|operation| operation.out = None);
        }
    }

    fn needs<'l>(&self, linears: impl IntoIterator<Item = &'l Linear>) -> Needs {
        let of = |l: &Linear| self.weights[l.matrix.number()].kind(self.mode).needs();
        linears.into_iter().map(of).fold(Needs::default(), Needs::and)
    }
}

impl Operations for ScratchPlanner<'_> {
    fn project(&mut self, x: Tensor, _: Option<Norm>, projections: &[Projection]) {
        let needs = self.needs(projections.iter().map(|p| &p.linear));
        self.encoded.grow(x.rows, x.cols, needs);
        let linears: Vec<&Linear> = projections.iter().map(|p| &p.linear).collect();
        self.split(&linears, x.rows);
        self.note(OperationKey::project(projections), &linears, None);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        self.note(OperationKey::Add(linear.matrix.number()), &[linear], Some(out));
        let needs = self.needs([linear]);
        self.split(&[linear], x.rows);
        self.encoded.grow(x.rows, x.cols, needs);
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        // Partitions with blocks of their own write a part each; rounding at most doubles their number.
        let tokens = self.tokens.min(MIN_PREFILL_TOKENS.max(self.sequences));
        let part = tokens * layer.heads * part_bytes(self.layouts[layer.group].v_dim);
        grow(&mut self.per_128_positions, 2 * part);
        self.take_selection(layer.selected);
        self.note(OperationKey::Attention(layer.group, layer.layer), &[], None);
    }

    fn latent_attention(&mut self, layer: &LatentLayer) {
        let rows = latent::most_rows(layer.heads, self.tokens);
        let matrices = [layer.keys.rows(), layer.values].map(|rows| rows.matrix.number());
        for (matrix, cols) in matrices.into_iter().zip([layer.plain(), layer.rank]) {
            self.latent_encoded.grow(
                latent::padded_rows(layer.heads, rows),
                cols,
                self.weights[matrix].kind(self.mode).needs(),
            );
        }
        grow(&mut self.latent, latent::scratch_bytes(layer, rows));
        let (fixed, part) = latent_rows::part_bytes(layer.rank);
        grow(&mut self.latent_parts, fixed);
        grow(&mut self.per_128_positions, part);
        self.take_selection(layer.selected);
        let key = OperationKey::Attention(layer.group, layer.layer);
        self.operations.push(PlannedOperation { key, matrices: matrices.to_vec(), out: None });
    }

    fn index(&mut self, layer: &IndexLayer) {
        let (slots, scores) = index::scratch_bytes(layer, self.tokens);
        grow(&mut self.index_slots, slots);
        grow(&mut self.index_scores, scores);
        self.index_at = self.operations.len();
        self.note(OperationKey::Attention(layer.group, layer.layer), &[], None);
    }

    fn compress(&mut self, layer: &CompressLayer) {
        for CacheLayer { group, layer } in [layer.rows, layer.entries] {
            self.note(OperationKey::Attention(group, layer), &[], None);
        }
    }

    fn select(&mut self, layer: &SelectLayer) {
        grow(&mut self.index_slots, 4 * self.tokens * layer.top);
        grow(&mut self.index_scores, index::scores_bytes(self.tokens));
        self.note(OperationKey::Attention(layer.keys.group, layer.keys.layer), &[], None);
    }

    fn compressed_attention(&mut self, layer: &CompressedLayer) {
        self.note(OperationKey::Attention(layer.rows.group, layer.rows.layer), &[], None);
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        grow(&mut self.delta, 4 * self.tokens * (layer.shape.channels() + 2 * layer.shape.value_heads));
        self.note(OperationKey::Recurrent(layer.layer), &[], None);
    }

    fn channel_delta(&mut self, layer: &ChannelDeltaLayer) {
        let DeltaShape { value_heads, key_dim, .. } = layer.shape;
        grow(&mut self.delta, 4 * self.tokens * (layer.shape.channels() + value_heads * (key_dim + 1)));
        self.note(OperationKey::Recurrent(layer.layer), &[], None);
    }

    fn state_space(&mut self, layer: &StateSpaceLayer) {
        grow(&mut self.state_space, 4 * self.tokens * layer.shape.channels());
        self.note(OperationKey::Recurrent(layer.layer), &[], None);
    }

    fn collapse(&mut self, layer: &StreamLayer) {
        self.note(OperationKey::Collapse(layer.mix.matrix.number()), &[&layer.mix], None);
        self.encoded.grow(self.tokens, layer.streams.cols, Needs::F32);
    }

    fn embed_ngrams(&mut self, table: &NgramTable, out: Tensor) {
        self.operations.push(PlannedOperation {
            key: OperationKey::Embed(table.parts[0].number()),
            matrices: table.parts.iter().map(|part| part.number()).collect(),
            out: Some(out.buffer),
        });
    }

    fn add_ngrams(&mut self, layer: &NgramLayer) {
        grow(&mut self.ngrams, ngrams::scratch_bytes(layer, self.tokens));
        self.note(OperationKey::Ngrams(layer.state_at), &[], Some(layer.streams));
    }

    fn mlp(&mut self, x: Tensor, _: Norm, mlp: &Mlp, residual: Tensor) {
        self.note(OperationKey::Mlp(mlp.gate.matrix.number()), &[&mlp.gate, &mlp.up, &mlp.down], Some(residual));
        let (both, last) = (self.needs([&mlp.gate, &mlp.up]), self.needs([&mlp.down]));
        let intermediate = mlp.gate.rows.len();
        self.split(&[&mlp.gate, &mlp.up], x.rows);
        self.split(&[&mlp.down], x.rows);
        grow(&mut self.gates, 4 * x.rows * intermediate);
        self.encoded.grow(x.rows, x.cols, both);
        self.hidden.grow(x.rows, intermediate, last);
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        let number = moe.number();
        let moe = self.moes[number];
        self.operations.push(PlannedOperation {
            key: OperationKey::Mixture(number),
            matrices: matrices(moe),
            out: Some(residual.buffer),
        });
        let (k, count, intermediate) = (moe.scoring.k(), moe.experts.count, moe.experts.intermediate());
        let pairs = x.rows * k;
        let [mut first, mut last] = [Needs::default(); 2];
        for expert in 0..count {
            let [gate, up, down] =
                operands(&moe.experts, expert).map(|o| self.weights[o.weight].kind(self.mode).needs());
            (first, last) = (first.and(gate).and(up), last.and(down));
        }
        let is_interleaved = matches!(moe.experts.interleaved(), Ok(Some(_)));
        if is_interleaved {
            grow(&mut self.moe_both, 8 * pairs * intermediate);
        } else {
            grow(&mut self.moe_gates, 4 * pairs * intermediate);
        }
        if is_interleaved || moe.experts.biases.is_some() || moe.experts.kind != ExpertKind::SwiGlu {
            last = needs_with_floats(last);
        }
        if moe.router_norm.is_some() {
            self.moe_router_x.grow(x.rows, x.cols, Needs::F32);
        }
        let (mut of_x, width) = (Needs::F32, moe.experts.hidden());
        match moe.experts.order {
            Some(_) => {
                self.moe_gathered.grow(pairs, width, first);
                grow(&mut self.moe_ordered, 4 * pairs * width);
            }
            None => of_x = of_x.and(first),
        }
        if moe.latent.is_some() {
            self.moe_latent.grow(x.rows, width, of_x);
            of_x = Needs::F32;
        }
        if let Some(shared) = &moe.shared {
            of_x = of_x.and(self.needs([&shared.mlp.gate, &shared.mlp.up]));
            let (needs, width) = (self.needs([&shared.mlp.down]), shared.mlp.gate.rows.len());
            self.split(&[&shared.mlp.gate, &shared.mlp.up], x.rows);
            self.split(&[&shared.mlp.down], x.rows);
            self.shared_hidden.grow(x.rows, width, needs);
            grow(&mut self.moe_gates, 4 * x.rows * width);
            grow(&mut self.shared, 4 * x.rows * (residual.cols + 1));
        }
        self.moe_x.grow(x.rows, x.cols, of_x);
        self.moe_hidden.grow(pairs, intermediate, last);
        self.split_experts(moe, pairs);
        grow(&mut self.choice, 4 * x.rows * (count + 2 * k));
        grow(&mut self.outputs, 4 * pairs * residual.cols);
        // Tiles of 16 bytes, the order and the counts; for one token the encoded inputs of gate and up, and of down.
        grow(&mut self.pairs, 16 * (pairs + 1) + 4 * (pairs + count) + 2 * (x.cols + (k + 1) * intermediate) + 1024);
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, _: Tensor, residual: Tensor) -> Routing {
        self.mixture(x, moe, residual);
        Routing::default()
    }

    fn elementwise(&mut self, operation: &Elementwise) {
        if let Elementwise::AddNormed { residual, .. }
        | Elementwise::Expand { streams: residual, .. }
        | Elementwise::Inject { streams: residual, .. } = operation
        {
            self.note(OperationKey::AddNormed, &[], Some(*residual));
        }
    }

    fn logits(&mut self, x: Tensor, _: Option<Norm>, head: MatrixId, _: Option<f32>) {
        self.operations.push(PlannedOperation {
            key: OperationKey::Logits(head.number()),
            matrices: vec![head.number()],
            out: None,
        });
        let weight = &self.weights[head.number()];
        grow(&mut self.logits, 4 * self.wanted * weight.rows() + sampling::bytes(self.wanted, weight.rows()));
        self.encoded.grow(self.wanted, x.cols, weight.kind(self.mode).needs());
        let rows = weight.rows();
        self.split_rows(&[(head, rows)], self.wanted);
    }

    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let matrices = vec![table.number()];
        self.operations.push(PlannedOperation {
            key: OperationKey::Embed(table.number()),
            matrices,
            out: Some(out.buffer),
        });
    }
}
