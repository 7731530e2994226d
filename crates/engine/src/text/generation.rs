//! A checkpoint's defaults for generation: `generation_config.json`, and the tokens that end an answer.

use super::files::read_json;
use super::tokenizer::Tokenizer;
use super::tokenizer::special::SpecialTokens;
use crate::sampling::SamplingParams;
use anyhow::{Result, bail};
use serde_json::Value;
use sluice_model::source::TextFiles;

/// The sampling parameters of `generation_config.json`; `None` for those that it leaves out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// `false`: greedy.
    pub do_sample: Option<bool>,
    /// As in [`SamplingParams`], like the next ones.
    pub temperature: Option<f32>,
    /// 0 keeps all.
    pub top_k: Option<u32>,
    /// 1 keeps all.
    pub top_p: Option<f32>,
    /// 0 keeps all.
    pub min_p: Option<f32>,
    /// 1 is none.
    pub repetition_penalty: Option<f32>,
    /// Fields that are not followed, and why, a line each.
    pub notes: Vec<String>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json`. If it is missing there are no defaults. Unreadable files and invalid fields are only noted, since defaults are no reason
    /// to refuse a model.
    pub fn load(files: impl TextFiles) -> Self {
        let files: &dyn TextFiles = &files;
        let name = "generation_config.json";
        let path = files.locate(name).display().to_string();
        let config = match read_json(files, name) {
            Ok(None) => return Self::default(),
            Ok(Some(config)) if config.is_object() => config,
            Ok(Some(_)) => {
                return Self { notes: vec![format!("not followed: {path}: not an object")], ..Self::default() };
            }
            Err(e) => return Self { notes: vec![format!("not followed: {e:#}")], ..Self::default() },
        };
        let mut notes = Vec::new();
        let fail =
            |field: &str, what: &str| format!("not followed: {path}: {field} must be {what}, found {}", config[field]);
        let mut field = |field: &str, wanted: &str, of: &dyn Fn(&Value) -> bool| match &config[field] {
            Value::Null => None,
            value if of(value) => Some(value),
            _ => {
                notes.push(fail(field, wanted));
                None
            }
        };
        let number = |v: &Value| v.as_f64().map(|x| x as f32);
        let count = |v: &Value| match v.as_i64() {
            // As in vLLM: keep all.
            Some(-1) => Some(0),
            _ => v.as_u64().and_then(|k| u32::try_from(k).ok()),
        };
        let is_number = |v: &Value| number(v).is_some();
        let eos = field("eos_token_id", "a token id or a list of them", &|v| token_ids(v).is_some());
        let do_sample = field("do_sample", "true or false", &Value::is_boolean).and_then(Value::as_bool);
        let top_k = field("top_k", "a count, or -1 for no cut", &|v| count(v).is_some()).and_then(count);
        let [temperature, top_p, min_p, repetition_penalty] = ["temperature", "top_p", "min_p", "repetition_penalty"]
            .map(|name| field(name, "a number", &is_number).and_then(number));
        let eos_token_ids = eos.and_then(token_ids).unwrap_or_default();
        let mut found =
            Self { eos_token_ids, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, notes: Vec::new() };
        // Drop values that cannot be sampled with, one after the other.
        while let Err(e) = found.sampling().validate() {
            notes.push(fail(e.field, e.expected));
            match e.field {
                "temperature" => found.temperature = None,
                "top_k" => found.top_k = None,
                "top_p" => found.top_p = None,
                "min_p" => found.min_p = None,
                "repetition_penalty" => found.repetition_penalty = None,
                _ => {
                    let neutral = Self { eos_token_ids: found.eos_token_ids, ..Self::default() };
                    return Self { notes, ..neutral };
                }
            }
        }
        Self { notes, ..found }
    }

    /// Sampling parameters if the user asks for none: the checkpoint's values, and neutral ones for those that it leaves out (temperature 1, no filter, no penalty).
    /// `do_sample: false` means temperature 0.
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

/// The tokens that end an answer, ascending: `eos_token_id` of `generation_config.json` and of `config.json` (or its `text_config`), and the tokenizer's
/// `eos_token`.
///
/// # Errors
/// A broken file, or an `eos_token_id` of `config.json` that is no token id.
pub fn stop_ids(files: &dyn TextFiles, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    let mut ids = GenerationDefaults::load(files).eos_token_ids;
    if let Some(config) = read_json(files, "config.json")? {
        for value in [&config["eos_token_id"], &config["text_config"]["eos_token_id"]] {
            let Some(more) = token_ids(value) else {
                bail!(
                    "{}: eos_token_id must be a token id or a list of them, found {value}",
                    files.locate("config.json").display()
                );
            };
            ids.extend(more);
        }
    }
    if let Some(tokenizer) = tokenizer {
        ids.extend(SpecialTokens::load(files)?.named("eos_token").and_then(|token| tokenizer.id(token)));
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
        assert_eq!(GenerationDefaults::load(dir.path()), GenerationDefaults::default());
        fs::write(
            dir.path().join("generation_config.json"),
            r#"{"eos_token_id": [2, 0], "do_sample": true, "temperature": 0.7, "top_k": 30}"#,
        )
        .unwrap();
        let defaults = GenerationDefaults::load(dir.path());
        assert_eq!(defaults.notes, [""; 0]);
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
        assert_eq!(stop_ids(&dir.path(), None).unwrap(), [3, 7]);
    }

    #[test]
    fn what_has_no_meaning_is_noted_by_file_and_field_and_the_rest_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("generation_config.json");
        // The one note that there is, of a file that also says what is right.
        let noted = |text: &str| {
            fs::write(&path, text).unwrap();
            let found = GenerationDefaults::load(dir.path());
            assert_eq!(found.notes.len(), 1, "{text}: {:?}", found.notes);
            let neutral = GenerationDefaults { eos_token_ids: found.eos_token_ids.clone(), ..Default::default() };
            assert_eq!(found.sampling(), neutral.sampling(), "{text}");
            assert!(found.eos_token_ids.is_empty() || found.eos_token_ids == [7], "{text}");
            (found.notes[0].clone(), found.eos_token_ids)
        };
        let (note, eos) = noted(r#"{"top_k": "many", "eos_token_id": 7}"#);
        assert!(note.contains("generation_config.json: top_k must be a count, or -1") && eos == [7], "{note}");
        for (field, value) in [
            ("temperature", "-1"),
            ("top_p", "0"),
            ("top_p", "1.5"),
            ("min_p", "2"),
            ("repetition_penalty", "0"),
            ("top_k", "-2"),
        ] {
            let (note, eos) = noted(&format!("{{\"eos_token_id\": [7], \"{field}\": {value}}}"));
            let start = format!("not followed: {}: {field} must be ", path.display());
            assert!(note.starts_with(&start) && note.ends_with(&format!("found {value}")) && eos == [7], "{note}");
        }
        let (note, _) = noted(r#"{"eos_token_id": "</s>"}"#);
        assert!(note.contains("eos_token_id must be a token id"), "{note}");
        fs::write(&path, r#"{"top_k": -1}"#).unwrap();
        assert_eq!(GenerationDefaults::load(dir.path()).sampling().top_k, 0, "-1 is no cut");
        for (text, why) in [("{\n  \"top_k\": 3,,\n}", "line 2"), ("[]", "not an object"), ("", "line 1")] {
            let (note, eos) = noted(text);
            assert!(note.contains("generation_config.json") && note.contains(why) && eos.is_empty(), "{note}");
        }
    }
}
