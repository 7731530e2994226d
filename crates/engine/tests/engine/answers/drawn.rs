//! Random answers: what a model might say, think and call.

use proptest::prelude::*;
use serde_json::{Value, json};

/// As `json.dumps` writes it.
pub fn python(value: &Value) -> String {
    match value {
        Value::Array(all) => format!("[{}]", all.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(all) => {
            let field = |(name, value): (&String, &Value)| format!("{}: {}", Value::from(name.as_str()), python(value));
            format!("{{{}}}", all.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// As Gemma 4 writes a value, with its names sorted.
pub fn gemma_notation(value: &Value) -> String {
    match value {
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(all) => format!("[{}]", all.iter().map(gemma_notation).collect::<Vec<_>>().join(",")),
        Value::Object(all) => {
            let mut fields: Vec<_> = all.iter().map(|(name, v)| format!("{name}:{}", gemma_notation(v))).collect();
            fields.sort();
            format!("{{{}}}", fields.join(","))
        }
        other => other.to_string(),
    }
}

/// Whether the notation can express a value, and templates write it in one way: they do not quote names, and Python has a word of its own for null.
pub fn has_notation(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(all) => all.iter().all(has_notation),
        Value::Object(all) => all.iter().all(|(name, value)| {
            has_notation(value) && !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase())
        }),
        _ => true,
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub thought: String,
    pub content: String,
    pub calls: Vec<(String, Vec<(String, Value)>)>,
}

pub fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {
        "text": {"type": "string"}, "on": {"type": "boolean"}, "n": {"type": "number"}, "list": {"type": "array"}, "map": {"type": "object"},
    }});
    json!([{"type": "function", "function": {"name": "use", "description": "Uses it.", "parameters": parameters}}])
}

fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[a-z ]{1,8}",
        Just("\n".to_owned()),
        "[\"'\\\\{}<>\\[\\]:,/\t]",
        "[éß日🦊]",
        Just("<|im_end|>".to_owned())
    ];
    prop::collection::vec(part, 1..10).prop_map(|parts| parts.concat())
}

/// What templates would cut white space off of.
fn said() -> impl Strategy<Value = String> {
    text().prop_map(|text| text.trim().to_owned())
}

fn value() -> impl Strategy<Value = (String, Value)> {
    let nested = prop_oneof![
        text().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(json!(null)),
        Just(json!(true)),
        prop::collection::vec(text().prop_map(Value::from), 0..3).prop_map(Value::from),
    ];
    let map =
        prop::collection::vec((said(), nested.clone()), 0..3).prop_map(|all| Value::Object(all.into_iter().collect()));
    prop_oneof![
        text().prop_map(|text| ("text".to_owned(), Value::from(text))),
        any::<bool>().prop_map(|on| ("on".to_owned(), Value::from(on))),
        (-1000i32..1000).prop_map(|n| ("n".to_owned(), json!(f64::from(n) + 0.5))),
        any::<i64>().prop_map(|n| ("n".to_owned(), Value::from(n))),
        prop::collection::vec(nested, 0..4).prop_map(|list| ("list".to_owned(), Value::from(list))),
        map.prop_map(|map| ("map".to_owned(), map)),
    ]
}

pub fn answer() -> impl Strategy<Value = Answer> {
    let arguments = prop::collection::vec(value(), 0..4).prop_map(|all| {
        let mut seen: Vec<(String, Value)> = Vec::new();
        for (name, value) in all {
            if !seen.iter().any(|(other, _)| *other == name) {
                seen.push((name, value));
            }
        }
        seen
    });
    let calls = prop::collection::vec((Just("use".to_owned()), arguments), 0..4);
    (prop_oneof![Just(String::new()), said()], prop_oneof![Just(String::new()), said()], calls)
        .prop_map(|(thought, content, calls)| Answer { thought, content, calls })
}
