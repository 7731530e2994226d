//! Mixtures of experts: all kinds of routing, stacked and single matrices, shared experts, chains of layers that look ahead.

use sluice_backend::{
    BlockFormat, E2m1, Elementwise, ExpertBiases, ExpertKind, ExpertMatrix, ExpertPart, Experts, Float, Linear,
    MatrixId, MemoryClass, Moe, MoeId, Outcome, Projection, Scoring, SharedExpert, Tensor, WeightFormat,
};

use crate::case::{Case, Placed};
use crate::setup::CAPACITY;
use crate::weights::Parts;

/// The experts of a layer before their matrices are registered: `experts` names them by their index in `matrices`.
pub struct Drawn {
    pub matrices: Vec<Parts>,
    pub experts: Experts,
}

/// Of gpt-oss, with a limit that random gates and ups reach.
const CLAMPED: [ExpertKind; 2] = [
    ExpertKind::ClampedSwiGlu { alpha: 1.702, limit: 0.5, added: 1.0 },
    ExpertKind::ClampedSwiGlu { alpha: 1.0, limit: 0.5, added: 0.0 },
];

/// Columns of experts like gpt-oss's, whose 2,880 are 64 more than a multiple of 256.
pub const CLAMPED_COLS: [usize; 4] = [32, 96, 64, 320];

impl Drawn {
    /// Leaves out the projections of what is not gated: gates become the only input projections.
    pub fn make_ungated(&mut self) {
        self.experts.parts.remove(1);
        self.experts.kind = ExpertKind::SquaredRelu;
    }

    /// The experts with registered matrices.
    pub fn known(&self, ids: &[MatrixId]) -> Experts {
        let mut experts = self.experts.clone();
        for part in &mut experts.parts {
            match &mut part.matrix {
                ExpertMatrix::Stacked { matrix, .. } => *matrix = ids[matrix.number()],
                ExpertMatrix::Single(all) => all.iter_mut().for_each(|m| *m = ids[m.number()]),
            }
        }
        experts
    }
}

/// Tokens whose experts a table has: more than any case knows.
const TOKENS: usize = 150;

impl Case {
    pub fn scoring(&mut self, count: usize) -> Scoring {
        let k = self.random.usize(1..=count.min(6));
        let renormalise = self.coin();
        let scoring = match self.random.u8(..5) {
            3 => Scoring::RootSoftplus { k, bias: self.small(count, 0.5), scale: 1.5 },
            4 => self.by_token(k, count),
            0 => Scoring::SoftmaxTopK { k, renormalise, scales: Vec::new() },
            1 => Scoring::TopKSoftmax { k },
            _ => {
                let divisors: Vec<usize> = (1..=count).filter(|n| count.is_multiple_of(*n)).collect();
                let groups = self.one_of(&divisors);
                let top_groups = self.random.usize(k.div_ceil(count / groups)..=groups);
                let bias = if self.coin() { self.small(count, 0.5) } else { vec![] };
                Scoring::Sigmoid { k, bias, groups, top_groups, renormalise, scale: self.one_of(&[1.0, 2.5]) }
            }
        };
        scoring.check(count).unwrap();
        scoring
    }

    /// Experts by the token's number, for some tokens.
    fn by_token(&mut self, k: usize, count: usize) -> Scoring {
        let mut of_token = || {
            let mut all: Vec<u32> = (0..count as u32).collect();
            self.random.shuffle(&mut all);
            all.truncate(k);
            all
        };
        Scoring::ByToken { k, table: (0..TOKENS).flat_map(|_| of_token()).collect(), scale: 1.5 }
    }

    /// Experts in one stacked matrix for each projection, in one for gate and up, or in a matrix each.
    pub fn experts(&mut self, count: usize, hidden: usize, intermediate: usize, stacked: bool) -> Drawn {
        let mut matrices = Vec::new();
        let mut draw = |c: &mut Case, form, rows, cols| {
            matrices.push(c.parts(form, rows, cols));
            MatrixId::new(matrices.len() - 1)
        };
        let fused = stacked && self.coin();
        let gate_up = if fused {
            let form = self.form(hidden);
            Some(draw(self, form, count * 2 * intermediate, hidden))
        } else {
            None
        };
        let mut parts = Vec::new();
        let sizes = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)];
        for (i, (rows, cols)) in sizes.into_iter().enumerate() {
            let form = self.form(cols);
            let matrix = match gate_up {
                Some(matrix) if i < 2 => {
                    ExpertMatrix::Stacked { matrix, stride: 2 * intermediate, offset: i * intermediate, step: 1 }
                }
                _ if stacked => {
                    let matrix = draw(self, form, count * rows, cols);
                    ExpertMatrix::Stacked { matrix, stride: rows, offset: 0, step: 1 }
                }
                _ => {
                    // All experts have one form, or each its own.
                    let one = self.coin();
                    let mut form = || if one { form } else { self.form(cols) };
                    let forms: Vec<WeightFormat> = (0..count).map(|_| form()).collect();
                    ExpertMatrix::Single(forms.into_iter().map(|form| draw(self, form, rows, cols)).collect())
                }
            };
            parts.push(ExpertPart { matrix, rows, cols });
        }
        let forms: Vec<_> = matrices.iter().map(|m| m.form).collect();
        self.shape(format!("{count} experts {hidden} -> {intermediate}, stacked {stacked}, fused {fused}, {forms:?}"));
        Drawn { matrices, experts: Experts { count, kind: ExpertKind::SwiGlu, parts, biases: None, order: None } }
    }

    /// Makes experts as gpt-oss has them: a clamped SwiGLU, biases, rows of gate and up that take turns, or some of these.
    pub fn make_clamped(&mut self, drawn: &mut Drawn) {
        let (count, hidden, width) = (drawn.experts.count, drawn.experts.hidden(), drawn.experts.intermediate());
        drawn.experts.kind = if self.once_in(4) { ExpertKind::SwiGlu } else { self.one_of(&CLAMPED) };
        if let [gate, up, _] = &mut drawn.experts.parts[..]
            && let ExpertMatrix::Stacked { step, .. } = &mut gate.matrix
            && let ExpertMatrix::Stacked { offset, step: other, .. } = &mut up.matrix
            && *offset > 0
        {
            (*offset, *step, *other) = (1, 2, 2);
        }
        if !self.once_in(4) {
            let mut rows = |cols| {
                let t = self.backend.alloc(MemoryClass::WeightsCopied, count, cols).expect("memory for biases");
                self.fill(t);
                t
            };
            drawn.experts.biases = Some(ExpertBiases { gate: rows(width), up: rows(width), down: rows(hidden) });
        }
        self.shape(format!("{:?}, biases {}", drawn.experts.kind, drawn.experts.biases.is_some()));
    }

    /// Gives each expert an order of its own in which it takes its input, as where columns are in the order of activations.
    pub fn make_ordered(&mut self, drawn: &mut Drawn) {
        let (count, hidden) = (drawn.experts.count, drawn.experts.hidden());
        let numbers: Vec<f32> = (0..count * hidden).map(|_| self.random.usize(..hidden) as f32).collect();
        let order = self.backend.alloc(MemoryClass::WeightsCopied, count, hidden).expect("memory for orders");
        self.backend.upload(&numbers, order);
        drawn.experts.order = Some(order);
    }

    /// Draws a matrix format of such experts for those that are drawn next, or leaves each its own.
    pub fn draw_clamped_format(&mut self) {
        let blocks = WeightFormat::Blocks(BlockFormat::Mxfp4);
        let all = [Some(WeightFormat::E2m1(E2m1::Power)), Some(blocks), Some(WeightFormat::Float(Float::Bf16)), None];
        self.uniform = self.one_of(&all);
    }

    /// A router of which some experts always score alike.
    pub fn router(&mut self, count: usize, hidden: usize) -> Linear {
        let form = self.form(hidden);
        let mut parts = self.parts(form, count, hidden);
        if self.coin() {
            let (from, to) = (self.random.usize(..count), self.random.usize(..count));
            for bytes in &mut parts.bytes {
                let row = bytes.len() / count;
                bytes.copy_within(from * row..(from + 1) * row, to * row);
            }
        }
        let bias = self.once_in(3).then(|| self.small(count, 1.0)).map(|values| self.vector(&values));
        Linear { matrix: self.register(&parts), rows: 0..count, bias }
    }

    /// A mixture of these experts.
    pub fn mixture(&mut self, experts: Experts) -> Moe {
        let (count, hidden) = (experts.count, experts.hidden());
        let scoring = self.scoring(count);
        let shared = self.coin().then(|| {
            let width = if self.uniform.is_some() { experts.intermediate() } else { self.cols() };
            let bias = self.coin();
            let gate = self.coin().then(|| self.linear(1, hidden, bias));
            SharedExpert { mlp: self.mlp(hidden, width), gate }
        });
        let gated = shared.as_ref().map(|s| s.gate.is_some());
        self.shape(format!("{scoring:?}, shared expert's gate {gated:?}"));
        let norm = if self.once_in(5) { None } else { Some(self.norm(hidden)) };
        let router = self.router(count, hidden);
        Moe { norm, router_norm: None, latent: None, router, scoring, experts, shared }
    }

    /// A chain of mixtures. `make_known` registers the matrices of all layers at once.
    pub fn mixtures(
        &mut self,
        drawn: &[Drawn],
        make_known: impl FnOnce(&mut Case) -> Vec<Vec<MatrixId>>,
    ) -> Vec<MoeId> {
        let ids = make_known(self);
        let mut before = None;
        let mut all = Vec::new();
        for (drawn, ids) in drawn.iter().zip(&ids) {
            let moe = self.mixture(drawn.known(ids));
            before = Some(self.backend.moe(moe, before).expect("a mixture"));
            all.extend(before);
        }
        all
    }

    /// Observes the choices of routers.
    pub fn see_routing(&mut self, outcome: &Outcome) {
        for routed in &outcome.routed {
            self.see_text(format!("what router {} chose", routed.layer), format!("{routed:?}"));
        }
    }
}

pub fn mixtures(c: &mut Case) {
    let hidden = c.cols().min(256);
    let mut drawn = Vec::new();
    for _ in 0..c.random.usize(1..=3) {
        let (count, intermediate, stacked) = (c.random.usize(1..=12), c.cols().min(160), c.coin());
        drawn.push(c.experts(count, hidden, intermediate, stacked));
    }
    let moes = c.mixtures(&drawn, |c| {
        drawn.iter().map(|d| d.matrices.iter().map(|parts| c.register(parts)).collect()).collect()
    });
    if c.coin() {
        c.shape("routing is recorded".into());
        c.backend.record_routing();
    }
    for _ in 0..c.random.usize(1..=2) {
        // A long prompt's are more than a backend may count at once.
        let tokens = if c.once_in(6) { c.random.usize(200..=CAPACITY.tokens) } else { c.tokens() };
        let x = c.tensor(tokens, hidden);
        let residual = if c.once_in(3) { c.tensor(tokens, hidden) } else { x };
        c.shape(format!("{tokens} tokens, x {x}, residual {residual}"));
        let outcome = c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, residual.tensor)));
        c.see("residual", residual.whole);
        c.see_routing(&outcome);
        c.see_text("failed rows", format!("{}", outcome.failed.len()));
        without_experts(c, moes[0], x.tensor);
    }
}

/// Computes steps through these mixtures, each of which adds to its own input. `then` goes on with the result of a step.
fn compute(c: &mut Case, drawn: &[Drawn], hidden: usize, mut then: impl FnMut(&mut Case, usize, &Placed)) {
    let moes = c.mixtures(drawn, |c| {
        drawn.iter().map(|d| d.matrices.iter().map(|parts| c.register(parts)).collect()).collect()
    });
    for _ in 0..2 {
        let tokens = c.tokens();
        let x = c.tensor(tokens, hidden);
        c.shape(format!("{tokens} tokens, x {x}"));
        c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, x.tensor)));
        c.see("residual", x.whole);
        then(c, tokens, &x);
    }
}

pub fn clamped(c: &mut Case) {
    c.draw_clamped_format();
    // Now and then as many columns as they have, of few and narrow experts.
    let whole = c.once_in(6);
    let wide = [2880, c.one_of(&CLAMPED_COLS[..2])];
    let hidden = if whole { c.one_of(&wide) } else { c.one_of(&CLAMPED_COLS) };
    let mut drawn = Vec::new();
    for _ in 0..c.random.usize(1..=2) {
        let (count, intermediate) = match (whole, hidden) {
            (true, 2880) => (3, c.one_of(&CLAMPED_COLS[..2])),
            (true, _) => (3, 2880),
            (false, _) => (c.random.usize(1..=12), c.one_of(&CLAMPED_COLS)),
        };
        let stacked = !c.once_in(4);
        drawn.push(c.experts(count, hidden, intermediate, stacked));
    }
    drawn.iter_mut().for_each(|drawn| c.make_clamped(drawn));
    c.uniform = None;
    compute(c, &drawn, hidden, |_, _, _| {});
}

/// As Nemotron-H has them: experts of two projections, without gates.
pub fn ungated(c: &mut Case) {
    let hidden = c.cols().min(256);
    let mut drawn = Vec::new();
    for _ in 0..c.random.usize(1..=2) {
        let (count, intermediate, stacked) = (c.random.usize(1..=12), c.cols().min(160), c.coin());
        drawn.push(c.experts(count, hidden, intermediate, stacked));
    }
    drawn.iter_mut().for_each(|drawn| drawn.make_ungated());
    compute(c, &drawn, hidden, |c, tokens, x| {
        // The activation of dense parts of such models.
        c.step(tokens, |b| b.elementwise(&Elementwise::SquaredRelu { x: x.tensor }));
        c.see("squared", x.whole);
    });
}

/// As Gemma 4 has them: experts with GELU, a router that norms its input by itself, a factor for each expert, or some of these; and experts with columns in orders of their own.
pub fn with_routers_of_their_own(c: &mut Case) {
    let hidden = c.cols().min(256);
    let (mut moes, mut before) = (Vec::new(), None);
    for _ in 0..c.random.usize(1..=2) {
        let (count, intermediate, stacked) = (c.random.usize(1..=12), c.cols().min(160), c.coin());
        let mut drawn = c.experts(count, hidden, intermediate, stacked);
        if !c.once_in(4) {
            drawn.experts.kind = ExpertKind::GeGlu;
        }
        if c.once_in(3) {
            c.make_ordered(&mut drawn);
        }
        let ids: Vec<MatrixId> = drawn.matrices.iter().map(|parts| c.register(parts)).collect();
        let mut moe = c.mixture(drawn.known(&ids));
        moe.router_norm = (!c.once_in(4)).then(|| c.norm(hidden));
        if let Scoring::SoftmaxTopK { scales, .. } = &mut moe.scoring
            && !c.once_in(4)
        {
            *scales = c.small(count, 2.0);
        }
        c.shape(format!(
            "{:?}, its own norm {}, orders {}, {:?}",
            moe.experts.kind,
            moe.router_norm.is_some(),
            moe.experts.order.is_some(),
            moe.scoring
        ));
        match c.backend.moe(moe, before) {
            Ok(made) => before = Some(made),
            Err(why) => return c.refuse(format!("{why:#}")),
        }
        moes.extend(before);
    }
    for _ in 0..2 {
        let tokens = c.tokens();
        let (x, residual) = (c.tensor(tokens, hidden), c.tensor(tokens, hidden));
        c.shape(format!("{tokens} tokens, x {x}, residual {residual}"));
        c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, residual.tensor)));
        c.see("residual", residual.whole);
    }
}

/// As in checkpoints: matrices of one format with groups of 64, and one token per step.
pub fn mixtures_of_one_token(c: &mut Case) {
    let format = affine(c);
    mixtures_of_one_format(c, format, 10, |_, _| (), |_, _| 1);
}

/// The same with some tokens, up to three per expert on average.
pub fn mixtures_of_few_tokens(c: &mut Case) {
    let format = affine(c);
    mixtures_of_one_format(c, format, 3, |_, _| (), |c, most| c.random.usize(2..=(3 * most).clamp(2, 32)));
}

/// The same with many: eight to 24 per expert on average.
pub fn mixtures_of_many_tokens(c: &mut Case) {
    let four = WeightFormat::Affine { bits: 4, group: c.one_of(&[64, 64, 128]), scale: Float::Bf16 };
    let format = match c.random.usize(0..6) {
        0 | 1 => affine(c),
        2 | 3 => c.blocks(256),
        _ => four,
    };
    // From three pairs for each expert on some weights are taken by tensor cores, from eight on others.
    let tokens = |c: &mut Case, most: usize| c.random.usize(3 * most..=24 * most).min(CAPACITY.tokens);
    if c.takes(format) {
        mixtures_of_one_format(c, format, 3, |_, _| (), tokens);
    }
}

/// The same of a type of GGUF's blocks, or of a format of small floats.
pub fn mixtures_of_blocks(c: &mut Case) {
    let format = c.blocks(256);
    if c.takes(format) {
        mixtures_of_one_format(c, format, 2, |_, _| (), |c, most| c.random.usize(1..=(3 * most).clamp(2, 32)));
    }
}

/// Experts that take their inputs in orders of their own: of one format, as quantised checkpoints have them, or of any.
pub fn ordered(c: &mut Case) {
    if !c.once_in(3) {
        let format = if c.once_in(3) { c.blocks(256) } else { affine(c) };
        if c.takes(format) {
            let tokens = |c: &mut Case, most: usize| c.random.usize(1..=(3 * most).clamp(2, 32));
            mixtures_of_one_format(c, format, 2, Case::make_ordered, tokens);
        }
        return;
    }
    let hidden = c.cols().min(256);
    let (count, intermediate, stacked) = (c.random.usize(1..=12), c.cols().min(160), c.coin());
    let mut drawn = c.experts(count, hidden, intermediate, stacked);
    c.make_ordered(&mut drawn);
    let moes = c.mixtures(std::slice::from_ref(&drawn), |c| {
        vec![drawn.matrices.iter().map(|parts| c.register(parts)).collect()]
    });
    for _ in 0..2 {
        let tokens = if c.once_in(6) { c.random.usize(200..=CAPACITY.tokens) } else { c.tokens() };
        let x = c.tensor(tokens, hidden);
        c.shape(format!("{tokens} tokens, x {x}"));
        c.step(tokens, |b| b.mixture(x.tensor, moes[0], x.tensor));
        c.see("residual", x.whole);
    }
}

fn affine(c: &mut Case) -> WeightFormat {
    let (bits, scale) = (c.one_of(&[2, 3, 4, 4, 4, 5, 6, 8]), c.one_of(&[Float::F16, Float::Bf16]));
    WeightFormat::Affine { bits, group: 64, scale }
}

/// The most products of weights in a step of such a mixture: large experts see fewer tokens. An emulated device computes 100 million in a second.
const MOST_PRODUCTS: usize = 1 << 26;

/// `widest`: the most columns of large experts, in units of 256. `change`: what becomes of experts that are drawn. `tokens`: tokens of a step, given the number with which each
/// expert has one on average.
fn mixtures_of_one_format(
    c: &mut Case,
    format: WeightFormat,
    widest: usize,
    change: impl FnOnce(&mut Case, &mut Drawn),
    mut tokens: impl FnMut(&mut Case, usize) -> usize,
) {
    // Few experts that are large, or many that are small.
    let (wide, count) = if c.once_in(4) { (1, c.random.usize(1..=512)) } else { (widest, c.random.usize(1..=40)) };
    let (hidden, stacked) = (256 * c.random.usize(1..=wide), c.coin());
    let unit = match format {
        WeightFormat::Blocks(blocks) if blocks.block_columns() > 64 => 256,
        // Narrow tiles of integers of 11 bits take whole stages.
        WeightFormat::Affine { bits: 4, .. } if c.coin() => 256,
        WeightFormat::Affine { group: 128, .. } => 128,
        _ => 64,
    };
    let (intermediate, most, bias) =
        (unit * c.random.usize(1..=wide.min(6)), c.random.usize(1..=count.min(15)), c.coin());
    c.uniform = Some(format);
    let mut drawn = c.experts(count, hidden, intermediate, stacked);
    change(c, &mut drawn);
    let ids: Vec<MatrixId> = drawn.matrices.iter().map(|parts| c.register(parts)).collect();
    let scoring = match c.random.u8(..5) {
        3 => Scoring::RootSoftplus { k: most, bias: c.small(count, 0.5), scale: 1.5 },
        4 => c.by_token(most, count),
        0 => Scoring::SoftmaxTopK { k: most, renormalise: c.coin(), scales: Vec::new() },
        1 => Scoring::TopKSoftmax { k: most },
        _ => {
            let bias = if bias { c.small(count, 0.5) } else { vec![] };
            Scoring::Sigmoid { k: most, bias, groups: 1, top_groups: 1, renormalise: c.coin(), scale: 2.5 }
        }
    };
    let shared = c.coin().then(|| {
        let gate = c.coin().then(|| c.linear(1, hidden, false));
        SharedExpert { mlp: c.mlp(hidden, intermediate), gate }
    });
    let gated = shared.as_ref().map(|s| s.gate.is_some());
    if c.coin() {
        c.uniform = Some(WeightFormat::Float(c.one_of(&[Float::Bf16, Float::F16, Float::F32])));
    }
    let router = Linear { bias: None, ..c.router(count, hidden) };
    c.shape(format!("router {:?}, {scoring:?}, shared expert's gate {gated:?}", c.uniform));
    // What follows the mixture, mostly with the same norm.
    c.uniform = Some(format);
    let rows = c.random.usize(1..80);
    let (behind, norms) = (c.linear(rows, hidden, false), [c.norm(hidden), c.norm(hidden)]);
    c.uniform = None;
    let (norm, experts) = (Some(c.norm(hidden)), drawn.known(&ids));
    let moe = Moe { norm, router_norm: None, latent: None, router, scoring, experts, shared };
    // Two of the same: the second's kernels meet what the first's have left.
    let moes = [moe.clone(), moe].map(|moe| c.backend.moe(moe, None).expect("a mixture"));
    for _ in 0..3 {
        let affordable = MOST_PRODUCTS / (2 * most * 3 * hidden * intermediate);
        let tokens = tokens(c, count / most).min(affordable.max(2));
        let x = c.backend.alloc(MemoryClass::Scratch, tokens, hidden).expect("memory for a tensor");
        c.shape(format!("{tokens} tokens"));
        c.fill(x);
        let (norm, out) = (norms[usize::from(c.once_in(4))], c.tensor(tokens, rows));
        c.step(tokens, |b| {
            moes.iter().for_each(|moe| b.mixture(x, *moe, x));
            b.project(x, Some(norm), &[Projection { linear: behind.clone(), out: out.tensor }]);
        });
        c.see("residual", x);
        c.see("projection", out.whole);
    }
}

/// As in calibration: everything of a mixture but its routed experts.
fn without_experts(c: &mut Case, moe: MoeId, x: Tensor) {
    let (normed, residual) = (c.tensor(x.rows, x.cols), c.tensor(x.rows, x.cols));
    let mut routing = None;
    c.step(x.rows, |b| routing = Some(b.mixture_but_experts(x, moe, normed.tensor, residual.tensor)));
    c.see("what experts would have been given", normed.whole);
    c.see("residual without experts", residual.whole);
    let routing = routing.expect("it was asked for");
    c.see_text("who would have been asked", format!("{:?}", (routing.k, routing.experts)));
    c.see_floats("with what weight", routing.k, routing.weights);
}
