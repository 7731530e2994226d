//! Which form the matrix of a module is in. Its tensors tell: their names and types. So modules that a producer left as they were need no list of names.

use anyhow::{Context, Result, anyhow, bail, ensure};
use sluice_backend::WeightFormat;
use sluice_store::{Checkpoint, Dtype, Tensor};

use crate::method::Method;
use crate::source::layout::MatrixShape;

/// The tensors of a quantised matrix.
#[derive(Debug)]
pub(super) enum Stored {
    /// Numbers of eight bits and their scales.
    Fp8 { values: Tensor, scales: Tensor },
    /// Numbers of four bits, two in a byte, and the scales of their groups.
    Fp4 { values: Tensor, scales: Tensor, global: Option<Global> },
    /// Integers by rows, each row one stream of bits (compressed-tensors). `groups`: the group of each column.
    Integers { packed: Tensor, scales: Tensor, zeros: Option<Tensor>, groups: Option<Tensor> },
    /// Integers by columns (AWQ, GPTQ).
    Transposed { packed: Tensor, scales: Tensor, zeros: Tensor, groups: Option<Tensor>, words: WordOrder },
}

/// The scale of a whole NVFP4 matrix.
#[derive(Debug)]
pub(super) struct Global {
    pub scale: Tensor,
    /// The scales of groups are divided by it.
    pub divides: bool,
}

/// What lies in a word of a matrix that is stored by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordOrder {
    /// Eight rows of one column, in AWQ's order.
    Awq,
    /// Columns of one row; `zero_offset` is added to zero points.
    Gptq { zero_offset: u8 },
}

/// The form of the matrix whose values have the name `name` in checkpoints of floats; `None` if it is not quantised.
///
/// # Errors
/// Tensors of a form that is not read, or that lack others of theirs.
pub(super) fn find(checkpoint: &Checkpoint, method: Option<Method>, name: &str) -> Result<Option<Stored>> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let of_module = |leaf: &str| checkpoint.tensor(&format!("{module}{leaf}"));
    let needed = |leaf: &str| of_module(leaf).ok_or_else(|| anyhow!("no tensor \"{module}{leaf}\""));
    if of_module(".pre_quant_scale").is_some() {
        bail!("tensor \"{module}.pre_quant_scale\": scaled inputs (ModelOpt's AWQ) are not supported");
    }
    // 1. integers by columns
    if let Some(packed) = of_module(".qweight") {
        let words = match method {
            Some(Method::Awq) => WordOrder::Awq,
            Some(Method::Gptq { zero_offset, .. }) => WordOrder::Gptq { zero_offset },
            _ => bail!("tensor {:?}: the config's `quantization_config` is neither of AWQ nor of GPTQ", packed.name),
        };
        let (zeros, scales) = (needed(".qzeros")?, needed(".scales")?);
        return Ok(Some(Stored::Transposed { packed, scales, zeros, groups: of_module(".g_idx"), words }));
    }
    // 2. compressed-tensors
    if let Some(packed) = of_module(".weight_packed") {
        let scales = needed(".weight_scale")?;
        return Ok(Some(match packed.dtype {
            Dtype::I32 => {
                let zeros = of_module(".weight_zero_point");
                if let Some(Method::CompressedTensors { symmetric: Some(symmetric), .. }) = method {
                    ensure!(
                        symmetric != zeros.is_some(),
                        "tensor {:?}: its zero points contradict `symmetric`: {symmetric} of `quantization_config`",
                        packed.name
                    );
                }
                Stored::Integers { packed, scales, zeros, groups: of_module(".weight_g_idx") }
            }
            Dtype::U8 => {
                let global = of_module(".weight_global_scale").map(|scale| Global { scale, divides: true });
                Stored::Fp4 { values: packed, scales, global }
            }
            other => bail!("tensor {:?}: packed weights in {other} are not supported (I32 and U8 are)", packed.name),
        }));
    }
    // 3. gpt-oss
    if let Some(values) = of_module("_blocks") {
        return Ok(Some(Stored::Fp4 { values, scales: needed("_scales")?, global: None }));
    }
    // 4. values under the usual name
    let Some(values) = checkpoint.tensor(name) else { return Ok(None) };
    let beside = |suffix: &str| checkpoint.tensor(&format!("{name}{suffix}"));
    let scales = beside("_scale_inv").or_else(|| beside("_scale")).or_else(|| of_module(".scale"));
    let (value_name, dtype) = (&values.name, values.dtype);
    match (dtype, scales) {
        (Dtype::F8_E4M3, Some(scales)) => Ok(Some(Stored::Fp8 { values, scales })),
        // DeepSeek-V4 has bytes with a sign.
        (Dtype::U8 | Dtype::I8, Some(scales)) => {
            let global = beside("_scale_2").map(|scale| Global { scale, divides: false });
            Ok(Some(Stored::Fp4 { values, scales, global }))
        }
        (Dtype::F32 | Dtype::F16 | Dtype::BF16, None) => Ok(None),
        (Dtype::F32 | Dtype::F16 | Dtype::BF16, Some(scales)) => {
            bail!("tensor {value_name:?}: {dtype} with scales ({:?}), a form that is not supported", scales.name)
        }
        (Dtype::F8_E4M3 | Dtype::U8 | Dtype::I8, None) => bail!("tensor {value_name:?}: {dtype} without scales"),
        _ => bail!("tensor {value_name:?}: weights in {dtype} are not supported"),
    }
}

/// The bytes of a tensor that something is made of. Read by themselves, so that nothing of them stays with the load.
///
/// # Errors
/// Those of the disk.
pub(super) fn read(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; tensor.bytes.len()];
    tensor.bytes.read_now(&mut bytes).with_context(|| format!("tensor {:?}", tensor.name))?;
    Ok(bytes)
}

/// Refuses columns that kernels of this format do not compute with.
///
/// # Errors
/// The message names the tensor.
pub(super) fn check_columns(format: WeightFormat, shape: MatrixShape, name: &str) -> Result<()> {
    format.planes(shape.cols).map(|_| ()).with_context(|| format!("tensor {name:?}"))
}

impl Stored {
    /// The shape of the matrix, as its tensors have it. `bits`: of integers whose tensors do not tell.
    pub fn shape(&self, bits: u8) -> Option<Vec<usize>> {
        let with_last = |shape: &[usize], last: Option<usize>| {
            let (_, leading) = shape.split_last()?;
            Some([leading, &[last?]].concat())
        };
        match self {
            Stored::Fp8 { values, .. } => Some(values.shape.clone()),
            Stored::Fp4 { values, .. } => match values.shape[..] {
                [experts, rows, groups, 16] => Some(vec![experts, rows, groups.checked_mul(32)?]),
                _ => with_last(&values.shape, values.shape.last()?.checked_mul(2)),
            },
            Stored::Integers { packed, .. } => {
                let last = packed.shape.last()?.checked_mul(32)?.checked_div(usize::from(bits));
                with_last(&packed.shape, last)
            }
            Stored::Transposed { packed, scales, zeros, words: order, .. } => {
                let (&rows, &first, &words) = (scales.shape.get(1)?, packed.shape.first()?, zeros.shape.get(1)?);
                let cols = match order {
                    WordOrder::Awq => first,
                    WordOrder::Gptq { .. } => {
                        let bits = words.checked_mul(32)?.checked_div(rows)?;
                        first.checked_mul(32)?.checked_div(bits)?
                    }
                };
                Some(vec![rows, cols])
            }
        }
    }
}
