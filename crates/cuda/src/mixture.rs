//! Mixtures of experts, all on the device: routed, computed and combined without a look from the host, where no expert is on disk.

mod choosing;

use anyhow::Result;
use sluice_backend::{
    Activations, ExpertMatrix, ExpertPart, Experts, Moe, MoeId, Routed, Routing, Scoring, SharedExpert, Tensor,
};

use self::choosing::{Choice, group_pairs};
use crate::backend::Cuda;
use crate::driver::{Address, Gpu};
use crate::graphs::HeldBack;
use crate::grouped_gemm::{Few, Output, multiply_few};
use crate::kernels::Kernel;
use crate::matmul::{Encoded, Input, MOST_BLOCKS, Product, Source, Table, encode, multiply, multiply_rows};
use crate::memory::{Memory, Pinned, Scratch};
use crate::mixture_one::MixtureOfOne;
use crate::parameters::{self as p, PROJECTIONS, number};
use crate::streaming::Streaming;
use crate::weights::{KernelFormat, Needs, Weights};

/// A projection of an expert: which matrix, and its first row.
#[derive(Clone, Copy)]
pub struct Operand {
    pub weight: usize,
    pub row: usize,
    pub rows: usize,
}

/// Gate, up and down projection of an expert.
pub fn operands(experts: &Experts, expert: usize) -> [Operand; PROJECTIONS] {
    let [gate, up, down] = &experts.parts[..] else { panic!("{:?} has three projections", experts.kind) };
    [gate, up, down].map(|part: &ExpertPart| match &part.matrix {
        ExpertMatrix::Stacked { matrix, stride, offset } => {
            Operand { weight: matrix.number(), row: expert * stride + offset, rows: part.rows }
        }
        ExpertMatrix::Single(all) => Operand { weight: all[expert].number(), row: 0, rows: part.rows },
    })
}

pub(crate) struct Registered {
    pub moe: Moe,
    /// The mixture of the layer right after.
    next: Option<usize>,
    /// Kinds of each projection over all experts.
    pub kinds: [Vec<KernelFormat>; PROJECTIONS],
    /// Columns of a group and type of its scale, where all of a projection have the same.
    pub groups: [Option<(u32, u32)>; PROJECTIONS],
    /// [`p::Matrix`] of each expert, projection after projection; where all are on the device.
    table: Option<Memory>,
    /// Of the router, `[experts]`.
    bias: Option<Memory>,
}

impl Registered {
    /// How a router that gave `logits` chooses, and where it says so.
    pub fn route(&self, tokens: usize, logits: Address, chosen: Address, weights: Address) -> p::Route {
        let scoring = &self.moe.scoring;
        let mut parameters = p::Route {
            logits,
            bias: self.bias.as_ref().map_or(0, |b| b.at),
            chosen,
            weights,
            tokens: number(tokens),
            experts: number(self.moe.router.rows.len()),
            k: number(scoring.k()),
            groups: 1,
            top_groups: 1,
            scale: 1.0,
            ..p::Route::default()
        };
        match scoring {
            Scoring::SoftmaxTopK { renormalise, .. } => {
                (parameters.scoring, parameters.renormalise) = (0, (*renormalise).into());
            }
            Scoring::TopKSoftmax { .. } => parameters.scoring = 1,
            Scoring::Sigmoid { groups, top_groups, renormalise, scale, .. } => {
                (parameters.scoring, parameters.renormalise, parameters.scale) = (2, (*renormalise).into(), *scale);
                (parameters.groups, parameters.top_groups) = (number(*groups), number(*top_groups));
            }
        }
        parameters
    }
}

#[derive(Default)]
pub struct Mixtures {
    pub(crate) all: Vec<Registered>,
    x: Encoded,
    hidden: Encoded,
    shared_hidden: Encoded,
    pub(crate) choice: Choice,
    /// What a router has normed, and what is hidden, of one token, encoded.
    pub(crate) encoded_one: [Scratch; 2],
    gates: Scratch,
    ups: Scratch,
    outputs: Scratch,
    /// Pairs of a token and an expert, by expert.
    pairs: Scratch,
    shared: Scratch,
    shared_gates: Scratch,
    streaming: Option<Streaming>,
    /// What a layer's router has chosen, on the host.
    chosen: Pinned,
    /// What routers chose, where it is recorded.
    routed: Option<Vec<Routed>>,
    /// What the router of a mixture would choose, from what came to the mixture before it.
    guess: Option<(usize, Vec<u32>)>,
    /// How often the host waited within the step.
    pub synchronisations: usize,
    /// What is gathered waits for the host.
    held_back: Option<HeldBack>,
}

impl Mixtures {
    pub fn register(
        &mut self,
        gpu: &Gpu,
        weights: &Weights,
        mode: Activations,
        moe: Moe,
        follows: Option<MoeId>,
    ) -> Result<MoeId> {
        let number = self.all.len();
        let mut kinds: [Vec<KernelFormat>; PROJECTIONS] = Default::default();
        let mut groups = operands(&moe.experts, 0).map(|o| weights.all[o.weight].groups());
        for expert in 0..moe.experts.count {
            for (groups, operand) in groups.iter_mut().zip(operands(&moe.experts, expert)) {
                *groups = groups.filter(|g| weights.all[operand.weight].groups() == Some(*g));
            }
            for (kinds, operand) in kinds.iter_mut().zip(operands(&moe.experts, expert)) {
                let kind = weights.all[operand.weight].kind(mode);
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                }
            }
        }
        let bias = match &moe.scoring {
            Scoring::Sigmoid { bias, .. } if !bias.is_empty() => {
                let memory = Memory::new(gpu, 4 * bias.len(), "a router's bias")?;
                // SAFETY: it was just allocated with so many bytes.
                unsafe { gpu.write(memory.at, crate::memory::bytes_of(bias), gpu.quiet()?)? };
                Some(memory)
            }
            _ => None,
        };
        if let Some(before) = follows {
            self.all[before.number()].next = Some(number);
        }
        self.all.push(Registered { moe, next: None, kinds, groups, table: None, bias });
        Ok(MoeId::new(number))
    }

    /// The mixtures in order.
    pub fn registered(&self) -> impl Iterator<Item = &Moe> + Clone {
        self.all.iter().map(|r| &r.moe)
    }

    pub fn stream(&mut self, streaming: Streaming) {
        self.streaming = Some(streaming);
    }

    pub fn streaming(&self) -> Option<&Streaming> {
        self.streaming.as_ref()
    }

    pub fn streaming_mut(&mut self) -> Option<&mut Streaming> {
        self.streaming.as_mut()
    }

    pub fn record_routing(&mut self) {
        self.routed.get_or_insert_default();
    }

    /// Tells the device where the experts are whose matrices it has.
    pub fn bring(&mut self, gpu: &Gpu, weights: &Weights, mode: Activations) -> Result<()> {
        if self.streaming.is_some() {
            return Ok(());
        }
        for r in self.all.iter_mut().filter(|r| r.table.is_none()) {
            let count = r.moe.experts.count;
            let mut matrices = vec![p::Matrix::default(); PROJECTIONS * count];
            for expert in 0..count {
                for (i, o) in operands(&r.moe.experts, expert).into_iter().enumerate() {
                    let weight = &weights.all[o.weight];
                    assert!(o.row + o.rows <= weight.rows(), "expert {expert} in {} rows", weight.rows());
                    matrices[i * count + expert] = weight.at_row(o.row, mode);
                }
            }
            let table = Memory::new(gpu, size_of_val(&matrices[..]), "tables of experts")?;
            // SAFETY: it was just allocated with so many bytes.
            unsafe { gpu.write(table.at, p::Matrix::bytes(&matrices), gpu.quiet()?)? };
            r.table = Some(table);
        }
        Ok(())
    }

    /// Nobody answers what the device may still ask in a step that went wrong, and what was held back is never carried out.
    pub fn ask_no_more(&mut self) {
        self.held_back = None;
        self.streaming.as_mut().into_iter().for_each(Streaming::ask_no_more);
    }

    /// The device has done all of the step.
    pub fn settle(&mut self, gpu: &Gpu, weights: &Weights) -> Result<()> {
        self.streaming.as_mut().map_or(Ok(()), |s| s.settle(gpu, weights))
    }

    /// What there is to say of the step that ends.
    pub fn end(&mut self) -> (Vec<sluice_backend::Failed>, Vec<Routed>, usize) {
        let failed = self.streaming.as_mut().and_then(Streaming::take_failure).into_iter().collect();
        let routed = self.routed.as_mut().map(std::mem::take).unwrap_or_default();
        (failed, routed, std::mem::take(&mut self.synchronisations))
    }

    /// Bytes of scratch, and of experts that were read, on the device.
    pub fn bytes(&self) -> (usize, usize) {
        let encoded = self.x.bytes() + self.hidden.bytes() + self.shared_hidden.bytes();
        let choice = [&self.choice.logits, &self.choice.chosen, &self.choice.weights];
        let [normed, hidden] = &self.encoded_one;
        let rest =
            [normed, hidden, &self.gates, &self.ups, &self.outputs, &self.pairs, &self.shared, &self.shared_gates];
        let scratch: usize = choice.into_iter().chain(rest).map(Scratch::bytes).sum();
        let tables = self.all.iter().flat_map(|r| [&r.table, &r.bias]).chain([&self.choice.counter]);
        let tables: usize = tables.flatten().map(|m| m.bytes).sum();
        (encoded + scratch + tables, self.streaming.as_ref().map_or(0, Streaming::device_bytes))
    }
}

impl Cuda {
    /// `residual += mixture(norm(x))`
    pub(crate) fn run_mixture(&mut self, x: Tensor, number: usize, residual: Tensor) -> Result<()> {
        let mut m = std::mem::take(&mut self.mixtures);
        let done = self.mixture_with(&mut m, x, number, residual);
        self.mixtures = m;
        done
    }

    /// Has the device do what was enqueued, and answers all that it asks meanwhile.
    pub(crate) fn carry_out(&mut self) -> Result<()> {
        self.gpu.end_step()?;
        self.answer_now()
    }

    /// Answers all that the device asks, or would have asked in what is held back.
    pub(crate) fn answer_now(&mut self) -> Result<()> {
        let mut m = std::mem::take(&mut self.mixtures);
        let done = self.answer(&mut m);
        self.mixtures = m;
        done
    }

    /// Whether the host may have to wait for the device in a mixture, or answers it at once.
    pub(crate) fn waits_in(&mut self, x: Tensor, moe: MoeId, residual: Tensor) -> Result<bool> {
        let (number, records) = (moe.number(), self.mixtures.routed.is_some());
        if !records && self.mixtures.streaming.as_ref().is_none_or(|s| s.complete(number).is_some()) {
            return Ok(false);
        }
        if records || x.rows > 1 || !self.can_ask_later() {
            return Ok(true);
        }
        let mut m = std::mem::take(&mut self.mixtures);
        let one = self.mixture_of_one(&mut m, x, number, residual);
        self.mixtures = m;
        Ok(one?.is_none())
    }

    /// Whether what asks can be held back with what comes behind it.
    fn can_ask_later(&self) -> bool {
        self.gpu.can_hold_back() && self.times_nothing()
    }

    fn mixture_with(&self, m: &mut Mixtures, x: Tensor, number: usize, residual: Tensor) -> Result<()> {
        let (tokens, k, records) = (x.rows, m.all[number].moe.scoring.k(), m.routed.is_some());
        // 1. What the next router would choose from what comes in, where that is recorded
        let guess = match m.all[number].next.filter(|_| records) {
            Some(next) => {
                self.normed(m, x, next, Needs::F32)?;
                self.choose(m, next, tokens)?;
                let k = m.all[next].moe.scoring.k();
                Some((next, self.read_choice(m, tokens, k)?.experts))
            }
            None => None,
        };
        // 2. One token
        let complete =
            m.streaming.as_ref().map_or_else(|| m.all[number].table.as_ref().map(|t| t.at), |s| s.complete(number));
        if tokens == 1
            && !records
            && let Some(one) = self.mixture_of_one(m, x, number, residual)?
        {
            return match (complete, m.streaming.is_some()) {
                (None, true) => self.ask_and_run_one(m, one, number),
                (table, _) => self.run_one(one, table.unwrap_or(0), None),
            };
        }
        // 3. norm, router
        self.answer(m)?;
        let needs = self.needs_of(m, number);
        if !self.normed_and_chosen(m, x, number, needs)? {
            self.normed(m, x, number, needs)?;
            self.choose(m, number, tokens)?;
        }
        // 4. where the host wants to know what was chosen
        let mut table = complete.unwrap_or(0);
        if records || complete.is_none() {
            let chosen = self.read_chosen(m, tokens * k, 4 * tokens * x.cols)?;
            if let Some(streaming) = &mut m.streaming {
                streaming.settle(&self.gpu, &self.weights)?;
                table = streaming.fetch(&self.gpu, &self.weights, number, (k, &chosen))?;
            }
            if let Some(routed) = &mut m.routed {
                let guessed = m.guess.take_if(|(of, _)| *of == number).map(|(_, guessed)| guessed).unwrap_or_default();
                routed.push(Routed { layer: number, k, experts: chosen, guessed });
            }
        }
        if guess.is_some() {
            m.guess = guess;
        }
        // 5. experts, and their sum
        self.experts(m, number, table, k, residual)?;
        // 6. the next layer's, where tokens are many
        match (&mut m.streaming, m.all[number].next) {
            (Some(streaming), Some(next)) => streaming.look_ahead(&self.weights, next),
            _ => Ok(()),
        }
    }

    /// One token's mixture where experts may have to come first, for which the device asks: at once, or with all of the step that is held back.
    fn ask_and_run_one(&self, m: &mut Mixtures, one: MixtureOfOne, number: usize) -> Result<()> {
        let held_back = self.can_ask_later();
        if !held_back {
            self.answer(m)?;
        } else if !self.gpu.holds_back() {
            m.held_back = Some(self.gpu.hold_back());
        }
        let streaming = m.streaming.as_mut().expect("experts that may have to come");
        let (question, table) = streaming.ask(number)?;
        self.run_one(one, table, Some(question))?;
        if held_back { Ok(()) } else { self.answer(m) }
    }

    /// Answers what the device asks in what was held back, which is carried out, if there is any.
    pub(crate) fn answer(&self, m: &mut Mixtures) -> Result<()> {
        let Mixtures { all, streaming, synchronisations, held_back, .. } = m;
        if let Some(streaming) = streaming.as_mut().filter(|s| s.is_asked()) {
            self.gpu.carry_out()?;
            *held_back = None;
            *synchronisations += streaming.answer(&self.gpu, &self.weights, |layer| all[layer].moe.scoring.k())?;
        }
        Ok(())
    }

    /// The same without what the routed experts add; leaves their inputs in `normed`, and says who would have had them.
    pub(crate) fn run_mixture_but_experts(
        &mut self,
        x: Tensor,
        number: usize,
        normed: Tensor,
        residual: Tensor,
    ) -> Result<Routing> {
        let mut m = std::mem::take(&mut self.mixtures);
        let done = (|| {
            let (needs, k) = (self.needs_of(&m, number), m.all[number].moe.scoring.k());
            self.normed(&mut m, x, number, needs)?;
            let from = p::Tensor::dense(m.x.floats(), x.cols);
            let (rows, cols) = (self::number(x.rows), self::number(x.cols));
            let copy = p::CopyRows { from, to: self.place(normed), rows, cols };
            // SAFETY: the router has its input as f32; the tensor is as large as x.
            unsafe { self.gpu.launch(Kernel::COPY_ROWS, [rows, 1, 1], 256, 0, &copy)? };
            self.choose(&mut m, number, x.rows)?;
            let routing = self.read_choice(&mut m, x.rows, k)?;
            self.experts(&mut m, number, 0, 0, residual)?;
            Ok(routing)
        })();
        self.mixtures = m;
        done
    }

    /// Encodings that a mixture wants of its input.
    fn needs_of(&self, m: &Mixtures, number: usize) -> Needs {
        let Registered { moe, kinds, .. } = &m.all[number];
        // Routers and gates take f32.
        let mut needs = kinds[..2].iter().flatten().fold(Needs::F32, |needs, kind| needs.and(kind.needs()));
        if let Some(SharedExpert { mlp, .. }) = &moe.shared {
            needs = needs.and(self.needs(&mlp.gate, self.mode)).and(self.needs(&mlp.up, self.mode));
        }
        needs
    }

    /// `residual += sum of the k routed experts of what was normed + shared expert of it`; `table`: where the experts are.
    fn experts(&self, m: &mut Mixtures, number: usize, table: Address, k: usize, residual: Tensor) -> Result<()> {
        let (gpu, tokens) = (&self.gpu, residual.rows);
        let Registered { moe, kinds, groups, .. } = &m.all[number];
        let (count, intermediate, width) = (moe.experts.count, moe.experts.intermediate(), residual.cols);
        let pairs = tokens * k;
        let mut combine = p::Combine {
            outputs: 0,
            weights: m.choice.weights.at(),
            shared: 0,
            gates: 0,
            residual: self.place(residual),
            tokens: self::number(tokens),
            cols: self::number(width),
            k: self::number(k),
            unused: 0,
        };
        // 1. routed experts, pair by pair
        if pairs > 0 {
            let chosen = m.choice.chosen.at();
            let [gates, ups] = [&mut m.gates, &mut m.ups].map(|s| s.room(gpu, 4 * pairs * intermediate));
            let [gates, ups] = [gates?, ups?].map(|at| p::Tensor::dense(at, intermediate));
            let outputs = m.outputs.room(gpu, 4 * pairs * width)?;
            let grouped = match self.tiles_of(&m.all[number], pairs).filter(|_| tokens > 1) {
                Some(tiles) => Some(match m.choice.grouped {
                    Some(grouped) => grouped,
                    None => group_pairs(gpu, &mut m.pairs, (chosen, pairs), count, tiles)?,
                }),
                None => None,
            };
            let of = |projection: usize, per_row| Table {
                matrices: table + (projection * count * size_of::<p::Matrix>()) as u64,
                experts: chosen,
                per_row,
                kinds: &kinds[projection],
                groups: groups[projection],
                grouped,
            };
            let product = |part: usize, out| {
                let ExpertPart { rows, cols, .. } = moe.experts.parts[part];
                let (matrix, table) = (p::Matrix::default(), Some(of(part, if part < 2 { k } else { 1 })));
                Product { matrix, table, rows, cols, outputs: pairs, out, bias: 0, accumulate: false, runs: None }
            };
            if m.streaming.as_ref().is_some_and(Streaming::has_failed) {
                // What no kernel computes is read all the same.
                for (at, len) in [(gates.at, intermediate), (ups.at, intermediate), (outputs, width)] {
                    // SAFETY: the room was just made.
                    unsafe { gpu.zero(at, 4 * pairs * len)? };
                }
            }
            let (both, last) = ([product(0, gates), product(1, ups)], [product(2, p::Tensor::dense(outputs, width))]);
            // Of an expert that could not be read nothing is known.
            let known = !m.streaming.as_ref().is_some_and(Streaming::has_failed);
            if let (true, Some(grouped)) = (known, grouped.filter(|g| g.few)) {
                let few = |part: usize, per_row| Few {
                    tables: [part, 1].map(|part| table + (part * count * size_of::<p::Matrix>()) as u64),
                    kinds: &kinds[part],
                    groups: groups[part],
                    grouped,
                    per_row,
                    rows: moe.experts.parts[part].rows,
                    pairs,
                    experts: count,
                };
                multiply_few(gpu, few(0, k), &m.x, Output::Hidden(&mut m.hidden))?;
                multiply_few(gpu, few(2, 1), &m.hidden, Output::Floats(p::Tensor::dense(outputs, width)))?;
            } else if known && grouped.is_none() && multiply_rows(gpu, Input::Encoded(&m.x), &both, true)? {
                let input = Input::Floats { x: gates, norm: p::Norm::default(), rows: pairs };
                if !multiply_rows(gpu, input, &last, false)? {
                    let source = Source { x: gates, rows: pairs, cols: intermediate, ..Source::default() };
                    encode(gpu, source, needs_of(&last), &mut m.hidden)?;
                    multiply(gpu, &last, &m.hidden)?;
                }
            } else {
                self.gated(&both, &last, &m.x, &mut m.hidden)?;
            }
            if let Some(streaming) = &mut m.streaming {
                streaming.compute_aside(&self.gpu, outputs)?;
            }
            combine.outputs = outputs;
        }
        // 2. the one that all tokens take
        if let Some(SharedExpert { mlp, gate }) = &moe.shared {
            let intermediate = mlp.gate.rows.len();
            let [gates, ups] = [&mut m.gates, &mut m.ups].map(|s| s.room(gpu, 4 * tokens * intermediate));
            let [gates, ups] = [gates?, ups?].map(|at| p::Tensor::dense(at, intermediate));
            combine.shared = m.shared.room(gpu, 4 * tokens * width)?;
            let out = p::Tensor::dense(combine.shared, width);
            let both =
                [(&mlp.gate, gates), (&mlp.up, ups)].map(|(l, out)| self.product(l, tokens, out, false, self.mode));
            let last = self.product(&mlp.down, tokens, out, false, self.mode);
            if multiply_rows(gpu, Input::Encoded(&m.x), &both, true)? {
                self.encode_and_multiply(gates, p::Norm::default(), &[last], &mut m.shared_hidden)?;
            } else {
                self.gated(&both, &[last], &m.x, &mut m.shared_hidden)?;
            }
            if let Some(gate) = gate {
                combine.gates = m.shared_gates.room(gpu, 4 * tokens)?;
                let out = p::Tensor::dense(combine.gates, 1);
                multiply(gpu, &[self.product(gate, tokens, out, false, Activations::F32)], &m.x)?;
            }
        }
        // 3. their sum
        let grid = [self::number(width.div_ceil(256)), self::number(tokens.min(MOST_BLOCKS)), 1];
        // SAFETY: the room was just made; the residual was checked against its buffer.
        unsafe { gpu.launch(Kernel::MOE_COMBINE, grid, 256, 0, &combine)? };
        Ok(())
    }

    /// `last` of `silu(gate(x)) * up(x)`, which is left encoded in `hidden`; `both`: gate and up.
    pub(crate) fn gated(
        &self,
        both: &[Product; 2],
        last: &[Product; 1],
        x: &Encoded,
        hidden: &mut Encoded,
    ) -> Result<()> {
        multiply(&self.gpu, both, x)?;
        let [gate, up] = both;
        let source = Source { x: gate.out, up: up.out, rows: gate.outputs, cols: gate.rows, ..Source::default() };
        encode(&self.gpu, source, needs_of(last), hidden)?;
        multiply(&self.gpu, last, hidden)
    }
}

/// Encodings that a product takes.
fn needs_of([product]: &[Product; 1]) -> Needs {
    product.kinds().into_iter().fold(Needs::default(), |needs, kind| needs.and(kind.needs()))
}
