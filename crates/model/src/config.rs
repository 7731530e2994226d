//! Reading `config.json`: every value is checked once, here, and an error names the key.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Map, Value};
use sluice_store::{MAX_SETTINGS, read_small};

use crate::method::Method;
use crate::{mlx_names, python_json};

/// The part of a `config.json` that describes the text model, with accessors that say which key is wrong.
#[derive(Debug)]
pub struct Config {
    path: PathBuf,
    root: Value,
    /// The text model's part is `text_config`; otherwise it is the root.
    nested: bool,
    /// Keys that only the root has and that were looked up: see [`Config::misplaced`].
    misplaced: Mutex<BTreeSet<String>>,
}

impl Config {
    /// Reads `folder/config.json`.
    pub fn open(folder: &Path) -> Result<Config> {
        let path = folder.join("config.json");
        let is_adapter = || !path.exists() && folder.join("adapter_config.json").exists();
        ensure!(
            !is_adapter(),
            "{}: an adapter without its model (adapter_config.json, no config.json): give the model that it was merged into",
            folder.display()
        );
        let text = read_small(&path, MAX_SETTINGS)?;
        Config::parse(path, &text)
    }

    /// Parses `text`; `path` is for messages.
    pub fn parse(path: PathBuf, text: &[u8]) -> Result<Config> {
        let read = serde_json::from_slice(text)
            .or_else(|e| serde_json::from_slice(&python_json::without_infinities(text)).map_err(|_| e));
        let root: Value = read.map_err(|e| anyhow!("{}: not JSON: {e}", path.display()))?;
        ensure!(root.is_object(), "{}: not a JSON object", path.display());
        let nested = root.get("text_config").is_some_and(Value::is_object);
        Ok(Config { path, root, nested, misplaced: Mutex::default() })
    }

    /// Where it was read, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of it, as it was read.
    pub fn root(&self) -> &Map<String, Value> {
        self.root.as_object().expect("checked when it was parsed")
    }

    /// The `model_type` of the whole checkpoint, not of its text part.
    ///
    /// # Errors
    /// A config without one.
    pub fn model_type(&self) -> Result<&str> {
        let kind = self.root.get("model_type").and_then(Value::as_str);
        kind.ok_or_else(|| anyhow!("{}: `model_type` is missing", self.path.display()))
    }

    /// Whether the text model is one part of a multimodal checkpoint.
    pub fn is_multimodal(&self) -> bool {
        self.nested
    }

    /// A value of the text model. As in the reference, a config with a `text_config` is read from there only.
    pub fn get<'a>(&'a self, key: &str) -> Option<&'a Value> {
        let value = |part: &'a Value| part.get(key).filter(|v| !v.is_null());
        let found = value(if self.nested { &self.root["text_config"] } else { &self.root });
        if self.nested && found.is_none() && value(&self.root).is_some() {
            self.misplaced.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned());
        }
        found
    }

    /// Keys of the text model that are beside `text_config` instead of in it, of those looked up so far. They are not read, and the user is told so.
    pub(crate) fn misplaced(&self) -> Vec<String> {
        self.misplaced.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn wrong(&self, key: &str, wanted: &str) -> anyhow::Error {
        let path = self.path.display();
        match self.get(key) {
            Some(v) => anyhow!("{path}: `{key}` is {v}, expected {wanted}"),
            None if self.nested => anyhow!("{path}: `{key}` is missing in `text_config`, expected {wanted}"),
            None => anyhow!("{path}: `{key}` is missing, expected {wanted}"),
        }
    }

    /// A dimension or count: a whole number from 1 to 2^24.
    ///
    /// # Errors
    /// A missing key, or another value.
    pub fn size(&self, key: &str) -> Result<usize> {
        let n = self.get(key).and_then(Value::as_u64).filter(|n| (1..=1 << 24).contains(n));
        n.map(|n| n as usize).ok_or_else(|| self.wrong(key, "a whole number from 1 to 2^24"))
    }

    /// The same, with a default where the key is missing.
    ///
    /// # Errors
    /// Another value.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    /// A number that satisfies `fits`. `wanted` is the same condition in words, for the error.
    ///
    /// # Errors
    /// Another value.
    pub fn float_or(&self, key: &str, default: f64, fits: impl Fn(f64) -> bool, wanted: &str) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_f64().filter(|x| x.is_finite() && fits(*x)).ok_or_else(|| self.wrong(key, wanted)),
        }
    }

    /// As [`Config::float_or`], but null is `None`, as in the reference.
    ///
    /// # Errors
    /// Another value.
    pub fn float_or_null(
        &self,
        key: &str,
        default: f64,
        fits: impl Fn(f64) -> bool,
        wanted: &str,
    ) -> Result<Option<f64>> {
        let part = if self.nested { &self.root["text_config"] } else { &self.root };
        if part.get(key).is_some_and(Value::is_null) {
            Ok(None)
        } else {
            self.float_or(key, default, fits, wanted).map(Some)
        }
    }

    /// A size, or the default where the key is missing; null is `None`, as in the reference.
    ///
    /// # Errors
    /// Another value.
    pub fn size_or_null(&self, key: &str, default: Option<usize>) -> Result<Option<usize>> {
        let part = if self.nested { &self.root["text_config"] } else { &self.root };
        match part.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.size(key).map(Some),
        }
    }

    /// The epsilon of RMS norms. A negative one could make a root of a negative number.
    ///
    /// # Errors
    /// A value outside of 0 to 1.
    pub fn norm_eps(&self) -> Result<f64> {
        let default = match self.text_type() {
            "mixtral" | "ministral3" | "phi3" | "olmo2" | "olmo3" | "glm4_moe" | "glm4_moe_lite" | "glm_moe_dsa"
            | "glm5_next" | "glm5_next_text" | "kimi_linear" => 1e-5,
            "glm4" => 1.5625e-7,
            _ => 1e-6,
        };
        self.float_or("rms_norm_eps", default, |x| (0.0..=1.0).contains(&x), "a number from 0 to 1")
    }

    /// `max_position_embeddings`, or the reference's default.
    ///
    /// # Errors
    /// A value that is no size.
    pub fn max_positions(&self) -> Result<usize> {
        let default = match self.text_type() {
            "llama" | "granite" | "granitemoe" | "granitemoehybrid" | "olmo2" | "olmo3" | "deepseek_v2" => 2048,
            "phi3" | "deepseek_v3" | "kimi_k2" => 4096,
            "gemma2" => 8192,
            "mistral" | "ministral" | "mixtral" | "glm4" | "glm4_moe" | "gemma4_text" => 131_072,
            "minimax_m2" => 196_608,
            "glm4_moe_lite" | "glm_moe_dsa" => 202_752,
            "deepseek_v32" => 163_840,
            "mistral4" | "glm5_next" | "glm5_next_text" | "deepseek_v4" => 1_048_576,
            "ministral3" => 262_144,
            _ => 32768,
        };
        self.size_or("max_position_embeddings", default)
    }

    /// The `model_type` of the text model: its own, where it is a part of a checkpoint and has one.
    pub fn text_type(&self) -> &str {
        let own = self.get("model_type").or_else(|| self.root.get("model_type")).and_then(Value::as_str);
        own.unwrap_or_default()
    }

    /// The number of layers.
    ///
    /// # Errors
    /// A missing key, or a value outside of 1 to 2^16.
    pub fn layers(&self) -> Result<usize> {
        let layers = self.size("num_hidden_layers")?;
        if layers <= 1 << 16 {
            Ok(layers)
        } else {
            Err(self.wrong("num_hidden_layers", "a whole number from 1 to 2^16"))
        }
    }

    /// The product of sizes. `keys` names their keys, for the error.
    ///
    /// # Errors
    /// A product outside of 1 to 2^24.
    pub fn product(&self, keys: &str, sizes: &[usize]) -> Result<usize> {
        let product =
            sizes.iter().try_fold(1usize, |n, size| n.checked_mul(*size)).filter(|n| (1..=1 << 24).contains(n));
        product.ok_or_else(|| anyhow!("{}: the product of {keys} is not a number from 1 to 2^24", self.path.display()))
    }

    /// True or false, with a default where the key is missing.
    ///
    /// # Errors
    /// Another value.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// Whether the output head is the embedding, unless the checkpoint stores another one. A multimodal config has this key at the top and in `text_config`;
    /// which of them the reference follows depends on the class that loads it. Here either suffices.
    ///
    /// # Errors
    /// A value that is neither true nor false.
    pub fn tied_embeddings(&self) -> Result<bool> {
        let of = |part: &Value| match part.get("tie_word_embeddings").filter(|v| !v.is_null()) {
            None => Ok(false),
            Some(Value::Bool(tied)) => Ok(*tied),
            Some(v) => Err(anyhow!("{}: `tie_word_embeddings` is {v}, expected true or false", self.path.display())),
        };
        Ok(of(&self.root)? || self.nested && of(&self.root["text_config"])?)
    }

    /// A whole number from 0 to 2^24, with a default where the key is missing.
    ///
    /// # Errors
    /// Another value.
    pub fn count_or(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key) {
            None => Ok(default),
            // As in the reference, 28.0 is a whole number too.
            Some(v) => {
                let whole = v.as_f64().filter(|x| x.fract() == 0.0 && (0.0..=16_777_216.0).contains(x));
                whole.map(|x| x as usize).ok_or_else(|| self.wrong(key, "a whole number from 0 to 2^24"))
            }
        }
    }

    /// A list of layer numbers, empty where the key is missing.
    ///
    /// # Errors
    /// Another value.
    pub fn indices(&self, key: &str) -> Result<Vec<usize>> {
        let Some(v) = self.get(key) else { return Ok(vec![]) };
        let list = v.as_array().and_then(|l| l.iter().map(|n| n.as_u64().map(|n| n as usize)).collect());
        list.ok_or_else(|| self.wrong(key, "a list of whole numbers"))
    }

    /// A list of strings, if the key is there.
    ///
    /// # Errors
    /// Another value.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let list = v.as_array().and_then(|l| l.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| self.wrong(key, "a list of strings"))
    }

    /// Refuses any value but `wanted`; a missing key is accepted.
    ///
    /// # Errors
    /// Another value.
    pub fn require(&self, key: &str, wanted: &str) -> Result<()> {
        match self.get(key) {
            Some(v) if v.as_str() != Some(wanted) => Err(self.wrong(key, wanted)),
            _ => Ok(()),
        }
    }

    /// MLX's `quantization` or its copy under `quantization_config`, where other producers' methods are; both at the top or in `text_config`.
    fn quantization_value(&self) -> Option<&Value> {
        let parts = [Some(&self.root), self.nested.then(|| &self.root["text_config"])];
        let of = |key: &str| parts.into_iter().flatten().find_map(|part| part.get(key).filter(|q| !q.is_null()));
        of("quantization").or_else(|| of("quantization_config"))
    }

    /// The method by which the checkpoint's producer has quantised weights; `None`: they are not quantised, or by MLX.
    ///
    /// # Errors
    /// A method, or a variant of one, that is not supported.
    pub fn method(&self) -> Result<Option<Method>> {
        let Some(q) = self.quantization_value() else { return Ok(None) };
        Method::read(q).map_err(|e| anyhow!("{}: {e:#}", self.path.display()))
    }

    /// How weights are quantised by MLX; nothing, if they are by another producer's method.
    ///
    /// # Errors
    /// A method, mode, width or group size that is not supported.
    pub fn quantization(&self) -> Result<Quantization> {
        let none = Quantization { default: None, layers: Value::Null };
        let Some(q) = self.quantization_value() else { return Ok(none) };
        if self.method()?.is_some() {
            return Ok(none);
        }
        let default = group(q).with_context(|| format!("{}: `quantization`", self.path.display()))?;
        Ok(Quantization { default: Some(default), layers: q.clone() })
    }
}

/// What MLX's groups consist of: its `mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupMode {
    /// Integers with a scale and a bias.
    Affine,
    /// Numbers of four bits with powers of two as scales, in groups of 32.
    Mxfp4,
    /// Numbers of four bits with scales of eight, in groups of 16.
    Nvfp4,
    /// Numbers of eight bits with powers of two as scales, in groups of 32.
    Mxfp8,
}

impl GroupMode {
    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            GroupMode::Affine => "affine",
            GroupMode::Mxfp4 => "MXFP4",
            GroupMode::Nvfp4 => "NVFP4",
            GroupMode::Mxfp8 => "MXFP8",
        }
    }
}

/// Mode, bits and group size.
type Width = (GroupMode, u8, u16);

fn group(q: &Value) -> Result<Width> {
    let number = |key: &str| q.get(key).filter(|v| !v.is_null()).map(|v| v.as_u64().unwrap_or(0));
    let (bits, group) = (number("bits"), number("group_size"));
    let fixed = |mode: GroupMode, of_bits: u8, of_group: u16| {
        let fits = bits.is_none_or(|n| n == u64::from(of_bits)) && group.is_none_or(|n| n == u64::from(of_group));
        ensure!(fits, "{} has {of_bits} bits in groups of {of_group}", mode.name());
        Ok((mode, of_bits, of_group))
    };
    match q.get("mode").and_then(Value::as_str).unwrap_or("affine") {
        "affine" => {}
        "mxfp4" => return fixed(GroupMode::Mxfp4, 4, 32),
        "nvfp4" => return fixed(GroupMode::Nvfp4, 4, 16),
        "mxfp8" => return fixed(GroupMode::Mxfp8, 8, 32),
        mode => bail!("mode {mode:?} is not supported (affine, mxfp4, nvfp4 and mxfp8 are)"),
    }
    let (bits, group) = (bits.unwrap_or(0), group.unwrap_or(0));
    ensure!([2, 3, 4, 5, 6, 8].contains(&bits), "bits must be 2, 3, 4, 5, 6 or 8, not {bits}");
    ensure!([32, 64, 128].contains(&group), "group_size must be 32, 64 or 128, not {group}");
    Ok((GroupMode::Affine, bits as u8, group as u16))
}

/// Bits and group size of each quantised module.
#[derive(Debug)]
pub struct Quantization {
    default: Option<Width>,
    layers: Value,
}

impl Quantization {
    /// (bits, group size) of `module`, which has scales. A module may override the default.
    ///
    /// # Errors
    /// A width or group size that is not supported, and a config without `quantization`.
    pub fn of(&self, module: &str) -> Result<(u8, u16)> {
        self.width_of(module).map(|(_, bits, group)| (bits, group))
    }

    /// The same with the mode.
    pub(crate) fn width_of(&self, module: &str) -> Result<Width> {
        // A bundle gives each expert its own tensors; the config still names the layer's stack.
        let found = self.layers.get(module).or_else(|| self.layers.get(mlx_names::stack_of(module)?));
        match found {
            Some(v) if v.is_object() => group(v).with_context(|| format!("config.json: `quantization` of {module}")),
            _ => self.default.ok_or_else(|| anyhow!("{module} has scales, but config.json has no `quantization`")),
        }
    }

    /// (bits, group size) of routed experts: those of their first module that has its own, else the default.
    pub fn of_experts(&self) -> Option<(u8, u16)> {
        let modules = self.layers.as_object().into_iter().flatten();
        let of_expert = |(name, v): (&String, &Value)| mlx_names::split(name).and_then(|_| group(v).ok());
        modules.filter_map(of_expert).next().or(self.default).map(|(_, bits, group)| (bits, group))
    }

    /// The default mode, if the checkpoint is quantised.
    pub fn mode(&self) -> Option<GroupMode> {
        self.default.map(|(mode, ..)| mode)
    }

    /// The default (bits, group size), if the checkpoint is quantised.
    pub fn default(&self) -> Option<(u8, u16)> {
        self.default.map(|(_, bits, group)| (bits, group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_may_have_widths_of_their_own() {
        let of = |text: &str| Config::parse("config.json".into(), text.as_bytes()).unwrap().quantization().unwrap();
        let plain = of(
            r#"{"quantization": {"bits": 4, "group_size": 64, "model.layers.0.mlp.gate": {"bits": 8, "group_size": 64}}}"#,
        );
        assert_eq!((plain.default(), plain.of_experts()), (Some((4, 64)), Some((4, 64))));
        let mixed = of(
            r#"{"quantization": {"bits": 4, "group_size": 64, "model.layers.0.mlp.switch_mlp.up_proj": {"bits": 2, "group_size": 32}}}"#,
        );
        assert_eq!(mixed.of_experts(), Some((2, 32)));
        assert_eq!(mixed.of("model.layers.0.mlp.experts.7.up_proj").unwrap(), (2, 32));
        assert_eq!(of("{}").of_experts(), None);
    }

    #[test]
    fn the_text_model_is_what_text_config_says_and_nothing_beside_it() {
        let of = |text: &str| Config::parse("config.json".into(), text.as_bytes()).unwrap();
        let nested =
            of(r#"{"hidden_size": 7, "rms_norm_eps": 0.5, "text_config": {"hidden_size": 8, "vocab_size": null}}"#);
        assert_eq!((nested.size("hidden_size").unwrap(), nested.norm_eps().unwrap()), (8, 1e-6));
        assert_eq!(nested.misplaced(), ["rms_norm_eps"]);
        let error = nested.size("vocab_size").unwrap_err().to_string();
        assert!(error.contains("`vocab_size` is missing in `text_config`"), "{error}");
        let flat = of(r#"{"rms_norm_eps": 0.5}"#);
        assert_eq!((flat.norm_eps().unwrap(), flat.misplaced().len()), (0.5, 0));
    }

    #[test]
    fn a_head_is_tied_where_either_place_says_so() {
        for (text, tied) in [
            ("{}", false),
            (r#"{"tie_word_embeddings": true}"#, true),
            (r#"{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}"#, true),
            (r#"{"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}}"#, true),
            (r#"{"text_config": {"tie_word_embeddings": true}}"#, true),
            (r#"{"text_config": {"tie_word_embeddings": null}}"#, false),
        ] {
            let config = Config::parse("config.json".into(), text.as_bytes()).unwrap();
            assert_eq!(config.tied_embeddings().unwrap(), tied, "{text}");
        }
        let wrong = Config::parse("config.json".into(), br#"{"tie_word_embeddings": 1}"#).unwrap();
        assert!(wrong.tied_embeddings().unwrap_err().to_string().contains("tie_word_embeddings"));
    }

    #[test]
    fn numbers_without_a_meaning_are_errors_that_name_the_key() {
        let of = |text: &str| Config::parse("config.json".into(), text.as_bytes()).unwrap();
        assert_eq!(of("{}").norm_eps().unwrap(), 1e-6);
        assert_eq!(of(r#"{"rms_norm_eps": 0}"#).norm_eps().unwrap(), 0.0);
        for bad in ["-1", "1e9", "\"1e-6\"", "true"] {
            let error = of(&format!("{{\"rms_norm_eps\": {bad}}}")).norm_eps().unwrap_err().to_string();
            assert_eq!(
                error,
                format!("config.json: `rms_norm_eps` is {bad}, expected a number from 0 to 1")
                    .replace("1e9", "1000000000.0")
            );
        }
        let layers = of(r#"{"num_hidden_layers": 16777216}"#).layers().unwrap_err().to_string();
        assert!(layers.contains("num_hidden_layers"), "{layers}");
        assert_eq!(of(r#"{"max_window_layers": 28.0}"#).count_or("max_window_layers", 1).unwrap(), 28);
        of(r#"{"max_window_layers": -1}"#).count_or("max_window_layers", 1).unwrap_err();
        let product = of("{}").product("a and b", &[1 << 20, 1 << 20]).unwrap_err().to_string();
        assert!(product.contains("a and b"), "{product}");
    }
}
