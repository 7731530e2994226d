//! Checks of the operations of a step.

use std::collections::HashSet;

use sluice_backend::{
    AttentionLayer, CacheLayer, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Elementwise, IndexLayer,
    IndexNorm, KvLayout, LatentKeys, LatentLayer, Linear, MOST_ATTENDED, MatrixId, Mlp, MoeId, NgramLayer, NgramTable,
    Norm, Operations, Projection, RotaryId, Routing, SelectLayer, StateSpaceLayer, StepInputs, StreamLayer, Tensor,
};

use super::names::Names;
use super::recording::{CacheContents, Operation};

/// A step in progress.
pub(super) struct Step {
    pub inputs: StepInputs,
    pub operations: Vec<Operation>,
    /// What the caches held when it began.
    pub before: CacheContents,
    /// The step only measures what a real one would need.
    pub is_sizing: bool,
    last_moe: Option<usize>,
}

impl Step {
    pub fn new(inputs: StepInputs, before: CacheContents) -> Step {
        Step { inputs, operations: Vec::new(), before, is_sizing: false, last_moe: None }
    }
}

/// Operations of a step, checked and passed on to a backend or a planner.
pub(super) struct CheckedStep<'a> {
    pub names: &'a Names,
    pub step: &'a mut Step,
    /// Changes an operation before it runs.
    pub fault: Option<fn(&mut Operation)>,
    pub inner: &'a mut dyn Operations,
}

impl CheckedStep<'_> {
    fn tokens(&self) -> usize {
        self.step.inputs.tokens().len()
    }

    /// Where an attention layer's rows go, and where those that it sees are.
    fn check_slots(
        &self,
        group: usize,
        block_tokens: usize,
        window: Option<usize>,
        rotary: impl Into<Option<RotaryId>>,
    ) {
        let (inputs, pool) = (&self.step.inputs, self.names.pools.all().get(group).expect("a cache group"));
        let mut taken = HashSet::new();
        for slot in inputs.slots(group) {
            assert!((*slot as usize) < pool.committed * block_tokens, "slot {slot} is not committed");
            assert!(taken.insert(*slot), "slot {slot} has two tokens");
        }
        for s in 0..inputs.sequences() {
            let (rows, first) = (inputs.rows(s), inputs.position(s));
            let seen = window.map_or(0, |w| (first + 1).saturating_sub(w)) / block_tokens;
            let last = (first + rows.len() - 1) / block_tokens;
            let blocks = &inputs.table(group, s)[seen..=last];
            assert!(blocks.iter().all(|b| (*b as usize) < pool.committed), "a block that is not committed");
        }
        let Some(rotary) = rotary.into() else { return };
        let positions = self.names.rotaries.get(rotary.number(), "rotary embedding").1;
        assert!(inputs.reach() <= positions, "position {} of {positions}", inputs.reach() - 1);
    }

    /// A layer of rows that are keys and values: its KV heads, the elements of a row, and positions that may share one.
    fn check_rows(
        &self,
        CacheLayer { group, layer }: CacheLayer,
        (heads, dim, rate): (usize, usize, usize),
        window: Option<usize>,
        rotary: Option<RotaryId>,
    ) {
        let pool = self.names.pools.all().get(group).expect("a cache group");
        let KvLayout { kv_heads, k_dim, v_dim, block_tokens, layers, every, .. } = pool.outer.layout;
        assert_eq!((kv_heads, k_dim, v_dim), (heads, dim, 0), "rows of a group");
        assert!(layer < layers && rate.is_multiple_of(every), "layers of a group, and rows of {every} positions");
        self.check_slots(group, block_tokens, window, rotary);
    }

    /// Whether recurrent layer `layer` has its place, of `len` elements, in a state for each sequence.
    fn check_states(&self, layer: usize, len: usize) {
        let (rows, all) = self.names.states.expect("a pool of states");
        assert!((layer + 1) * len <= all, "layer {layer} of states of {all}");
        let inputs = &self.step.inputs;
        if !self.step.is_sizing {
            let states: HashSet<usize> = (0..inputs.sequences()).map(|s| inputs.state(s)).collect();
            assert!(states.len() == inputs.sequences() && states.iter().all(|s| *s < rows), "a state each");
        }
    }

    /// Runs the operation on the device inside, and records it.
    fn run(&mut self, operation: Operation) {
        let mut done = operation.clone();
        if let Some(fault) = self.fault {
            fault(&mut done);
        }
        let (n, b) = (self.names, &mut *self.inner);
        match &done {
            Operation::Embed { table, out } => b.embed(n.matrix(*table).inner, n.tensor(*out)),
            Operation::Project { x, norm, projections } => {
                let projections: Vec<_> = projections.iter().map(|p| n.projection(p, x.rows, x.cols)).collect();
                b.project(n.tensor(*x), norm.map(|norm| n.norm(norm)), &projections);
            }
            Operation::ProjectAdd { x, linear, out } => {
                b.project_add(n.tensor(*x), &n.linear_of(linear, out.cols, x.cols), n.tensor(*out));
            }
            Operation::Attention(layer) => b.attention(&n.attention(layer)),
            Operation::LatentAttention(layer) => b.latent_attention(&n.latent(layer)),
            Operation::Index(layer) => b.index(&n.index(layer)),
            Operation::Compress(layer) => b.compress(&n.compress(layer)),
            Operation::Select(layer) => b.select(&n.select(layer)),
            Operation::CompressedAttention(layer) => b.compressed_attention(&n.compressed(layer)),
            Operation::DeltaNet(layer) => b.delta_net(&n.delta(layer)),
            Operation::ChannelDelta(layer) => b.channel_delta(&n.channel_delta(layer)),
            Operation::StateSpace(layer) => b.state_space(&n.state_space(layer)),
            Operation::Collapse(layer) => b.collapse(&n.streams(layer)),
            Operation::EmbedNgrams { table, out } => b.embed_ngrams(&n.ngram_table(table), n.tensor(*out)),
            Operation::AddNgrams(layer) => b.add_ngrams(&n.ngrams(layer)),
            Operation::Mlp { x, norm, mlp, residual } => {
                b.mlp(n.tensor(*x), n.norm(*norm), &n.mlp(mlp, x.cols), n.tensor(*residual));
            }
            Operation::Elementwise(operation) => b.elementwise(&n.elementwise(operation)),
            Operation::Mixture { x, moe, residual } => {
                let moe = n.moes.get(moe.number(), "mixture").0;
                b.mixture(n.tensor(*x), moe, n.tensor(*residual));
            }
            Operation::Logits { x, norm, head, softcap } => {
                b.logits(n.tensor(*x), norm.map(|norm| n.norm(norm)), n.matrix(*head).inner, *softcap);
            }
        }
        self.step.operations.push(operation);
    }
}

impl Operations for CheckedStep<'_> {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let matrix = self.names.matrix(table);
        assert_eq!(matrix.cols, out.cols, "columns of an embedding");
        assert!(out.rows >= self.tokens(), "a row for each token");
        let tokens = self.step.inputs.tokens();
        assert!(tokens.iter().all(|t| (*t as usize) < matrix.rows), "a token outside of the embedding");
        self.run(Operation::Embed { table, out });
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        assert_eq!(x.rows, self.tokens(), "a row for each token");
        assert!(norm.is_none_or(|n| n.weight.cols == x.cols), "a norm over {} columns", x.cols);
        self.run(Operation::Project { x, norm, projections: projections.to_vec() });
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        assert_eq!(x.rows, self.tokens(), "a row for each token");
        assert!(out.rows >= x.rows, "an output of {} rows for {} tokens", out.rows, x.rows);
        self.run(Operation::ProjectAdd { x, linear: linear.clone(), out });
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        let tokens = self.tokens();
        let step = &*self.step;
        let AttentionLayer { q, k, v, out, heads, group, .. } = *layer;
        assert!([q, k, v, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        if !step.is_sizing {
            // 1. Shapes
            let pool = self.names.pools.all().get(group).expect("a cache group");
            let KvLayout { kv_heads, k_dim, v_dim, block_tokens, layers, .. } = pool.outer.layout;
            let width = if layer.gated { 2 * k_dim } else { k_dim };
            assert_eq!((q.cols, out.cols), (heads * width, heads * v_dim), "columns of q and the output");
            let own = (kv_heads * k_dim, kv_heads * v_dim);
            assert!(layer.shared || (k.cols, v.cols) == own, "columns of k and v");
            assert!(heads.is_multiple_of(kv_heads) && layer.layer < layers, "heads and layers of a group");
            // 2. Where keys and values go, and where they come from
            self.check_slots(group, block_tokens, layer.window, layer.rotary);
        }
        let indexed = self.step.operations.iter().any(|o| matches!(o, Operation::Index(of) if of.rows_group == group));
        assert!(!layer.selected || indexed && layer.window.is_none(), "an indexer before, in this step");
        self.run(Operation::Attention(layer.clone()));
    }

    fn latent_attention(&mut self, layer: &LatentLayer) {
        let tokens = self.tokens();
        let LatentLayer { q, kv, out, heads, rank, group, .. } = *layer;
        assert!([q, kv, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        assert!(kv.cols >= rank && layer.rotated().is_multiple_of(2), "an even number of rotated elements");
        let width = layer.plain() + layer.rotated();
        assert_eq!((q.cols, out.cols), (heads * width, heads * layer.v_dim()), "columns of q and the output");
        assert_eq!(layer.norm.weight.cols, rank, "a norm over the vector");
        let keys = if let LatentKeys::Rows(_) = layer.keys { layer.plain() } else { rank };
        assert_eq!(layer.keys.rows().rows, keys, "rows of a head's keys");
        let indexed = self.step.operations.iter().any(|o| matches!(o, Operation::Index(of) if of.rows_group == group));
        assert!(!layer.selected || indexed, "an indexer before, in this step");
        if !self.step.is_sizing {
            let pool = self.names.pools.all().get(group).expect("a cache group");
            let KvLayout { kv_heads, k_dim, v_dim, block_tokens, layers, .. } = pool.outer.layout;
            assert_eq!((kv_heads, k_dim, v_dim), (1, kv.cols, 0), "rows of a latent group");
            assert!(layer.layer < layers, "layers of a group");
            self.check_slots(group, block_tokens, None, layer.rotary);
        }
        self.run(Operation::LatentAttention(layer.clone()));
    }

    fn index(&mut self, layer: &IndexLayer) {
        let tokens = self.tokens();
        let IndexLayer { q, k, weights, heads, top, group, rows_group, .. } = *layer;
        assert!([q, k].into_iter().chain(weights).all(|t| t.rows >= tokens), "a row for each token");
        assert!(q.cols == heads * layer.dim() && top > 0, "columns of an indexer");
        assert!(weights.is_none_or(|t| t.cols == heads), "a weight of each head");
        let norm = match layer.norm {
            IndexNorm::Tokens(norm) => norm.scale,
            IndexNorm::Pools(norm) => norm,
        };
        assert!(norm.weight.cols == layer.dim(), "a norm over the key");
        assert!(layer.pool.is_some() || matches!(layer.norm, IndexNorm::Tokens(_)), "a norm of pools, and no pools");
        if let Some(pool) = layer.pool {
            assert!(pool.size > 0 && top.is_multiple_of(pool.size), "{top} positions in pools of {}", pool.size);
        }
        if let Some(of) = layer.pool_logits() {
            assert!(of.logits.rows >= tokens && of.logits.cols == layer.dim(), "logits of each token");
            let all = layer.pool_size() * layer.dim();
            assert_eq!((of.bias.rows, of.bias.cols), (1, all), "a bias for each position");
        }
        if !self.step.is_sizing {
            let pools = self.names.pools.all();
            let KvLayout { kv_heads, k_dim, v_dim, block_tokens, layers, .. } =
                pools.get(group).expect("a cache group").outer.layout;
            assert_eq!((kv_heads, k_dim, v_dim), (layer.kv_heads(), layer.dim(), 0), "keys of an indexer's group");
            assert!(layer.layer < layers && rows_group < pools.len(), "layers of a group");
            self.check_slots(group, block_tokens, None, layer.rotary);
        }
        self.run(Operation::Index(layer.clone()));
    }

    fn compress(&mut self, layer: &CompressLayer) {
        let tokens = self.tokens();
        let CompressLayer { values, logits, bias, rate, .. } = *layer;
        let (dim, series) = (layer.dim(), layer.series());
        assert!([values, logits].iter().all(|t| t.rows >= tokens && t.cols == series * dim), "a row for each token");
        assert!((1..=2).contains(&series) && rate > 0, "{series} series, entries of {rate} positions");
        assert_eq!((bias.rows, bias.cols), (1, layer.rows_of_entry() * dim), "a bias for each row of an entry");
        if !self.step.is_sizing {
            let window = layer.rows_of_entry();
            self.check_rows(layer.rows, (2 * series, dim, 1), Some(window), Some(layer.rotary));
            self.check_rows(layer.entries, (1, dim, rate), None, Some(layer.rotary));
        }
        self.run(Operation::Compress(layer.clone()));
    }

    fn select(&mut self, layer: &SelectLayer) {
        let tokens = self.tokens();
        let SelectLayer { q, weights, heads, top, rate, keys, .. } = *layer;
        assert!([q, weights].iter().all(|t| t.rows >= tokens) && weights.cols == heads, "a row for each token");
        assert!(heads > 0 && q.cols.is_multiple_of(heads) && top > 0, "columns of an indexer");
        if !self.step.is_sizing {
            self.check_rows(keys, (1, q.cols / heads, rate), None, None);
        }
        self.run(Operation::Select(layer.clone()));
    }

    fn compressed_attention(&mut self, layer: &CompressedLayer) {
        let tokens = self.tokens();
        let CompressedLayer { q, row, out, heads, rows, window, entries, sinks, .. } = *layer;
        assert!([q, row, out].iter().all(|t| t.rows >= tokens) && window > 0, "a row for each token");
        let width = heads * layer.dim();
        assert_eq!((q.cols, out.cols, sinks.rows, sinks.cols), (width, width, 1, heads), "columns of heads");
        let selects = |o: &Operation| matches!(o, Operation::Select(of) if Some(of.top) == entries.and_then(|e| e.top));
        let limited = entries.is_some_and(|of| of.top.is_some());
        assert!(!limited || self.step.operations.iter().any(selects), "an indexer before, in this step");
        if !self.step.is_sizing {
            self.check_rows(rows, (1, layer.dim(), 1), Some(window), None);
            if let Some(of) = entries {
                self.check_rows(of.cache, (1, layer.dim(), of.rate), None, None);
            }
        }
        self.run(Operation::CompressedAttention(layer.clone()));
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        let tokens = self.tokens();
        let DeltaLayer { shape, qkv, z, b, a, out, .. } = *layer;
        let values = shape.value_heads * shape.value_dim;
        assert!([qkv, z, b, a, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        assert_eq!((qkv.cols, z.cols, out.cols), (shape.channels(), values, values), "columns of a delta rule");
        self.check_states(layer.layer, shape.state_len());
        self.run(Operation::DeltaNet(layer.clone()));
    }

    fn channel_delta(&mut self, layer: &ChannelDeltaLayer) {
        let tokens = self.tokens();
        let ChannelDeltaLayer { shape, qkv, z, b, f, out, .. } = *layer;
        let (heads, values) = (shape.value_heads, shape.value_heads * shape.value_dim);
        assert!([qkv, z, b, f, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        assert_eq!((qkv.cols, z.cols, out.cols), (shape.channels(), values, values), "columns of a delta rule");
        assert!(heads == shape.key_heads && (b.cols, f.cols) == (heads, heads * shape.key_dim), "columns of gates");
        self.check_states(layer.layer, shape.state_len());
        self.run(Operation::ChannelDelta(layer.clone()));
    }

    fn state_space(&mut self, layer: &StateSpaceLayer) {
        let tokens = self.tokens();
        let StateSpaceLayer { shape, xbc, z, dt, out, .. } = *layer;
        assert!([xbc, z, dt, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        let (inner, heads) = (shape.inner(), shape.heads);
        assert_eq!(
            (xbc.cols, z.cols, out.cols, dt.cols),
            (shape.channels(), inner, inner, heads),
            "columns of a layer"
        );
        assert!(heads.is_multiple_of(shape.groups) && layer.norm.weight.cols == inner, "groups, and a norm over all");
        self.check_states(layer.layer, shape.state_len());
        self.run(Operation::StateSpace(layer.clone()));
    }

    fn collapse(&mut self, layer: &StreamLayer) {
        let (tokens, n) = (self.tokens(), layer.count());
        let StreamLayer { streams, weights, out, bias, .. } = *layer;
        assert!([streams, weights, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        assert!(n > 0 && streams.cols == n * out.cols && layer.norm.weight.cols == streams.cols, "columns of streams");
        assert!([n, (2 + n) * n].contains(&weights.cols), "columns of weights");
        assert_eq!((bias.rows, bias.cols), (1, weights.cols), "a bias for each");
        self.run(Operation::Collapse(layer.clone()));
    }

    fn embed_ngrams(&mut self, table: &NgramTable, out: Tensor) {
        assert!(out.rows >= self.tokens() && out.cols == table.hash.heads() * table.cols, "a row for each head");
        self.run(Operation::EmbedNgrams { table: table.clone(), out });
    }

    fn add_ngrams(&mut self, layer: &NgramLayer) {
        let NgramLayer { keys, queries, value, streams, conv, .. } = *layer;
        let tokens = self.tokens();
        assert!([keys, queries, value, streams].iter().all(|t| t.rows >= tokens), "a row for each token");
        assert!([keys, queries, conv, layer.norm.weight].iter().all(|t| t.cols == streams.cols), "columns of streams");
        assert!(streams.cols.is_multiple_of(value.cols) && conv.rows > 0, "columns of a value, and taps");
        let (_, all) = self.names.states.expect("a pool of states");
        assert!(layer.state_at + layer.state_len() <= all, "its place in states of {all}");
        self.run(Operation::AddNgrams(layer.clone()));
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        assert_eq!(x.rows, self.tokens(), "a row for each token");
        assert!(norm.weight.cols == x.cols && residual.cols == x.cols && residual.rows >= x.rows, "shapes alike");
        self.run(Operation::Mlp { x, norm, mlp: mlp.clone(), residual });
    }

    fn elementwise(&mut self, operation: &Elementwise) {
        let tokens = self.tokens();
        let fits = |a: Tensor, b: Tensor| a.rows >= tokens && b.rows >= tokens && a.cols == b.cols;
        match *operation {
            Elementwise::Scale { x, .. } => assert!(x.rows >= tokens, "a row for each token"),
            Elementwise::GeGlu { gate, up }
            | Elementwise::SwiGlu { gate, up }
            | Elementwise::SiTu { gate, up, .. }
            | Elementwise::SigmoidGate { x: gate, gate: up }
            | Elementwise::ClampedSwiGlu { gate, up, .. } => {
                assert!(fits(gate, up), "shapes alike");
            }
            Elementwise::AttendStreams { streams, norm, out } => {
                let count = streams.cols / out.cols.max(1);
                assert!(streams.rows >= tokens && out.rows >= tokens, "a row for each token");
                assert!((1..=MOST_ATTENDED).contains(&count) && streams.cols == count * out.cols, "whole streams");
                assert_eq!(norm.weight.cols, out.cols, "a weight for each element");
            }
            Elementwise::Expand { x, weights, streams } => {
                let n = streams.cols / x.cols;
                assert!([x, weights, streams].iter().all(|t| t.rows >= tokens), "a row for each token");
                assert!(streams.cols == n * x.cols && weights.cols == (2 + n) * n, "columns of streams and weights");
            }
            Elementwise::Mean { streams, out } => {
                assert!(streams.rows >= tokens && out.rows >= tokens, "a row for each token");
                assert!(streams.cols.is_multiple_of(out.cols), "columns of streams");
            }
            Elementwise::NormGroups { x, norm, group, out } => {
                assert!(fits(x, out) && norm.weight.cols == x.cols, "shapes alike");
                assert!(group > 0 && x.cols.is_multiple_of(group), "whole runs");
            }
            Elementwise::DividedSilu { x, .. } => assert!(x.rows >= tokens, "a row for each token"),
            Elementwise::GatedMean { gates, streams, out } => {
                assert!(fits(gates, streams) && out.rows >= tokens, "a row for each token");
                assert!(streams.cols.is_multiple_of(out.cols), "columns of streams");
            }
            Elementwise::Inject { x, logits, streams } => {
                assert!([x, logits, streams].iter().all(|t| t.rows >= tokens), "a row for each token");
                assert!(streams.cols == logits.cols * x.cols, "columns of streams");
            }
            Elementwise::SquaredRelu { x } => assert!(x.rows >= tokens, "a row for each token"),
            Elementwise::Zero { out } => assert!(out.rows >= tokens, "a row for each token"),
            Elementwise::Norm { x, norm, out } => {
                assert!(fits(x, out) && x.cols.is_multiple_of(norm.weight.cols), "shapes alike");
            }
            Elementwise::ScaleRows { x, factors } => {
                assert!(x.rows >= tokens && factors.period > 0, "a row for each token");
                assert!(factors.table.rows == 1 && factors.table.cols > 0, "a row of factors");
            }
            Elementwise::AddNormed { x, norm, residual } => {
                assert!(fits(x, residual) && x.cols.is_multiple_of(norm.weight.cols), "shapes alike");
            }
            Elementwise::Gather { x, order, out } => {
                assert!(x.rows >= tokens && out.rows >= tokens, "a row for each token");
                assert!(order.rows == 1 && order.cols == out.cols, "a number for each column");
                assert!(x.buffer != out.buffer, "what is gathered is read elsewhere");
            }
            Elementwise::TurnPairs { x, head, rotary, .. } => {
                assert!(x.rows >= tokens && head > 0 && x.cols.is_multiple_of(head), "heads of pairs");
                let positions = self.names.rotaries.get(rotary.number(), "rotary embedding").1;
                assert!(self.step.is_sizing || self.step.inputs.reach() <= positions, "angles of all positions");
            }
            Elementwise::SplitPairs { x, head } => {
                assert!(x.rows >= tokens && head > 0 && head.is_multiple_of(2), "heads of pairs");
                assert!(x.cols.is_multiple_of(head), "{} columns in heads of {head}", x.cols);
            }
        }
        self.run(Operation::Elementwise(*operation));
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        assert_eq!(x.rows, self.tokens(), "a row for each token");
        let (_, known) = self.names.moes.get(moe.number(), "mixture");
        let hidden = known.experts.hidden();
        assert!(residual.cols == hidden && (x.cols == hidden || known.latent.is_some()), "shapes alike");
        assert!(known.latent.is_none_or(|t| t.rows >= x.rows), "what experts take, of each token");
        assert_eq!(residual.rows, x.rows, "a row for each token");
        let before = self.step.last_moe.replace(moe.number());
        assert!(before.is_none_or(|b| b < moe.number()), "mixtures in the order in which they were made known");
        self.run(Operation::Mixture { x, moe, residual });
    }

    fn logits(&mut self, x: Tensor, norm: Option<Norm>, head: MatrixId, softcap: Option<f32>) {
        assert_eq!(x.rows, self.tokens(), "a row for each token");
        let matrix = self.names.matrix(head);
        assert!(matrix.cols == x.cols && norm.is_none_or(|n| n.weight.cols == x.cols), "columns of the head");
        let step = &*self.step;
        assert!(!step.inputs.wanted().is_empty(), "logits that nobody wants");
        let before = step.operations.iter().any(|o| matches!(o, Operation::Logits { .. }));
        assert!(!before, "logits once in a step");
        self.run(Operation::Logits { x, norm, head, softcap });
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        assert_eq!(x.rows, self.tokens(), "a row for each token");
        let inner = self.names.moes.get(moe.number(), "mixture").0;
        let [x, normed, residual] = [x, normed, residual].map(|t| self.names.tensor(t));
        self.inner.mixture_but_experts(x, inner, normed, residual)
    }
}
