//! Rewrites one schema.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::formats::is_unknown;
use super::keywords::{BY_NAME, IN_PLACE, LISTS, NOTES, SINGLE, TYPES, is_any};
use super::limits::{MAX_VALUES, check_size};
use super::negation::{negated, without};
use super::unevaluated::{unevaluated_items, unevaluated_properties};

/// The same schema in keywords that llguidance supports, as far as possible.
///
/// # Errors
/// A schema that is too large.
pub(crate) fn rewrite(schema: &Value) -> Result<Value> {
    check_size(schema)?;
    let mut anchors = Vec::new();
    dynamic_anchors(schema, &mut anchors);
    anchors.sort_unstable();
    let are_unique = anchors.windows(2).all(|two| two[0] != two[1]);
    let mut schema = schema.clone();
    Rewriter { anchors_are_unique: are_unique, copies: MAX_VALUES }.rewrite(&mut schema);
    Ok(schema)
}

struct Rewriter {
    /// Whether each `$dynamicRef` can only mean one place of the schema.
    anchors_are_unique: bool,
    /// Values that may still be duplicated.
    copies: usize,
}

fn dynamic_anchors<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Array(all) => all.iter().for_each(|value| dynamic_anchors(value, found)),
        Value::Object(fields) => {
            found.extend(fields.get("$dynamicAnchor").and_then(Value::as_str));
            fields.values().for_each(|value| dynamic_anchors(value, found));
        }
        _ => {}
    }
}

fn size(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(size).sum(),
        Value::Object(fields) => fields.values().map(size).sum(),
        _ => 0,
    }
}

impl Rewriter {
    fn rewrite(&mut self, schema: &mut Value) {
        let Some(fields) = schema.as_object_mut() else { return };
        if fields.get("format").is_some_and(is_unknown) {
            fields.shift_remove("format");
        }
        // 1. Unevaluated parts, before other keywords change
        unevaluated_properties(fields);
        unevaluated_items(fields);
        // 2. Schemas inside
        for (name, value) in fields.iter_mut() {
            let name = name.as_str();
            match value {
                Value::Object(all) if BY_NAME.contains(&name) => {
                    all.values_mut().for_each(|schema| self.rewrite(schema));
                }
                Value::Array(all) if LISTS.contains(&name) || name == "items" => {
                    all.iter_mut().for_each(|schema| self.rewrite(schema));
                }
                value if SINGLE.contains(&name) => self.rewrite(value),
                _ => {}
            }
        }
        let looks = fields.contains_key("unevaluatedProperties") || fields.contains_key("unevaluatedItems");
        // 3. Other keywords become parts that must hold too
        let mut parts = Vec::new();
        if !looks {
            items(fields, &mut parts);
            self.conditions(fields, &mut parts);
            dependencies(fields, &mut parts);
            if let Some(negated) = fields.get("not").and_then(negated) {
                fields.shift_remove("not");
                parts.push(negated);
            }
        }
        self.property_names(fields);
        if self.anchors_are_unique
            && !fields.contains_key("$ref")
            && let Some(reference) = fields.shift_remove("$dynamicRef")
        {
            fields.insert("$ref".into(), reference);
        }
        if !parts.is_empty() {
            let mut all = fields.shift_remove("allOf").and_then(|all| all.as_array().cloned()).unwrap_or_default();
            all.extend(parts);
            // Last, so that properties keep the order of the schema.
            fields.insert("allOf".into(), Value::Array(all));
        }
    }

    /// Whether a value may be duplicated this often.
    fn may_copy(&mut self, value: &Value, times: usize) -> bool {
        let wanted = size(value).saturating_mul(times);
        let may = wanted <= self.copies;
        self.copies -= if may { wanted } else { 0 };
        may
    }

    /// `if`, `then` and `else`: either the condition and `then` hold, or its negation and `else`.
    fn conditions(&mut self, fields: &mut Map<String, Value>, parts: &mut Vec<Value>) {
        let Some(condition) = fields.get("if").cloned() else {
            fields.shift_remove("then");
            fields.shift_remove("else");
            return;
        };
        let branch = |name: &str| fields.get(name).cloned().filter(|schema| !is_any(schema));
        let said = match (branch("then"), branch("else")) {
            (None, None) => Some(json!(true)),
            (None, Some(otherwise)) => Some(json!({"anyOf": [condition, otherwise]})),
            (Some(then), None) => negated(&condition).map(|without| json!({"anyOf": [without, then]})),
            (Some(_), Some(_)) if !self.may_copy(&condition, 1) => None,
            (Some(then), Some(otherwise)) => negated(&condition)
                .map(|without| json!({"anyOf": [{"allOf": [condition, then]}, {"allOf": [without, otherwise]}]})),
        };
        if let Some(said) = said {
            ["if", "then", "else"].iter().for_each(|name| _ = fields.shift_remove(*name));
            parts.push(said);
        }
    }

    /// `propertyNames`, if no other keyword lists names.
    fn property_names(&mut self, fields: &mut Map<String, Value>) {
        let Some(asked) = fields.get("propertyNames") else { return };
        let rest = fields.get("additionalProperties").cloned().unwrap_or(json!(true));
        let rest = || rest.clone();
        let listed = ["properties", "patternProperties", "unevaluatedProperties"];
        let lists = listed.iter().chain(&IN_PLACE).any(|name| fields.contains_key(*name));
        let said = match asked {
            asked if is_any(asked) => json!({}),
            Value::Bool(false) if !fields.contains_key("maxProperties") => json!({"maxProperties": 0}),
            Value::Object(asked) if !lists => {
                let words: Vec<(&str, &Value)> = asked
                    .iter()
                    .map(|(name, value)| (name.as_str(), value))
                    .filter(|(name, value)| !(NOTES.contains(name) || *name == "type" && **value == "string"))
                    .collect();
                match words[..] {
                    [("pattern", Value::String(pattern))] => {
                        json!({"patternProperties": {pattern.as_str(): rest()}, "additionalProperties": false})
                    }
                    [("const", Value::String(name))] => {
                        json!({"properties": {name.as_str(): rest()}, "additionalProperties": false})
                    }
                    [("enum", Value::Array(all))] if self.may_copy(&rest(), all.len()) => {
                        let all = all.iter().filter_map(Value::as_str);
                        let properties: Map<String, Value> = all.map(|name| (name.to_owned(), rest())).collect();
                        json!({"properties": properties, "additionalProperties": false})
                    }
                    [("maxLength" | "minLength", _)]
                    | [("maxLength" | "minLength", _), ("maxLength" | "minLength", _)] => {
                        let count = |name: &str| asked.get(name).and_then(Value::as_u64);
                        let (least, most) = (count("minLength").unwrap_or(0), count("maxLength"));
                        let most = most.map_or(String::new(), |most| most.to_string());
                        let pattern = format!("^[\\s\\S]{{{least},{most}}}$");
                        json!({"patternProperties": {pattern: rest()}, "additionalProperties": false})
                    }
                    _ => return,
                }
            }
            _ => return,
        };
        fields.shift_remove("propertyNames");
        if let Value::Object(said) = said {
            fields.extend(said);
        }
    }
}

/// `uniqueItems` and `contains`, if they restrict nothing or can be expressed otherwise.
fn items(fields: &mut Map<String, Value>, parts: &mut Vec<Value>) {
    let at_most_one = fields.get("maxItems").and_then(Value::as_f64).is_some_and(|most| most <= 1.0);
    if fields.get("uniqueItems").is_some_and(|unique| *unique == false || at_most_one) {
        fields.shift_remove("uniqueItems");
    }
    let count = |name: &str, fields: &Map<String, Value>| fields.get(name).map(|n| n.as_f64().unwrap_or(f64::NAN));
    let Some(contained) = fields.get("contains") else {
        fields.shift_remove("minContains");
        fields.shift_remove("maxContains");
        return;
    };
    let (least, most) = (count("minContains", fields).unwrap_or(1.0), count("maxContains", fields));
    let number = |n: f64| (n.fract() == 0.0 && (0.0..1e9).contains(&n)).then_some(n as u64);
    let said = if is_any(contained) {
        match (number(least), most.map(number)) {
            (Some(least), None) => Some(json!({"minItems": least})),
            (Some(least), Some(Some(most))) => Some(json!({"minItems": least, "maxItems": most})),
            _ => None,
        }
    } else if least == 0.0 && most.is_none() {
        Some(json!(true))
    } else if *contained == false && least > 0.0 {
        Some(json!({"type": TYPES.iter().filter(|name| **name != "array").collect::<Vec<_>>()}))
    } else {
        None
    };
    if let Some(said) = said {
        ["contains", "minContains", "maxContains"].iter().for_each(|name| _ = fields.shift_remove(*name));
        parts.push(said);
    }
}

/// Dependencies of a property: either it is missing, or its dependency holds.
fn dependencies(fields: &mut Map<String, Value>, parts: &mut Vec<Value>) {
    for keyword in ["dependentRequired", "dependentSchemas", "dependencies"] {
        let Some(Value::Object(all)) = fields.get(keyword) else { continue };
        let one = |(name, asked): (&String, &Value)| {
            let asked = if asked.is_array() { json!({"required": asked}) } else { asked.clone() };
            json!({"anyOf": [without(name), asked]})
        };
        parts.extend(all.iter().map(one));
        fields.shift_remove(keyword);
    }
}
