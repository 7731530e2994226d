//! `options` of a request: sampling and length, under Ollama's names.

use serde_json::{Map, Value};

use crate::api::sampling::{SamplingFields, Stop};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::openapi::json_schema;

json_schema! {
    /// Sampling and length. Options for loading a model (`num_ctx`, `num_gpu`, ..) are ignored.
    OllamaOptions, uses [], {
        "type": "object",
        "properties": {
            "temperature": {"type": ["number", "null"]},
            "top_k": {"type": ["integer", "null"]},
            "top_p": {"type": ["number", "null"]},
            "min_p": {"type": ["number", "null"]},
            "repeat_penalty": {"type": ["number", "null"]},
            "presence_penalty": {"type": ["number", "null"]},
            "frequency_penalty": {"type": ["number", "null"]},
            "seed": {"type": ["integer", "null"]},
            "num_predict": {"type": ["integer", "null"], "description": "0 or less: as many as the context allows."},
            "stop": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}}]},
            "num_ctx": {"type": ["integer", "null"]},
        },
        "additionalProperties": true,
    }
}

/// Options that would change the answer but are not supported, with the value that is harmless.
const REFUSED: [(&str, f64); 5] =
    [("typical_p", 1.0), ("tfs_z", 1.0), ("mirostat", 0.0), ("dry_multiplier", 0.0), ("xtc_probability", 0.0)];

/// Converts options.
///
/// # Errors
/// An option that is invalid or not supported, by name.
pub fn sampling_fields(options: Map<String, Value>) -> Result<SamplingFields, ApiError> {
    let mut sampling = SamplingFields::default();
    for (name, value) in options.into_iter().filter(|(_, value)| !value.is_null()) {
        let wrong = |what: &str| {
            let field = format!("options.{name}");
            ApiError::invalid(&field, format!("{field} must be {what}, not {value}"))
        };
        let number = || value.as_f64().map(|x| x as f32).map(Some).ok_or_else(|| wrong("a number"));
        let integer = || {
            // Some clients send all numbers as floats.
            let whole = value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 1e18).map(|x| x as i64);
            value.as_i64().or(whole).ok_or_else(|| wrong("an integer"))
        };
        match name.as_str() {
            "temperature" => sampling.temperature = number()?,
            "top_p" => sampling.top_p = number()?,
            "min_p" => sampling.min_p = number()?,
            "repeat_penalty" => sampling.repetition_penalty = number()?,
            "presence_penalty" => sampling.presence_penalty = number()?,
            "frequency_penalty" => sampling.frequency_penalty = number()?,
            "top_k" => sampling.top_k = Some(integer()?),
            "seed" => sampling.seed = Some(integer()?).filter(|seed| *seed >= 0),
            "num_predict" => sampling.max_tokens = usize::try_from(integer()?).ok().filter(|most| *most > 0),
            "stop" => sampling.stop = Some(stop(&value).ok_or_else(|| wrong("a string or a list of strings"))?),
            name => match REFUSED.iter().find(|(refused, _)| *refused == name) {
                Some((_, nothing)) if value.as_f64() != Some(*nothing) => {
                    let field = format!("options.{name}");
                    return Err(ApiError::invalid(&field, format!("{field} is not supported (got {value})")));
                }
                Some(_) => {}
                None => note_ignored(&format!("options.{name}")),
            },
        }
    }
    Ok(sampling)
}

/// Stop strings; empty ones are dropped.
fn stop(value: &Value) -> Option<Stop> {
    let all = match value {
        Value::String(one) => vec![one.clone()],
        Value::Array(all) => all.iter().map(|s| s.as_str().map(str::to_owned)).collect::<Option<_>>()?,
        _ => return None,
    };
    Some(Stop::Many(all.into_iter().filter(|s| !s.is_empty()).collect()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(options: Value) -> Result<SamplingFields, ApiError> {
        let Value::Object(options) = options else { panic!("an object") };
        sampling_fields(options)
    }

    #[test]
    fn options_are_read() {
        let all = json!({
            "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repeat_penalty": 1.5, "seed": 3.0, "num_predict": 9,
            "stop": ["a", ""], "num_ctx": 8192, "mirostat": 0, "presence_penalty": null,
        });
        let sampling = read(all).unwrap();
        assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (Some(0.0), Some(0.5), Some(0.1)));
        assert_eq!((sampling.top_k, sampling.seed, sampling.max_tokens), (Some(7), Some(3), Some(9)));
        assert_eq!((sampling.repetition_penalty, sampling.presence_penalty), (Some(1.5), None));
        assert_eq!(sampling.stops().unwrap(), ["a"]);
        let sampling = read(json!({"seed": -1, "num_predict": -2, "stop": "b"})).unwrap();
        assert_eq!((sampling.seed, sampling.max_tokens, sampling.stops().unwrap()), (None, None, vec!["b".to_owned()]));
    }

    #[test]
    fn what_cannot_be_obeyed_is_named() {
        for (options, part) in [
            (json!({"mirostat": 2}), "options.mirostat is not supported"),
            (json!({"typical_p": 0.5}), "options.typical_p is not supported"),
            (json!({"temperature": "warm"}), "options.temperature must be a number"),
            (json!({"seed": 1.5}), "options.seed must be an integer"),
            (json!({"stop": [1]}), "options.stop must be"),
        ] {
            let error = read(options).unwrap_err();
            assert!(error.message.contains(part), "{}", error.message);
        }
    }
}
