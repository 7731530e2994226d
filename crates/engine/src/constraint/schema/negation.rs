//! Negations of schemas.

use serde_json::{Map, Value, json};

use super::keywords::{NOTES, TYPES};

/// A schema of objects without this property.
pub(super) fn without(name: &str) -> Value {
    json!({"properties": {name: false}})
}

/// The negation of a schema; `None` if llguidance has no keywords for it.
pub(super) fn negated(schema: &Value) -> Option<Value> {
    let fields = match schema {
        Value::Bool(any) => return Some(json!(!any)),
        other => other.as_object()?,
    };
    let keywords: Vec<(&str, &Value)> =
        fields.iter().map(|(name, value)| (name.as_str(), value)).filter(|(name, _)| !NOTES.contains(name)).collect();
    // A schema fails if one of its keywords does.
    let mut either =
        keywords.into_iter().map(|(name, value)| negated_keyword(name, value, fields)).collect::<Option<Vec<_>>>()?;
    Some(match either.len() {
        0 => json!(false),
        1 => either.remove(0),
        _ => json!({"anyOf": either}),
    })
}

fn negated_keyword(name: &str, value: &Value, all: &Map<String, Value>) -> Option<Value> {
    let of_type = |kind: &str, word: &str, value: Value| Some(json!({"type": kind, word: value}));
    // The bound one lower, or one higher. Nothing is lower than 0.
    let fewer = |kind: &str, word: &str| match value.as_u64()? {
        0 => Some(json!(false)),
        least => of_type(kind, word, json!(least - 1)),
    };
    let more = |kind: &str, word: &str| of_type(kind, word, json!(value.as_u64()?.checked_add(1)?));
    match name {
        "not" => Some(value.clone()),
        "anyOf" => Some(json!({"allOf": value.as_array()?.iter().map(negated).collect::<Option<Vec<_>>>()?})),
        "allOf" => Some(json!({"anyOf": value.as_array()?.iter().map(negated).collect::<Option<Vec<_>>>()?})),
        "type" => {
            let named: Vec<&str> = match value {
                Value::String(one) => vec![one],
                Value::Array(all) => all.iter().map(Value::as_str).collect::<Option<_>>()?,
                _ => return None,
            };
            // JSON Schema has no type for numbers that are not whole.
            let has_integers_alone = named.contains(&"integer") && !named.contains(&"number");
            let others: Vec<&str> = TYPES.into_iter().filter(|name| !named.contains(name)).collect();
            match (has_integers_alone, others.is_empty()) {
                (true, _) => None,
                (false, true) => Some(json!(false)),
                (false, false) => Some(json!({"type": others})),
            }
        }
        "const" => negated_values(std::slice::from_ref(value)),
        "enum" => negated_values(value.as_array()?),
        "required" => {
            let missing = value.as_array()?.iter().map(|name| Some(without(name.as_str()?)));
            let missing = missing.collect::<Option<Vec<_>>>()?;
            if missing.is_empty() { Some(json!(false)) } else { of_type("object", "anyOf", missing.into()) }
        }
        "properties" => {
            let one = |(name, schema): (&String, &Value)| {
                Some(json!({"type": "object", "properties": {name: negated(schema)?}, "required": [name]}))
            };
            let wrong = value.as_object()?.iter().map(one).collect::<Option<Vec<_>>>()?;
            Some(if wrong.is_empty() { json!(false) } else { json!({"anyOf": wrong}) })
        }
        "minimum" => of_type("number", "exclusiveMaximum", value.clone()),
        "maximum" => of_type("number", "exclusiveMinimum", value.clone()),
        "exclusiveMinimum" if value.is_number() => of_type("number", "maximum", value.clone()),
        "exclusiveMaximum" if value.is_number() => of_type("number", "minimum", value.clone()),
        "minLength" => fewer("string", "maxLength"),
        "maxLength" => more("string", "minLength"),
        "minItems" => fewer("array", "maxItems"),
        "maxItems" => more("array", "minItems"),
        "minProperties" => fewer("object", "maxProperties"),
        "maxProperties" => more("object", "minProperties"),
        "then" | "else" if !all.contains_key("if") => Some(json!(false)),
        _ => None,
    }
}

/// All values except these. Only null and booleans can be excluded.
fn negated_values(values: &[Value]) -> Option<Value> {
    let mut others = TYPES.to_vec();
    let mut booleans = vec![true, false];
    for value in values {
        match value {
            Value::Null => others.retain(|name| *name != "null"),
            Value::Bool(value) => booleans.retain(|other| other != value),
            _ => return None,
        }
    }
    if booleans.len() == 2 {
        return Some(json!({"type": others}));
    }
    others.retain(|name| *name != "boolean");
    Some(json!({"anyOf": [{"type": others}, {"enum": booleans}]}))
}
