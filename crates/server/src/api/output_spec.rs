//! What a request demands of its answer, in any dialect: which tools may or must be called, and the format of the text.

use serde_json::{Value, json};
use sluice_engine::{ConstraintSpec, GrammarFormat, ToolCallRules, unknown_formats};

use crate::http::context::note_ignored;
use crate::http::error::ApiError;

/// Most tools of a request, and most characters of a tool's name.
const MAX_TOOLS: usize = 512;
const MAX_NAME: usize = 128;

/// Which tools may be called, and which must be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model chooses whether to call any.
    #[default]
    Auto,
    /// None may be called; they stay in the prompt.
    None,
    /// At least one must be called.
    Required,
    /// The tool of this name must be called.
    Named(String),
    /// Only these may be called.
    Allowed {
        /// Names of tools.
        names: Vec<String>,
        /// Whether one of them must be called.
        must: bool,
    },
}

/// The format of an answer's text.
#[derive(Clone, Debug, PartialEq)]
pub struct TextFormat {
    /// The request's field that demands it.
    pub field: &'static str,
    /// The grammar.
    pub form: GrammarFormat,
}

/// What a request demands of its answer.
#[derive(Debug, Default)]
pub struct OutputSpec {
    /// A list of tools as chat templates take them.
    pub tools: Option<Value>,
    /// How many of the last tools are left out of the prompt, because the conversation itself describes them.
    pub unlisted: usize,
    /// Whether tool calls in the answer are parsed.
    pub parses_calls: bool,
    /// What the grammar is made from.
    pub constraint: ConstraintSpec,
    /// The request's field to name if the grammar cannot be compiled.
    pub blamed_field: &'static str,
    /// Calls are constrained only because tools are strict.
    only_strict: bool,
}

impl OutputSpec {
    /// `tools`: a list as chat templates take it. `several`: an answer may have more than one call.
    ///
    /// # Errors
    /// Invalid tools; a choice of tools that are not in the list.
    pub fn new(
        tools: Option<Value>,
        choice: &ToolChoice,
        several: bool,
        format: Option<TextFormat>,
        thinking_budget: Option<usize>,
    ) -> Result<OutputSpec, ApiError> {
        let all = tools.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        check(all)?;
        let tools = (!all.is_empty()).then(|| json!(all));
        let parses_calls = tools.is_some() && *choice != ToolChoice::None;
        let TextFormat { field, form } = format.unwrap_or(TextFormat { field: "tools", form: GrammarFormat::Text });
        let missing = |what: String| ApiError::invalid("tool_choice", what);
        let called = match choice {
            ToolChoice::Required => {
                let tools = tools.clone().ok_or_else(|| missing("there are no tools to call".into()))?;
                Some(ToolCallRules { tools, several, must: true, strict: Vec::new() })
            }
            ToolChoice::Named(name) => {
                let tool = all.iter().find(|tool| tool["function"]["name"] == name.as_str());
                let tool = tool.ok_or_else(|| missing(format!("there is no tool {name:?}")))?;
                Some(ToolCallRules { tools: json!([tool]), several: false, must: true, strict: Vec::new() })
            }
            ToolChoice::Allowed { names, must } => {
                let one = |name: &String| {
                    let tool = all.iter().find(|tool| tool["function"]["name"] == name.as_str());
                    tool.ok_or_else(|| missing(format!("there is no tool {name:?}")))
                };
                let tools = names.iter().map(one).collect::<Result<Vec<_>, ApiError>>()?;
                if tools.is_empty() {
                    return Err(missing("tool_choice allows no tools; use \"none\" for that".into()));
                }
                Some(ToolCallRules { tools: json!(tools), several, must: *must, strict: Vec::new() })
            }
            // If the answer has a grammar, calls must be part of it.
            ToolChoice::Auto | ToolChoice::None => (tools
                .clone()
                .filter(|_| parses_calls && form != GrammarFormat::Text))
            .map(|tools| ToolCallRules { tools, several, must: false, strict: Vec::new() }),
        };
        let (form, blamed_field) = match &called {
            Some(called) if called.must => (GrammarFormat::Text, "tools"),
            Some(_) if form == GrammarFormat::Text => (form, "tool_choice"),
            _ => (form, field),
        };
        // A string format that is not known does not constrain anything.
        let note = |field: &str, schema: &Value| {
            unknown_formats(schema).iter().for_each(|format| note_ignored(&format!("{field}.format.{format}")));
        };
        if let GrammarFormat::Schema(schema) = &form {
            note(field, schema);
        }
        for tool in called.iter().filter_map(|called| called.tools.as_array()).flatten() {
            let function = &tool["function"];
            note(&format!("tools.{}", function["name"].as_str().unwrap_or_default()), &function["parameters"]);
        }
        let constraint = ConstraintSpec { format: form, called, thinking_budget };
        Ok(OutputSpec { tools, unlisted: 0, parses_calls, constraint, blamed_field, only_strict: false })
    }

    /// Makes calls of these tools follow their schemas even if the model is free to call none. With a required call, or a text format, all calls do anyway.
    pub fn with_strict_tools(mut self, names: Vec<String>, several: bool) -> OutputSpec {
        match &mut self.constraint {
            _ if names.is_empty() || !self.parses_calls => {}
            ConstraintSpec { called: Some(called), .. } => called.strict = names,
            ConstraintSpec { called: called @ None, format: GrammarFormat::Text, .. } => {
                let tools = self.tools.clone().unwrap_or_default();
                *called = Some(ToolCallRules { tools, several, must: false, strict: names });
                (self.blamed_field, self.only_strict) = ("tools", true);
            }
            ConstraintSpec { called: None, .. } => {}
        }
        self
    }

    /// Drops strictness, and records it as ignored, unless the model's calls can be constrained.
    pub fn drop_strictness_unless(&mut self, can_constrain: bool) {
        if self.only_strict && !can_constrain {
            self.constraint.called = None;
            note_ignored("tools.strict");
        }
    }

    /// The tools that the prompt lists; `None` if there are none.
    pub fn prompt_tools(&self) -> Option<Value> {
        let all = self.tools.as_ref()?.as_array()?;
        let listed = &all[..all.len().saturating_sub(self.unlisted)];
        (!listed.is_empty()).then(|| json!(listed))
    }
}

/// Names of the tools that have `strict`.
pub fn strict_names<'a>(tools: impl Iterator<Item = &'a Value>) -> Vec<String> {
    let is_strict = |tool: &&Value| tool["strict"] == true || tool["function"]["strict"] == true;
    let name = |tool: &Value| tool["name"].as_str().or(tool["function"]["name"].as_str()).map(str::to_owned);
    tools.filter(is_strict).filter_map(name).collect()
}

fn check(tools: &[Value]) -> Result<(), ApiError> {
    for (i, tool) in tools.iter().enumerate() {
        let wrong = |what: String| ApiError::invalid(&format!("tools[{i}]"), format!("tools[{i}]{what}"));
        let name = tool["function"]["name"].as_str().ok_or_else(|| wrong(" has no function.name".into()))?;
        let is_fit = |c: char| !c.is_control() && !c.is_whitespace() && !"\"\\<>".contains(c);
        if name.is_empty() || name.chars().count() > MAX_NAME || !name.chars().all(is_fit) {
            return Err(wrong(format!(": {name:?} is not a valid function name")));
        }
        if !matches!(tool["function"].get("parameters"), None | Some(Value::Null | Value::Object(_))) {
            return Err(wrong(".function.parameters is not a schema".into()));
        }
    }
    if tools.len() > MAX_TOOLS {
        return Err(ApiError::invalid("tools", format!("at most {MAX_TOOLS} tools are accepted")));
    }
    Ok(())
}

/// Parses `response_format`, or one of its variants `text.format` and `output_config.format`. `None`: any text.
///
/// # Errors
/// An unknown type, or one without its schema.
pub fn parse_format(field: &'static str, requested: &Value) -> Result<Option<TextFormat>, ApiError> {
    let form = match requested["type"].as_str() {
        None if requested.is_null() => return Ok(None),
        Some("text") => return Ok(None),
        Some("json_object") if requested["schema"].is_object() => GrammarFormat::Schema(requested["schema"].clone()),
        Some("json_object") => GrammarFormat::Object,
        Some("json_schema") => {
            let schema = [&requested["json_schema"]["schema"], &requested["schema"]].into_iter().find(|s| !s.is_null());
            let missing = || ApiError::invalid(field, format!("{field} has no json_schema.schema"));
            GrammarFormat::Schema(schema.ok_or_else(missing)?.clone())
        }
        Some("regex") => GrammarFormat::Regex(nonempty_string(field, first(requested, &["regex", "pattern"]))?),
        Some("grammar") => lark(field, &requested["grammar"])?,
        _ => {
            let message = format!("{field}: its type must be text, json_object, json_schema, regex or grammar");
            return Err(ApiError::invalid(field, message));
        }
    };
    Ok(Some(TextFormat { field, form }))
}

fn first<'a>(value: &'a Value, names: &[&str]) -> &'a Value {
    names.iter().map(|name| &value[*name]).find(|v| !v.is_null()).unwrap_or(&Value::Null)
}

/// A string that is not empty.
///
/// # Errors
/// Anything else.
pub fn nonempty_string(field: &str, value: &Value) -> Result<String, ApiError> {
    let text = value.as_str().filter(|text| !text.is_empty());
    text.map(str::to_owned).ok_or_else(|| ApiError::invalid(field, format!("{field} must be a string")))
}

/// A grammar in Lark.
///
/// # Errors
/// Anything that is not a string; a grammar in GBNF.
pub fn lark(field: &str, value: &Value) -> Result<GrammarFormat, ApiError> {
    let source = nonempty_string(field, value)?;
    if source.contains("::=") {
        return Err(ApiError::invalid(
            field,
            format!("{field}: grammars must be in Lark (start: ..); this one is in GBNF"),
        ));
    }
    Ok(GrammarFormat::Lark(source))
}
