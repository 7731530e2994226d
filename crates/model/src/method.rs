//! How a checkpoint's producer says that its weights are quantised: `quantization_config` of `config.json`, where it is not MLX's.

use anyhow::{Result, bail, ensure};
use serde_json::Value;

/// Methods of quantisation whose checkpoints are read, for messages.
const METHODS: &str = "fp8, fbgemm_fp8, compressed-tensors, modelopt, awq, gptq, mxfp4 and MLX's are";

/// A method of quantisation. What each module is in is told by its tensors; here is what they do not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Numbers of eight bits (e4m3) with a scale for a block, a row or the whole matrix: DeepSeek's `fp8`, Meta's `fbgemm_fp8`.
    Fp8 {
        /// Rows and columns of a block.
        block: Option<[usize; 2]>,
    },
    /// compressed-tensors, in any of its formats for weights that are read.
    CompressedTensors {
        /// Rows and columns of a block, where scales are of blocks.
        block: Option<[usize; 2]>,
        /// Bits of integers, if all groups of modules have the same.
        bits: Option<u8>,
        /// Whether integers have no zero points, if that is so for all groups of modules or for none.
        symmetric: Option<bool>,
    },
    /// NVIDIA's ModelOpt: FP8 and NVFP4.
    ModelOpt,
    /// MXFP4 as gpt-oss has it.
    Mxfp4,
    /// AWQ, in the layout of its matrix kernel (`gemm`): four bits.
    Awq,
    /// GPTQ.
    Gptq {
        /// Bits of most modules' integers.
        bits: u8,
        /// What is added to stored zero points: 1 in files of the first version.
        zero_offset: u8,
    },
}

impl Method {
    /// Reads a `quantization_config`; `None` if it has no method and so is MLX's.
    ///
    /// # Errors
    /// A method, or a variant of one, that is not read.
    pub fn read(q: &Value) -> Result<Option<Method>> {
        let Some(method) = q.get("quant_method").and_then(Value::as_str) else { return Ok(None) };
        Ok(Some(match method {
            "fp8" | "fbgemm_fp8" => {
                let format = q.get("fmt").and_then(Value::as_str).unwrap_or("e4m3");
                ensure!(format == "e4m3", "fp8 of format {format:?} is not supported (e4m3 is)");
                Method::Fp8 { block: block(q.get("weight_block_size"), "weight_block_size")? }
            }
            "compressed-tensors" => compressed_tensors(q)?,
            "modelopt" | "modelopt_fp4" => {
                let algorithm = q.get("quant_algo").and_then(Value::as_str).unwrap_or_default();
                let is_read = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"];
                ensure!(is_read.contains(&algorithm), "modelopt's {algorithm:?} is not supported (FP8 and NVFP4 are)");
                Method::ModelOpt
            }
            "mxfp4" => Method::Mxfp4,
            "awq" => {
                let version = q.get("version").and_then(Value::as_str).unwrap_or("gemm").to_lowercase();
                ensure!(version == "gemm", "AWQ of version {version:?} is not supported (gemm is)");
                let bits = number(q, "bits").or(number(q, "w_bit")).unwrap_or(4);
                ensure!(bits == 4, "AWQ of {bits} bits is not supported (4 bits are)");
                Method::Awq
            }
            "gptq" => {
                let format = q.get("checkpoint_format").and_then(Value::as_str).unwrap_or("gptq");
                let zero_offset = match format {
                    "gptq" => 1,
                    "gptq_v2" => 0,
                    _ => bail!("GPTQ of format {format:?} is not supported (gptq and gptq_v2 are)"),
                };
                let marlin = q.get("is_marlin_format").and_then(Value::as_bool).unwrap_or(false);
                ensure!(!marlin, "GPTQ in Marlin's order is not supported");
                let bits = number(q, "bits").unwrap_or(4);
                ensure!([2, 4, 8].contains(&bits), "GPTQ of {bits} bits is not supported (2, 4 and 8 are)");
                Method::Gptq { bits: bits as u8, zero_offset }
            }
            _ => bail!("quantised by {method:?}, which is not supported ({METHODS})"),
        }))
    }

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Method::Fp8 { .. } => "FP8",
            Method::CompressedTensors { .. } => "compressed-tensors",
            Method::ModelOpt => "ModelOpt",
            Method::Mxfp4 => "MXFP4",
            Method::Awq => "AWQ",
            Method::Gptq { .. } => "GPTQ",
        }
    }

    /// Rows and columns that share a scale, where scales are of blocks.
    pub(crate) fn block(self) -> Option<[usize; 2]> {
        match self {
            Method::Fp8 { block } | Method::CompressedTensors { block, .. } => block,
            _ => None,
        }
    }

    /// Bits of most integers, for sizes; 4 where it is not said.
    pub(crate) fn bits(self) -> u8 {
        match self {
            Method::CompressedTensors { bits, .. } => bits.unwrap_or(4),
            Method::Gptq { bits, .. } => bits,
            _ => 4,
        }
    }
}

fn number(q: &Value, key: &str) -> Option<u64> {
    q.get(key).and_then(Value::as_u64)
}

/// Rows and columns of a block. Scales of fewer than 32 columns are no blocks that anybody writes, and would be larger than the weights.
fn block(value: Option<&Value>, key: &str) -> Result<Option<[usize; 2]>> {
    let Some(value) = value.filter(|v| !v.is_null()) else { return Ok(None) };
    let sizes: Option<Vec<u64>> = value.as_array().and_then(|all| all.iter().map(Value::as_u64).collect());
    match sizes.as_deref() {
        Some(&[rows, cols]) if (1..=1 << 24).contains(&rows) && (32..1 << 16).contains(&cols) => {
            Ok(Some([rows as usize, cols as usize]))
        }
        _ => bail!("`{key}` is {value}, expected rows and columns of a block, at least 32 columns"),
    }
}

fn compressed_tensors(q: &Value) -> Result<Method> {
    const READ: [&str; 8] = [
        "dense",
        "pack-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    ];
    let check = |value: Option<&Value>| match value.and_then(Value::as_str) {
        Some(format) if !READ.contains(&format) => bail!("compressed-tensors of format {format:?} is not supported"),
        _ => Ok(()),
    };
    check(q.get("format"))?;
    let holds = |value: &&Value| value.as_object().is_some_and(|object| !object.is_empty());
    if let Some(transforms) = q.get("transform_config").filter(holds) {
        let some = transforms.get("config_groups").is_none_or(|groups| holds(&groups));
        ensure!(!some, "compressed-tensors with transforms (rotated weights) is not supported");
    }
    if let Some(sparse) = q.get("sparsity_config").filter(holds) {
        let format = sparse.get("format").and_then(Value::as_str).unwrap_or("dense");
        ensure!(format == "dense", "compressed-tensors with sparsity of format {format:?} is not supported");
    }
    let (mut found, mut all_bits, mut all_symmetric) = (None, Vec::new(), Vec::new());
    for group in q.get("config_groups").and_then(Value::as_object).into_iter().flatten().map(|(_, group)| group) {
        check(group.get("format"))?;
        let Some(weights) = group.get("weights").filter(|w| !w.is_null()) else { continue };
        if let Some(sizes) = block(weights.get("block_structure"), "block_structure")? {
            ensure!(found.is_none_or(|other| other == sizes), "compressed-tensors with blocks of two sizes");
            found = Some(sizes);
        }
        if weights.get("type").and_then(Value::as_str) == Some("int") {
            let bits = number(weights, "num_bits").unwrap_or_default();
            ensure!((2..=8).contains(&bits), "compressed-tensors of {bits} bits is not supported (2 to 8 are)");
            all_bits.push(bits as u8);
            all_symmetric.extend(weights.get("symmetric").and_then(Value::as_bool));
        }
    }
    Ok(Method::CompressedTensors { block: found, bits: same(&all_bits), symmetric: same(&all_symmetric) })
}

/// What all are, if they are alike.
fn same<T: PartialEq + Copy>(all: &[T]) -> Option<T> {
    all.first().copied().filter(|first| all.iter().all(|one| one == first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<Method>, String> {
        Method::read(&serde_json::from_str(text).unwrap()).map_err(|e| format!("{e:#}"))
    }

    #[test]
    fn methods_are_read_with_what_tensors_do_not_tell() {
        assert_eq!(read(r#"{"bits": 4, "group_size": 64}"#), Ok(None));
        let fp8 = r#"{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}"#;
        assert_eq!(read(fp8), Ok(Some(Method::Fp8 { block: Some([128, 128]) })));
        let packed = r#"{"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {}, "config_groups":
            {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": false, "group_size": 128, "block_structure": null}}}}"#;
        let wanted = Method::CompressedTensors { block: None, bits: Some(4), symmetric: Some(false) };
        assert_eq!(read(packed), Ok(Some(wanted)));
        let gptq = |more: &str| read(&format!(r#"{{"quant_method": "gptq", "bits": 4 {more}}}"#));
        assert_eq!(gptq(""), Ok(Some(Method::Gptq { bits: 4, zero_offset: 1 })));
        let second = r#", "checkpoint_format": "gptq_v2""#;
        assert_eq!(gptq(second), Ok(Some(Method::Gptq { bits: 4, zero_offset: 0 })));
    }

    #[test]
    fn what_is_not_read_is_refused_by_its_name() {
        let of_compressed = |more: &str| format!(r#"{{"quant_method": "compressed-tensors", {more}}}"#);
        for (text, named) in [
            (r#"{"quant_method": "bitsandbytes"}"#.to_owned(), "\"bitsandbytes\", which is not supported"),
            (r#"{"quant_method": "fp8", "fmt": "e5m2"}"#.to_owned(), "e5m2"),
            (r#"{"quant_method": "fp8", "weight_block_size": [128]}"#.to_owned(), "weight_block_size"),
            (r#"{"quant_method": "fp8", "weight_block_size": [128, 1]}"#.to_owned(), "at least 32 columns"),
            (of_compressed(r#""format": "marlin-24""#), "marlin-24"),
            (of_compressed(r#""config_groups": {"a": {"format": "int-quantized"}}"#), "int-quantized"),
            (of_compressed(r#""config_groups": {"a": {"weights": {"type": "int", "num_bits": 0}}}"#), "0 bits"),
            (of_compressed(r#""transform_config": {"config_groups": {"u": {"type": "hadamard"}}}"#), "transforms"),
            (of_compressed(r#""sparsity_config": {"format": "sparse-24-bitmask"}"#), "sparse-24-bitmask"),
            (r#"{"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}"#.to_owned(), "W4A8_AWQ"),
            (r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#.to_owned(), "gemv"),
            (r#"{"quant_method": "awq", "bits": 3}"#.to_owned(), "3 bits"),
            (r#"{"quant_method": "gptq", "bits": 3}"#.to_owned(), "3 bits"),
            (r#"{"quant_method": "gptq", "checkpoint_format": "marlin"}"#.to_owned(), "marlin"),
        ] {
            let why = read(&text).unwrap_err();
            assert!(why.contains(named), "{text}: {why}");
        }
    }
}
