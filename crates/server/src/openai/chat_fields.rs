//! What a chat demands of its answer, in the words of OpenAI's clients, vLLM's and llama-server's.

use serde::Deserialize;
use serde_json::{Value, json};
use sluice_engine::GrammarFormat;
use utoipa::ToSchema;

use crate::context::ignore;
use crate::error::ApiError;
use crate::given;
use crate::openapi::written;
use crate::output_spec::{Format, OutputSpec, ToolChoice, format_of, lark, strict_names, text};

/// Fields of tools, and of what an answer is to be.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = Demands)]
pub struct Fields {
    #[serde(default, deserialize_with = "given::list")]
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    #[schema(value_type = Option<ChatToolChoice>)]
    tool_choice: Option<Value>,
    #[serde(default, deserialize_with = "given::flag")]
    parallel_tool_calls: Option<bool>,
    #[serde(default)]
    #[schema(value_type = Option<ResponseFormat>)]
    response_format: Option<Value>,
    /// vLLM's: `json`, `regex`, `choice`, `grammar`, `json_object`.
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
    /// Tokens of thoughts at most; below 0: any number.
    #[serde(default, deserialize_with = "given::whole", alias = "thinking_budget", alias = "thinking_token_budget")]
    reasoning_budget: Option<i64>,
}

written! {
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
            "reasoning_content": {"type": ["string", "null"], "description": "What was thought, as it was answered."},
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

written! {
    /// A function that may be called. Tools of other types have no effect.
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
                    "strict": {"type": ["boolean", "null"], "description": "Its calls keep to the schema, also where the model is free to call it or not."},
                },
            },
        },
    }
}

written! {
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
                            "tools": {"type": "array", "items": {"type": "object"}, "description": "Of each the type and the name."},
                        },
                    },
                },
            },
        ],
    }
}

written! {
    /// What the text of the answer is.
    ResponseFormat, uses [], {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "enum": ["text", "json_object", "json_schema", "regex", "grammar"]},
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"name": {"type": "string"}, "schema": {"type": ["object", "boolean"]}}},
            "schema": {"type": ["object", "boolean"]},
            "regex": {"type": "string", "description": "In the syntax of Rust's `regex`."},
            "grammar": {"type": "string", "description": "In Lark."},
        },
    }
}

written! {
    /// The same in the words of vLLM: one of them.
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

impl Fields {
    /// # Errors
    /// A field that cannot be what it is, and fields that contradict each other.
    pub fn demanded(&self) -> Result<OutputSpec, ApiError> {
        // What a client's own side would do is nothing that a model can be told of.
        let ours = |tool: &&Value| tool["type"].as_str().is_none_or(|kind| kind == "function");
        let (ours, others): (Vec<&Value>, Vec<&Value>) = self.tools.iter().flatten().partition(ours);
        if !others.is_empty() {
            ignore("tools");
        }
        let (several, budget) = (self.parallel_tool_calls.unwrap_or(true), self.reasoning_budget);
        let budget = budget.and_then(|tokens| usize::try_from(tokens).ok());
        let strict = strict_names(ours.iter().copied());
        let demanded = OutputSpec::new(Some(json!(ours)), &self.tool_choice()?, several, self.format()?, budget)?;
        Ok(demanded.strictly(strict, several))
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

    /// The form that is asked for.
    fn format(&self) -> Result<Option<Format>, ApiError> {
        let mut forms = Vec::new();
        let format = self.response_format.as_ref().unwrap_or(&Value::Null);
        forms.extend(format_of("response_format", format)?.map(|Format { field, form }| (form, field)));
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
            // Some send the schema's text.
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
            forms.extend(value.map(|v| text(field, &v)).transpose()?.map(|regex| (GrammarFormat::Regex(regex), field)));
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
            0 | 1 => Ok(forms.pop().map(|(form, field)| Format { field, form })),
            _ => Err(ApiError::invalid(
                forms[1].1,
                format!("{} and {} both say what the answer is", forms[0].1, forms[1].1),
            )),
        }
    }
}

/// A choice among some of the tools. `None`: it is not understood.
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
        _ => Err(ApiError::invalid(field, format!("{field}: a choice is a list of texts"))),
    }
}
