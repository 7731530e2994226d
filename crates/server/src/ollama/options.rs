//! `options` of a request: how tokens are chosen, in Ollama's words.

use serde_json::{Map, Value};

use crate::context::ignore;
use crate::error::ApiError;
use crate::openai::{SamplingFields, Stop};
use crate::openapi::written;

written! {
    /// How tokens are chosen, and how many. Options of how a model is loaded (`num_ctx`, `num_gpu`, ..) have no effect.
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
            "num_predict": {"type": ["integer", "null"], "description": "0 and less: as many as there is room for."},
            "stop": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}}]},
            "num_ctx": {"type": ["integer", "null"]},
        },
        "additionalProperties": true,
    }
}

/// Options that would change the answer and are not obeyed, with the value that asks for nothing.
const REFUSED: [(&str, f64); 5] =
    [("typical_p", 1.0), ("tfs_z", 1.0), ("mirostat", 0.0), ("dry_multiplier", 0.0), ("xtc_probability", 0.0)];

/// # Errors
/// An option that cannot be what it is or cannot be obeyed, by name.
pub fn common(options: Map<String, Value>) -> Result<SamplingFields, ApiError> {
    let mut common = SamplingFields::default();
    for (name, value) in options.into_iter().filter(|(_, value)| !value.is_null()) {
        let wrong = |what: &str| {
            let field = format!("options.{name}");
            ApiError::invalid(&field, format!("{field} must be {what}, not {value}"))
        };
        let number = || value.as_f64().map(|x| x as f32).map(Some).ok_or_else(|| wrong("a number"));
        let integer = || {
            // Some clients have no other numbers than floats.
            let whole = value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 1e18).map(|x| x as i64);
            value.as_i64().or(whole).ok_or_else(|| wrong("a whole number"))
        };
        match name.as_str() {
            "temperature" => common.temperature = number()?,
            "top_p" => common.top_p = number()?,
            "min_p" => common.min_p = number()?,
            "repeat_penalty" => common.repetition_penalty = number()?,
            "presence_penalty" => common.presence_penalty = number()?,
            "frequency_penalty" => common.frequency_penalty = number()?,
            "top_k" => common.top_k = Some(integer()?),
            "seed" => common.seed = Some(integer()?).filter(|seed| *seed >= 0),
            "num_predict" => common.max_tokens = usize::try_from(integer()?).ok().filter(|most| *most > 0),
            "stop" => common.stop = Some(stop(&value).ok_or_else(|| wrong("a text or a list of texts"))?),
            name => match REFUSED.iter().find(|(refused, _)| *refused == name) {
                Some((_, nothing)) if value.as_f64() != Some(*nothing) => {
                    let field = format!("options.{name}");
                    return Err(ApiError::invalid(&field, format!("{field} is not supported (got {value})")));
                }
                Some(_) => {}
                None => ignore(&format!("options.{name}")),
            },
        }
    }
    Ok(common)
}

/// Empty texts end nothing.
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
        common(options)
    }

    #[test]
    fn options_are_read() {
        let all = json!({
            "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repeat_penalty": 1.5, "seed": 3.0, "num_predict": 9,
            "stop": ["a", ""], "num_ctx": 8192, "mirostat": 0, "presence_penalty": null,
        });
        let common = read(all).unwrap();
        assert_eq!((common.temperature, common.top_p, common.min_p), (Some(0.0), Some(0.5), Some(0.1)));
        assert_eq!((common.top_k, common.seed, common.max_tokens), (Some(7), Some(3), Some(9)));
        assert_eq!((common.repetition_penalty, common.presence_penalty), (Some(1.5), None));
        assert_eq!(common.stops().unwrap(), ["a"]);
        let common = read(json!({"seed": -1, "num_predict": -2, "stop": "b"})).unwrap();
        assert_eq!((common.seed, common.max_tokens, common.stops().unwrap()), (None, None, vec!["b".to_owned()]));
    }

    #[test]
    fn what_cannot_be_obeyed_is_named() {
        for (options, part) in [
            (json!({"mirostat": 2}), "options.mirostat is not supported"),
            (json!({"typical_p": 0.5}), "options.typical_p is not supported"),
            (json!({"temperature": "warm"}), "options.temperature must be a number"),
            (json!({"seed": 1.5}), "options.seed must be a whole number"),
            (json!({"stop": [1]}), "options.stop must be"),
        ] {
            let error = read(options).unwrap_err();
            assert!(error.message.contains(part), "{}", error.message);
        }
    }
}
