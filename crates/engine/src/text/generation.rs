//! What a checkpoint says about generating from it: `generation_config.json`, and which tokens end an answer.

use super::files::read_json;
use super::special::SpecialTokens;
use super::tokenizer::Tokenizer;
use crate::sampler::SamplingParams;
use anyhow::{Result, bail};
use serde_json::Value;
use std::path::Path;

/// The sampling values of `generation_config.json`; what the file leaves out is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    pub eos_token_ids: Vec<u32>,
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    /// Reads `folder/generation_config.json`. A folder without one states nothing.
    ///
    /// # Errors
    /// A file that is no JSON, or a field of the wrong type: the message names both.
    pub fn load(folder: &Path) -> Result<Self> {
        let name = "generation_config.json";
        let Some(config) = read_json(folder, name)? else { return Ok(Self::default()) };
        let fail = |field: &str, what: &str| {
            anyhow::anyhow!("{}: {field} must be {what}, found {}", folder.join(name).display(), config[field])
        };
        let number = |field: &str| match &config[field] {
            Value::Null => Ok(None),
            value => value.as_f64().map(|x| Some(x as f32)).ok_or_else(|| fail(field, "a number")),
        };
        let top_k = match &config["top_k"] {
            Value::Null => None,
            // As in vLLM: no cut.
            value if value.as_i64() == Some(-1) => Some(0),
            value => {
                let count = value.as_u64().and_then(|k| u32::try_from(k).ok());
                Some(count.ok_or_else(|| fail("top_k", "a count, or -1 for no cut"))?)
            }
        };
        let do_sample = match &config["do_sample"] {
            Value::Null => None,
            value => Some(value.as_bool().ok_or_else(|| fail("do_sample", "true or false"))?),
        };
        let defaults = Self {
            eos_token_ids: token_ids(&config["eos_token_id"])
                .ok_or_else(|| fail("eos_token_id", "a token id or a list of them"))?,
            do_sample,
            temperature: number("temperature")?,
            top_k,
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        };
        // Wherever they are asked for, they can be sampled with.
        match defaults.sampling().validate() {
            Ok(()) => Ok(defaults),
            Err(e) => Err(fail(e.field, e.expected)),
        }
    }

    /// The parameters to sample with where the user says nothing: the checkpoint's values, and neutral ones (temperature 1, no
    /// cut, no penalty) where it is silent. `do_sample: false` means greedy, that is temperature 0.
    pub fn sampling(&self) -> SamplingParams {
        let neutral = SamplingParams::default();
        let temperature = match self.do_sample {
            Some(false) => 0.0,
            _ => self.temperature.unwrap_or(neutral.temperature),
        };
        SamplingParams {
            temperature,
            top_k: self.top_k.unwrap_or(neutral.top_k),
            top_p: self.top_p.unwrap_or(neutral.top_p),
            min_p: self.min_p.unwrap_or(neutral.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(neutral.repetition_penalty),
            ..neutral
        }
    }
}

/// The tokens that end an answer, ascending: `eos_token_id` of `generation_config.json`, that of `config.json` (or of its `text_config`),
/// and the tokenizer's own `eos_token`, together.
pub fn stop_ids(folder: &Path, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    let mut ids = GenerationDefaults::load(folder)?.eos_token_ids;
    if let Some(config) = read_json(folder, "config.json")? {
        for value in [&config["eos_token_id"], &config["text_config"]["eos_token_id"]] {
            let Some(more) = token_ids(value) else {
                bail!(
                    "{}: eos_token_id must be a token id or a list of them, found {value}",
                    folder.join("config.json").display()
                );
            };
            ids.extend(more);
        }
    }
    if let Some(tokenizer) = tokenizer {
        ids.extend(SpecialTokens::load(folder)?.named("eos_token").and_then(|token| tokenizer.id(token)));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// `null`, one id or a list of ids.
fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Null => Some(Vec::new()),
        Value::Array(list) => list.iter().map(id).collect(),
        one => Some(vec![id(one)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn values_are_read_and_the_rest_is_neutral() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(GenerationDefaults::load(dir.path()).unwrap(), GenerationDefaults::default());
        fs::write(
            dir.path().join("generation_config.json"),
            r#"{"eos_token_id": [2, 0], "do_sample": true, "temperature": 0.7, "top_k": 30}"#,
        )
        .unwrap();
        let defaults = GenerationDefaults::load(dir.path()).unwrap();
        assert_eq!(defaults.eos_token_ids, [2, 0]);
        let params = defaults.sampling();
        assert_eq!((params.temperature, params.top_k, params.top_p), (0.7, 30, 1.0));
        assert_eq!(GenerationDefaults { do_sample: Some(false), ..defaults }.sampling().temperature, 0.0);
    }

    #[test]
    fn stop_ids_are_gathered_from_all_configs() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 7}"#).unwrap();
        fs::write(dir.path().join("config.json"), r#"{"text_config": {"eos_token_id": [3, 7]}}"#).unwrap();
        assert_eq!(stop_ids(dir.path(), None).unwrap(), [3, 7]);
    }

    #[test]
    fn errors_name_file_and_field() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("generation_config.json");
        fs::write(&path, r#"{"top_k": "many"}"#).unwrap();
        let error = format!("{:#}", GenerationDefaults::load(dir.path()).unwrap_err());
        assert!(error.contains("generation_config.json: top_k must be a count, or -1"), "{error}");
        for (field, value) in [
            ("temperature", "-1"),
            ("top_p", "0"),
            ("top_p", "1.5"),
            ("min_p", "2"),
            ("repetition_penalty", "0"),
            ("top_k", "-2"),
        ] {
            fs::write(&path, format!("{{\"{field}\": {value}}}")).unwrap();
            let error = format!("{:#}", GenerationDefaults::load(dir.path()).unwrap_err());
            let start = format!("{}: {field} must be ", path.display());
            assert!(error.starts_with(&start) && error.ends_with(&format!("found {value}")), "{error}");
        }
        fs::write(&path, r#"{"top_k": -1}"#).unwrap();
        assert_eq!(GenerationDefaults::load(dir.path()).unwrap().sampling().top_k, 0, "-1 is no cut");
        fs::write(&path, "{\n  \"top_k\": 3,,\n}").unwrap();
        let error = format!("{:#}", GenerationDefaults::load(dir.path()).unwrap_err());
        assert!(error.contains("generation_config.json") && error.contains("line 2"), "{error}");
    }
}
