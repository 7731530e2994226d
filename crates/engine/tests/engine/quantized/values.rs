//! The values that quantised checkpoints define, by plain loops over their tensors, and checkpoints of these values as f32.

use std::path::Path;

use sluice_store::{Checkpoint, Dtype, Tensor, TensorPlan, Writer};
use tempfile::TempDir;

const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Rows and columns, and the value at a row and a column.
type Matrix = (usize, usize, Box<dyn Fn(usize, usize) -> f32>);

fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) };
    if byte < 128 { size } else { -size }
}

/// Element `i` of a tensor of scales.
fn scale(t: &Tensor, i: usize) -> f32 {
    let b = &t.bytes[i * t.dtype.size()..];
    match t.dtype {
        Dtype::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        Dtype::BF16 => f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16),
        Dtype::F16 => {
            let bits = u32::from(u16::from_le_bytes([b[0], b[1]]));
            // Scales are normal numbers.
            assert!(!(bits >> 10 & 31).is_multiple_of(31), "{}: {bits:04x}", t.name);
            f32::from_bits((bits & 0x8000) << 16 | (((bits & 0x7fff) << 13) + (112 << 23)))
        }
        Dtype::U8 | Dtype::F8_E8M0 => 2f32.powi(i32::from(b[0]) - 127),
        Dtype::F8_E4M3 => e4m3(b[0]),
        other => panic!("{other} of scales"),
    }
}

/// `bits` bits from bit `at` of int32 words on, of which the tensor has word `i` at `place(i)`.
fn field(t: &Tensor, at: usize, bits: usize, place: impl Fn(usize) -> usize) -> f32 {
    assert!(at % 32 + bits <= 32);
    let word = t.bytes.as_chunks::<4>().0[place(at / 32)];
    (u32::from_le_bytes(word) >> (at % 32) & ((1 << bits) - 1)) as f32
}

/// Number `i` of four bits.
fn nibble(t: &Tensor, i: usize) -> f32 {
    E2M1[usize::from(t.bytes[i / 2] >> (i % 2 * 4) & 15)]
}

fn awq([q, zeros, scales]: [Tensor; 3]) -> Matrix {
    let (groups, rows, cols) = (scales.shape[0], scales.shape[1], q.shape[0]);
    let value = move |r: usize, c: usize| {
        let (g, words) = (c / (cols / groups), rows / 8);
        let at = r / 8 * 32 + 4 * AWQ.iter().position(|x| *x == r % 8).unwrap();
        let (q, zero) = (field(&q, at, 4, |i| c * words + i), field(&zeros, at, 4, |i| g * words + i));
        (q - zero) * scale(&scales, g * rows + r)
    };
    (rows, cols, Box::new(value))
}

fn gptq([q, zeros, scales]: [Tensor; 3], offset: f32) -> Matrix {
    let (groups, rows) = (scales.shape[0], scales.shape[1]);
    let bits = zeros.shape[1] * 32 / rows;
    let cols = q.shape[0] * 32 / bits;
    let value = move |r: usize, c: usize| {
        let g = c / (cols / groups);
        let q = field(&q, c * bits, bits, |i| i * rows + r);
        let zero = field(&zeros, r * bits, bits, |i| g * zeros.shape[1] + i) + offset;
        (q - zero) * scale(&scales, g * rows + r)
    };
    (rows, cols, Box::new(value))
}

fn mlx(q: Tensor, scales: Tensor) -> Matrix {
    let (rows, words, groups) = (q.shape[0], q.shape[1], scales.shape[1]);
    if words * 4 == groups * 32 {
        let cols = words * 4;
        return (rows, cols, Box::new(move |r, c| e4m3(q.bytes[r * cols + c]) * scale(&scales, r * groups + c / 32)));
    }
    let cols = words * 8;
    let is_nvfp4 = cols == groups * 16;
    let value = move |r: usize, c: usize| {
        let g = r * groups + c / (cols / groups);
        nibble(&q, r * cols + c) * if is_nvfp4 { e4m3(scales.bytes[g]) } else { scale(&scales, g) }
    };
    (rows, cols, Box::new(value))
}

fn integers(q: Tensor, scales: Tensor, zeros: Option<Tensor>, shape: &Tensor) -> Matrix {
    let [rows, cols] = [0, 8].map(|at| usize::from(u16::from_le_bytes([shape.bytes[at], shape.bytes[at + 1]])));
    let (words, groups) = (q.shape[1], scales.shape[1]);
    let bits = words * 32 / cols;
    let value = move |r: usize, c: usize| {
        let g = c / (cols / groups);
        let zero = match &zeros {
            Some(zeros) => field(zeros, r * bits, bits, |i| i * groups + g),
            None => (1 << (bits - 1)) as f32,
        };
        (field(&q, c * bits, bits, |i| r * words + i) - zero) * scale(&scales, r * groups + g)
    };
    (rows, cols, Box::new(value))
}

fn fp4(q: Tensor, scales: Tensor, times: Option<Tensor>, by: Option<Tensor>) -> Matrix {
    let (rows, cols, groups) = (q.shape[0], q.shape[1] * 2, scales.shape[1]);
    let value = move |r: usize, c: usize| {
        let s = scale(&scales, r * groups + c / (cols / groups));
        let s = match (&times, &by) {
            (Some(whole), _) => s * scale(whole, 0),
            (_, Some(whole)) => s / scale(whole, 0),
            (None, None) => s,
        };
        nibble(&q, r * cols + c) * s
    };
    (rows, cols, Box::new(value))
}

fn fp8(q: Tensor, scales: Tensor) -> Matrix {
    let [rows, cols] = q.shape[..] else { panic!("{}: {:?}", q.name, q.shape) };
    let (down, across) = match scales.shape[..] {
        [] => (rows, cols),
        [n, m] if n == rows => (1, cols / m),
        _ => (128, 128),
    };
    let in_row = cols.div_ceil(across);
    let value = move |r: usize, c: usize| e4m3(q.bytes[r * cols + c]) * scale(&scales, r / down * in_row + c / across);
    (rows, cols, Box::new(value))
}

/// The matrix in `module`; `None` if it is stored as floats.
fn matrix(checkpoint: &Checkpoint, module: &str, gptq_offset: f32) -> Option<Matrix> {
    let of = |leaf: &str| checkpoint.tensor(&format!("{module}.{leaf}"));
    if let (Some(q), Some(zeros), Some(scales)) = (of("qweight"), of("qzeros"), of("scales")) {
        let all = [q, zeros, scales];
        return Some(if of("g_idx").is_none() { awq(all) } else { gptq(all, gptq_offset) });
    }
    if let (Some(q), Some(scales)) = (of("weight"), of("scales")) {
        return Some(mlx(q, scales));
    }
    let scales = of("weight_scale").or_else(|| of("weight_scale_inv")).or_else(|| of("scale"))?;
    let q = of("weight_packed").or_else(|| of("weight"))?;
    Some(match q.dtype {
        Dtype::I32 => integers(q, scales, of("weight_zero_point"), &of("weight_shape")?),
        Dtype::U8 | Dtype::I8 => fp4(q, scales, of("weight_scale_2"), of("weight_global_scale")),
        _ => fp8(q, scales),
    })
}

/// The checkpoint with the values of its quantised matrices as f32.
pub fn dequantised(from: &Path) -> TempDir {
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let object = config.as_object_mut().unwrap();
    object.remove("quantization");
    let method = object.remove("quantization_config");
    let is_second = method.is_some_and(|m| m["checkpoint_format"] == "gptq_v2");
    let checkpoint = Checkpoint::open(from).unwrap();
    let mut tensors: Vec<(TensorPlan, Vec<u8>)> = Vec::new();
    let mut quantised = 0;
    for t in checkpoint.tensors() {
        let (module, leaf) = t.name.rsplit_once('.').unwrap_or(("", &*t.name));
        // A vector without a module of its own.
        let own = ["e_score_correction_bias", "attn_sink", "ape", "tid2eid", "bias"];
        let is_vector = own.contains(&leaf) || leaf.starts_with("hc_");
        let name = if is_vector { t.name.to_string() } else { format!("{module}.weight") };
        if tensors.iter().any(|(plan, _)| plan.name == name) {
            continue;
        }
        let offset = if is_second { 0.0 } else { 1.0 };
        match matrix(&checkpoint, module, offset).filter(|_| !is_vector) {
            Some((rows, cols, value)) => {
                let bytes = (0..rows * cols).flat_map(|i| value(i / cols, i % cols).to_le_bytes()).collect();
                tensors.push((TensorPlan { name, dtype: Dtype::F32, shape: vec![rows, cols] }, bytes));
                quantised += 1;
            }
            None => {
                assert!(leaf == "weight" || is_vector, "{}", t.name);
                let plan = TensorPlan { name, dtype: t.dtype, shape: t.shape.clone() };
                tensors.push((plan, t.bytes.to_vec()));
            }
        }
    }
    assert!(quantised >= 7, "{quantised} quantised matrices in {}", from.display());
    let to = tempfile::tempdir().unwrap();
    std::fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    let plans: Vec<TensorPlan> = tensors.iter().map(|(plan, _)| plan.clone()).collect();
    let mut writer = Writer::create(&to.path().join("model.safetensors"), &plans, &Default::default()).unwrap();
    tensors.iter().for_each(|(plan, bytes)| writer.append(&plan.name, bytes).unwrap());
    writer.finish().unwrap();
    to
}
