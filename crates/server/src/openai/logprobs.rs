//! Log-probabilities of tokens, as chat completions and responses report them.

use serde_json::{Value, json};
use sluice_engine::sampling::Logprobs;
use sluice_engine::text::Tokenizer;

use crate::http::openapi::json_schema;

/// How many of the most likely tokens a request may ask for.
pub const MAX_TOP_LOGPROBS: usize = 20;

json_schema! {
    TokenLogprob, uses [], {
        "type": "object",
        "required": ["token", "logprob", "bytes", "top_logprobs"],
        "properties": {
            "token": {"type": "string"},
            "logprob": {"type": ["number", "null"]},
            "bytes": {"type": "array", "items": {"type": "integer"}},
            "top_logprobs": {"type": "array", "items": {
                "type": "object",
                "required": ["token", "logprob", "bytes"],
                "properties": {
                    "token": {"type": "string"},
                    "logprob": {"type": ["number", "null"]},
                    "bytes": {"type": "array", "items": {"type": "integer"}},
                },
            }},
        },
    }
}

/// A token with its log-probability. If the token is part of a character, its text is U+FFFD; clients can join the bytes instead.
fn token(tokenizer: &Tokenizer, id: u32, logprob: f64) -> Value {
    let text = tokenizer.decode(&[id], false).unwrap_or_default();
    json!({"token": text, "logprob": logprob, "bytes": tokenizer.raw_bytes(id)})
}

/// The entries of those tokens whose log-probabilities are known.
pub fn entries(tokenizer: &Tokenizer, tokens: &[(u32, Option<Logprobs>)]) -> Vec<Value> {
    let entry = |(id, logprobs): &(u32, Option<Logprobs>)| {
        let logprobs = logprobs.as_ref()?;
        let mut entry = token(tokenizer, *id, logprobs.chosen);
        let top: Vec<Value> = logprobs.top.iter().map(|(id, p)| token(tokenizer, *id, *p)).collect();
        entry["top_logprobs"] = json!(top);
        Some(entry)
    };
    tokens.iter().filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_token_that_is_part_of_a_character_has_its_own_bytes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let tokenizer = Tokenizer::load(&folder, None).unwrap();
        let ids = tokenizer.encode("👩‍🚀", false).unwrap();
        let tokens: Vec<Value> = ids.iter().map(|id| token(&tokenizer, *id, -1.0)).collect();
        assert!(tokens.iter().any(|t| t["token"].as_str().unwrap().contains('\u{FFFD}')), "{tokens:?}");
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|t| t["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap() as u8).collect();
        assert_eq!(bytes, "👩‍🚀".as_bytes());
    }
}
