//! Quantises rows of a float matrix to MLX's affine groups, and measures the error.

use std::array::from_fn;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use sluice_kernels::Isa;
use sluice_kernels::affine::dequantize_row;
use sluice_kernels::format::{Float, WeightFormat};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::quantize::{Rounding, quantize};

/// How blocks are quantised.
#[derive(Clone, Copy, Debug)]
pub struct Quantizer {
    pub isa: Isa,
    pub rounding: Rounding,
}

/// Some rows, quantised.
#[derive(Debug, Default)]
pub struct Packed {
    /// [rows, cols * bits / 8]
    pub data: Vec<u8>,
    /// [rows, cols / group] of the input's type.
    pub scales: Vec<u8>,
    /// As `scales`.
    pub biases: Vec<u8>,
    pub error: SquaredError,
}

/// Sums over weights that were quantised.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct SquaredError {
    /// How many weights.
    pub count: u64,
    /// Sum of w^2.
    pub weight: f64,
    /// Sum of (w - stored w)^2.
    pub error: f64,
}

impl SquaredError {
    /// Adds another sum.
    pub fn add(&mut self, other: SquaredError) {
        self.count += other.count;
        self.weight += other.weight;
        self.error += other.error;
    }

    /// Root of the mean squared error.
    pub fn rmse(&self) -> f64 {
        (self.error / self.count.max(1) as f64).sqrt()
    }

    /// The same relative to the weights' root mean square.
    pub fn relative(&self) -> f64 {
        if self.weight > 0.0 { (self.error / self.weight).sqrt() } else { 0.0 }
    }
}

impl Quantizer {
    /// Quantises rows to `bits` in groups of `group`; scales have type `float`. Rows that are affine already are dequantised first; the
    /// error is against what they stood for.
    pub fn block(&self, plain: &Matrix, float: Float, bits: u8, group: u16) -> Result<Packed> {
        let (rows, cols) = (plain.rows(), plain.cols());
        let x = values(self.isa, plain)?;

        let groups = rows * cols / group as usize;
        let mut packed = Packed {
            data: vec![0; x.len() / 8 * bits as usize],
            scales: vec![0; groups * float.size()],
            biases: vec![0; groups * float.size()],
            error: SquaredError::default(),
        };
        let Packed { data, scales, biases, .. } = &mut packed;
        quantize(self.isa, self.rounding, &x, bits, group, float, data, scales, biases);

        let form = WeightFormat::Affine { bits, group, scale: float };
        let stored = Matrix::new(form, rows, cols, [&packed.data[..], &packed.scales, &packed.biases])?;
        let mut y = vec![0.0; cols];
        for (r, x) in x.chunks_exact(cols).enumerate() {
            dequantize_row(self.isa, &stored, r, &mut y);
            let (weight, error) = squares(x, &y);
            packed.error.add(SquaredError { count: cols as u64, weight, error });
        }
        Ok(packed)
    }
}

/// All rows as f32.
pub fn values(isa: Isa, m: &Matrix) -> Result<Vec<f32>> {
    let mut x = vec![0.0; m.rows() * m.cols()];
    for (r, x) in x.chunks_exact_mut(m.cols()).enumerate() {
        dequantize_row(isa, m, r, x);
    }
    ensure!(x.iter().all(|x| x.is_finite()), "holds a value that is not finite");
    Ok(x)
}

/// Sums of x^2 and of (x - y)^2, in eight lanes so that the compiler finds its vectors.
pub fn squares(x: &[f32], y: &[f32]) -> (f64, f64) {
    let (mut weight, mut error) = ([0f32; 8], [0f32; 8]);
    for (x, y) in x.as_chunks::<8>().0.iter().zip(y.as_chunks::<8>().0) {
        weight = from_fn(|i| weight[i] + x[i] * x[i]);
        error = from_fn(|i| error[i] + (x[i] - y[i]) * (x[i] - y[i]));
    }
    let sum = |lanes: [f32; 8]| lanes.iter().map(|&v| v as f64).sum();
    (sum(weight), sum(error))
}
