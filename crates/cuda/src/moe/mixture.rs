//! A step's mixtures: routed, computed and combined without the host, unless experts may have to come from the host's memory or from disk.

use anyhow::Result;
use sluice_backend::{Failed, Moe, MoeId, Routed, Routing, Tensor};

use crate::device::graph::HoldGuard;
use crate::device::pinned::PinnedBuffer;
use crate::kernels::Kernel;
use crate::moe::grouped::ExpertScratch;
use crate::moe::layer::MoeLayer;
use crate::moe::offload::ExpertStreaming;
use crate::moe::route::{RouterScratch, norm};
use crate::moe::single::{SingleTokenMoe, SingleTokenScratch};
use crate::ops::activations::{EncodeInput, EncodedActivations, encode};
use crate::ops::context::Context;
use crate::parameters::{self as p, number};
use crate::weights::Needs;

/// All mixtures of a model, with their scratch.
#[derive(Default)]
pub struct Mixtures {
    layers: Vec<MoeLayer>,
    /// The normed input.
    x: EncodedActivations,
    /// What routed experts take, where it is not that.
    latent: EncodedActivations,
    router: RouterScratch,
    experts: ExpertScratch,
    single: SingleTokenScratch,
    streaming: Option<ExpertStreaming>,
    /// A router's choice on the host.
    chosen: PinnedBuffer,
    /// The choices of routers, if they are recorded.
    routed: Option<Vec<Routed>>,
    /// A mixture and what its router would choose by the input of the mixture before it.
    guess: Option<(usize, Vec<u32>)>,
    /// How often the host waited within the step.
    pub synchronisations: usize,
    /// Events between launches measure times, so launches cannot be held.
    pub is_profiled: bool,
    /// Recorded launches wait for the host.
    hold: Option<HoldGuard>,
}

impl Mixtures {
    /// Registers a mixture; `follows`: the mixture of the layer before.
    pub fn register(&mut self, context: &Context, moe: Moe, follows: Option<MoeId>) -> Result<MoeId> {
        let number = self.layers.len();
        let layer = MoeLayer::new(&context.gpu, &context.weights, context.mode, moe)?;
        if let Some(before) = follows {
            self.layers[before.number()].next = Some(number);
        }
        self.layers.push(layer);
        Ok(MoeId::new(number))
    }

    pub fn moe(&self, number: usize) -> &Moe {
        &self.layers[number].moe
    }

    /// The mixtures in order.
    pub fn registered(&self) -> impl Iterator<Item = &Moe> + Clone {
        self.layers.iter().map(|layer| &layer.moe)
    }

    /// Takes experts from `streaming` from here on.
    pub fn stream(&mut self, streaming: ExpertStreaming) {
        self.streaming = Some(streaming);
    }

    pub fn streaming(&self) -> Option<&ExpertStreaming> {
        self.streaming.as_ref()
    }

    pub fn streaming_mut(&mut self) -> Option<&mut ExpertStreaming> {
        self.streaming.as_mut()
    }

    /// Records the choices of routers from here on.
    pub fn record_routing(&mut self) {
        self.routed.get_or_insert_default();
    }

    /// Writes the tables of experts, if all experts stay on the device.
    pub fn write_tables(&mut self, context: &Context) -> Result<()> {
        if self.streaming.is_some() {
            return Ok(());
        }
        let Context { gpu, weights, mode, .. } = context;
        self.layers.iter_mut().try_for_each(|layer| layer.write_table(gpu, weights, *mode))
    }

    /// Ends a step that failed: held launches never run, and the device goes on without the experts that it still requests.
    pub fn cancel(&mut self) {
        self.hold = None;
        self.streaming.as_mut().into_iter().for_each(ExpertStreaming::cancel);
    }

    /// Takes down that the device has finished the step.
    pub fn settle(&mut self, context: &Context) -> Result<()> {
        self.streaming.as_mut().map_or(Ok(()), |s| s.settle(&context.gpu, &context.weights))
    }

    /// The results of a step: lost rows, recorded choices, and how often the host waited.
    pub fn end(&mut self) -> (Vec<Failed>, Vec<Routed>, usize) {
        let failed = self.streaming.as_mut().and_then(ExpertStreaming::take_failure).into_iter().collect();
        let routed = self.routed.as_mut().map(std::mem::take).unwrap_or_default();
        (failed, routed, std::mem::take(&mut self.synchronisations))
    }

    /// Bytes of scratch and of streamed experts on the device.
    pub fn bytes(&self) -> (usize, usize) {
        let scratch =
            self.x.bytes() + self.latent.bytes() + self.router.bytes() + self.experts.bytes() + self.single.bytes();
        let tables = self.layers.iter().flat_map(|layer| [&layer.table, &layer.of_scoring, &layer.of_tokens]).flatten();
        let tables: usize = tables.map(|m| m.bytes).sum();
        (scratch + tables, self.streaming.as_ref().map_or(0, ExpertStreaming::device_bytes))
    }

    /// Whether the host may wait for the device in a mixture, or answers it at once.
    pub fn waits_in(&mut self, context: &Context, x: Tensor, moe: MoeId, residual: Tensor) -> Result<bool> {
        let (number, records) = (moe.number(), self.routed.is_some());
        if !records && self.streaming.as_ref().is_none_or(|s| s.complete_table(number).is_some()) {
            return Ok(false);
        }
        if records || x.rows > 1 || !self.can_hold(context) {
            return Ok(true);
        }
        Ok(self.prepare_single(context, x, number, residual)?.is_none())
    }

    /// Whether launches that wait for the host can be held together with those that follow.
    fn can_hold(&self, context: &Context) -> bool {
        context.gpu.can_hold() && !self.is_profiled
    }

    fn prepare_single(
        &mut self,
        context: &Context,
        x: Tensor,
        number: usize,
        residual: Tensor,
    ) -> Result<Option<SingleTokenMoe>> {
        let (layer, logits) = (&self.layers[number], &mut self.router.logits);
        SingleTokenMoe::prepare(context, layer, logits, &mut self.single, x, residual)
    }

    /// `residual += mixture(norm(x))`
    pub fn run(&mut self, context: &Context, x: Tensor, number: usize, residual: Tensor) -> Result<()> {
        let (tokens, k, records) = (x.rows, self.layers[number].moe.scoring.k(), self.routed.is_some());
        // 1. If choices are recorded: what the next router would choose from this input
        let guess = match self.layers[number].next.filter(|_| records) {
            Some(next) => {
                self.norm(context, x, next, Needs::F32)?;
                self.route(context, x, next)?;
                Some((next, self.read_routing(context, tokens, next)?.experts))
            }
            None => None,
        };
        // 2. One token
        let resident = self.layers[number].table.as_ref().map(|t| t.at);
        let complete = self.streaming.as_ref().map_or(resident, |s| s.complete_table(number));
        if tokens == 1
            && !records
            && let Some(single) = self.prepare_single(context, x, number, residual)?
        {
            return match (complete, self.streaming.is_some()) {
                (None, true) => self.run_requesting(context, single, number),
                (table, _) => single.launch(&context.gpu, table.unwrap_or(0), None),
            };
        }
        // 3. Norm and router
        self.answer(context)?;
        let (layer, to) = (&self.layers[number], &mut self.x);
        let needs = layer.needs(context);
        if !self.router.norm_and_route_few(context, layer, x, needs, to)? {
            self.norm(context, x, number, needs)?;
            self.route(context, x, number)?;
        }
        self.encode_latent(context, number, tokens)?;
        // 4. The choice on the host, if it is needed there
        let mut table = complete.unwrap_or(0);
        let looks = records || complete.is_none();
        if looks {
            let chosen = self.read_chosen(context, number, tokens)?;
            if let Some(streaming) = &mut self.streaming {
                streaming.settle(&context.gpu, &context.weights)?;
                table = streaming.fetch(&context.gpu, &context.weights, number, (k, &chosen))?;
            }
            if let Some(routed) = &mut self.routed {
                let guessed = self.guess.take_if(|(of, _)| *of == number).map(|(_, guessed)| guessed);
                routed.push(Routed { layer: number, k, experts: chosen, guessed: guessed.unwrap_or_default() });
            }
        }
        if guess.is_some() {
            self.guess = guess;
        }
        // 5. The experts and their sum
        let layer = &self.layers[number];
        let is_complete = !self.streaming.as_ref().is_some_and(ExpertStreaming::has_failed);
        let outputs = match tokens * k {
            0 => 0,
            _ => {
                let taken = if layer.moe.latent.is_some() { &self.latent } else { &self.x };
                let outputs = self.experts.routed(context, layer, &mut self.router, taken, table, is_complete)?;
                // Of a layer whose choice the host has not seen it computes nothing; what it keeps is the part of a layer before.
                if let Some(streaming) = self.streaming.as_mut().filter(|_| looks) {
                    streaming.compute_on_host(&context.gpu, outputs)?;
                }
                outputs
            }
        };
        self.experts.combine(context, layer, &self.x, self.router.chosen(outputs, k), residual)?;
        // 6. If there are many tokens: the next layer's experts
        match (&mut self.streaming, self.layers[number].next) {
            (Some(streaming), Some(next)) => streaming.prefetch(&context.weights, next),
            _ => Ok(()),
        }
    }

    /// One token's mixture whose experts may have to come first: the device requests them, either at once or within the held launches of the whole step.
    fn run_requesting(&mut self, context: &Context, single: SingleTokenMoe, number: usize) -> Result<()> {
        let holds = self.can_hold(context);
        if !holds {
            self.answer(context)?;
        } else if !context.gpu.is_held() {
            self.hold = Some(context.gpu.hold());
        }
        let streaming = self.streaming.as_mut().expect("experts that may have to come");
        let (slot, table) = streaming.request(number)?;
        single.launch(&context.gpu, table, Some(slot))?;
        if holds { Ok(()) } else { self.answer(context) }
    }

    /// Answers all requests of the device. Held launches run first.
    pub fn answer(&mut self, context: &Context) -> Result<()> {
        let Mixtures { layers, streaming, synchronisations, hold, .. } = self;
        if let Some(streaming) = streaming.as_mut().filter(|s| s.has_requests()) {
            context.gpu.flush()?;
            *hold = None;
            let k = |layer: usize| layers[layer].moe.scoring.k();
            *synchronisations += streaming.answer(&context.gpu, &context.weights, k)?;
        }
        Ok(())
    }

    /// As [`Mixtures::run`] without the routed experts. Writes their input to `normed` and returns the choice.
    pub fn run_without_experts(
        &mut self,
        context: &Context,
        x: Tensor,
        number: usize,
        normed: Tensor,
        residual: Tensor,
    ) -> Result<Routing> {
        let needs = self.layers[number].needs(context);
        self.norm(context, x, number, needs)?;
        self.encode_latent(context, number, x.rows)?;
        let (taken, width) = (self.taken(number).floats(), self.layers[number].moe.experts.hidden());
        let from = p::Tensor::dense(taken, width);
        let (rows, cols) = (self::number(x.rows), self::number(width));
        let copy = p::CopyRows { from, to: context.place(normed), rows, cols };
        // SAFETY: the router has its input as f32; the tensor is as large as x.
        unsafe { context.gpu.launch(Kernel::COPY_ROWS, [rows, 1, 1], 256, 0, &copy)? };
        self.route(context, x, number)?;
        let routing = self.read_routing(context, x.rows, number)?;
        self.experts.combine(context, &self.layers[number], &self.x, self.router.chosen(0, 0), residual)?;
        Ok(routing)
    }

    fn norm(&mut self, context: &Context, x: Tensor, number: usize, needs: Needs) -> Result<()> {
        norm(context, &self.layers[number], x, needs, &mut self.x)
    }

    fn route(&mut self, context: &Context, x: Tensor, number: usize) -> Result<()> {
        self.router.route(context, &self.layers[number], x, &self.x)
    }

    /// Encodes what routed experts take of so many tokens, where that is not the normed input.
    fn encode_latent(&mut self, context: &Context, number: usize, tokens: usize) -> Result<()> {
        let layer = &self.layers[number];
        let Some(latent) = layer.moe.latent else { return Ok(()) };
        let x = context.place(latent.first_rows(tokens));
        let input = EncodeInput { x, rows: tokens, cols: latent.cols, ..EncodeInput::default() };
        encode(&context.gpu, input, layer.needs_of_experts(), &mut self.latent)
    }

    /// What routed experts take.
    fn taken(&self, number: usize) -> &EncodedActivations {
        if self.layers[number].moe.latent.is_some() { &self.latent } else { &self.x }
    }

    /// The router's choice on the host. The step waits for it. If the host computes experts, their input is copied too.
    fn read_chosen(&mut self, context: &Context, number: usize, tokens: usize) -> Result<Vec<u32>> {
        let gpu = &context.gpu;
        let moe = &self.layers[number].moe;
        let (pairs, input_bytes) = (tokens * moe.scoring.k(), 4 * tokens * moe.experts.hidden());
        let input = self.taken(number).floats();
        if let Some(streaming) = &mut self.streaming
            && let Some(host) = streaming.host_input(gpu, pairs, input_bytes)?
        {
            // SAFETY: the input has this many bytes; waited for below.
            unsafe { gpu.read_async(input, host)? };
        }
        let host = self.chosen.reserve(gpu, 4 * pairs)?;
        // SAFETY: the router writes this many bytes; `read` waits.
        unsafe { gpu.read(self.router.chosen.at(), host, gpu.wait_permit()?)? };
        self.synchronisations += 1;
        Ok(host.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// The router's choice with its weights on the host. The step waits for it.
    fn read_routing(&mut self, context: &Context, tokens: usize, number: usize) -> Result<Routing> {
        let routing = self.router.read(&context.gpu, tokens, self.layers[number].moe.scoring.k())?;
        self.synchronisations += 1;
        Ok(routing)
    }
}
