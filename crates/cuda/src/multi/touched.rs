//! What elementwise operations read and write.

use sluice_backend::{Elementwise, Tensor};

/// The tensors that an operation reads, and the one that it writes.
pub fn touched(operation: &Elementwise) -> (Vec<Tensor>, Tensor) {
    match *operation {
        Elementwise::Scale { x, .. }
        | Elementwise::TurnPairs { x, .. }
        | Elementwise::SplitPairs { x, .. }
        | Elementwise::SquaredRelu { x } => (vec![x], x),
        Elementwise::Zero { out } => (vec![out], out),
        Elementwise::Norm { x, norm, out } => (vec![x, norm.weight, out], out),
        Elementwise::ScaleRows { x, factors } => (vec![x, factors.table], x),
        Elementwise::GeGlu { gate, up }
        | Elementwise::SwiGlu { gate, up }
        | Elementwise::SiTu { gate, up, .. }
        | Elementwise::SigmoidGate { x: gate, gate: up }
        | Elementwise::ClampedSwiGlu { gate, up, .. } => (vec![gate, up], gate),
        Elementwise::AttendStreams { streams, norm, out } => (vec![streams, norm.weight, out], out),
        Elementwise::Gather { x, order, out } => (vec![x, order, out], out),
        Elementwise::AddNormed { x, norm, residual } => (vec![x, norm.weight, residual], residual),
        Elementwise::Expand { x, weights, streams } => (vec![x, weights, streams], streams),
        Elementwise::Mean { streams, out } => (vec![streams], out),
        Elementwise::NormGroups { x, norm, out, .. } => (vec![x, norm.weight, out], out),
        Elementwise::DividedSilu { x, .. } => (vec![x], x),
        Elementwise::GatedMean { gates, streams, out } => (vec![gates, streams], out),
        Elementwise::Inject { x, logits, streams } => (vec![x, logits, streams], streams),
    }
}
