//! The checker's own handles, and the inner handles and shapes that belong to them.

use sluice_backend::{
    AttentionLayer, BufferId, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Elementwise, ExpertBiases,
    ExpertMatrix, Experts, HeadRows, IndexLayer, IndexNorm, IndexPool, KvPool, LatentKeys, LatentLayer, LayerNorm,
    Linear, MatrixId, Mlp, Moe, MoeId, NgramLayer, NgramTable, Norm, PoolLogits, Projection, RotaryId, RowFactors,
    SelectLayer, SharedExpert, StateSpaceLayer, StreamLayer, Tensor,
};

/// Handles are numbered by threes from here, so that none equals an inner handle.
const FIRST: usize = 1000;
const STEP: usize = 3;

/// The handles of one kind, in order of creation.
#[derive(Clone)]
pub struct Given<T>(Vec<T>);

impl<T> Default for Given<T> {
    fn default() -> Given<T> {
        Given(Vec::new())
    }
}

impl<T> Given<T> {
    /// The number of its handle.
    pub fn add(&mut self, thing: T) -> usize {
        self.0.push(thing);
        FIRST + STEP * (self.0.len() - 1)
    }

    fn place(&self, number: usize, what: &str) -> usize {
        let place = number.checked_sub(FIRST).filter(|n| n.is_multiple_of(STEP)).map(|n| n / STEP);
        place.filter(|p| *p < self.0.len()).unwrap_or_else(|| panic!("{what} {number} was never made"))
    }

    pub fn get(&self, number: usize, what: &str) -> &T {
        &self.0[self.place(number, what)]
    }

    pub fn get_mut(&mut self, number: usize, what: &str) -> &mut T {
        let place = self.place(number, what);
        &mut self.0[place]
    }

    pub fn all(&self) -> &[T] {
        &self.0
    }
}

#[derive(Clone, Copy)]
pub struct MatrixName {
    pub inner: MatrixId,
    pub rows: usize,
    pub cols: usize,
}

#[derive(Clone, Copy)]
pub struct PoolName {
    pub inner: KvPool,
    /// The checker's handle.
    pub outer: KvPool,
    pub blocks: usize,
    pub committed: usize,
}

/// All handles.
#[derive(Clone, Default)]
pub struct Names {
    /// (inner handle, elements)
    pub buffers: Given<(BufferId, usize)>,
    pub matrices: Given<MatrixName>,
    /// (inner handle, positions)
    pub rotaries: Given<(RotaryId, usize)>,
    pub moes: Given<(MoeId, Moe)>,
    /// One for each cache group; their buffers' handles are of another kind than tensors'.
    pub pools: Given<PoolName>,
    /// (Rows, elements of each)
    pub states: Option<(usize, usize)>,
}

/// From the checker's handles to inner ones. Panics at unknown handles and at ranges that exceed them.
impl Names {
    pub fn tensor(&self, t: Tensor) -> Tensor {
        let (buffer, elements) = *self.buffers.get(t.buffer.number(), "buffer");
        let end = if t.rows == 0 { t.offset } else { t.offset + (t.rows - 1) * t.stride + t.cols };
        assert!(end <= elements, "{t:?} reaches beyond a buffer of {elements}");
        assert!(t.rows <= 1 || t.stride >= t.cols, "rows of {t:?} overlap");
        Tensor { buffer, ..t }
    }

    pub fn matrix(&self, id: MatrixId) -> MatrixName {
        *self.matrices.get(id.number(), "matrix")
    }

    pub fn norm(&self, n: Norm) -> Norm {
        assert_eq!(n.weight.rows, 1, "a norm's weight is one row");
        Norm { weight: self.tensor(n.weight), ..n }
    }

    pub fn linear(&self, l: &Linear) -> Linear {
        let matrix = self.matrix(l.matrix);
        assert!(l.rows.start < l.rows.end && l.rows.end <= matrix.rows, "rows {:?} of {}", l.rows, matrix.rows);
        assert!(l.bias.is_none_or(|b| (b.rows, b.cols) == (1, l.rows.len())), "one bias for each row");
        Linear { matrix: matrix.inner, rows: l.rows.clone(), bias: l.bias.map(|b| self.tensor(b)) }
    }

    /// A linear that takes rows of `cols` columns to `rows`.
    pub fn linear_of(&self, l: &Linear, rows: usize, cols: usize) -> Linear {
        assert_eq!((l.rows.len(), self.matrix(l.matrix).cols), (rows, cols), "rows and columns of a linear");
        self.linear(l)
    }

    pub fn projection(&self, p: &Projection, tokens: usize, cols: usize) -> Projection {
        assert!(p.out.rows >= tokens, "an output of {} rows for {tokens} tokens", p.out.rows);
        Projection { linear: self.linear_of(&p.linear, p.out.cols, cols), out: self.tensor(p.out) }
    }

    pub fn mlp(&self, mlp: &Mlp, hidden: usize) -> Mlp {
        let width = mlp.gate.rows.len();
        assert!(mlp.gate.bias.is_none() && mlp.up.bias.is_none(), "gate and up have no bias");
        Mlp {
            gate: self.linear_of(&mlp.gate, width, hidden),
            up: self.linear_of(&mlp.up, width, hidden),
            down: self.linear_of(&mlp.down, hidden, width),
        }
    }

    pub fn moe(&self, moe: &Moe) -> Moe {
        let Moe { norm, router_norm, latent, router, scoring, experts, shared } = moe;
        let (hidden, count) = (experts.hidden(), experts.count);
        let width = latent.map_or(hidden, |_| self.matrix(router.matrix).cols);
        assert!(latent.is_none_or(|t| t.cols == hidden && shared.is_none()), "what experts take is theirs alone");
        scoring.check(count).unwrap_or_else(|e| panic!("a router that cannot choose: {e}"));
        let known = |part: &ExpertMatrix| match part {
            &ExpertMatrix::Stacked { matrix, stride, offset, step } => {
                ExpertMatrix::Stacked { matrix: self.matrix(matrix).inner, stride, offset, step }
            }
            ExpertMatrix::Single(all) => {
                assert_eq!(all.len(), count, "a matrix for each expert");
                ExpertMatrix::Single(all.iter().map(|m| self.matrix(*m).inner).collect())
            }
        };
        let mut parts = experts.parts.clone();
        parts.iter_mut().for_each(|p| p.matrix = known(&p.matrix));
        let biases = experts.biases.map(|all| {
            let of = |t: Tensor, cols| {
                assert_eq!((t.rows, t.cols), (count, cols), "a bias for each expert");
                self.tensor(t)
            };
            let width = experts.intermediate();
            ExpertBiases { gate: of(all.gate, width), up: of(all.up, width), down: of(all.down, hidden) }
        });
        let order = experts.order.map(|t| {
            assert_eq!((t.rows, t.cols), (count, hidden), "an order for each expert");
            self.tensor(t)
        });
        let shared = shared.as_ref().map(|s| SharedExpert {
            mlp: self.mlp(&s.mlp, hidden),
            gate: s.gate.as_ref().map(|g| self.linear_of(g, 1, hidden)),
        });
        Moe {
            norm: norm.map(|norm| self.norm(norm)),
            router_norm: router_norm.map(|norm| self.norm(norm)),
            latent: latent.map(|t| self.tensor(t)),
            router: self.linear_of(router, count, width),
            scoring: scoring.clone(),
            experts: Experts { count, kind: experts.kind, parts, biases, order },
            shared,
        }
    }

    pub fn attention(&self, a: &AttentionLayer) -> AttentionLayer {
        AttentionLayer {
            q: self.tensor(a.q),
            k: self.tensor(a.k),
            v: self.tensor(a.v),
            out: self.tensor(a.out),
            q_norm: a.q_norm.map(|n| self.norm(n)),
            k_norm: a.k_norm.map(|n| self.norm(n)),
            rotary: self.rotaries.get(a.rotary.number(), "rotary embedding").0,
            sinks: a.sinks.map(|t| self.tensor(t)),
            ..a.clone()
        }
    }

    /// Rows of each of some heads, `cols` columns.
    fn head_rows(&self, rows: HeadRows, heads: usize, cols: usize) -> HeadRows {
        let matrix = self.matrix(rows.matrix);
        assert!(rows.rows > 0 && rows.offset + rows.rows <= rows.stride, "rows of a head: {rows:?}");
        assert!(rows.of(heads - 1).end <= matrix.rows, "{heads} heads in {} rows", matrix.rows);
        assert_eq!(matrix.cols, cols, "columns of a head's projection");
        HeadRows { matrix: matrix.inner, ..rows }
    }

    pub fn latent(&self, a: &LatentLayer) -> LatentLayer {
        let (heads, rank) = (a.heads, a.rank);
        LatentLayer {
            q: self.tensor(a.q),
            kv: self.tensor(a.kv),
            out: self.tensor(a.out),
            norm: self.norm(a.norm),
            keys: match a.keys {
                LatentKeys::Rows(rows) => LatentKeys::Rows(self.head_rows(rows, heads, rank)),
                LatentKeys::Columns(rows) => LatentKeys::Columns(self.head_rows(rows, heads, a.plain())),
            },
            values: self.head_rows(a.values, heads, rank),
            rotary: self.rotaries.get(a.rotary.number(), "rotary embedding").0,
            ..a.clone()
        }
    }

    pub fn elementwise(&self, operation: &Elementwise) -> Elementwise {
        match *operation {
            Elementwise::Scale { x, by } => Elementwise::Scale { x: self.tensor(x), by },
            Elementwise::GeGlu { gate, up } => Elementwise::GeGlu { gate: self.tensor(gate), up: self.tensor(up) },
            Elementwise::AddNormed { x, norm, residual } => {
                Elementwise::AddNormed { x: self.tensor(x), norm: self.norm(norm), residual: self.tensor(residual) }
            }
            Elementwise::SwiGlu { gate, up } => Elementwise::SwiGlu { gate: self.tensor(gate), up: self.tensor(up) },
            Elementwise::SiTu { gate, up, beta, linear } => {
                Elementwise::SiTu { gate: self.tensor(gate), up: self.tensor(up), beta, linear }
            }
            Elementwise::SigmoidGate { x, gate } => {
                Elementwise::SigmoidGate { x: self.tensor(x), gate: self.tensor(gate) }
            }
            Elementwise::AttendStreams { streams, norm, out } => Elementwise::AttendStreams {
                streams: self.tensor(streams),
                norm: self.norm(norm),
                out: self.tensor(out),
            },
            Elementwise::ClampedSwiGlu { gate, up, limit } => {
                Elementwise::ClampedSwiGlu { gate: self.tensor(gate), up: self.tensor(up), limit }
            }
            Elementwise::Expand { x, weights, streams } => {
                let [x, weights, streams] = [x, weights, streams].map(|t| self.tensor(t));
                Elementwise::Expand { x, weights, streams }
            }
            Elementwise::Mean { streams, out } => {
                Elementwise::Mean { streams: self.tensor(streams), out: self.tensor(out) }
            }
            Elementwise::NormGroups { x, norm, group, out } => {
                Elementwise::NormGroups { x: self.tensor(x), norm: self.norm(norm), group, out: self.tensor(out) }
            }
            Elementwise::DividedSilu { x, by } => Elementwise::DividedSilu { x: self.tensor(x), by },
            Elementwise::GatedMean { gates, streams, out } => {
                let [gates, streams, out] = [gates, streams, out].map(|t| self.tensor(t));
                Elementwise::GatedMean { gates, streams, out }
            }
            Elementwise::Inject { x, logits, streams } => {
                let [x, logits, streams] = [x, logits, streams].map(|t| self.tensor(t));
                Elementwise::Inject { x, logits, streams }
            }
            Elementwise::SquaredRelu { x } => Elementwise::SquaredRelu { x: self.tensor(x) },
            Elementwise::Zero { out } => Elementwise::Zero { out: self.tensor(out) },
            Elementwise::Norm { x, norm, out } => {
                Elementwise::Norm { x: self.tensor(x), norm: self.norm(norm), out: self.tensor(out) }
            }
            Elementwise::ScaleRows { x, factors } => {
                let factors = RowFactors { table: self.tensor(factors.table), ..factors };
                Elementwise::ScaleRows { x: self.tensor(x), factors }
            }
            Elementwise::Gather { x, order, out } => {
                Elementwise::Gather { x: self.tensor(x), order: self.tensor(order), out: self.tensor(out) }
            }
            Elementwise::TurnPairs { x, head, rotary, back } => {
                let rotary = self.rotaries.get(rotary.number(), "rotary embedding").0;
                Elementwise::TurnPairs { x: self.tensor(x), head, rotary, back }
            }
            Elementwise::SplitPairs { x, head } => Elementwise::SplitPairs { x: self.tensor(x), head },
        }
    }

    pub fn compress(&self, l: &CompressLayer) -> CompressLayer {
        let [values, logits, bias] = [l.values, l.logits, l.bias].map(|t| self.tensor(t));
        let rotary = self.rotaries.get(l.rotary.number(), "rotary embedding").0;
        CompressLayer { values, logits, bias, norm: self.norm(l.norm), rotary, ..l.clone() }
    }

    pub fn select(&self, l: &SelectLayer) -> SelectLayer {
        let [q, weights] = [l.q, l.weights].map(|t| self.tensor(t));
        SelectLayer { q, weights, ..l.clone() }
    }

    pub fn compressed(&self, l: &CompressedLayer) -> CompressedLayer {
        let [q, row, out, sinks] = [l.q, l.row, l.out, l.sinks].map(|t| self.tensor(t));
        CompressedLayer { q, row, out, sinks, ..l.clone() }
    }

    pub fn index(&self, l: &IndexLayer) -> IndexLayer {
        let [q, k] = [l.q, l.k].map(|t| self.tensor(t));
        let norm = match l.norm {
            IndexNorm::Tokens(n) => {
                IndexNorm::Tokens(LayerNorm { scale: self.norm(n.scale), bias: self.tensor(n.bias) })
            }
            IndexNorm::Pools(norm) => IndexNorm::Pools(self.norm(norm)),
        };
        let rotary = self.rotaries.get(l.rotary.number(), "rotary embedding").0;
        let logits = |of: PoolLogits| PoolLogits { logits: self.tensor(of.logits), bias: self.tensor(of.bias) };
        let pool = l.pool.map(|pool| IndexPool { logits: pool.logits.map(logits), ..pool });
        IndexLayer { q, k, weights: l.weights.map(|t| self.tensor(t)), norm, rotary, pool, ..l.clone() }
    }

    /// A table of n-grams, whose parts have the rows that it says.
    pub fn ngram_table(&self, table: &NgramTable) -> NgramTable {
        let parts: Vec<MatrixName> = table.parts.iter().map(|part| self.matrix(*part)).collect();
        let (last, others) = parts.split_last().expect("a table has parts");
        assert!(others.iter().all(|part| part.rows == table.rows_of_part), "parts of {} rows", table.rows_of_part);
        assert!(last.rows <= table.rows_of_part && parts.iter().all(|part| part.cols == table.cols), "parts alike");
        let rows = others.len() * table.rows_of_part + last.rows;
        assert!(table.hash.rows() <= rows as u64, "{rows} rows for {}", table.hash.rows());
        NgramTable { parts: parts.iter().map(|part| part.inner).collect(), ..table.clone() }
    }

    pub fn ngrams(&self, l: &NgramLayer) -> NgramLayer {
        let [keys, queries, value, streams, conv] =
            [l.keys, l.queries, l.value, l.streams, l.conv].map(|t| self.tensor(t));
        NgramLayer { keys, queries, value, streams, conv, norm: self.norm(l.norm), ..l.clone() }
    }

    pub fn delta(&self, d: &DeltaLayer) -> DeltaLayer {
        let [qkv, z, b, a, out] = [d.qkv, d.z, d.b, d.a, d.out].map(|t| self.tensor(t));
        let [conv, decay, dt_bias] = [d.conv, d.decay, d.dt_bias].map(|t| self.tensor(t));
        DeltaLayer { qkv, z, b, a, out, conv, decay, dt_bias, norm: self.norm(d.norm), ..d.clone() }
    }

    pub fn channel_delta(&self, l: &ChannelDeltaLayer) -> ChannelDeltaLayer {
        let [qkv, z, b, f, out] = [l.qkv, l.z, l.b, l.f, l.out].map(|t| self.tensor(t));
        let [conv, rates, dt_bias] = [l.conv, l.rates, l.dt_bias].map(|t| self.tensor(t));
        ChannelDeltaLayer { qkv, z, b, f, out, conv, rates, dt_bias, norm: self.norm(l.norm), ..l.clone() }
    }

    pub fn state_space(&self, l: &StateSpaceLayer) -> StateSpaceLayer {
        let [xbc, z, dt, out] = [l.xbc, l.z, l.dt, l.out].map(|t| self.tensor(t));
        let [conv, decay, dt_bias, skip] = [l.conv, l.decay, l.dt_bias, l.skip].map(|t| self.tensor(t));
        let (conv_bias, norm) = (l.conv_bias.map(|t| self.tensor(t)), self.norm(l.norm));
        StateSpaceLayer { xbc, z, dt, out, conv, conv_bias, decay, dt_bias, skip, norm, ..l.clone() }
    }

    pub fn streams(&self, l: &StreamLayer) -> StreamLayer {
        let [streams, bias, weights, out] = [l.streams, l.bias, l.weights, l.out].map(|t| self.tensor(t));
        let mix = self.linear_of(&l.mix, weights.cols, streams.cols);
        StreamLayer { streams, norm: self.norm(l.norm), mix, bias, weights, out, ..l.clone() }
    }

    pub fn pool(&self, pool: &KvPool) -> &PoolName {
        let name = self.pools.get(pool.buffer.number(), "pool");
        assert_eq!(name.outer.layout, pool.layout, "a pool's layout");
        name
    }
}
