//! `unevaluatedProperties` and `unevaluatedItems`.

use serde_json::{Map, Value, json};

use super::keywords::{IN_PLACE, is_any};

/// Turns `unevaluatedProperties` into `additionalProperties`, if it is certain which properties the other keywords evaluate.
pub(super) fn unevaluated_properties(fields: &mut Map<String, Value>) {
    let Some(asked) = fields.get("unevaluatedProperties").cloned() else { return };
    let mut evaluated = Evaluated::default();
    if !is_any(&asked) && evaluated.properties(fields).is_none() {
        return;
    }
    fields.shift_remove("unevaluatedProperties");
    if evaluated.all || is_any(&asked) {
        return;
    }
    for (keyword, names) in [("properties", evaluated.names), ("patternProperties", evaluated.patterns)] {
        if names.is_empty() {
            continue;
        }
        if let Value::Object(listed) = fields.entry(keyword).or_insert_with(|| json!({})) {
            names.into_iter().for_each(|name| _ = listed.entry(name).or_insert(true.into()));
        }
    }
    fields.insert("additionalProperties".into(), asked);
}

/// Turns `unevaluatedItems` into `items`, if it is certain which items the other keywords evaluate.
pub(super) fn unevaluated_items(fields: &mut Map<String, Value>) {
    let Some(asked) = fields.get("unevaluatedItems").cloned() else { return };
    let mut evaluated = Evaluated::default();
    if !is_any(&asked) && evaluated.items(fields).is_none() {
        return;
    }
    fields.shift_remove("unevaluatedItems");
    if evaluated.all || is_any(&asked) {
        return;
    }
    if evaluated.first > 0
        && let Value::Array(listed) = fields.entry("prefixItems").or_insert_with(|| json!([]))
    {
        listed.resize(evaluated.first.max(listed.len()), true.into());
    }
    fields.insert("items".into(), asked);
}

/// What of an object or array is evaluated, whatever its value.
#[derive(Default)]
struct Evaluated {
    all: bool,
    names: Vec<String>,
    patterns: Vec<String>,
    /// The number of items from the first on.
    first: usize,
}

impl Evaluated {
    /// Adds the properties that a schema evaluates; `None` if that depends on the value.
    fn properties(&mut self, fields: &Map<String, Value>) -> Option<()> {
        for (keyword, value) in fields {
            match (keyword.as_str(), value) {
                ("properties", Value::Object(all)) => self.names.extend(all.keys().cloned()),
                ("patternProperties", Value::Object(all)) => self.patterns.extend(all.keys().cloned()),
                ("additionalProperties", _) => self.all = true,
                _ => self.in_place(keyword, value, "unevaluatedProperties", Evaluated::properties)?,
            }
        }
        Some(())
    }

    /// Adds the items that a schema evaluates; `None` if that depends on the value.
    fn items(&mut self, fields: &Map<String, Value>) -> Option<()> {
        for (keyword, value) in fields {
            match (keyword.as_str(), value) {
                ("prefixItems", Value::Array(all)) => self.first = self.first.max(all.len()),
                ("items", Value::Array(_)) | ("contains", _) => return None,
                ("items" | "additionalItems", _) => self.all = true,
                _ => self.in_place(keyword, value, "unevaluatedItems", Evaluated::items)?,
            }
        }
        Some(())
    }

    /// Adds what other schemas for the same value evaluate. `own`: the keyword in question, which evaluates everything that is left.
    fn in_place(
        &mut self,
        keyword: &str,
        value: &Value,
        own: &str,
        collect: fn(&mut Evaluated, &Map<String, Value>) -> Option<()>,
    ) -> Option<()> {
        match (keyword, value) {
            ("allOf", Value::Array(all)) => all.iter().try_for_each(|schema| match schema {
                Value::Object(fields) => {
                    self.all |= fields.contains_key(own);
                    collect(self, fields)
                }
                _ => Some(()),
            }),
            // A negated schema evaluates nothing.
            ("not", _) => Some(()),
            _ if IN_PLACE.contains(&keyword) => None,
            _ => Some(()),
        }
    }
}
