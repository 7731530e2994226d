//! Halves of layers that attend to residual streams (attention residuals, Kimi-K3).

use sluice_backend::{Elementwise, Norm, Operations, Tensor};

/// One half of a layer behind the streams that there are then.
pub struct AttendedBlock {
    /// Makes scores of streams.
    norm: Norm,
    /// How many there are before it.
    count: usize,
    /// What it puts out is a stream more.
    begins: bool,
}

impl AttendedBlock {
    /// Half `half` of layer `at`, where a stream begins in every so-manieth layer.
    pub fn new(norm: Norm, every: usize, (at, half): (usize, usize)) -> AttendedBlock {
        let begins = half == 0 && at.is_multiple_of(every);
        // The first half of such a layer is before its stream.
        let count = if half == 0 { at.div_ceil(every) + 1 } else { at / every + 2 };
        AttendedBlock { norm, count, begins }
    }

    /// `block` adds to its second tensor what it makes of its first, which goes to `x`.
    pub fn forward(
        &self,
        backend: &mut dyn Operations,
        streams: Tensor,
        x: Tensor,
        block: impl FnOnce(&mut dyn Operations, Tensor, Tensor),
    ) {
        let stream = |number: usize| streams.columns(number * x.cols..(number + 1) * x.cols);
        let all = streams.columns(0..self.count * x.cols);
        backend.elementwise(&Elementwise::AttendStreams { streams: all, norm: self.norm, out: x });
        let out = if self.begins { stream(self.count) } else { stream(self.count - 1) };
        if self.begins {
            backend.elementwise(&Elementwise::Zero { out });
        }
        block(backend, x, out);
    }
}
