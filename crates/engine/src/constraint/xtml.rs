//! Grammars of calls in XTML, Kimi-K3's notation. Text cannot contain the tokens around its tags.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::grammar::{Grammars, literal, spaced};
use crate::text::marks::{XTML_CALLED, XTML_CLOSE, XTML_MESSAGE_END, XTML_OPEN, XTML_RESPONDED, XTML_SEP, XTML_VALUED};
use crate::text::xtml_escaped as escaped;

/// Types of values, as schemas name them and as arguments do.
const TYPES: [[&str; 2]; 7] = [
    ["string", "string"],
    ["number", "number"],
    ["integer", "number"],
    ["boolean", "boolean"],
    ["array", "array"],
    ["object", "object"],
    ["null", "null"],
];
/// References from schema to schema that are followed, at most.
const MAX_DEPTH: usize = 8;

/// A type, as arguments name it, and a schema of values of this type.
type Variant = (&'static str, Value);

impl Grammars {
    /// # Errors
    /// A tokenizer without XTML's tokens.
    pub(super) fn check_xtml(&self) -> Result<()> {
        for mark in [XTML_OPEN, XTML_CLOSE, XTML_SEP] {
            ensure!(self.is_token(mark), "this model's tokenizer has no token {mark}, which its answers are made of");
        }
        Ok(())
    }

    /// A tag, or the beginning of one.
    pub(super) fn tag(&self, text: &str) -> String {
        let mark = |mark| if self.is_token(mark) { self.mark(mark) } else { literal(mark) };
        let (begin, inner) = match text.strip_prefix(XTML_OPEN) {
            Some(inner) => (XTML_OPEN, inner),
            None => (XTML_CLOSE, text.strip_prefix(XTML_CLOSE).unwrap_or(text)),
        };
        match inner.strip_suffix(XTML_SEP) {
            Some(inner) => format!("{} {} {}", mark(begin), literal(inner), mark(XTML_SEP)),
            None => format!("{} {}", mark(begin), literal(inner)),
        }
    }

    /// What may stand behind a text that is complete.
    pub(super) fn xtml_end(&self) -> String {
        format!("({} {})?", self.mark(XTML_RESPONDED), self.mark(XTML_MESSAGE_END))
    }

    /// The rule `tool{i}` of a tool's call, with arguments in the schema's order, or any if it is free.
    pub(super) fn xtml_call(
        &self,
        source: &mut String,
        (i, is_free): (usize, bool),
        name: &str,
        schema: &Value,
    ) -> Result<()> {
        let [called, valued, sep] = [XTML_CALLED, XTML_VALUED, XTML_SEP].map(|mark| self.mark(mark));
        let quote = literal("\"");
        let head = self.mark(&format!("{XTML_OPEN}call tool=\"{}\" index=\"", escaped(name)));
        let head = format!("{head} /[1-9][0-9]{{0,2}}/ {quote} {sep}");
        if is_free {
            let begin = self.mark(&format!("{XTML_OPEN}argument key=\""));
            let kind = literal("\" type=\"");
            let kinds = ["string", "number", "boolean", "array", "object", "null"].map(literal).join(" | ");
            writeln!(source, "tool{i}: {head} tool{i}p* {called}")?;
            writeln!(source, "tool{i}p: {begin} tool{i}n {kind} ({kinds}) {quote} {sep} tool{i}v {valued}")?;
            writeln!(source, "tool{i}n: /[^<>\"\\n]+/\ntool{i}v: /(?s:.{{0,}})/")?;
            return Ok(());
        }
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let (mut rules, mut parts) = (String::new(), String::new());
        for (j, (name, property)) in schema["properties"].as_object().into_iter().flatten().enumerate() {
            ensure!(!name.contains(['<', '>', '\n']), "a parameter cannot be called {name:?}");
            let variants = variants(property, schema, MAX_DEPTH)?;
            let is_required = required.contains(&name.as_str());
            ensure!(!variants.is_empty() || !is_required, "the parameter {name:?} allows no value");
            if variants.is_empty() {
                continue;
            }
            write!(parts, " tool{i}p{j}{}", if is_required { "" } else { "?" })?;
            let all: Vec<String> = (0..variants.len()).map(|k| format!("tool{i}p{j}v{k}")).collect();
            writeln!(rules, "tool{i}p{j}: ({}) {valued}", all.join(" | "))?;
            for (rule, (kind, value)) in all.iter().zip(variants) {
                let tag = format!("{XTML_OPEN}argument key=\"{}\" type=\"{kind}\"{XTML_SEP}", escaped(name));
                writeln!(rules, "{rule}: {} {rule}t", self.mark(&tag))?;
                match kind {
                    "string" => writeln!(rules, "{rule}t: {}", text(&value))?,
                    _ => writeln!(rules, "{rule}t: %json {}", spaced(&value)?)?,
                }
            }
        }
        writeln!(source, "tool{i}: {head}{parts} {called}")?;
        source.push_str(&rules);
        Ok(())
    }
}

/// In Lark: texts of a schema, as they are.
fn text(schema: &Value) -> String {
    let words: Vec<&Value> = match (&schema["enum"], &schema["const"]) {
        (Value::Array(all), _) => all.iter().collect(),
        (_, Value::Null) => Vec::new(),
        (_, one) => vec![one],
    };
    if !words.is_empty() {
        return words.into_iter().filter_map(Value::as_str).map(literal).collect::<Vec<_>>().join(" | ");
    }
    let (least, most) = (schema["minLength"].as_u64().unwrap_or(0), schema["maxLength"].as_u64());
    format!("/(?s:.{{{least},{}}})/", most.map_or(String::new(), |most| most.to_string()))
}

/// What a parameter's schema allows, by type. `root`: where references lead.
fn variants(schema: &Value, root: &Value, depth: usize) -> Result<Vec<Variant>> {
    if let Some(to) = schema["$ref"].as_str() {
        ensure!(depth > 0, "schemas refer to one another in a circle");
        let found = to.strip_prefix('#').and_then(|path| root.pointer(path));
        return variants(found.with_context(|| format!("there is no schema {to}"))?, root, depth - 1);
    }
    if let Some(options) = ["anyOf", "oneOf"].iter().find_map(|name| schema[*name].as_array()) {
        ensure!(depth > 0, "a schema is too deep");
        let all = options.iter().map(|option| variants(option, root, depth - 1));
        return Ok(all.collect::<Result<Vec<_>>>()?.concat());
    }
    let values: Vec<&Value> = match schema["enum"].as_array() {
        Some(all) => all.iter().collect(),
        None => schema.get("const").into_iter().collect(),
    };
    let named: Vec<&str> = match &schema["type"] {
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
        Value::String(one) => vec![one],
        // Numbers are not told apart.
        _ => TYPES.iter().map(|[name, _]| *name).filter(|name| *name != "integer").collect(),
    };
    let one = |[name, kind]: [&'static str; 2]| {
        let is_one = |value: &Value| match name {
            "string" => value.is_string(),
            "number" => value.is_number(),
            "integer" => value.is_i64() || value.is_u64(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => value.is_null(),
        };
        if !named.contains(&name) || !(values.is_empty() || values.iter().any(|value| is_one(value))) {
            return None;
        }
        let mut own = schema.as_object().cloned().unwrap_or_default();
        own.insert("type".into(), name.into());
        if own.contains_key("enum") {
            let some: Vec<&Value> = values.iter().copied().filter(|value| is_one(value)).collect();
            own.insert("enum".into(), json!(some));
        }
        for name in ["$defs", "definitions"] {
            if let Some(all) = root.get(name) {
                own.entry(name).or_insert_with(|| all.clone());
            }
        }
        Some((kind, Value::Object(own)))
    };
    Ok(TYPES.into_iter().filter_map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_taken_apart_by_type() {
        let root = json!({"$defs": {"a": {"enum": ["x", 1]}, "b": {"$ref": "#/$defs/b"}}});
        let kinds = |schema: Value| -> Vec<&'static str> {
            variants(&schema, &root, MAX_DEPTH).unwrap().into_iter().map(|(kind, _)| kind).collect()
        };
        assert_eq!(kinds(json!({"type": "string"})), ["string"]);
        assert_eq!(kinds(json!({"type": ["integer", "null"]})), ["number", "null"]);
        assert_eq!(kinds(json!({"anyOf": [{"type": "string"}, {"type": "null"}]})), ["string", "null"]);
        assert_eq!(kinds(json!({"$ref": "#/$defs/a"})), ["string", "number"]);
        assert_eq!(kinds(json!({"const": true})), ["boolean"]);
        assert_eq!(kinds(json!({})), ["string", "number", "boolean", "array", "object", "null"]);
        assert!(kinds(json!({"type": "string", "enum": [1]})).is_empty());
        for wrong in ["#/$defs/b", "#/$defs/c", "x"] {
            assert!(variants(&json!({"$ref": wrong}), &root, MAX_DEPTH).is_err(), "{wrong}");
        }
        let (_, words) = variants(&json!({"$ref": "#/$defs/a"}), &root, MAX_DEPTH).unwrap().remove(0);
        assert_eq!(text(&words), "\"x\"");
        assert_eq!(text(&json!({"type": "string", "maxLength": 3})), "/(?s:.{0,3})/");
    }
}
