//! The two ends of a step: embeddings of its tokens, and logits of the rows that are wanted.

use anyhow::Result;
use sluice_backend::{Linear, Logits, MatrixId, Norm, Tensor};

use crate::device::memory::Scratch;
use crate::device::pinned::PinnedBuffer;
use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::ops::activations::{EncodeInput, EncodedActivations, encode};
use crate::ops::context::Context;
use crate::ops::gemv_fused::gemv_fused;
use crate::ops::matmul::matmul;
use crate::ops::product::MatmulInput;
use crate::parameters::{self as p, number};

/// `out = table[tokens]`
pub fn embed(context: &Context, table: MatrixId, out: Tensor) -> Result<()> {
    let weight = &context.weights.all[table.number()];
    let (rows, cols) = (number(context.inputs.tokens().len()), number(weight.cols()));
    let (tokens, out) = (context.step.tokens, context.place(out));
    let parameters = p::Embed { table: weight.at_row(0, context.mode), tokens, out, rows, cols };
    // SAFETY: tokens and the tensor were checked.
    unsafe { context.gpu.launch(Kernel::EMBED, [rows, 1, 1], 256, 0, &parameters)? };
    Ok(())
}

/// The logits of the last step.
#[derive(Default)]
pub struct LogitsBuffer {
    /// `[rows, vocabulary]` f32
    device: Scratch,
    /// Their copy, which is made when the host first reads them.
    host: PinnedBuffer,
    is_copied: bool,
    pub shape: Logits,
}

impl LogitsBuffer {
    /// Forgets the step before.
    pub fn reset(&mut self) {
        self.shape = Logits::default();
    }

    /// No row of this step has logits.
    pub fn set_empty(&mut self, vocabulary: usize) {
        self.is_copied = false;
        self.shape = Logits { rows: 0, vocabulary };
    }

    /// `head(norm(x))` of the step's wanted rows.
    pub fn run(
        &mut self,
        context: &Context,
        x: Tensor,
        norm: Option<&Norm>,
        head: &Linear,
        encoded: &mut EncodedActivations,
    ) -> Result<()> {
        self.is_copied = false;
        let (gpu, rows, vocabulary) = (&context.gpu, context.inputs.wanted().len(), head.rows.len());
        let (norm, taken) = (norm.map_or(p::Norm::default(), |norm| context.norm(norm)), context.step.wanted);
        let at = self.device.reserve(gpu, 4 * rows * vocabulary)?;
        let product = context.product(head, rows, p::Tensor::dense(at, vocabulary), false, context.mode);
        // If all rows are wanted, they are adjacent and nothing has to be gathered.
        let all = rows == context.inputs.tokens().len();
        let input = MatmulInput::Floats { x: context.place(x), norm, rows };
        if !all || !gemv_fused(gpu, input, &[product], false)? {
            let input = EncodeInput { x: context.place(x), norm, taken, rows, cols: x.cols, ..EncodeInput::default() };
            encode(gpu, input, context.needs(head, context.mode), encoded)?;
            matmul(gpu, &[product], encoded)?;
        }
        self.shape = Logits { rows, vocabulary };
        Ok(())
    }

    /// Makes room for the copy on the host, while the step can still fail.
    pub fn reserve_copy(&mut self, context: &Context) -> Result<()> {
        self.host.reserve(&context.gpu, 4 * self.shape.rows * self.shape.vocabulary).map(drop)
    }

    /// The logits on the host, `[rows, vocabulary]`. The first call copies them.
    pub fn read(&mut self, context: &Context) -> Result<&[f32]> {
        let Logits { rows, vocabulary } = self.shape;
        if !self.is_copied {
            let (gpu, bytes) = (&context.gpu, 4 * rows * vocabulary);
            let host = self.host.reserve(gpu, bytes)?;
            // SAFETY: the head wrote this many bytes; `read` waits.
            unsafe { gpu.read(self.device.at(), &mut host[..bytes], gpu.wait_permit()?)? };
            self.is_copied = true;
        }
        Ok(self.host.floats(rows * vocabulary))
    }

    /// Their address on the device.
    pub fn at(&self) -> Address {
        self.device.at()
    }

    pub fn device_bytes(&self) -> usize {
        self.device.bytes()
    }

    pub fn host_bytes(&self) -> usize {
        self.host.bytes()
    }
}
