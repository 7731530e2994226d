//! The CPU backend: its state, and where its threads run.

use std::time::Instant;

use anyhow::{Context, Result};
use sluice_backend::{Activations, Capacity, KvPool, Logits, Norm, Phase, Profile, StepInputs, Tensor};
use sluice_kernels::Isa;

use crate::attention::{AttentionWork, CompressedWork, IndexWork, LatentWork};
use crate::channel_delta::ChannelDeltaWork;
use crate::delta_net::DeltaWork;
use crate::encoded::Encoded;
use crate::exec::{Product, Worker, context};
use crate::matmul;
use crate::memory::{Buffer, PerThread, Place, RotaryTable, Weight};
use crate::moe::HostMixture;
use crate::ngrams::NgramWork;
use crate::numa::affinity::{CoreBinding, Mask};
use crate::numa::{Numa, Processors, Replicas};
use crate::state_space::StateSpaceWork;
use crate::tables::Tables;
use crate::threads::{Pool, SHORT, ThreadTuner, Waits};

/// The CPU.
pub struct Cpu {
    pub(crate) isa: Isa,
    pub(crate) mode: Activations,
    pub(crate) pool: Pool,
    pub(crate) tuner: ThreadTuner,
    pub(crate) waits: Waits,
    /// The start of the current step.
    pub(crate) began: Instant,
    /// The processor of the thread that computes steps, if threads are bound, and a line that describes the binding.
    pub(crate) binding: Option<CoreBinding>,
    pub(crate) binding_note: Option<String>,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) weights: Vec<Weight>,
    /// Copies of weights on each memory node, if they are wanted.
    pub(crate) replicas: Option<Replicas>,
    pub(crate) rotary: Vec<RotaryTable>,
    /// One for each cache group.
    pub(crate) kv: Vec<KvPool>,
    /// `[rows, state]`
    pub(crate) states: Option<Tensor>,
    pub(crate) workers: PerThread<Worker>,
    pub(crate) inputs: StepInputs,
    /// Encoded inputs, and hidden activations of dense layers.
    pub(crate) encoded: Encoded,
    pub(crate) hidden: Encoded,
    pub(crate) products: Vec<Product>,
    /// 0, 1, 2, ..: the list of all rows.
    pub(crate) identity_rows: Vec<u32>,
    pub(crate) attention: AttentionWork,
    pub(crate) latents: LatentWork,
    pub(crate) delta: DeltaWork,
    pub(crate) channel_deltas: ChannelDeltaWork,
    pub(crate) state_spaces: StateSpaceWork,
    pub(crate) index: IndexWork,
    pub(crate) compressed: CompressedWork,
    pub(crate) mixture: HostMixture,
    /// Tables that stay on disk.
    pub(crate) ngrams: NgramWork,
    pub(crate) tables: Tables,
    /// `[rows, vocabulary]`
    pub(crate) logits: Vec<f32>,
    pub(crate) last_logits: Logits,
    pub(crate) profile: Option<Profile>,
}

impl Cpu {
    /// `threads` threads, with the arithmetic of `isa` and activations encoded as `mode` says.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(isa: Isa, threads: usize, mode: Activations) -> Result<Cpu> {
        let pool = Pool::new(threads).with_context(|| format!("cannot start {threads} threads"))?;
        Ok(Cpu {
            isa,
            mode,
            workers: PerThread::new(pool.threads()),
            tuner: ThreadTuner::new(pool.threads()),
            waits: Waits::new(pool.threads()),
            began: Instant::now(),
            binding: None,
            binding_note: None,
            pool,
            buffers: Vec::new(),
            weights: Vec::new(),
            replicas: None,
            rotary: Vec::new(),
            kv: Vec::new(),
            states: None,
            inputs: StepInputs::new(&[], Capacity { tokens: 0, sequences: 0, blocks: 0 }),
            encoded: Encoded::default(),
            hidden: Encoded::default(),
            products: Vec::new(),
            identity_rows: Vec::new(),
            attention: AttentionWork::default(),
            latents: LatentWork::default(),
            delta: DeltaWork::default(),
            channel_deltas: ChannelDeltaWork::default(),
            state_spaces: StateSpaceWork::default(),
            index: IndexWork::default(),
            compressed: CompressedWork::default(),
            ngrams: NgramWork::default(),
            mixture: HostMixture::default(),
            tables: Tables::default(),
            logits: Vec::new(),
            last_logits: Logits::default(),
            profile: None,
        })
    }

    /// On machines with several memory nodes, binds threads to some of these processors as `numa` says: the thread that calls steps only during a step, the others for good.
    ///
    /// # Errors
    /// When this process may not use a processor.
    pub fn bind(&mut self, here: &Processors, numa: Numa) -> Result<()> {
        let threads = self.pool.threads();
        let Some(processors) = here.of_threads(numa, threads) else {
            let Some((fast, note)) = here.fast(threads) else { return Ok(()) };
            self.binding_note = Some(note);
            return self.bind_to(&vec![fast; threads]);
        };
        self.bind_to(&processors.iter().map(|processor| vec![*processor]).collect::<Vec<_>>())?;
        self.binding_note = Some(here.describe(numa, threads));
        if numa == Numa::Replicate {
            let nodes: Vec<usize> = processors.iter().filter_map(|p| here.node_of(*p)).collect();
            self.replicas = Replicas::new(&nodes);
            for (worker, node) in self.workers.iter_mut().zip(&nodes) {
                let known = self.replicas.iter().flat_map(Replicas::nodes);
                worker.node = known.take_while(|known| *known != node).count();
            }
        }
        Ok(())
    }

    /// Binds thread t to `processors[t]`: to one, or to several among which the kernel chooses.
    pub(crate) fn bind_to(&mut self, processors: &[Vec<usize>]) -> Result<()> {
        let mask = |thread: usize| Mask::from_processors(processors[thread].iter().copied());
        self.binding = Some(CoreBinding::new(mask(0)));
        for (thread, own) in processors.iter().enumerate().skip(1) {
            let bound = mask(thread).bind(self.pool.wait_for_number(thread));
            bound.with_context(|| format!("cannot bind a thread to processors {own:?}"))?;
        }
        Ok(())
    }

    /// Copies a portion of the weights to each node, if copies are wanted. Returns whether there was any. The calling thread is bound.
    pub(crate) fn copy_portion(&mut self) -> bool {
        self.replicas.as_mut().is_some_and(|r| r.copy_some(&mut self.weights, &mut self.pool, &self.workers))
    }

    /// Whether the current step has so few tokens that its rounds are short.
    pub(crate) fn is_short(&self) -> bool {
        self.inputs.tokens().len() <= SHORT
    }

    pub(crate) fn place(&self, t: Tensor) -> Place {
        Place::new(&self.buffers[t.buffer.number()], t)
    }

    /// The weight of a norm.
    pub(crate) fn norm_weight(&self, norm: &Norm) -> (&'static [f32], f32) {
        let place = self.place(norm.weight);
        // SAFETY: weights are written once, at load, and their buffers live as long as the backend; the slice is not kept
        // beyond the operation.
        (unsafe { place.get(0, 0..place.cols) }, norm.eps)
    }

    pub(crate) fn extend_identity_rows(&mut self, n: usize) {
        let from = self.identity_rows.len();
        self.identity_rows.extend((from..n).map(|i| i as u32));
    }

    /// The recurrent state in this row.
    pub(crate) fn state(&self, row: u32) -> Place {
        let states = self.states.expect("a pool of states");
        self.place(states.rows(row as usize..row as usize + 1))
    }

    /// The bytes of a block.
    pub(crate) fn block(&mut self, pool: &KvPool, block: u32) -> &mut [u8] {
        let len = pool.layout.block_bytes();
        &mut self.buffers[pool.buffer.number()].as_bytes_mut()[block as usize * len..][..len]
    }

    /// Runs the listed products on all encoded rows.
    pub(crate) fn run_products(&mut self, tokens: usize) {
        self.extend_identity_rows(tokens);
        matmul::run_products(context!(self), &mut self.products, &self.encoded, &self.identity_rows[..tokens]);
        self.products.clear();
    }

    /// Records a phase that used these matrices once for each of `tokens` tokens.
    pub(crate) fn record(
        &mut self,
        phase: Phase,
        since: Instant,
        used: impl Iterator<Item = (usize, usize)>,
        tokens: usize,
    ) {
        let Some(profile) = &mut self.profile else { return };
        let (mut bytes, mut macs) = (0, 0);
        for (weight, rows) in used {
            let w = &self.weights[weight];
            bytes += (rows * w.bytes_per_row()) as u64;
            macs += (rows * w.cols() * tokens) as u64;
        }
        profile.add(phase, since.elapsed(), bytes, macs);
    }
}
