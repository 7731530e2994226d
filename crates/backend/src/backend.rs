//! A device that takes models through steps.

use crate::{
    Caches, DeviceSampling, Isa, Logits, MemoryUse, Norm, Operations, Outcome, Profile, Resources, RowStats,
    StepInputs, Streamed, Tensor,
};

/// A device: what it keeps ([`Resources`], [`Caches`]), what it computes ([`Operations`]), and the steps that frame the operations.
///
/// Operations are called between [`Backend::begin`] and [`Backend::end`], everything else outside. `crates/conformance` holds implementors to all of this.
pub trait Backend: Operations + Resources + Caches + Send {
    // 1. A step

    /// Whether steps can keep recurrent states between tokens: see [`StepInputs::keep_states`].
    fn keeps_states(&self) -> bool {
        false
    }
    /// Whether there may be steps of other operations than those of the model's layers in turn, such as those of a head that predicts one token more.
    fn takes_other_steps(&self) -> bool {
        true
    }
    /// Begins a step with these tokens.
    fn begin(&mut self, inputs: &StepInputs);
    /// Ends the step: everything that was enqueued is done.
    fn end(&mut self) -> Outcome;

    // 2. What the last step left

    /// Logits of the last step on the host, `[rows, vocabulary]`. Valid until the next step begins.
    fn read_logits(&mut self, logits: Logits) -> &[f32];
    /// Calls `each(row, thread, logits)` for all rows of the last step's logits, in parallel. `thread` is below [`Backend::threads`], and no two calls at the
    /// same time have the same.
    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync));
    /// Sampling on the device, where it can.
    fn device_sampling(&mut self) -> Option<&mut dyn DeviceSampling> {
        None
    }
    /// `norm(x)` of rows of the last step, or `x` as it is, `[rows, cols]`, on the host. Each row has the bits that [`Operations::logits`] gives to a head.
    fn hidden(&mut self, x: Tensor, norm: Option<Norm>, out: &mut [f32]) {
        assert_eq!(out.len(), x.rows * x.cols);
        let Some(norm) = norm else { return self.download(x, out) };
        let mut weight = vec![0.0; x.cols];
        self.download(norm.weight, &mut weight);
        self.download(x, out);
        for row in out.chunks_exact_mut(x.cols.max(1)) {
            sluice_kernels::norm::rms_norm_in_place(Isa::GENERIC, row, Some(&weight), norm.eps);
        }
    }
    /// Threads of the host that work for it.
    fn threads(&self) -> usize;

    // 3. Measurements

    /// Time and bytes by phase since the last call, while profiling is on.
    fn take_profile(&mut self) -> Profile;
    /// What streamed experts took since the last call, and how they are read. `None` where none are streamed.
    fn take_streamed(&mut self) -> Option<Streamed>;
    /// What was read of tables on disk since the start. `None` if no table is on disk.
    fn table_stats(&self) -> Option<RowStats>;
    /// The fallbacks that it uses, a clause each.
    fn notes(&self) -> Vec<String>;
    /// Bytes by class and device.
    fn memory(&mut self) -> Vec<MemoryUse>;
}
