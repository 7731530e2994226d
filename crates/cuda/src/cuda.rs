//! A GPU that computes a model: its context, the scratch of its operations, and how an operation is enqueued.
//!
//! An operation only enqueues. If one fails, the error is kept, nothing more is enqueued, and the step ends with all its rows failed.

use std::sync::Arc;

use anyhow::{Error, Result};
use sluice_backend::{Activations, Isa, Linear, MatrixId, Phase, Tensor, Unified};
use sluice_cpu::Pool as Threads;

use crate::device::stream::Gpu;
use crate::moe::experts::bytes_of_experts;
use crate::moe::host_split::{HostOffload, SharedHostExperts};
use crate::moe::mixture::Mixtures;
use crate::ops::activations::EncodedActivations;
use crate::ops::attention::AttentionScratch;
use crate::ops::context::Context;
use crate::ops::delta_net::DeltaScratch;
use crate::ops::index::IndexScratch;
use crate::ops::int11;
use crate::ops::latent::LatentScratch;
use crate::ops::logits::LogitsBuffer;
use crate::ops::mlp::MlpScratch;
use crate::ops::ngrams::NgramScratch;
use crate::ops::sampling::SamplingScratch;
use crate::ops::state_space::StateSpaceScratch;
use crate::ops::tables::DiskTables;
use crate::plan::profile::{Profiler, work_of_linears};

/// An NVIDIA GPU.
pub struct Cuda {
    pub(crate) mixtures: Mixtures,
    pub(crate) delta: DeltaScratch,
    pub(crate) state_space: StateSpaceScratch,
    pub(crate) attention: AttentionScratch,
    pub(crate) latent: LatentScratch,
    pub(crate) index: IndexScratch,
    pub(crate) ngrams: NgramScratch,
    pub(crate) mlp: MlpScratch,
    /// The encoded input of an operation, or the output that attention has encoded for the next one.
    pub(crate) encoded: EncodedActivations,
    pub(crate) logits: LogitsBuffer,
    pub(crate) sampling: SamplingScratch,
    pub(crate) tables: DiskTables,
    /// How the host computes experts that the device does not have, if it does.
    pub(crate) host: Option<HostOffload>,
    pub(crate) computes: Option<SharedHostExperts>,
    /// The host's threads that read logits and widen rows of tables.
    pub(crate) threads: Option<Threads>,
    /// Bytes of the device that were free when it was opened.
    pub(crate) free: u64,
    /// The first error of the step.
    pub(crate) error: Option<Arc<Error>>,
    pub(crate) profiler: Option<Profiler>,
    /// Dropped last: everything else uses its stream.
    pub(crate) context: Context,
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.mixtures.cancel();
        // No memory may be freed while work is under way.
        let _ = self.wait();
        #[cfg(feature = "tuning")]
        self.context.gpu.device.print_stamps();
    }
}

/// The result of a call that cannot return an error.
///
/// # Panics
/// On an error: the device is lost, and everything that was on it.
pub(crate) fn expect_device<T, E: Into<Error>>(done: Result<T, E>) -> T {
    done.unwrap_or_else(|e| panic!("the CUDA device fails: {:#}", e.into()))
}

impl Cuda {
    /// Opens device `ordinal`; `mode`: the encoding of activations.
    ///
    /// # Errors
    /// One line if there is no such device, or it or its driver is too old.
    pub fn new(ordinal: u32, mode: Activations) -> Result<Cuda> {
        let gpu = Gpu::open(ordinal)?;
        if mode == Activations::Int11 && gpu.device.exact().is_none() {
            gpu.device.set_exact(int11::probe(&gpu)?);
        }
        let (free, _) = gpu.device.memory()?;
        Ok(Cuda {
            mixtures: Mixtures::default(),
            delta: DeltaScratch::default(),
            state_space: StateSpaceScratch::default(),
            attention: AttentionScratch::default(),
            latent: LatentScratch::default(),
            index: IndexScratch::default(),
            ngrams: NgramScratch::default(),
            mlp: MlpScratch::default(),
            encoded: EncodedActivations::default(),
            logits: LogitsBuffer::default(),
            sampling: SamplingScratch::default(),
            tables: DiskTables::default(),
            host: None,
            computes: None,
            threads: None,
            free: free as u64,
            error: None,
            profiler: None,
            context: Context::new(gpu, mode),
        })
    }

    /// Lets the host compute some of the experts that are not on the device.
    pub fn with_host_experts(mut self, host: HostOffload) -> Cuda {
        self.host = Some(host);
        self.set_sampling_threads(host.threads);
        self
    }

    /// Whether weights and experts are read where the host has them. To be called before there are any.
    pub fn with_unified(mut self, unified: Unified) -> Cuda {
        let host = self.context.gpu.device.host;
        let is_on = unified == Unified::On || unified == Unified::Auto && host.is_integrated;
        self.context.weights.in_place = is_on.then_some(host);
        self
    }

    /// Limits the launches of a step that may be enqueued while the device waits for the host. For tests; by default it is what a driver can queue.
    pub fn with_max_held_launches(mut self, launches: usize) -> Cuda {
        self.context.gpu.max_held_launches = launches;
        self
    }

    /// Lets this many threads of the host read logits and widen rows of tables. If the system refuses them, only the caller's does.
    pub(crate) fn set_sampling_threads(&mut self, threads: usize) {
        self.threads = Threads::new(threads).ok();
    }

    /// Bytes of all experts of its mixtures.
    pub(crate) fn bytes_of_experts(&self) -> u64 {
        bytes_of_experts(&self.context.weights, self.mixtures.registered())
    }

    /// Waits for everything that was enqueued.
    pub(crate) fn wait(&self) -> Result<()> {
        Ok(self.context.gpu.wait(self.context.gpu.wait_permit()?)?)
    }

    /// Runs the recorded launches of a step and answers the device's requests.
    pub(crate) fn end_launches(&mut self) -> Result<()> {
        self.context.gpu.end_step()?;
        self.answer()
    }

    /// Answers the device's requests.
    pub(crate) fn answer(&mut self) -> Result<()> {
        self.mixtures.answer(&self.context)
    }

    /// `out = table[tokens]` of a table on disk. What was recorded so far runs while the host waits for the rows.
    pub(crate) fn embed_from_disk(&mut self, table: MatrixId, out: Tensor) -> Result<()> {
        self.end_launches()?;
        let isa = self.host.map_or_else(Isa::from_env, |host| Ok(host.isa))?;
        let threads = self.threads.as_mut().expect("made with the table");
        self.tables.embed(&self.context, table, (isa, threads), out)?;
        self.context.gpu.restart_recording();
        Ok(())
    }

    /// Enqueues an operation, unless the step has failed.
    pub(crate) fn enqueue(&mut self, operation: impl FnOnce(&mut Cuda) -> Result<()>) {
        if self.error.is_some() {
            return;
        }
        let ready = if self.context.gpu.is_full() { self.answer() } else { Ok(()) };
        if let Err(error) = ready.and_then(|()| operation(self)) {
            self.error = Some(Arc::new(error));
            // The recorded launches are of no use, and a device that waits for an answer goes on.
            self.mixtures.cancel();
            self.context.gpu.discard();
        }
    }

    /// Enqueues an operation of a phase that uses these matrices once for each of `tokens` tokens.
    pub(crate) fn enqueue_phase(
        &mut self,
        phase: Phase,
        used: &[&Linear],
        tokens: usize,
        operation: impl FnOnce(&mut Cuda) -> Result<()>,
    ) {
        self.enqueue_profiled(phase, |own| work_of_linears(&own.context.weights.all, used, tokens), operation);
    }

    /// Enqueues an operation of a phase; `work`: its bytes of weights and multiply-adds, for the profile.
    pub(crate) fn enqueue_profiled(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&Cuda) -> (u64, u64),
        operation: impl FnOnce(&mut Cuda) -> Result<()>,
    ) {
        let operation = |own: &mut Cuda| {
            operation(own)?;
            if phase != Phase::Attention {
                own.encoded.encoded_from = None;
            }
            Ok(())
        };
        if self.profiler.is_none() {
            return self.enqueue(operation);
        }
        let (bytes, macs) = work(self);
        let mark = |own: &mut Cuda, ends| match &mut own.profiler {
            Some(profiler) => profiler.mark(&own.context.gpu, ends),
            None => Ok(()),
        };
        self.enqueue(|own| {
            mark(own, None)?;
            operation(own)?;
            mark(own, Some((phase, bytes, macs)))
        });
    }
}
