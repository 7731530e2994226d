//! Formats of strings that are not supported.

use serde_json::Value;

use super::keywords::{BY_NAME, FORMATS, LISTS, SINGLE};

/// Whether a format restricts nothing, because it is unknown.
pub(super) fn is_unknown(format: &Value) -> bool {
    format.as_str().is_some_and(|name| !FORMATS.contains(&name))
}

/// The unknown formats in a schema, each once. Strings with them are not restricted.
pub fn unknown_formats(schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    collect_formats(schema, &mut found);
    found
}

fn collect_formats(schema: &Value, found: &mut Vec<String>) {
    let Some(fields) = schema.as_object() else { return };
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("format", Value::String(format)) if is_unknown(value) && !found.contains(format) => {
                found.push(format.clone());
            }
            (name, Value::Object(all)) if BY_NAME.contains(&name) => {
                all.values().for_each(|schema| collect_formats(schema, found));
            }
            (name, Value::Array(all)) if LISTS.contains(&name) || name == "items" => {
                all.iter().for_each(|schema| collect_formats(schema, found));
            }
            (name, value) if SINGLE.contains(&name) => collect_formats(value, found),
            _ => {}
        }
    }
}
