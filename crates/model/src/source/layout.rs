//! Which tensors of a checkpoint hold which weight of a model.

use std::borrow::Cow;
use std::fmt::Debug;

use anyhow::{Result, bail, ensure};
use sluice_backend::{Float, MatrixSource, WeightFormat};
use sluice_store::{Checkpoint, Dtype, Tensor};

use crate::description::ProjectionLayout;

/// How the routed experts of a layer are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpertStorage {
    /// Two tensors, each with all experts one after the other: one has the rows of gate and then of up for each expert, the other those of down.
    FusedGateUp { gate_up: String, down: String },
    /// A tensor for each projection, with all experts one after the other: names of the modules of gate, up and down.
    Stacked,
    /// A tensor for each projection of each expert.
    Single,
}

/// The shape of a matrix, or of a stack of them: `[leading.., rows, cols]`.
#[derive(Clone, Copy, Debug)]
pub struct MatrixShape<'a> {
    /// Matrices of a stack; empty for one.
    pub leading: &'a [usize],
    /// Outputs of each.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

impl MatrixShape<'_> {
    /// Rows of all matrices together.
    pub fn all_rows(self) -> usize {
        self.leading.iter().product::<usize>() * self.rows
    }

    /// Refuses a tensor that has not `last` elements for each row.
    pub(crate) fn check(self, tensor: &Tensor, last: usize) -> Result<()> {
        let wanted = [self.leading, &[self.rows, last]].concat();
        let (name, shape) = (&tensor.name, &tensor.shape);
        ensure!(*shape == wanted, "tensor {name:?} has shape {shape:?}, the config asks for {wanted:?}");
        Ok(())
    }
}

/// A matrix as kernels take it.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// The matrix.
    pub matrix: MatrixSource,
    /// The input that each of its columns is multiplied with, `[cols]`; `None`: the one of the column's own number.
    pub order: Option<Vec<u32>>,
}

impl From<MatrixSource> for Assembled {
    fn from(matrix: MatrixSource) -> Assembled {
        Assembled { matrix, order: None }
    }
}

impl Assembled {
    /// The matrix by itself, for users that take inputs as they are. `name`: of the tensor of its values.
    ///
    /// # Errors
    /// Columns in another order.
    pub fn in_order(self, name: &str) -> Result<MatrixSource> {
        ensure!(
            self.order.is_none(),
            "tensor {name:?}: columns in the order of activations (`desc_act`, `actorder`) are not supported here"
        );
        Ok(self.matrix)
    }
}

/// How the tensors of a checkpoint hold the weights of a model. The model's own names are those of a Hugging Face text model, such as
/// `layers.0.mlp.gate.weight`; the checkpoint's may differ.
///
/// A format whose blocks interleave values and scales has a single plane, `weight`: its [`WeightFormat`] says what is in it.
pub trait TensorLayout: Debug + Send + Sync {
    /// What people call this layout.
    fn name(&self) -> &'static str;

    /// Refuses a checkpoint that is quantised in a way that is not read.
    ///
    /// # Errors
    /// The message names the method.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// What people call the form that most matrices are quantised in, where bits and groups alone do not tell it.
    fn quantized_form(&self) -> Option<&str> {
        None
    }

    /// The checkpoint's name for the model's tensor or module `short`.
    fn full(&self, short: &str) -> String;

    /// The model's name for a tensor of the checkpoint; `None` for a tensor that is not the text model's.
    fn short(&self, name: &str) -> Option<String>;

    /// Whether embedding and output head are one matrix that has the head's name.
    fn shares_head(&self) -> bool;

    /// The format of the matrix whose values `tensor` holds.
    ///
    /// # Errors
    /// A type that is not supported, or planes that contradict each other.
    fn format(&self, checkpoint: &Checkpoint, tensor: &Tensor) -> Result<WeightFormat>;

    /// The tensor that holds the plane `plane` (as the format calls it) of the matrix whose values are in the tensor `name`.
    fn plane(&self, checkpoint: &Checkpoint, name: &str, plane: &str) -> Option<Tensor>;

    /// The matrix whose values a checkpoint of floats would have in the tensor `name`, where it is not the planes of its format as they are. `None` where it is.
    /// Unless it `reads`, what would be made of values is zeros.
    ///
    /// # Errors
    /// Tensors that are missing, have another shape, or are of a form that is not supported.
    fn assembled(
        &self,
        _checkpoint: &Checkpoint,
        _name: &str,
        _shape: MatrixShape,
        _reads: bool,
    ) -> Result<Option<Assembled>> {
        Ok(None)
    }

    /// The name that the values in the tensor `name` have in checkpoints of floats. `None`: it only belongs to other tensors' values, as scales do.
    fn values_of<'a>(&self, name: &'a str) -> Option<Cow<'a, str>> {
        Some(Cow::Borrowed(name))
    }

    /// How the routed experts of a layer are stored; `gate` is the model's name of their gate projection, `layers.0.mlp.experts.gate_proj`.
    fn experts(&self, checkpoint: &Checkpoint, gate: &str) -> ExpertStorage;

    /// Whether stacks of gate and up are laid out as the architecture's own checkpoints have them ([`crate::StackOrder`]); if not, halves follow each other.
    fn has_own_stacks(&self) -> bool {
        false
    }

    /// The checkpoint's name for the module of a stack of experts that the model calls `short`.
    fn stacked_experts(&self, short: &str) -> String;

    /// Whether norms that an architecture centres at zero are stored less one.
    fn has_centred_norms(&self) -> bool;

    /// The shape of a depthwise convolution's tensor. Elements are in the order `[channels, taps]` in any case.
    fn convolution_shape(&self, channels: usize, taps: usize) -> Vec<usize>;

    /// What people call the type of a tensor's elements, and how many elements it has.
    fn stored(&self, tensor: &Tensor) -> (&'static str, u64) {
        (tensor.dtype.name(), (tensor.bytes.len() / tensor.dtype.size()) as u64)
    }

    /// Whether its names follow from the model's own, whatever an architecture's checkpoints call parts elsewhere.
    fn has_own_names(&self) -> bool {
        false
    }

    /// Whether rows of q and k are moved within their heads: what is rotated together is beside each other, rows 2i and 2i + 1 being those that the model has at
    /// i and half a head later.
    fn has_adjacent_pairs(&self) -> bool {
        false
    }

    /// Whether value head v of recurrent layers uses key head `v % key_heads`, instead of `v / (value_heads / key_heads)`.
    fn has_tiled_value_heads(&self) -> bool {
        false
    }

    /// Whether recurrent layers store their decay rates, `-exp(A_log)`, in place of `A_log`.
    fn has_decay_rates(&self) -> bool {
        false
    }

    /// Whether gate and up of dense parts and of shared experts have matrices of their own, also where the architecture's checkpoints have them in one.
    fn divides_joined(&self) -> bool {
        false
    }

    /// How input projections of recurrent layers are stored, where it is not as the architecture has them.
    fn delta_projections(&self) -> Option<ProjectionLayout> {
        None
    }
}

/// The floating-point type of a tensor's elements.
///
/// # Errors
/// Elements of another type.
pub(crate) fn float_type(name: &str, dtype: Dtype) -> Result<Float> {
    match dtype {
        Dtype::F32 => Ok(Float::F32),
        Dtype::F16 => Ok(Float::F16),
        Dtype::BF16 => Ok(Float::Bf16),
        other => bail!("tensor {name}: {other:?} weights are not supported (F32, F16, BF16 and MLX's U32 are)"),
    }
}
