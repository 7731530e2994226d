//! The weights of Kimi Delta Attention.

use sluice_backend::DeltaShape;

use super::ChannelDeltaDescription;
use super::weights::{WeightClass, WeightDescription, WeightKind, matrix, vector};

impl ChannelDeltaDescription {
    /// Its weights, without the layer's number.
    pub(super) fn weights(&self, hidden: usize) -> Vec<WeightDescription> {
        let (keys, values, rank) = (self.keys(), self.values(), self.rank());
        let DeltaShape { value_heads, value_dim, taps, .. } = self.shape;
        let projection = |part, rows, cols| matrix(part, WeightClass::Recurrent, rows, cols);
        let convolution = |part, rows| WeightDescription { rows, ..vector(part, WeightKind::Convolution, taps) };
        let gate = match self.full_gate {
            true => vec![projection("self_attn.g_proj", values, hidden)],
            false => {
                vec![projection("self_attn.g_a_proj", rank, hidden), projection("self_attn.g_b_proj", values, rank)]
            }
        };
        let mut all = vec![
            projection("self_attn.q_proj", keys, hidden),
            projection("self_attn.k_proj", keys, hidden),
            projection("self_attn.v_proj", values, hidden),
            convolution("self_attn.q_conv1d", keys),
            convolution("self_attn.k_conv1d", keys),
            convolution("self_attn.v_conv1d", values),
            projection("self_attn.f_a_proj", rank, hidden),
            projection("self_attn.f_b_proj", keys, rank),
            projection("self_attn.b_proj", value_heads, hidden),
            vector("self_attn.A_log", WeightKind::Vector, value_heads),
            vector("self_attn.dt_bias", WeightKind::Vector, keys),
            vector("self_attn.o_norm", WeightKind::Norm { centred: false }, value_dim),
            projection("self_attn.o_proj", hidden, values),
        ];
        all.extend(gate);
        all
    }
}
