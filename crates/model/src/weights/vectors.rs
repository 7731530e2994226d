//! Norms, decays, convolutions and other vectors, as kernels take them.

use anyhow::{Result, ensure};
use sluice_backend::{LayerNorm, Norm, RowFactors, Tensor, decay_rates};

use super::Weights;
use crate::description::{QueryGrowth, WeightKind};

impl Weights<'_> {
    /// The layer norm `part`, of weights and biases.
    pub fn layer_norm(&mut self, layer: usize, part: &str, eps: f32) -> Result<LayerNorm> {
        let w = self.described(layer, part);
        let scale = Norm { eps, ..self.norm(layer, part)? };
        let (bias, _) = self.values(&format!("{}.bias", self.module(&w)), &[w.cols])?;
        Ok(LayerNorm { scale, bias: self.upload(&bias, 1, w.cols)? })
    }

    /// What a recurrent layer's decay is multiplied by: `[1, heads]`.
    pub fn decay(&mut self, layer: usize, part: &str) -> Result<Tensor> {
        self.decay_of_first(layer, part, None)
    }

    /// The same where the file may have `padded` of them: those of heads come first (Kimi-K3).
    pub fn decay_of_first(&mut self, layer: usize, part: &str, padded: Option<usize>) -> Result<Tensor> {
        let w = self.described(layer, part);
        let name = self.module(&w);
        let stored = self.tensors.checkpoint().tensor(&name).map(|t| t.shape.iter().product::<usize>());
        let padded = padded.filter(|padded| stored == Some(*padded) && *padded > w.cols);
        let (mut values, _) = self.values(&name, &[padded.unwrap_or(w.cols)])?;
        values.truncate(w.cols);
        if !self.layout().has_decay_rates() {
            values = decay_rates(&values);
        }
        self.upload(&values, 1, w.cols)
    }

    /// The values of the vector `part`: `[len]`.
    pub fn host_vector(&mut self, layer: impl Into<Option<usize>>, part: &str) -> Result<Vec<f32>> {
        let w = self.described(layer, part);
        self.values(&self.module(&w), &[w.cols]).map(|(values, _)| values)
    }

    /// The RMS norm `part`.
    pub fn norm(&mut self, layer: impl Into<Option<usize>>, part: &str) -> Result<Norm> {
        self.scaled_norm(layer, part, None)
    }

    /// An RMS norm over `len` elements that multiplies by nothing.
    pub fn norm_without_weights(&mut self, len: usize) -> Result<Norm> {
        Ok(Norm { weight: self.upload(&vec![1.0; len], 1, len)?, eps: self.description.eps as f32 })
    }

    /// The norm of a router's input, whose weights are the vector `part` over the root of its length.
    pub fn router_norm(&mut self, layer: usize, part: &str) -> Result<Norm> {
        let mut values = self.host_vector(layer, part)?;
        let root = (values.len() as f64).sqrt();
        values.iter_mut().for_each(|w| *w = (f64::from(*w) / root) as f32);
        Ok(Norm { weight: self.upload(&values, 1, values.len())?, eps: self.description.eps as f32 })
    }

    /// The same, and what it puts out is multiplied by `scale`.
    pub fn scaled_norm(&mut self, layer: impl Into<Option<usize>>, part: &str, scale: Option<f64>) -> Result<Norm> {
        let w = self.described(layer, part);
        let (mut values, _) = self.values(&format!("{}.weight", self.module(&w)), &[w.cols])?;
        if w.kind == (WeightKind::Norm { centred: true }) && self.tensors.layout().has_centred_norms() {
            values.iter_mut().for_each(|w| *w += 1.0);
        }
        if let Some(scale) = scale {
            values.iter_mut().for_each(|w| *w = (f64::from(*w) * scale) as f32);
        }
        Ok(Norm { weight: self.upload(&values, 1, w.cols)?, eps: self.description.eps as f32 })
    }

    /// The norm `part` whose weights are multiplied by the vector `by`: sums of what it makes are scores.
    pub fn score_norm(&mut self, layer: Option<usize>, [part, by]: [&str; 2]) -> Result<Norm> {
        let values = |part| -> Result<Vec<f32>> {
            let w = self.described(layer, part);
            self.values(&format!("{}.weight", self.module(&w)), &[w.cols]).map(|(values, _)| values)
        };
        let (of_norm, by) = (values(part)?, values(by)?);
        let product: Vec<f32> = of_norm.iter().zip(&by).map(|(a, b)| a * b).collect();
        Ok(Norm { weight: self.made_vector(&product)?, eps: self.description.eps as f32 })
    }

    /// What queries are multiplied by, for all positions: `[1, steps]`.
    pub fn row_factors(&mut self, growth: &QueryGrowth) -> Result<RowFactors> {
        let factors = growth.factors(self.positions);
        let table = self.upload(&factors, 1, factors.len())?;
        Ok(RowFactors { table, period: growth.period })
    }

    /// The depthwise convolution `part`, transposed to `[taps, channels]`.
    pub fn convolution(&mut self, layer: usize, part: &str) -> Result<Tensor> {
        self.convolutions(layer, &[part])
    }

    /// The same with taps that are so many tokens apart: those between are zeros.
    pub fn dilated_convolution(&mut self, layer: usize, part: &str, apart: usize) -> Result<Tensor> {
        let (values, taps) = self.taps(layer, part)?;
        let channels = values.len() / taps.max(1);
        let mut all = vec![0.0; ((taps - 1) * apart + 1) * channels];
        for (tap, values) in values.chunks_exact(channels).enumerate() {
            all[tap * apart * channels..][..channels].copy_from_slice(values);
        }
        self.upload(&all, all.len() / channels, channels)
    }

    /// The same of several beside each other, which have as many taps each.
    pub fn convolutions(&mut self, layer: usize, parts: &[&str]) -> Result<Tensor> {
        let each = parts.iter().map(|part| self.taps(layer, part)).collect::<Result<Vec<_>>>()?;
        let taps = each.first().map_or(0, |(_, taps)| *taps);
        let width = |values: &[f32]| values.len() / taps.max(1);
        let channels = each.iter().map(|(values, _)| width(values)).sum();
        let of_tap = |tap: usize| {
            each.iter().flat_map(move |(values, _)| values[tap * width(values)..(tap + 1) * width(values)].iter())
        };
        let all: Vec<f32> = (0..taps).flat_map(of_tap).copied().collect();
        self.upload(&all, taps, channels)
    }

    /// The values of a convolution, tap by tap, and how many taps it has.
    fn taps(&self, layer: usize, part: &str) -> Result<(Vec<f32>, usize)> {
        let w = self.described(layer, part);
        let (name, channels, taps) = (format!("{}.weight", self.module(&w)), w.rows, w.cols);
        let wanted = self.tensors.layout().convolution_shape(channels, taps);
        let (values, shape) = self.values(&name, &wanted)?;
        ensure!(shape == wanted, "tensor {name} has shape {shape:?}, expected {wanted:?}");
        Ok(((0..taps * channels).map(|i| values[i % channels * taps + i / channels]).collect(), taps))
    }
}
