//! Grammars of Gemma 4's notation of arguments, by JSON schemas: names are bare, and the quotes around texts are tokens.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::grammar::{Grammars, expression, literal, spaced};
use crate::text::marks::GEMMA_QUOTE;

/// Schemas may be nested this deeply.
const DEPTH: usize = 64;

/// Keys of schemas that say nothing of what is written.
const SAID: [&str; 14] = [
    "type",
    "description",
    "title",
    "default",
    "examples",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "additionalProperties",
    "$schema",
];

/// Writes rules, which it numbers.
pub(super) struct Notation<'a> {
    grammars: &'a Grammars,
    rules: usize,
    has_any: bool,
}

impl<'a> Notation<'a> {
    pub fn new(grammars: &'a Grammars) -> Notation<'a> {
        Notation { grammars, rules: 0, has_any: false }
    }

    /// Adds rules for what fits `schema`, and returns the name of the first.
    ///
    /// # Errors
    /// A keyword that the notation's grammars cannot hold a model to.
    pub fn rule(&mut self, source: &mut String, schema: &Value) -> Result<String> {
        self.nested(source, schema, DEPTH)
    }

    fn next(&mut self) -> String {
        self.rules += 1;
        format!("note{}", self.rules)
    }

    fn nested(&mut self, source: &mut String, schema: &Value, depth: usize) -> Result<String> {
        let depth = depth.checked_sub(1).context("a schema that is nested too deeply")?;
        let Some(keys) = schema.as_object() else { return self.any(source) };
        let rule = self.next();
        if let Some(all) = schema["enum"].as_array().cloned().or_else(|| keys.get("const").map(|v| vec![v.clone()])) {
            ensure!(!all.is_empty(), "an enum of nothing");
            let all: Vec<String> = all.iter().map(|value| self.value(value)).collect::<Result<_>>()?;
            writeln!(source, "{rule}: {}", all.join(" | "))?;
            return Ok(rule);
        }
        if let Some(all) = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array()) {
            ensure!(!all.is_empty(), "an anyOf of nothing");
            let all: Vec<String> = all.iter().map(|one| self.nested(source, one, depth)).collect::<Result<_>>()?;
            writeln!(source, "{rule}: {}", all.join(" | "))?;
            return Ok(rule);
        }
        if let Some(kinds) = schema["type"].as_array() {
            let of = |kind: &Value| {
                let mut one = schema.clone();
                one["type"] = kind.clone();
                one
            };
            let all: Vec<String> =
                kinds.iter().map(|kind| self.nested(source, &of(kind), depth)).collect::<Result<_>>()?;
            ensure!(!all.is_empty(), "a type of nothing");
            writeln!(source, "{rule}: {}", all.join(" | "))?;
            return Ok(rule);
        }
        let number = |key: &str| schema[key].as_u64();
        let more: &[&str] = match schema["type"].as_str() {
            // As JSON has them.
            Some("integer" | "number" | "boolean" | "null") => {
                writeln!(source, "{rule}: %json {}", spaced(schema)?)?;
                return Ok(rule);
            }
            Some("string") => {
                let most = number("maxLength").map_or(String::new(), |most| most.to_string());
                let times = format!("{{{},{most}}}", number("minLength").unwrap_or(0));
                let text = self.text(source, &rule, &times)?;
                writeln!(source, "{rule}: {text}")?;
                &["minLength", "maxLength"]
            }
            Some("array") => {
                let item = match schema.get("items") {
                    Some(items) => self.nested(source, items, depth)?,
                    None => self.any(source)?,
                };
                let (least, most) = (number("minItems").unwrap_or(0), number("maxItems"));
                ensure!(most.is_none_or(|most| least <= most), "minItems is above maxItems");
                let last = most.map_or(String::new(), |most| most.saturating_sub(1).to_string());
                let items = format!("{item} (\",\" {item}){{{},{last}}}", least.saturating_sub(1));
                match (least, most) {
                    (_, Some(0)) => writeln!(source, "{rule}: \"[]\"")?,
                    (0, _) => writeln!(source, "{rule}: \"[\" ({items})? \"]\"")?,
                    _ => writeln!(source, "{rule}: \"[\" {items} \"]\"")?,
                }
                &["minItems", "maxItems"]
            }
            Some("object") if schema["properties"].as_object().is_some_and(|all| !all.is_empty()) => {
                self.object(source, &rule, schema, depth)?;
                &[]
            }
            Some("object") => {
                self.any(source)?;
                writeln!(source, "{rule}: anyobject")?;
                &[]
            }
            None => {
                let any = self.any(source)?;
                writeln!(source, "{rule}: {any}")?;
                &[]
            }
            Some(other) => bail!("a type {other:?}"),
        };
        let unknown = keys.keys().find(|key| !SAID.contains(&key.as_str()) && !more.contains(&key.as_str()));
        ensure!(unknown.is_none(), "keywords that cannot be kept to: {}", unknown.map_or("", String::as_str));
        Ok(rule)
    }

    /// Fields in the schema's order, of which some may be left out, with commas between those that are there.
    fn object(&mut self, source: &mut String, rule: &str, schema: &Value, depth: usize) -> Result<()> {
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let fields: Vec<(&String, &Value)> = schema["properties"].as_object().into_iter().flatten().collect();
        writeln!(source, "{rule}: \"{{\" {rule}first0 \"}}\"")?;
        for (i, (name, of)) in fields.iter().enumerate() {
            ensure!(!name.contains([':', '{', '}', '<', ',', '\n']), "a parameter cannot be called {name:?}");
            let value = self.nested(source, of, depth)?;
            let (field, next) = (format!("{} {value}", literal(&format!("{name}:"))), i + 1);
            let or = |rest: &str| match required.contains(&name.as_str()) {
                true => String::new(),
                false => format!(" | {rule}{rest}{next}"),
            };
            writeln!(source, "{rule}first{i}: {field} {rule}more{next}{}", or("first"))?;
            writeln!(source, "{rule}more{i}: \",\" {field} {rule}more{next}{}", or("more"))?;
        }
        let last = fields.len();
        writeln!(source, "{rule}first{last}: \"\"\n{rule}more{last}: \"\"")?;
        Ok(())
    }

    /// A text between quotes. `times`: how many characters it has.
    fn text(&self, source: &mut String, rule: &str, times: &str) -> Result<String> {
        let quote = self.grammars.mark(GEMMA_QUOTE);
        if self.grammars.is_token(GEMMA_QUOTE) {
            // Text cannot contain the token.
            writeln!(source, "{rule}text: /(?s:.{times})/")?;
            return Ok(format!("{quote} {rule}text {quote}"));
        }
        writeln!(source, "{rule}text[lazy]: /(?s:.{times}){}/", expression(GEMMA_QUOTE))?;
        Ok(format!("{quote} {rule}text"))
    }

    /// A value in the notation.
    fn value(&self, value: &Value) -> Result<String> {
        let quote = self.grammars.mark(GEMMA_QUOTE);
        match value {
            Value::String(text) if text.is_empty() => Ok(format!("{quote} {quote}")),
            Value::String(text) => Ok(format!("{quote} {} {quote}", literal(text))),
            Value::Number(_) | Value::Bool(_) | Value::Null => Ok(literal(&value.to_string())),
            Value::Array(_) | Value::Object(_) => bail!("keywords that cannot be kept to: enum of lists or objects"),
        }
    }

    /// The rule of anything.
    fn any(&mut self, source: &mut String) -> Result<String> {
        if !self.has_any {
            self.has_any = true;
            let text = self.text(source, "any", "{0,}")?;
            writeln!(source, "any: anyobject | anylist | anystring | anynumber\nanystring: {text}")?;
            writeln!(source, "anynumber: %json {}", json!({"type": ["number", "boolean", "null"]}))?;
            writeln!(source, "anylist: \"[\" (any (\",\" any)*)? \"]\"")?;
            writeln!(source, "anyobject: \"{{\" (anyfield (\",\" anyfield)*)? \"}}\"\nanyfield: ANYNAME \":\" any")?;
            writeln!(source, "ANYNAME: /[A-Za-z_][A-Za-z0-9_.-]*/")?;
        }
        Ok("any".into())
    }
}
