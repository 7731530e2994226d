//! Fields that demand something of a chat's answer: OpenAI's, vLLM's and llama-server's.

use serde::Deserialize;
use serde_json::{Value, json};
use sluice_engine::GrammarFormat;
use utoipa::ToSchema;

use crate::api::fields;
use crate::api::output_spec::{OutputSpec, TextFormat, ToolChoice, lark, nonempty_string, parse_format, strict_names};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::openapi::json_schema;

/// Tools, and the format of the answer.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = Demands)]
pub struct OutputFields {
    #[serde(default, deserialize_with = "fields::list")]
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    #[schema(value_type = Option<ChatToolChoice>)]
    tool_choice: Option<Value>,
    #[serde(default, deserialize_with = "fields::boolean")]
    parallel_tool_calls: Option<bool>,
    #[serde(default)]
    #[schema(value_type = Option<ResponseFormat>)]
    response_format: Option<Value>,
    /// vLLM's: `json`, `regex`, `choice`, `grammar` or `json_object`.
    #[serde(default)]
    #[schema(value_type = Option<StructuredOutputs>)]
    structured_outputs: Option<Value>,
    #[serde(default)]
    guided_json: Option<Value>,
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    guided_regex: Option<Value>,
    #[serde(default)]
    #[schema(value_type = Option<Vec<String>>)]
    guided_choice: Option<Value>,
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    guided_grammar: Option<Value>,
    /// llama-server's.
    #[serde(default)]
    json_schema: Option<Value>,
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    regex: Option<Value>,
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    grammar: Option<Value>,
    /// Most tokens for thoughts; below 0: no limit.
    #[serde(default, deserialize_with = "fields::integer", alias = "thinking_budget", alias = "thinking_token_budget")]
    reasoning_budget: Option<i64>,
}

json_schema! {
    /// A message.
    ChatMessage, uses [], {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "description": "system, developer, user, assistant or tool"},
            "content": {"anyOf": [
                {"type": ["string", "null"]},
                {"type": "array", "items": {
                    "type": "object",
                    "required": ["type", "text"],
                    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}, "cache_control": {"type": ["object", "null"]}},
                }},
            ]},
            "reasoning_content": {"type": ["string", "null"], "description": "The thoughts, as the answer had them."},
            "tool_calls": {"type": ["array", "null"], "items": {
                "type": "object",
                "required": ["function"],
                "properties": {
                    "id": {"type": "string"},
                    "type": {"type": "string", "enum": ["function"]},
                    "function": {
                        "type": "object",
                        "required": ["name", "arguments"],
                        "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object"]}},
                    },
                },
            }},
            "tool_call_id": {"type": "string"},
        },
    }
}

json_schema! {
    /// A function that may be called. Tools of other types are ignored.
    ChatTool, uses [], {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"type": "string", "enum": ["function"]},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 128},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
                    "strict": {"type": ["boolean", "null"], "description": "Calls follow the schema, even if the model is free not to call it."},
                },
            },
        },
    }
}

json_schema! {
    /// Which tools may be called.
    ChatToolChoice, uses [], {
        "anyOf": [
            {"type": "string", "enum": ["auto", "none", "required"]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"type": "string", "enum": ["function"]},
                    "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
                },
            },
            {
                "type": "object",
                "required": ["type", "allowed_tools"],
                "properties": {
                    "type": {"type": "string", "enum": ["allowed_tools"]},
                    "allowed_tools": {
                        "type": "object",
                        "required": ["tools"],
                        "properties": {
                            "mode": {"type": ["string", "null"], "enum": ["auto", "required", null]},
                            "tools": {"type": "array", "items": {"type": "object"}, "description": "Each with its type and name."},
                        },
                    },
                },
            },
        ],
    }
}

json_schema! {
    /// The format of the answer's text.
    ResponseFormat, uses [], {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema", "regex", "grammar"]},
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"name": {"type": "string"}, "schema": {"type": ["object", "boolean"]}}},
            "schema": {"type": ["object", "boolean"]},
            "regex": {"type": "string", "description": "In the syntax of Rust's `regex` crate."},
            "grammar": {"type": "string", "description": "In Lark's syntax."},
        },
    }
}

json_schema! {
    /// vLLM's way to set the format: one of these.
    StructuredOutputs, uses [], {
        "type": "object",
        "properties": {
            "json": {"type": ["object", "boolean", "string"]},
            "json_object": {"type": "boolean"},
            "regex": {"type": "string"},
            "grammar": {"type": "string"},
            "choice": {"type": "array", "items": {"type": "string"}},
        },
    }
}

impl OutputFields {
    /// Converts them.
    ///
    /// # Errors
    /// An invalid field; fields that contradict each other.
    pub fn output_spec(&self) -> Result<OutputSpec, ApiError> {
        // Tools of other types would run on OpenAI's side.
        let ours = |tool: &&Value| tool["type"].as_str().is_none_or(|kind| kind == "function");
        let (ours, others): (Vec<&Value>, Vec<&Value>) = self.tools.iter().flatten().partition(ours);
        if !others.is_empty() {
            note_ignored("tools");
        }
        let (several, budget) = (self.parallel_tool_calls.unwrap_or(true), self.reasoning_budget);
        let budget = budget.and_then(|tokens| usize::try_from(tokens).ok());
        let strict = strict_names(ours.iter().copied());
        let output = OutputSpec::new(Some(json!(ours)), &self.tool_choice()?, several, self.format()?, budget)?;
        Ok(output.with_strict_tools(strict, several))
    }

    fn tool_choice(&self) -> Result<ToolChoice, ApiError> {
        let choice = self.tool_choice.as_ref().unwrap_or(&Value::Null);
        let named = |choice: &Value| choice["function"]["name"].as_str().or(choice["name"].as_str()).map(str::to_owned);
        let found = match choice.as_str() {
            None if choice.is_null() => Some(ToolChoice::Auto),
            Some("auto") => Some(ToolChoice::Auto),
            Some("none") => Some(ToolChoice::None),
            Some("required") => Some(ToolChoice::Required),
            None if choice["type"] == "function" => named(choice).map(ToolChoice::Named),
            None if choice["type"] == "allowed_tools" => {
                let allowed = &choice["allowed_tools"];
                let of = if allowed.is_object() { allowed } else { choice };
                let names = of["tools"].as_array().and_then(|all| all.iter().map(named).collect::<Option<_>>());
                allowed_tools(&of["mode"], names)
            }
            _ => None,
        };
        found.ok_or_else(|| ApiError::invalid("tool_choice", format!("tool_choice cannot be {choice}")))
    }

    /// The requested format; `None`: any text.
    fn format(&self) -> Result<Option<TextFormat>, ApiError> {
        let mut forms = Vec::new();
        let format = self.response_format.as_ref().unwrap_or(&Value::Null);
        forms.extend(parse_format("response_format", format)?.map(|TextFormat { field, form }| (form, field)));
        let structured = self.structured_outputs.as_ref().unwrap_or(&Value::Null);
        if structured["json_object"] == true {
            forms.push((GrammarFormat::Object, "structured_outputs"));
        }
        let given = |value: &Option<Value>| value.clone().filter(|v| !v.is_null());
        let within = |name: &str| Some(structured[name].clone()).filter(|v| !v.is_null());
        for (value, field) in [
            (within("json"), "structured_outputs"),
            (given(&self.guided_json), "guided_json"),
            (given(&self.json_schema), "json_schema"),
        ] {
            // Some clients send the schema as a string.
            let read = |value| match value {
                Value::String(json) => {
                    serde_json::from_str(&json).map_err(|e| ApiError::invalid(field, format!("{field}: {e}")))
                }
                other => Ok(other),
            };
            forms.extend(value.map(read).transpose()?.map(|schema| (GrammarFormat::Schema(schema), field)));
        }
        for (value, field) in [
            (within("regex"), "structured_outputs"),
            (given(&self.guided_regex), "guided_regex"),
            (given(&self.regex), "regex"),
        ] {
            forms.extend(
                value
                    .map(|v| nonempty_string(field, &v))
                    .transpose()?
                    .map(|regex| (GrammarFormat::Regex(regex), field)),
            );
        }
        for (value, field) in [
            (within("grammar"), "structured_outputs"),
            (given(&self.guided_grammar), "guided_grammar"),
            (given(&self.grammar), "grammar"),
        ] {
            forms.extend(value.map(|v| lark(field, &v)).transpose()?.map(|form| (form, field)));
        }
        for (value, field) in [(within("choice"), "structured_outputs"), (given(&self.guided_choice), "guided_choice")]
        {
            forms.extend(value.map(|v| one_of(field, &v)).transpose()?.map(|form| (form, field)));
        }
        match forms.len() {
            0 | 1 => Ok(forms.pop().map(|(form, field)| TextFormat { field, form })),
            _ => Err(ApiError::invalid(
                forms[1].1,
                format!("{} and {} both set the answer's format", forms[0].1, forms[1].1),
            )),
        }
    }
}

/// A choice among some of the tools; `None` if it is invalid.
pub fn allowed_tools(mode: &Value, names: Option<Vec<String>>) -> Option<ToolChoice> {
    let must = match mode.as_str() {
        Some("required") => true,
        Some("auto") => false,
        None if mode.is_null() => false,
        _ => return None,
    };
    names.map(|names| ToolChoice::Allowed { names, must })
}

fn one_of(field: &str, value: &Value) -> Result<GrammarFormat, ApiError> {
    let texts = value.as_array().map(|all| all.iter().map(Value::as_str).collect::<Option<Vec<&str>>>());
    match texts {
        Some(Some(texts)) if !texts.is_empty() => {
            let texts: Vec<String> = texts.into_iter().map(|text| Value::from(text).to_string()).collect();
            Ok(GrammarFormat::Lark(format!("start: {}", texts.join(" | "))))
        }
        _ => Err(ApiError::invalid(field, format!("{field}: must be a list of strings"))),
    }
}
