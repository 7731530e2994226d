//! Matrices of quantised safetensors in shapes that the golden checkpoints do not have: stacks, wide groups, odd widths, gpt-oss.

use sluice_backend::{E2m1, Float, Fp8, Fp8Scale, MatrixSource, WeightFormat};
use sluice_model::source::{Assembled, MatrixShape};
use sluice_model::{Config, ModelTensors};
use sluice_store::{Checkpoint, Dtype, TensorPlan, Writer};
use tempfile::TempDir;

/// A checkpoint of these tensors, whose bytes count upwards.
fn checkpoint(method: &str, tensors: &[(&str, Dtype, &[usize])]) -> (TempDir, ModelTensors) {
    let folder = tempfile::tempdir().unwrap();
    let plan = |(name, dtype, shape): &(&str, Dtype, &[usize])| TensorPlan {
        name: (*name).to_owned(),
        dtype: *dtype,
        shape: shape.to_vec(),
    };
    let plans: Vec<TensorPlan> = tensors.iter().map(plan).collect();
    let path = folder.path().join("model.safetensors");
    let mut writer = Writer::create(&path, &plans, &Default::default()).unwrap();
    for plan in &plans {
        let bytes: Vec<u8> = (0..plan.size().unwrap()).map(|i| (i % 61) as u8).collect();
        writer.append(&plan.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    let config = format!(r#"{{"model_type": "llama", "quantization_config": {method}}}"#);
    let config = Config::parse("config.json".into(), config.as_bytes()).unwrap();
    let tensors = ModelTensors::of_safetensors(Checkpoint::open(folder.path()).unwrap(), config);
    (folder, tensors)
}

fn matrix(tensors: &ModelTensors, name: &str, shape: MatrixShape) -> Result<MatrixSource, String> {
    tensors.matrix(name, shape, true).map_err(|e| format!("{e:#}"))
}

#[test]
fn gpt_oss_has_blocks_and_scales_in_stacks() {
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
    let (_folder, tensors) = checkpoint(
        r#"{"quant_method": "mxfp4"}"#,
        &[(&blocks, Dtype::U8, &[2, 6, 3, 16]), (&scales, Dtype::U8, &[2, 6, 3])],
    );
    let found = matrix(&tensors, name, MatrixShape { leading: &[2], rows: 6, cols: 96 }).unwrap();
    assert_eq!((found.format, found.rows, found.cols), (WeightFormat::E2m1(E2m1::Power), 12, 96));
    assert_eq!(found.planes.iter().map(|p| p.len()).collect::<Vec<_>>(), [2 * 6 * 48, 2 * 6 * 3]);
    assert!(found.planes.iter().all(|plane| plane.is_of_file()));
    let stored = tensors.checkpoint().tensor(&blocks).unwrap();
    assert_eq!(tensors.layout().stored(&stored), ("MXFP4", 2 * 6 * 96));
    let why = matrix(&tensors, name, MatrixShape { leading: &[2], rows: 6, cols: 64 }).unwrap_err();
    assert!(why.contains("gate_up_proj_blocks") && why.contains("[2, 6, 3, 16]"), "{why}");
}

#[test]
fn stacks_of_fp8_have_blocks_of_each_expert() {
    let name = "model.layers.0.mlp.experts.down_proj";
    let (_folder, tensors) = checkpoint(
        r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#,
        &[(name, Dtype::F8_E4M3, &[3, 160, 288]), (&format!("{name}_scale_inv"), Dtype::F8_E8M0, &[3, 2, 3])],
    );
    let shape = MatrixShape { leading: &[3], rows: 160, cols: 288 };
    let found = matrix(&tensors, name, shape).unwrap();
    assert_eq!(found.format, WeightFormat::Fp8(Fp8 { group: 128, scale: Fp8Scale::Power }));
    let scales = &found.planes[1];
    for row in 0..3 * 160 {
        let first = (row / 160 * 2 + row % 160 / 128) * 3;
        let wanted: Vec<u8> = (first..first + 3).map(|i| i as u8).collect();
        assert_eq!(scales[row * 3..][..3], wanted[..], "row {row}");
    }
    // Without values, as `inspect` asks for it, the shape is the same.
    let empty = tensors.matrix(name, shape, false).unwrap();
    assert_eq!((empty.format, empty.planes[1].len()), (found.format, scales.len()));
    assert!(empty.planes[1].iter().all(|byte| *byte == 0));
}

#[test]
fn wide_groups_are_several_for_kernels_and_narrow_ones_are_refused() {
    let packed = r#"{"quant_method": "compressed-tensors", "format": "pack-quantized"}"#;
    let (name, shape) = ("model.layers.0.mlp.up_proj.weight", MatrixShape { leading: &[], rows: 2, cols: 768 });
    let (of_values, of_scales) = (format!("{name}_packed"), format!("{name}_scale"));
    for (groups, columns, times) in [(1, 128, 6), (2, 128, 3), (3, 128, 2), (4, 64, 3), (6, 128, 1), (24, 32, 1)] {
        let (_folder, tensors) =
            checkpoint(packed, &[(&of_values, Dtype::I32, &[2, 768 * 3 / 32]), (&of_scales, Dtype::F32, &[2, groups])]);
        let found = matrix(&tensors, name, shape).unwrap();
        assert_eq!(found.format, WeightFormat::Affine { bits: 3, group: columns, scale: Float::F32 }, "{groups}");
        assert_eq!(found.planes[1].len(), 2 * groups * times * 4);
        // Scales are the file's own where each is of one group.
        assert_eq!(found.planes[1].is_of_file(), times == 1);
        let floats = |plane: usize| -> Vec<f32> {
            found.planes[plane].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let (scales, biases) = (floats(1), floats(2));
        assert!(scales.iter().zip(&biases).all(|(s, b)| *b == -4.0 * s), "{groups}");
        assert!(scales.chunks(times).all(|same| same.iter().all(|s| *s == same[0])), "{groups}");
    }
    let tensors = [(&*of_values, Dtype::I32, &[2, 96][..]), (&*of_scales, Dtype::F32, &[2, 48])];
    let (_folder, tensors) = checkpoint(packed, &tensors);
    let why = matrix(&tensors, name, shape).unwrap_err();
    assert!(why.contains("groups of 16 columns") && why.contains(&of_scales), "{why}");
}

#[test]
fn matrices_by_columns_are_copied_by_rows() {
    const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let module = "model.layers.0.mlp.up_proj";
    let [q, zeros, scales] = ["qweight", "qzeros", "scales"].map(|leaf| format!("{module}.{leaf}"));
    for (rows, cols) in [(8, 32), (264, 320), (128, 128)] {
        for (method, bits) in [("awq", 4), ("gptq", 2), ("gptq", 4), ("gptq", 8)] {
            if rows * bits % 32 > 0 {
                continue;
            }
            let of_values = if method == "awq" { [cols, rows / 8] } else { [cols * bits / 32, rows] };
            let (_folder, tensors) = checkpoint(
                &format!(r#"{{"quant_method": {method:?}, "bits": {bits}}}"#),
                &[
                    (&q, Dtype::I32, &of_values),
                    (&zeros, Dtype::I32, &[1, rows * bits / 32]),
                    (&scales, Dtype::BF16, &[1, rows]),
                ],
            );
            let shape = MatrixShape { leading: &[], rows, cols };
            let found = matrix(&tensors, &format!("{module}.weight"), shape).unwrap();
            let stored = tensors.checkpoint().tensor(&q).unwrap();
            let word = |i: usize| u32::from_le_bytes(stored.bytes.as_chunks::<4>().0[i]);
            for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                let (word, place) = match method {
                    "awq" => (word(c * rows / 8 + r / 8), AWQ.iter().position(|row| *row == r % 8).unwrap()),
                    _ => (word(c * bits / 32 * rows + r), c % (32 / bits)),
                };
                let at = (r * cols + c) * bits;
                let byte = found.planes[0][at / 8] >> (at % 8);
                let mask = ((1u32 << bits) - 1) as u8;
                assert_eq!(byte & mask, (word >> (place * bits)) as u8 & mask, "{method} {bits}: {r}, {c}");
            }
        }
    }
}

/// `bits` bits from bit `at` on.
fn field(bytes: &[u8], at: usize, bits: usize) -> f32 {
    let two = u16::from_le_bytes([bytes[at / 8], bytes.get(at / 8 + 1).copied().unwrap_or(0)]);
    f32::from(two >> (at % 8) & ((1 << bits) - 1))
}

/// A checkpoint of a matrix whose columns are grouped in the order of activations: `[rows, cols]`, the integers of its rows, and the group of each column.
struct Ordered {
    tensors: ModelTensors,
    _folder: TempDir,
    groups: Vec<i32>,
}

impl Ordered {
    /// In the order `c * 7 % cols` by groups of 32.
    fn new(method: &str, tensors: &[(&str, Dtype, &[usize])], list: &str, cols: usize) -> Ordered {
        let groups: Vec<i32> = (0..cols).map(|c| (c * 7 % cols / 32) as i32).collect();
        let folder = tempfile::tempdir().unwrap();
        let of_list = [cols];
        let all = [tensors, &[(list, Dtype::I32, &of_list)]].concat();
        let plan = |(name, dtype, shape): &(&str, Dtype, &[usize])| TensorPlan {
            name: (*name).to_owned(),
            dtype: *dtype,
            shape: shape.to_vec(),
        };
        let plans: Vec<TensorPlan> = all.iter().map(plan).collect();
        let mut writer = Writer::create(&folder.path().join("model.safetensors"), &plans, &Default::default()).unwrap();
        for plan in &plans {
            let bytes: Vec<u8> = match plan.name == list {
                true => groups.iter().flat_map(|group| group.to_le_bytes()).collect(),
                // Scales are small numbers of f32.
                false if plan.dtype == Dtype::F32 => {
                    (0..plan.size().unwrap() / 4).flat_map(|i| (0.5 + (i % 29) as f32).to_le_bytes()).collect()
                }
                false => (0..plan.size().unwrap()).map(|i| (i * 37 % 251) as u8).collect(),
            };
            writer.append(&plan.name, &bytes).unwrap();
        }
        writer.finish().unwrap();
        let config = format!(r#"{{"model_type": "llama", "quantization_config": {method}}}"#);
        let config = Config::parse("config.json".into(), config.as_bytes()).unwrap();
        let tensors = ModelTensors::of_safetensors(Checkpoint::open(folder.path()).unwrap(), config);
        Ordered { tensors, _folder: folder, groups }
    }

    /// Every element is `(q - zero) * scale` of its column's group. `integer(row, column)` and `scale_and_zero(row, group)` are those of the file.
    fn check(
        &self,
        name: &str,
        (rows, cols, bits): (usize, usize, usize),
        integer: impl Fn(usize, usize) -> f32,
        scale_and_zero: impl Fn(usize, usize) -> (f32, f32),
    ) {
        let shape = MatrixShape { leading: &[], rows, cols };
        let why = matrix(&self.tensors, name, shape).unwrap_err();
        assert!(why.contains("desc_act") && why.contains(name), "{why}");
        let Assembled { matrix, order } = self.tensors.ordered_matrix(name, shape, true).unwrap();
        let order = order.unwrap();
        assert_eq!(matrix.format, WeightFormat::Affine { bits: bits as u8, group: 32, scale: Float::F32 });
        let [scales, biases] = [1, 2].map(|plane| {
            let plane = matrix.planes[plane].as_chunks::<4>().0.iter();
            plane.map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
        });
        for r in 0..rows {
            for (place, column) in order.iter().enumerate() {
                let (column, group) = (*column as usize, r * (cols / 32) + place / 32);
                let q = field(&matrix.planes[0], (r * cols + place) * bits, bits);
                let found = q.mul_add(scales[group], biases[group]);
                let (s, zero) = scale_and_zero(r, self.groups[column] as usize);
                let wanted = (integer(r, column) - zero) * s;
                assert_eq!(found, wanted, "{bits} bits: row {r}, column {column}");
                assert_eq!(place / 32, self.groups[column] as usize, "columns beside those of their group");
            }
        }
        let mut all = order.clone();
        all.sort_unstable();
        assert!(all.iter().enumerate().all(|(i, column)| i == *column as usize), "each column once");
    }
}

#[test]
fn columns_in_the_order_of_activations_move_to_their_groups() {
    let module = "model.layers.0.mlp.up_proj";
    let named = |leaf: &str| format!("{module}.{leaf}");
    let (rows, cols) = (272, 96);
    // 1. GPTQ: words of several columns of a row
    for bits in [2, 4, 8] {
        let [q, zeros, scales, list] = ["qweight", "qzeros", "scales", "g_idx"].map(named);
        let made = Ordered::new(
            &format!(r#"{{"quant_method": "gptq", "bits": {bits}, "desc_act": true}}"#),
            &[
                (&q, Dtype::I32, &[cols * bits / 32, rows]),
                (&zeros, Dtype::I32, &[3, rows * bits / 32]),
                (&scales, Dtype::F32, &[3, rows]),
            ],
            &list,
            cols,
        );
        let of = |name: &str| made.tensors.checkpoint().tensor(name).unwrap().bytes.to_vec();
        let (q, zeros, scales) = (of(&q), of(&zeros), of(&scales));
        let integer = |r: usize, c: usize| {
            let at = (c * bits / 32 * rows + r) * 32 + c * bits % 32;
            field(&q, at, bits)
        };
        let scale_and_zero = |r: usize, g: usize| {
            let zero = field(&zeros, g * rows * bits + r * bits, bits) + 1.0;
            (f32::from_le_bytes(scales.as_chunks::<4>().0[g * rows + r]), zero)
        };
        made.check(&named("weight"), (rows, cols, bits), integer, scale_and_zero);
    }
    // 2. compressed-tensors: each row one stream of bits
    for bits in [3, 4, 5, 8] {
        let [q, scales, list] = ["weight_packed", "weight_scale", "weight_g_idx"].map(named);
        let made = Ordered::new(
            r#"{"quant_method": "compressed-tensors", "format": "pack-quantized"}"#,
            &[(&q, Dtype::I32, &[rows, cols * bits / 32]), (&scales, Dtype::F32, &[rows, 3])],
            &list,
            cols,
        );
        let of = |name: &str| made.tensors.checkpoint().tensor(name).unwrap().bytes.to_vec();
        let (q, scales) = (of(&q), of(&scales));
        let integer = |r: usize, c: usize| field(&q, r * cols * bits + c * bits, bits);
        let scale_and_zero = |r: usize, g: usize| {
            (f32::from_le_bytes(scales.as_chunks::<4>().0[r * 3 + g]), (1u32 << (bits - 1)) as f32)
        };
        made.check(&named("weight"), (rows, cols, bits), integer, scale_and_zero);
    }
}

#[test]
fn modules_that_stayed_floats_are_floats() {
    let (_folder, tensors) = checkpoint(
        r#"{"quant_method": "fp8", "modules_to_not_convert": ["mlp.gate"]}"#,
        &[
            ("model.layers.0.mlp.gate.weight", Dtype::BF16, &[4, 32]),
            ("model.layers.0.mlp.down_proj.weight", Dtype::F8_E5M2, &[4, 32]),
            ("model.layers.0.mlp.up_proj.weight", Dtype::F32, &[4, 32]),
            ("model.layers.0.mlp.up_proj.weight_scale", Dtype::F32, &[4, 1]),
        ],
    );
    let shape = MatrixShape { leading: &[], rows: 4, cols: 32 };
    let found = matrix(&tensors, "model.layers.0.mlp.gate.weight", shape).unwrap();
    assert_eq!(found.format, WeightFormat::Float(Float::Bf16));
    for (part, wanted) in [("down_proj", "F8_E5M2"), ("up_proj", "with scales")] {
        let why = matrix(&tensors, &format!("model.layers.0.mlp.{part}.weight"), shape).unwrap_err();
        assert!(why.contains(wanted) && why.contains(part), "{why}");
    }
}
