//! The grammar of a whole answer in the harmony format: thoughts and texts before a call as the model likes, then a text of the form that was asked for, or a call.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::grammar::{GrammarFormat, Grammars, MAX_SOURCE, ToolCallRules, as_object, compact, literal, spaced};
use crate::text::harmony_marks::{CALL, CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START};

impl Grammars {
    /// The Lark grammar of an answer with this form, or with a call of one of these tools. An answer has one call at most: its mark ends it.
    pub(super) fn harmony(&self, form: &GrammarFormat, called: Option<&ToolCallRules>) -> Result<String> {
        for mark in [START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL] {
            ensure!(self.is_token(mark), "this model's tokenizer has no token {mark}, which its answers are made of");
        }
        let [start, end, message, channel, constrain] =
            [START, END, MESSAGE, CHANNEL, CONSTRAIN].map(|mark| self.mark(mark));
        let mut source = String::new();
        // 1. What comes before. Text cannot contain the marks.
        writeln!(source, "TEXT: /(?s:.+)/")?;
        writeln!(
            source,
            "before: {channel} (\"analysis\" | \"commentary\") {message} TEXT? {end} {start} \"assistant\""
        )?;
        // 2. The text
        let body = match (form, called) {
            (_, Some(called)) if called.must => None,
            (GrammarFormat::Text, _) => Some("TEXT?".to_owned()),
            (GrammarFormat::Object, _) => Some(format!("%json {}", spaced(&json!({"type": "object"}))?)),
            (GrammarFormat::Schema(schema), _) => {
                ensure!(schema.is_object() || schema.is_boolean(), "a schema is an object");
                Some(format!("%json {}", spaced(schema)?))
            }
            (GrammarFormat::Regex(regex), _) => Some(format!("/{}/", regex.replace('/', "\\/"))),
            (GrammarFormat::Lark(_), _) => bail!("answers of this model cannot follow a grammar in Lark"),
        };
        // 3. The calls
        let mut answers = Vec::new();
        if let Some(body) = body {
            writeln!(source, "final: {channel} \"final\" {message} body\nbody: {body}")?;
            answers.push("final".to_owned());
        }
        if let Some(called) = called {
            let tools =
                called.tools.as_array().filter(|tools| !tools.is_empty()).context("there are no tools to call")?;
            for (i, tool) in tools.iter().enumerate() {
                let function = tool.get("function").unwrap_or(tool);
                let name = function["name"].as_str().context("a tool has no name")?;
                let is_within_text = !called.must && *form == GrammarFormat::Text;
                let is_free = is_within_text && !called.strict.iter().any(|strict| strict == name);
                let schema = match &function["parameters"] {
                    Value::Object(schema) if !schema.is_empty() && !is_free => Value::Object(schema.clone()),
                    _ => json!({"type": "object"}),
                };
                let head = literal(&format!("commentary to={FUNCTIONS}{name} "));
                writeln!(source, "tool{i}: {channel} {head} {constrain} \"json\" {message} args{i}")?;
                writeln!(source, "args{i}: %json {}", compact(&as_object(schema))?)?;
                answers.push(format!("tool{i}"));
            }
        }
        writeln!(source, "start: before* ({})", answers.join(" | "))?;
        ensure!(source.len() <= MAX_SOURCE, "the schemas have more than {MAX_SOURCE} bytes");
        Ok(source)
    }
}
