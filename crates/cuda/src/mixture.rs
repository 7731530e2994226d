//! Mixtures of experts, all on the device: routed, computed and combined without a look from the host, where no expert is on disk.

use anyhow::Result;
use sluice_backend::{
    Activations, ExpertMatrix, ExpertPart, Experts, Moe, MoeId, Routed, Routing, Scoring, SharedExpert, Tensor,
};

use crate::backend::Cuda;
use crate::driver::{Address, Gpu};
use crate::few::{self, Few, Output, multiply_few};
use crate::kernels::{Kernel, STATIC_SHARED};
use crate::memory::{Memory, Pinned, Scratch, bytes_of_mut};
use crate::mixture_one::{MOST_EXPERTS, MOST_SLOTS, MixtureOfOne, NORMED, ROUTE_ROWS, ROUTE_THREADS};
use crate::parameters::{self as p, PROJECTIONS, number};
use crate::products::{
    self, Encoded, Grouped, Input, MOST_BLOCKS, Product, Source, Table, encode, multiply, multiply_rows,
};
use crate::streaming::Streaming;
use crate::weights::{self, Kind, Needs, Weights};

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

/// From so many experts for each pair of a token and an expert on, pairs are computed one by one.
const TOO_FEW: usize = 8;
/// Up to so many pairs of a token and an expert for each expert, tiles would be mostly empty.
const FEW_PAIRS: usize = 3;
/// From so many pairs for each expert on, tiles are large.
const MANY_PAIRS: usize = 20;
/// Of the kernels that choose for a few tokens (`kernels/mixture_few.cu`), which are made as those for one: tokens at most; tokens of a block
/// that chooses, and its threads; tokens of a block of the router, and its blocks on a multiprocessor.
const FEW_TOKENS: usize = 32;
const CHOOSE_TOKENS: usize = 8;
const CHOOSE_THREADS: u32 = 256;
const ROUTE_TOKENS: usize = 8;
const ROUTE_BLOCKS: usize = 2;
/// Threads of a block that counts or orders an expert's pairs.
const PAIR_THREADS: u32 = 512;

pub(crate) struct Registered {
    pub moe: Moe,
    /// The mixture of the layer right after.
    next: Option<usize>,
    /// Kinds of each projection over all experts.
    pub kinds: [Vec<Kind>; PROJECTIONS],
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

/// Which experts tokens take, on the device.
#[derive(Default)]
pub(crate) struct Choice {
    pub logits: Scratch,
    chosen: Scratch,
    weights: Scratch,
    /// How many blocks have chosen; zero between kernels.
    counter: Option<Memory>,
    /// Pairs by their expert, where whoever chose last has found that out.
    grouped: Option<Grouped>,
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
        let mut kinds: [Vec<Kind>; PROJECTIONS] = Default::default();
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
                unsafe { gpu.write(memory.at, crate::memory::bytes_of(bias))? };
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
            unsafe { gpu.write(table.at, p::Matrix::bytes(&matrices))? };
            r.table = Some(table);
        }
        Ok(())
    }

    /// Nobody answers what the device may still ask in a step that went wrong.
    pub fn ask_no_more(&mut self) {
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
        let tables: usize = self.all.iter().flat_map(|r| [&r.table, &r.bias]).flatten().map(|m| m.bytes).sum();
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
        let mut m = std::mem::take(&mut self.mixtures);
        let done = self.answer(&mut m);
        self.mixtures = m;
        done
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
        let held_back = self.gpu.can_hold_back() && self.times_nothing();
        match held_back {
            true => self.gpu.hold_back(),
            false => self.answer(m)?,
        }
        let streaming = m.streaming.as_mut().expect("experts that may have to come");
        let (question, table) = streaming.ask(number)?;
        self.run_one(one, table, Some(question))?;
        if held_back { Ok(()) } else { self.answer(m) }
    }

    /// Answers what the device asks in what was held back, which is carried out, if there is any.
    pub(crate) fn answer(&self, m: &mut Mixtures) -> Result<()> {
        let Mixtures { all, streaming, synchronisations, .. } = m;
        if let Some(streaming) = streaming.as_mut().filter(|s| s.is_asked()) {
            self.gpu.carry_out()?;
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
            unsafe { self.gpu.launch(Kernel::CopyRows, [rows, 1, 1], 256, 0, &copy)? };
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

    /// `m.x = norm(x)`, with a mixture's norm.
    fn normed(&self, m: &mut Mixtures, x: Tensor, number: usize, needs: Needs) -> Result<()> {
        let norm = self.norm(&m.all[number].moe.norm);
        let source = Source { x: self.place(x), norm, rows: x.rows, cols: x.cols, ..Source::default() };
        encode(&self.gpu, source, needs, &mut m.x)
    }

    /// The same, and what the router makes of a few tokens, by which it chooses: one kernel. Says whether it does.
    fn normed_and_chosen(&self, m: &mut Mixtures, x: Tensor, of: usize, needs: Needs) -> Result<bool> {
        let (gpu, moe) = (&self.gpu, &m.all[of].moe);
        let (norm, from, count) = (self.norm(&moe.norm), self.place(x), moe.router.rows.len());
        let product = self.product(&moe.router, x.rows, p::Tensor::default(), false, Activations::F32);
        let shared = |rows: usize| 4 * (ROUTE_TOKENS + 1 + rows) * x.cols;
        let blocks = |rows: usize| (count.div_ceil(rows) + ROUTE_TOKENS) * x.rows.div_ceil(ROUTE_TOKENS);
        let fits = |rows: usize| shared(rows) + STATIC_SHARED <= gpu.device.shared;
        // Twice the rows where blocks are more than the device holds.
        let many = blocks(ROUTE_ROWS) > ROUTE_BLOCKS * gpu.device.multiprocessors && fits(2 * ROUTE_ROWS);
        let rows = if many { 2 * ROUTE_ROWS } else { ROUTE_ROWS };
        let aligned = [from.at, 4 * from.stride, norm.weight].iter().all(|at| at.is_multiple_of(16));
        let possible = gpu.device.few
            && x.rows <= FEW_TOKENS
            && (product.bias, product.runs, product.cols) == (0, None, x.cols)
            && product.matrix.kind < 4
            && x.cols.is_multiple_of(NORMED)
            && norm.weight != 0
            && aligned
            && fits(rows);
        if !possible {
            return Ok(false);
        }
        moe.scoring.check(count).unwrap_or_else(|e| panic!("{e}"));
        let logits = m.choice.logits.room(gpu, 4 * x.rows * count)?;
        let to = m.x.room(gpu, x.rows, x.cols, needs)?;
        let row_blocks = number(count.div_ceil(rows));
        let normed = p::Encode {
            x: from,
            up: p::Tensor::default(),
            norm,
            taken: 0,
            rows: number(x.rows),
            cols: number(x.cols),
            to,
        };
        let parameters = p::RouteFew {
            x: normed,
            router: product.matrix,
            logits,
            experts: number(count),
            row_blocks,
            block_rows: number(rows),
            unused: 0,
        };
        let grid = [row_blocks + number(ROUTE_TOKENS), number(x.rows.div_ceil(ROUTE_TOKENS)), 1];
        // SAFETY: matrices and tensors were checked against their buffers; the room was just made.
        unsafe { gpu.launch(Kernel::RouteFew, grid, ROUTE_THREADS, number(shared(rows)), &parameters)? };
        self.choose_by(m, of, x.rows, logits)?;
        Ok(true)
    }

    /// Lets a mixture's router choose among its experts for the rows of `m.x`.
    fn choose(&self, m: &mut Mixtures, number: usize, tokens: usize) -> Result<()> {
        let Registered { moe, .. } = &m.all[number];
        let count = moe.router.rows.len();
        moe.scoring.check(count).unwrap_or_else(|e| panic!("{e}"));
        let logits = m.choice.logits.room(&self.gpu, 4 * tokens * count)?;
        let product = self.product(&moe.router, tokens, p::Tensor::dense(logits, count), false, Activations::F32);
        multiply(&self.gpu, &[product], &m.x)?;
        self.choose_by(m, number, tokens, logits)
    }

    /// The same by what the router has made of them.
    fn choose_by(&self, m: &mut Mixtures, number: usize, tokens: usize, logits: Address) -> Result<()> {
        let (count, k) = (m.all[number].moe.router.rows.len(), m.all[number].moe.scoring.k());
        let chosen = m.choice.chosen.room(&self.gpu, 4 * tokens * k)?;
        let weights = m.choice.weights.room(&self.gpu, 4 * tokens * k)?;
        let parameters = m.all[number].route(tokens, logits, chosen, weights);
        m.choice.grouped = None;
        if self.gpu.device.few
            && tokens <= FEW_TOKENS
            && k <= MOST_SLOTS
            && (k..=MOST_EXPERTS).contains(&count)
            && parameters.groups == 1
        {
            let (of_tile, few) = self.tiles_of(&m.all[number], tokens * k).unwrap_or((few::TOGETHER, true));
            let grouped = room_of_pairs(&self.gpu, &mut m.pairs, tokens * k, count, (of_tile, few))?;
            let Grouped { tiles, order, .. } = grouped;
            let counter = match &m.choice.counter {
                Some(counter) => counter.at,
                None => m.choice.counter.insert(Memory::zeroed(&self.gpu, size_of::<u32>(), "scratch")?).at,
            };
            let parameters =
                p::ChooseFew { route: parameters, tiles, order, counter, of_tile: self::number(of_tile), unused: 0 };
            let blocks = self::number(tokens.div_ceil(CHOOSE_TOKENS));
            // SAFETY: the room was just made.
            unsafe { self.gpu.launch(Kernel::ChooseFew, [blocks, 1, 1], CHOOSE_THREADS, 0, &parameters)? };
            m.choice.grouped = Some(grouped);
            return Ok(());
        }
        let shared = self::number(4 * (2 * count + 2 * k));
        // SAFETY: the room was just made.
        unsafe { self.gpu.launch(Kernel::Route, [self::number(tokens), 1, 1], 32, shared, &parameters)? };
        Ok(())
    }

    /// How so many pairs are grouped by their expert: pairs of a tile, and whether experts have a few each; `None`: they are computed one by one.
    fn tiles_of(&self, of: &Registered, pairs: usize) -> Option<(usize, bool)> {
        let (gpu, Registered { moe, kinds, groups, .. }) = (&self.gpu, of);
        let count = moe.experts.count;
        let integers = kinds.iter().all(|kinds| kinds.len() == 1 && kinds[0].needs().int8);
        if !integers || !gpu.device.tiles || pairs * TOO_FEW <= count {
            return None;
        }
        let each_few = |part: usize| Few::fits(gpu, &kinds[part], groups[part], moe.experts.parts[part].cols);
        let alike = kinds[0] == kinds[1] && groups[0] == groups[1];
        if gpu.device.few && pairs <= FEW_PAIRS * count && alike && (0..PROJECTIONS).all(each_few) {
            return Some((few::TOGETHER, true));
        }
        // Where a tile of many tokens does not fit, it is one of few.
        let fits = |(kinds, groups): (&Vec<Kind>, &Option<(u32, u32)>)| {
            let of = groups.map_or(0, |(group, _)| group as usize / products::GROUP);
            kinds[0].tiles(of, weights::TILE, gpu.device.shared).is_some()
        };
        let many = pairs >= MANY_PAIRS * count && kinds.iter().zip(groups).all(fits);
        Some((if many { weights::TILE } else { weights::FEW }, false))
    }

    /// Which experts the router has chosen, on the host: the step waits for it. `input`: bytes of what was normed.
    fn read_chosen(&self, m: &mut Mixtures, n: usize, input: usize) -> Result<Vec<u32>> {
        if let Some(streaming) = &mut m.streaming
            && let Some(host) = streaming.input(&self.gpu, n, input)?
        {
            // SAFETY: what was normed has so many bytes; waited for below.
            unsafe { self.gpu.read_later(m.x.floats(), host)? };
        }
        let host = m.chosen.room(&self.gpu, 4 * n)?;
        // SAFETY: the router has written as much.
        unsafe { self.gpu.read(m.choice.chosen.at(), host)? };
        m.synchronisations += 1;
        Ok(host.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// The same with their weights.
    fn read_choice(&self, m: &mut Mixtures, tokens: usize, k: usize) -> Result<Routing> {
        let (mut experts, mut weights) = (vec![0; tokens * k], vec![0.0; tokens * k]);
        // SAFETY: the router has written as much.
        unsafe {
            self.gpu.read_later(m.choice.weights.at(), bytes_of_mut(&mut weights))?;
            self.gpu.read(m.choice.chosen.at(), bytes_of_mut(&mut experts))?;
        }
        m.synchronisations += 1;
        Ok(Routing { k, experts, weights })
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
        unsafe { gpu.launch(Kernel::Combine, grid, 256, 0, &combine)? };
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

/// Puts pairs of a token and an expert in the order of their experts.
fn group_pairs(
    gpu: &Gpu,
    room: &mut Scratch,
    (chosen, pairs): (Address, usize),
    experts: usize,
    (of_tile, few): (usize, bool),
) -> Result<Grouped> {
    let grouped = room_of_pairs(gpu, room, pairs, experts, (of_tile, few))?;
    let (at, order) = (grouped.tiles, grouped.order);
    let counts = order + 4 * pairs as u64;
    let parameters = p::Pairs {
        chosen,
        counts,
        tiles: at,
        order,
        pairs: number(pairs),
        experts: number(experts),
        of_tile: number(of_tile),
        unused: 0,
    };
    for kernel in [Kernel::CountPairs, Kernel::GroupPairs] {
        // SAFETY: the router has chosen as many; the room was just made.
        unsafe { gpu.launch(kernel, [number(experts), 1, 1], PAIR_THREADS, 0, &parameters)? };
    }
    Ok(grouped)
}

/// Room for tiles of pairs, their order, and a number for each expert behind it.
fn room_of_pairs(
    gpu: &Gpu,
    room: &mut Scratch,
    pairs: usize,
    experts: usize,
    (of_tile, few): (usize, bool),
) -> Result<Grouped> {
    // Each expert's last tile may have room left.
    let most = (pairs / of_tile + experts).min(pairs);
    let tiles = 16 * (most + 1);
    let at = room.room(gpu, tiles + 4 * pairs + 4 * experts)?;
    Ok(Grouped { tiles: at, order: at + tiles as u64, most, of_tile, few })
}

/// Encodings that a product takes.
fn needs_of([product]: &[Product; 1]) -> Needs {
    product.kinds().into_iter().fold(Needs::default(), |needs, kind| needs.and(kind.needs()))
}
