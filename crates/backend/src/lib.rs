//! The seam between a model and the devices that compute it: the operations it is written in, and the traits that a device implements. It computes nothing itself.
//!
//! A model speaks in fused layer operations ([`Operations`]) over handles ([`Resources`], [`Caches`]). Host pointers exist only inside a device. A step is
//! [`Backend::begin`], operations that only enqueue work, and [`Backend::end`], which returns an [`Outcome`] and a handle to logits. A new device is one more
//! implementor of these traits, in a crate of its own. A new operation is one method of [`Operations`] and one file per device.

#![forbid(unsafe_code)]

mod backend;
mod channel_delta;
mod compressed;
mod index;
mod latent;
mod layers;
mod memory;
mod mixture;
mod ngrams;
mod operations;
mod profile;
mod resources;
mod sampling;
mod state_space;
mod step;
mod streamed;
mod streams;

pub use backend::Backend;
pub use channel_delta::ChannelDeltaLayer;
pub use compressed::{CacheLayer, CompressLayer, CompressedLayer, Entries, SelectLayer};
pub use index::{IndexLayer, IndexNorm, IndexPool, LayerNorm, PoolLogits};
pub use latent::{HeadRows, LatentKeys, LatentLayer};
pub use layers::*;
pub use memory::*;
pub use mixture::*;
pub use ngrams::{NgramLayer, NgramTable};
pub use operations::Operations;
pub use profile::{Phase, PhaseRow, Profile};
pub use resources::{Caches, Resources};
pub use sampling::{Best, DRAWN_TOGETHER, DeviceSampling, MAX_RANKS, Ranked, Scaled, Top};
pub use sluice_experts::{ExpertOptions, ExpertStats, RowOptions, RowStats};
pub use sluice_kernels::attention::{AttentionMode, KvType, MOST_POOLED};
pub use sluice_kernels::format::{Activations, BlockFormat, E2m1, Element, Float, Fp8, Fp8Scale, WeightFormat};
pub use sluice_kernels::isa::Isa;
pub use sluice_kernels::ngrams::{MOST_GRAM, NgramHash};
pub use sluice_kernels::route::Scoring;
pub use sluice_kernels::sample;
pub use sluice_kernels::streams::{MOST_ATTENDED, MOST_STREAMS};
pub use sluice_kernels::{NUMERICS_VERSION, rotary::RotaryFrequencies};
pub use state_space::{StateSpaceLayer, StateSpaceShape};
pub use step::{Capacity, Failed, Logits, NOT_KEPT, Outcome, SequenceInput, StepInputs, Wanted};
pub use streamed::{Lookahead, Streamed};
pub use streams::StreamLayer;

/// What a recurrent layer's decay is multiplied by, of the logarithms that checkpoints store: `0 - exp(A_log)`.
pub fn decay_rates(a_log: &[f32]) -> Vec<f32> {
    a_log.iter().map(|&a| 0.0 - sluice_kernels::math::exp1(a)).collect()
}

/// Floats of a checkpoint as f32.
pub fn widen(float: Float, bytes: &[u8]) -> anyhow::Result<Vec<f32>> {
    one_row(WeightFormat::Float(float), bytes, bytes.len() / float.size())
}

/// What whole blocks of a checkpoint hold.
pub fn widen_blocks(format: BlockFormat, bytes: &[u8]) -> anyhow::Result<Vec<f32>> {
    let columns = bytes.len() / format.block_bytes() * format.block_columns();
    one_row(WeightFormat::Blocks(format), bytes, columns)
}

fn one_row(format: WeightFormat, bytes: &[u8], columns: usize) -> anyhow::Result<Vec<f32>> {
    let mut out = vec![0.0; columns];
    if !out.is_empty() {
        let row = sluice_kernels::matrix::Matrix::new(format, 1, columns, [bytes])?;
        sluice_kernels::affine::dequantize_row(Isa::GENERIC, &row, 0, &mut out);
    }
    Ok(out)
}
