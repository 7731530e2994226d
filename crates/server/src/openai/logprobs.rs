//! Log-probabilities of tokens, as chat completions and responses report them.

use serde_json::{Value, json};
use sluice_engine::sampling::Logprobs;
use sluice_engine::text::Tokenizer;

use crate::http::context::fresh_id;
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

/// Lists of log-probabilities that are kept until an answer is complete, as JSON text: as values they would take ten times the memory. In the answer's
/// object a placeholder stands for each list until it is written.
pub struct LogprobLists {
    /// Begins all placeholders. Random, so that no other text of the object has it.
    mark: String,
    /// The elements of each list.
    lists: Vec<String>,
}

impl LogprobLists {
    /// `lists` empty lists. More are made as they are needed.
    pub fn new(lists: usize) -> LogprobLists {
        LogprobLists { mark: format!("{}{}:", fresh_id(), fresh_id()), lists: vec![String::new(); lists] }
    }

    /// Appends an element to a list.
    pub fn push(&mut self, list: usize, element: &Value) {
        self.lists.resize(self.lists.len().max(list + 1), String::new());
        let all = &mut self.lists[list];
        if !all.is_empty() {
            all.push(',');
        }
        *all += &element.to_string();
    }

    /// The placeholder of a list.
    pub fn placeholder(&self, list: usize) -> Value {
        Value::String(format!("{}{list}", self.mark))
    }

    /// The JSON of an object, with its lists.
    pub fn write(&self, object: &Value) -> String {
        let (text, mark) = (object.to_string(), format!("\"{}", self.mark));
        let mut parts = text.split(&mark);
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (number, rest) = part.split_once('"').unwrap_or((part, ""));
            let list = number.parse::<usize>().ok().and_then(|list| self.lists.get(list));
            out.push('[');
            out += list.map_or("", String::as_str);
            out.push(']');
            out += rest;
        }
        out
    }

    /// Bytes of all lists.
    pub fn bytes(&self) -> usize {
        self.lists.iter().map(String::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn lists_are_written_where_their_placeholders_are() {
        let mut lists = LogprobLists::new(2);
        lists.push(1, &json!({"a": "\""}));
        lists.push(1, &json!(2));
        lists.push(3, &json!(null));
        let object =
            json!({"x": [lists.placeholder(0), {"y": lists.placeholder(1)}], "z": lists.placeholder(3), "t": "0:1"});
        let written: Value = serde_json::from_str(&lists.write(&object)).unwrap();
        assert_eq!(written, json!({"x": [[], {"y": [{"a": "\""}, 2]}], "z": [null], "t": "0:1"}));
        assert_eq!(lists.bytes(), 16);
    }

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
