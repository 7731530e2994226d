//! A mixture of experts on the host: routing, grouping of tokens by expert, experts that are mapped or streamed, and their ordered sum.
//!
//! It needs only an [`ExecContext`], no step and no model, so that another device can share a layer with it.

use std::time::Instant;

use anyhow::Result;
use sluice_kernels::format::{ActivationFormat, Activations};
use sluice_kernels::{math, norm, route};

use super::experts::{self, Grouping, Operand, SharedDown};
use super::gather::gather;
use super::stream::{StreamedLayer, Streaming};
use crate::encoded::{Encoded, Needs};
use crate::exec::ExecContext;
use crate::matmul;
use crate::memory::{Parts, Place, Weight, part};
use sluice_backend::{
    ExpertOptions, Failed, Lookahead, MatrixId, Moe, MoeId, Phase, Profile, Routed, Routing, SharedExpert,
};

/// The mixtures of a model.
#[derive(Default)]
pub struct HostMixture {
    moes: Vec<Registered>,
    /// The normed input `[tokens, hidden]`, and its encodings.
    normed: Vec<f32>,
    encoded: Encoded,
    /// The inputs of all (expert, token) pairs, `[pairs, hidden]`, where experts take them in orders of their own.
    gathered: Encoded,
    /// Hidden activations of routed experts, and of the shared one.
    hidden: Encoded,
    shared_hidden: Encoded,
    routing: Routing,
    grouping: Grouping,
    /// Router logits `[tokens, experts]`, and the shared expert's gates `[tokens, 1]`.
    logits: Vec<f32>,
    gates: Vec<f32>,
    /// 0, 1, 2, ..: the list of all rows.
    identity_rows: Vec<u32>,
    streaming: Option<Streaming>,
    guess: RouterPrediction,
    routed: Option<Vec<Routed>>,
    synchronisations: usize,
}

struct Registered {
    moe: Moe,
    /// The mixture of the layer right after.
    next: Option<usize>,
}

/// What a router would choose from the input of an earlier layer.
#[derive(Default)]
pub struct RouterPrediction {
    /// The predicted mixture.
    pub moe: Option<usize>,
    pub routing: Routing,
}

/// When the next layer's experts are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PrefetchPoint {
    /// Before this layer's experts are added to the residual stream.
    Early,
    /// After, with only the next layer's token mixer in between.
    Late,
}

impl HostMixture {
    pub fn register(&mut self, moe: Moe, follows: Option<MoeId>) -> MoeId {
        let number = self.moes.len();
        if let Some(before) = follows {
            self.moes[before.number()].next = Some(number);
        }
        self.moes.push(Registered { moe, next: None });
        MoeId::new(number)
    }

    /// The mixtures in order, each with that of the layer right after.
    pub fn registered(&self) -> Vec<(&Moe, Option<&Moe>)> {
        self.moes.iter().map(|Registered { moe, next }| (moe, next.map(|n| &self.moes[n].moe))).collect()
    }

    /// See [`sluice_backend::Resources::stream_experts`].
    pub fn stream(&mut self, weights: &mut [Weight], options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        let layers: Vec<_> = self.moes.iter().map(|r| &r.moe.experts).collect();
        let k = self.moes.iter().map(|r| r.moe.scoring.k()).max().unwrap_or(0);
        self.streaming = Some(Streaming::open(weights, &layers, k, options, lookahead)?);
        Ok(())
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

    /// Failed rows, recorded routing and synchronisations of the step that ends.
    pub fn end(&mut self) -> (Vec<Failed>, Vec<Routed>, usize) {
        let failed = self.streaming.as_mut().and_then(Streaming::take_failure).into_iter().collect();
        let routed = self.routed.as_mut().map(std::mem::take).unwrap_or_default();
        (failed, routed, std::mem::take(&mut self.synchronisations))
    }

    pub fn scratch_bytes(&self) -> usize {
        let encoded = self.encoded.bytes() + self.gathered.bytes() + self.hidden.bytes() + self.shared_hidden.bytes();
        let routing = |r: &Routing| r.experts.len() + r.weights.len();
        let lists = self.normed.len() + self.logits.len() + self.gates.len() + self.identity_rows.len();
        let words = lists + routing(&self.routing) + routing(&self.guess.routing);
        encoded + 4 * words + self.grouping.bytes() + self.streaming.as_ref().map_or(0, Streaming::scratch_bytes)
    }

    fn extend_identity_rows(&mut self, n: usize) {
        let from = self.identity_rows.len() as u32;
        self.identity_rows.extend(from..n as u32);
    }

    /// `residual += mixture(norm(x))`, where `x` may be the residual. `tokens`: the numbers of the step's tokens.
    pub fn run(
        &mut self,
        mut context: ExecContext,
        (number, tokens): (usize, &[u32]),
        x: Place,
        residual: Place,
        profile: Option<&mut Profile>,
    ) {
        let t0 = Instant::now();
        // Mixtures do not change while a step runs.
        let moes = std::mem::take(&mut self.moes);
        let Registered { moe, next } = &moes[number];
        let next = next.map(|n| (n, &moes[n].moe));
        // 1. norm, router
        self.norm(context.reborrow(), moe, x);
        self.route(context.reborrow(), moe, tokens, x);
        if let Some(routed) = &mut self.routed {
            let guessed = self.guess.moe.take_if(|m| *m == number).map(|_| self.guess.routing.experts.clone());
            routed.push(Routed {
                layer: number,
                k: self.routing.k,
                experts: self.routing.experts.clone(),
                guessed: guessed.unwrap_or_default(),
            });
        }
        let t1 = Instant::now();
        // 2. start to read missing experts; meanwhile predict the next layer's
        self.grouping.fill(&context, &self.routing, &moe.experts);
        if let Some(streaming) = &mut self.streaming {
            streaming.fetch(number, &self.grouping, moe.experts.count, residual.cols);
            // Look-ahead may be switched on at any step, which must not allocate then.
            let (guess, pairs) = (&mut self.guess.routing, x.rows * moe.scoring.k());
            guess.experts.reserve(pairs.saturating_sub(guess.experts.len()));
            guess.weights.reserve(pairs.saturating_sub(guess.weights.len()));
        }
        self.look_ahead(context.reborrow(), (x, tokens), next, PrefetchPoint::Early);
        // 3. experts, and their sum
        self.experts(context.reborrow(), moe, residual);
        self.look_ahead(context.reborrow(), (x, tokens), next, PrefetchPoint::Late);
        if let Some(profile) = profile {
            self.record(&context, moe, x.rows, profile, t0, t1);
        }
        self.moes = moes;
    }

    /// As [`HostMixture::run`] without what the routed experts add; leaves their inputs in `normed`, and returns their routing.
    pub fn run_but_experts(
        &mut self,
        mut context: ExecContext,
        (number, tokens): (usize, &[u32]),
        x: Place,
        normed: Place,
        residual: Place,
    ) -> Routing {
        let moes = std::mem::take(&mut self.moes);
        let moe = &moes[number].moe;
        self.norm(context.reborrow(), moe, x);
        let from = self.input(&context, moe, x.rows);
        for t in 0..x.rows {
            // SAFETY: no task is running, and `normed` is no part of the input.
            unsafe { normed.get_mut(t, 0..from.cols).copy_from_slice(from.get(t, 0..from.cols)) };
        }
        self.route(context.reborrow(), moe, tokens, x);
        let none = Routing { k: self.routing.k, ..Routing::default() };
        let routing = std::mem::replace(&mut self.routing, none);
        self.grouping.fill(&context, &self.routing, &moe.experts);
        self.experts(context.reborrow(), moe, residual);
        self.moes = moes;
        routing
    }

    /// `normed = norm(x)`
    fn norm(&mut self, context: ExecContext, moe: &Moe, x: Place) {
        let norm = moe.norm.as_ref().map(|norm| context.norm(norm));
        let (out, isa) = (Place::of_slice(part(&mut self.normed, x.rows * x.cols), x.cols), context.isa);
        context.pool.run(x.rows.div_ceil(4), &|task, _| {
            for row in task * 4..((task + 1) * 4).min(x.rows) {
                // SAFETY: this task alone uses these rows.
                let (x, out) = unsafe { (x.get(row, 0..x.cols), out.get_mut(row, 0..x.cols)) };
                match norm {
                    Some((weight, eps)) => norm::rms_norm(isa, x, weight, eps, out),
                    None => out.copy_from_slice(x),
                }
            }
        });
    }

    /// What routed experts take: what is normed, or what a projection has made of that.
    fn input(&mut self, context: &ExecContext, moe: &Moe, tokens: usize) -> Place {
        let hidden = moe.experts.hidden();
        match moe.latent {
            Some(latent) => context.place(latent.first_rows(tokens)),
            None => Place::of_slice(&mut self.normed[..tokens * hidden], hidden),
        }
    }

    /// Routes the rows, which are normed.
    fn route(&mut self, mut context: ExecContext, moe: &Moe, tokens: &[u32], x: Place) {
        let count = x.rows;
        let (x, norm) = match &moe.router_norm {
            Some(norm) => (x, Some(norm)),
            None => (Place::of_slice(&mut self.normed[..count * x.cols], x.cols), None),
        };
        self.extend_identity_rows(count);
        matmul::encode(context.reborrow(), x, norm, Needs::of([ActivationFormat::F32]), &mut self.encoded);
        let rows = (&self.identity_rows[..count], tokens);
        choose(context, moe, &self.encoded, rows, &mut self.logits, &mut self.routing);
    }

    /// `residual += sum of the routed experts of the normed rows + their shared expert`
    fn experts(&mut self, mut context: ExecContext, moe: &Moe, residual: Place) {
        let (tokens, shared) = (residual.rows, moe.shared.as_ref());
        let mut grouping = std::mem::take(&mut self.grouping);
        let pairs = grouping.order.len();
        // 1. one encoding of x for all
        let ids = grouping.units.iter().flat_map(|u| [u.gate.weight, u.up.weight]).map(MatrixId::new);
        let mut needs = context.needs(ids);
        if let Some(s) = shared {
            for e in [&s.mlp.gate, &s.mlp.up] {
                needs.add(context.weights[e.matrix.number()].format().activation_format(context.mode));
            }
            needs.f32 |= s.gate.is_some();
        }
        let x = self.input(&context, moe, tokens);
        matmul::encode(context.reborrow(), x, None, needs, &mut self.encoded);
        if self.streaming.is_none() {
            for unit in &grouping.units {
                [unit.gate, unit.up, unit.down].iter().for_each(|o| context.weights[o.weight].wait());
            }
        }
        self.extend_identity_rows(tokens.max(pairs));
        if let Some(order) = moe.experts.order {
            let (order, x) = (context.place(order), self.input(&context, moe, tokens));
            gather(context.reborrow(), &grouping, (x, order), needs, &mut self.gathered);
        }
        // 2. hidden activations: shared expert, routed experts
        let gate = shared.and_then(|s| self.shared_gate_up(context.reborrow(), s, tokens));
        let needs = experts::hidden_needs(&context, &grouping.units);
        self.hidden.reset(pairs, moe.experts.intermediate(), needs);
        let shared_down = shared.map(|s| Operand::of(&s.mlp.down));
        // Experts are computed as they are read; if all are in memory, together.
        let there = match self.streaming.take() {
            Some(mut streaming) if !grouping.units.is_empty() => {
                streaming.reserve(pairs, tokens, residual.cols);
                experts::reserve(context.reborrow(), &grouping.units, shared_down, tokens, residual.cols);
                let there = streaming.all_there(&mut grouping);
                if !there {
                    self.synchronisations += 1;
                    let is_gathered = moe.experts.order.is_some();
                    let layer = StreamedLayer {
                        x: if is_gathered { &self.gathered } else { &self.encoded },
                        is_gathered,
                        needs,
                        identity_rows: &self.identity_rows,
                        shared: shared_down.map(|down| (down, &self.shared_hidden, gate)),
                        residual,
                    };
                    streaming.run(context.reborrow(), &mut grouping, layer, &mut self.hidden);
                }
                self.streaming = Some(streaming);
                there
            }
            streaming => {
                self.streaming = streaming;
                true
            }
        };
        // 3. down projections, summed
        if there {
            let (rows, x) = match moe.experts.order {
                Some(_) => (&self.identity_rows[..pairs], &self.gathered),
                None => (&grouping.order[..], &self.encoded),
            };
            experts::gate_up(context.reborrow(), &mut grouping.units, rows, x, needs, &mut self.hidden);
            let identity_rows = &self.identity_rows;
            let hidden = &self.shared_hidden;
            let shared = shared_down.map(|down| SharedDown { down, hidden, gate, tokens: &identity_rows[..tokens] });
            let rows = &identity_rows[..pairs];
            experts::down_and_add(context, &grouping.units, &grouping, rows, &self.hidden, shared, None, residual);
            if let Some(streaming) = &mut self.streaming {
                streaming.release_all(&grouping);
            }
        }
        self.grouping = grouping;
    }

    /// First round of the shared expert, into `shared_hidden`; its gates, where it has some.
    fn shared_gate_up(&mut self, mut context: ExecContext, s: &SharedExpert, tokens: usize) -> Option<Place> {
        context.wait_for([&s.mlp.gate, &s.mlp.up, &s.mlp.down].into_iter().chain(&s.gate));
        let gate = s.gate.as_ref().map(|gate| {
            let place = Place::of_slice(part(&mut self.gates, tokens), 1);
            let product = context.product(gate, place, false);
            let context = ExecContext { mode: Activations::F32, ..context.reborrow() };
            matmul::run_products(context, &mut [product], &self.encoded, &self.identity_rows[..tokens]);
            // SAFETY: the product is done; nobody else uses the gates now.
            (0..tokens).for_each(|t| unsafe {
                let g = &mut place.get_mut(t, 0..1)[0];
                *g = math::sigmoid1(*g);
            });
            place
        });
        experts::dense_gate_up(context, &s.mlp, &self.encoded, &self.identity_rows[..tokens], &mut self.shared_hidden);
        gate
    }

    /// Predicts the next mixture's experts from the current residual stream, and prefetches them. Changes no result.
    fn look_ahead(
        &mut self,
        context: ExecContext,
        (x, tokens): (Place, &[u32]),
        next: Option<(usize, &Moe)>,
        sight: PrefetchPoint,
    ) {
        let Some((number, moe)) = next else { return };
        let few = self.streaming.as_ref().is_none_or(Streaming::out_of_order);
        let ahead = self.streaming.as_ref().is_some_and(Streaming::looks_ahead);
        // The early prediction is recorded; for many tokens it is good enough.
        if sight == PrefetchPoint::Late && (self.routed.is_some() || !few || !ahead) {
            return;
        }
        if self.routed.is_some() || self.streaming.as_ref().is_some_and(Streaming::predicts) {
            self.guess(context, (x, tokens), number, moe);
        }
        if let Some(s) = self.streaming.as_mut().filter(|_| ahead) {
            s.look_ahead(number, moe.experts.count, &self.guess.routing, sight == PrefetchPoint::Late);
        }
    }

    /// The choice of the router of mixture `number` for the input `x`.
    fn guess(&mut self, mut context: ExecContext, (x, tokens): (Place, &[u32]), number: usize, moe: &Moe) {
        self.extend_identity_rows(x.rows);
        matmul::encode(
            context.reborrow(),
            x,
            moe.norm_of_router(),
            Needs::of([ActivationFormat::F32]),
            &mut self.encoded,
        );
        let rows = (&self.identity_rows[..x.rows], tokens);
        choose(context, moe, &self.encoded, rows, &mut self.logits, &mut self.guess.routing);
        self.guess.moe = Some(number);
    }

    fn record(&self, context: &ExecContext, moe: &Moe, tokens: usize, profile: &mut Profile, t0: Instant, t1: Instant) {
        let pairs = self.grouping.order.len();
        let mut add = |phase, time, used: &mut dyn Iterator<Item = (usize, usize)>, tokens: usize| {
            let (mut bytes, mut macs) = (0, 0);
            for (weight, rows) in used {
                let w = &context.weights[weight];
                bytes += (rows * w.bytes_per_row()) as u64;
                macs += (rows * w.cols() * tokens) as u64;
            }
            profile.add(phase, time, bytes, macs);
        };
        let router = (moe.router.matrix.number(), moe.router.rows.len());
        add(Phase::Route, t1 - t0, &mut std::iter::once(router), tokens);
        let (i, h) = (moe.experts.intermediate(), moe.experts.hidden());
        let units = self.grouping.units.iter();
        let routed = units.flat_map(|u| [(u.gate.weight, i), (u.up.weight, i), (u.down.weight, h)]);
        let dense = moe.shared.iter().flat_map(|s| [&s.mlp.gate, &s.mlp.up, &s.mlp.down]);
        let dense = dense.map(|l| (l.matrix.number(), l.rows.len()));
        add(Phase::Experts, t1.elapsed(), &mut routed.chain(dense), pairs.div_ceil(self.grouping.units.len().max(1)));
    }
}

/// Routes the encoded tokens. Router logits are always computed from f32, so that the choice does not depend on the activation mode.
fn choose(
    mut context: ExecContext,
    moe: &Moe,
    x: &Encoded,
    (rows, tokens): (&[u32], &[u32]),
    logits: &mut Vec<f32>,
    routing: &mut Routing,
) {
    let (n, count, k, isa) = (rows.len(), moe.router.rows.len(), moe.scoring.k(), context.isa);
    context.wait_for([&moe.router]);
    let out = Place::of_slice(part(logits, n * count), count);
    let product = context.product(&moe.router, out, false);
    matmul::run_products(ExecContext { mode: Activations::F32, ..context.reborrow() }, &mut [product], x, rows);
    routing.k = k;
    routing.experts.resize(n * k, 0);
    routing.weights.resize(n * k, 0.0);
    let (ids, weights) = (Parts::new(&mut routing.experts), Parts::new(&mut routing.weights));
    context.pool.run(n.div_ceil(8), &|task, _| {
        for (t, token) in tokens.iter().enumerate().take(n).skip(task * 8).take(8) {
            // SAFETY: this task alone uses this token's parts.
            let (logits, ids, weights) =
                unsafe { (out.get_mut(t, 0..count), ids.get(t * k..(t + 1) * k), weights.get(t * k..(t + 1) * k)) };
            route::route(isa, &moe.scoring, *token, logits, ids, weights);
        }
    });
}
