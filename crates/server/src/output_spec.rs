//! What a request demands of its answer, whatever its dialect: tools that may or must be called, the form of its text.

use serde_json::{Value, json};
use sluice_engine::{Demand, GrammarFormat, ToolCallRules, unknown_formats};

use crate::context::ignore;
use crate::error::ApiError;

/// Tools of a request at most, and characters of a tool's name.
const MOST_TOOLS: usize = 512;
const NAME: usize = 128;

/// Which tools may be called, and which must be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// Whatever the model wants.
    #[default]
    Auto,
    /// No tool; they stay in the prompt.
    None,
    /// At least one, whichever.
    Required,
    /// The one of this name.
    Named(String),
    /// Of these alone, whether the model wants any or must call one.
    Allowed { names: Vec<String>, must: bool },
}

/// What an answer's text must be, and which field says so.
#[derive(Clone, Debug, PartialEq)]
pub struct Format {
    pub field: &'static str,
    pub form: GrammarFormat,
}

/// What becomes of a request's fields.
#[derive(Debug, Default)]
pub struct OutputSpec {
    /// As templates take them.
    pub tools: Option<Value>,
    /// So many of them, the last, are not listed in the prompt: the conversation tells of them.
    pub unlisted: usize,
    /// Calls are read as such.
    pub reads_calls: bool,
    pub demand: Demand,
    /// The field to blame where it cannot be had.
    pub blame: &'static str,
    /// Calls are demanded something of since tools are strict, and for nothing else.
    is_for_strictness: bool,
}

impl OutputSpec {
    /// `tools`: as templates take them. `several`: an answer may have more than one call.
    ///
    /// # Errors
    /// A choice among tools that are not there, tools that are none.
    pub fn new(
        tools: Option<Value>,
        choice: &ToolChoice,
        several: bool,
        format: Option<Format>,
        thinking_budget: Option<usize>,
    ) -> Result<OutputSpec, ApiError> {
        let all = tools.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        check(all)?;
        let tools = (!all.is_empty()).then(|| json!(all));
        let reads_calls = tools.is_some() && *choice != ToolChoice::None;
        let Format { field, form } = format.unwrap_or(Format { field: "tools", form: GrammarFormat::Text });
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
                    return Err(missing("tool_choice allows no tools: say none".into()));
                }
                Some(ToolCallRules { tools: json!(tools), several, must: *must, strict: Vec::new() })
            }
            // Calls must have a place in the grammar of an answer that has one.
            ToolChoice::Auto | ToolChoice::None => (tools
                .clone()
                .filter(|_| reads_calls && form != GrammarFormat::Text))
            .map(|tools| ToolCallRules { tools, several, must: false, strict: Vec::new() }),
        };
        let (form, blame) = match &called {
            Some(called) if called.must => (GrammarFormat::Text, "tools"),
            Some(_) if form == GrammarFormat::Text => (form, "tool_choice"),
            _ => (form, field),
        };
        // Texts of a format that is not known are free.
        let note = |field: &str, schema: &Value| {
            unknown_formats(schema).iter().for_each(|format| ignore(&format!("{field}.format.{format}")));
        };
        if let GrammarFormat::Schema(schema) = &form {
            note(field, schema);
        }
        for tool in called.iter().filter_map(|called| called.tools.as_array()).flatten() {
            let function = &tool["function"];
            note(&format!("tools.{}", function["name"].as_str().unwrap_or_default()), &function["parameters"]);
        }
        let demand = Demand { form, called, thinking_budget };
        Ok(OutputSpec { tools, unlisted: 0, reads_calls, demand, blame, is_for_strictness: false })
    }

    /// Has calls of these tools keep to their schemas where the model is free to call any; where they must be made, or a form is kept, all do.
    pub fn strictly(mut self, names: Vec<String>, several: bool) -> OutputSpec {
        match &mut self.demand {
            _ if names.is_empty() || !self.reads_calls => {}
            Demand { called: Some(called), .. } => called.strict = names,
            Demand { called: called @ None, form: GrammarFormat::Text, .. } => {
                let tools = self.tools.clone().unwrap_or_default();
                *called = Some(ToolCallRules { tools, several, must: false, strict: names });
                (self.blame, self.is_for_strictness) = ("tools", true);
            }
            Demand { called: None, .. } => {}
        }
        self
    }

    /// Leaves strictness out, and says so, where a model's calls cannot be held to anything.
    pub fn without_strictness(&mut self, can_hold: bool) {
        if self.is_for_strictness && !can_hold {
            self.demand.called = None;
            ignore("tools.strict");
        }
    }

    /// The tools that the prompt lists.
    pub fn listed(&self) -> Option<Value> {
        let all = self.tools.as_ref()?.as_array()?;
        let listed = &all[..all.len().saturating_sub(self.unlisted)];
        (!listed.is_empty()).then(|| json!(listed))
    }
}

/// Names of those of a client's tools that are strict.
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
        if name.is_empty() || name.chars().count() > NAME || !name.chars().all(is_fit) {
            return Err(wrong(format!(": {name:?} is no name for a function")));
        }
        if !matches!(tool["function"].get("parameters"), None | Some(Value::Null | Value::Object(_))) {
            return Err(wrong(".function.parameters is no schema".into()));
        }
    }
    if tools.len() > MOST_TOOLS {
        return Err(ApiError::invalid("tools", format!("at most {MOST_TOOLS} tools are accepted")));
    }
    Ok(())
}

/// The form that is asked for in the words of `response_format` (of which `text.format` and `output_config.format` are variants); `None`: any text.
///
/// # Errors
/// What is no form.
pub fn format_of(field: &'static str, asked: &Value) -> Result<Option<Format>, ApiError> {
    let form = match asked["type"].as_str() {
        None if asked.is_null() => return Ok(None),
        Some("text") => return Ok(None),
        Some("json_object") if asked["schema"].is_object() => GrammarFormat::Schema(asked["schema"].clone()),
        Some("json_object") => GrammarFormat::Object,
        Some("json_schema") => {
            let schema = [&asked["json_schema"]["schema"], &asked["schema"]].into_iter().find(|s| !s.is_null());
            let missing = || ApiError::invalid(field, format!("{field} has no json_schema.schema"));
            GrammarFormat::Schema(schema.ok_or_else(missing)?.clone())
        }
        Some("regex") => GrammarFormat::Regex(text(field, first(asked, &["regex", "pattern"]))?),
        Some("grammar") => lark(field, &asked["grammar"])?,
        _ => {
            let message = format!("{field}: its type is none of text, json_object, json_schema, regex and grammar");
            return Err(ApiError::invalid(field, message));
        }
    };
    Ok(Some(Format { field, form }))
}

fn first<'a>(value: &'a Value, names: &[&str]) -> &'a Value {
    names.iter().map(|name| &value[*name]).find(|v| !v.is_null()).unwrap_or(&Value::Null)
}

/// # Errors
/// Anything but a text that is not empty.
pub fn text(field: &str, value: &Value) -> Result<String, ApiError> {
    let text = value.as_str().filter(|text| !text.is_empty());
    text.map(str::to_owned).ok_or_else(|| ApiError::invalid(field, format!("{field} must be a text")))
}

/// # Errors
/// What is no grammar in Lark.
pub fn lark(field: &str, value: &Value) -> Result<GrammarFormat, ApiError> {
    let source = text(field, value)?;
    if source.contains("::=") {
        return Err(ApiError::invalid(
            field,
            format!("{field}: grammars are in Lark (start: ..); this one is in GBNF"),
        ));
    }
    Ok(GrammarFormat::Lark(source))
}
