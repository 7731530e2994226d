//! The request of `/v1/responses`.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::text::Tokenizer;
use utoipa::ToSchema;

use crate::api::chat::{ChatRequest, EFFORT, Thinking};
use crate::api::fields;
use crate::api::output_spec::{OutputSpec, ToolChoice, parse_format};
use crate::api::sampling::{SamplingFields, Stop};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::openapi::{ANY, json_schema};
use crate::openai::logprobs::MAX_TOP_LOGPROBS;
use crate::openai::responses::input::append_input;
use crate::openai::responses::tools::{Namespaces, functions, parse_tool_choice, strict_functions};

/// The request.
#[derive(Deserialize, ToSchema)]
#[schema(as = ResponseRequest)]
pub struct ResponsesRequest {
    #[serde(default)]
    #[schema(value_type = ResponseInput)]
    input: Value,
    #[serde(default, deserialize_with = "fields::string")]
    instructions: Option<String>,
    #[serde(default, deserialize_with = "fields::list")]
    #[schema(value_type = Option<Vec<ResponseTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    #[schema(value_type = ResponseToolChoice)]
    tool_choice: Value,
    #[serde(default, deserialize_with = "fields::boolean")]
    parallel_tool_calls: Option<bool>,
    #[serde(default, deserialize_with = "fields::limit")]
    #[schema(value_type = Option<i64>, minimum = -1)]
    max_output_tokens: Option<usize>,
    #[serde(default, deserialize_with = "fields::number")]
    temperature: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    top_p: Option<f32>,
    #[serde(default, deserialize_with = "fields::boolean")]
    stream: Option<bool>,
    #[serde(default)]
    #[schema(value_type = ResponseReasoning)]
    reasoning: Value,
    /// `reasoning.encrypted_content`: return thoughts in a form that the client can send back. `message.output_text.logprobs`: return log-probabilities of the text's tokens.
    #[serde(default, deserialize_with = "fields::strings")]
    include: Option<Vec<String>>,
    #[serde(default)]
    #[schema(value_type = ResponseText)]
    text: Value,
    #[serde(default)]
    metadata: Value,
    /// How many of the most likely tokens to list with each log-probability, at most 20.
    #[serde(default, deserialize_with = "fields::integer")]
    #[schema(maximum = 20)]
    top_logprobs: Option<usize>,
    // Extensions.
    #[serde(default, deserialize_with = "fields::integer")]
    top_k: Option<i64>,
    #[serde(default, deserialize_with = "fields::number")]
    min_p: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    presence_penalty: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    frequency_penalty: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    repetition_penalty: Option<f32>,
    #[serde(default, deserialize_with = "fields::seed")]
    seed: Option<i64>,
    #[serde(default)]
    stop: Option<Stop>,
    /// Only requests with equal salts share cached prompts.
    #[serde(default, deserialize_with = "fields::string")]
    cache_salt: Option<String>,
    /// Most tokens for thoughts; below 0: no limit.
    #[serde(default, deserialize_with = "fields::integer", alias = "thinking_budget", alias = "thinking_token_budget")]
    reasoning_budget: Option<i64>,
    /// More variables for the chat template.
    #[serde(default, deserialize_with = "fields::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

json_schema! {
    /// A string, or items of a conversation.
    ResponseInput, uses [], {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {
                "type": "object",
                "properties": {
                    "type": {"type": "string", "description": "message, reasoning, function_call, function_call_output, custom_tool_call or custom_tool_call_output"},
                    "role": {"type": "string", "description": "user, assistant, system or developer"},
                    "content": {"anyOf": [
                        {"type": ["string", "null"]},
                        {"type": "array", "items": {
                            "type": "object",
                            "required": ["type"],
                            "properties": {"type": {"type": "string"}, "text": {"type": "string"}},
                        }},
                    ]},
                    "summary": {"type": "array", "items": {"type": "object", "properties": {"type": {"type": "string"}, "text": {"type": "string"}}}},
                    "encrypted_content": {"type": ["string", "null"]},
                    "call_id": {"type": "string"},
                    "name": {"type": "string"},
                    "arguments": {"type": "string"},
                    "output": {"type": ANY},
                },
            }},
        ],
    }
}

json_schema! {
    /// A function that may be called. Tools of other types are ignored.
    ResponseTool, uses [], {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string"},
            "name": {"type": "string", "minLength": 1, "maxLength": 128},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
            "strict": {"type": ["boolean", "null"], "description": "Calls follow the schema, even if the model is free not to call it."},
        },
    }
}

json_schema! {
    /// Which tools may be called.
    ResponseToolChoice, uses [], {
        "anyOf": [
            {"type": ["string", "null"], "enum": ["auto", "none", "required", null]},
            {
                "type": "object",
                "required": ["type", "name"],
                "properties": {"type": {"type": "string", "enum": ["function"]}, "name": {"type": "string"}},
            },
            {
                "type": "object",
                "required": ["type", "tools"],
                "properties": {
                    "type": {"type": "string", "enum": ["allowed_tools"]},
                    "mode": {"type": ["string", "null"], "enum": ["auto", "required", null]},
                    "tools": {"type": "array", "items": {"type": "object"}, "description": "Each with its type and name."},
                },
            },
        ],
    }
}

json_schema! {
    /// Whether to think, and whether thoughts are returned as a summary.
    ResponseReasoning, uses [], {
        "type": ["object", "null"],
        "properties": {
            "effort": {"type": ["string", "null"], "description": "`none` turns thinking off."},
            "summary": {"type": ["string", "null"]},
        },
    }
}

json_schema! {
    /// The format of the answer's text.
    ResponseText, uses [], {
        "type": ["object", "null"],
        "properties": {
            "format": {
                "type": ["object", "null"],
                "required": ["type"],
                "properties": {
                    "type": {"type": "string", "enum": ["text", "json_object", "json_schema", "regex", "grammar"]},
                    "name": {"type": "string"},
                    "schema": {"type": ["object", "boolean"]},
                    "regex": {"type": "string"},
                    "grammar": {"type": "string"},
                },
            },
            "verbosity": {"type": ANY, "description": "Ignored."},
        },
    }
}

/// How the answer is reported.
#[derive(Default)]
pub struct ResponseOptions {
    /// Report thoughts as a summary.
    pub as_summary: bool,
    /// Return thoughts as `encrypted_content`.
    pub carries_thoughts: bool,
    /// Return log-probabilities of the text's tokens.
    pub with_logprobs: bool,
    /// The tokenizer for those, if they are wanted.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Fields of the request that the response repeats.
    pub echo: Map<String, Value>,
    /// Namespaces of the functions.
    pub namespaces: Namespaces,
}

/// Fields that would change the answer but are not supported, and why.
const REFUSED: [(&str, &str); 4] = [
    ("previous_response_id", "no responses are stored: send the whole conversation as input"),
    ("conversation", "no conversations are stored: send the whole conversation as input"),
    ("prompt", "no prompts are stored: send it as instructions and input"),
    ("background", "responses are not computed in the background"),
];

const THOUGHTS: &str = "reasoning.encrypted_content";
const LOGPROBS: &str = "message.output_text.logprobs";

impl ResponsesRequest {
    /// Converts it.
    ///
    /// # Errors
    /// A field that is invalid or not supported, by name.
    pub fn into_chat(self) -> Result<(ChatRequest, ResponseOptions), ApiError> {
        self.check_unknown_fields()?;
        let mut options = self.options();
        // 1. Messages
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions.filter(|i| !i.is_empty()) {
            messages.push(json!({"role": "system", "content": instructions}));
        }
        append_input(&self.input, &mut messages)?;
        // 2. Tools
        let tools = self.tools.unwrap_or_default();
        let strict = strict_functions(&tools);
        let (functions, namespaces) = functions(&tools)?;
        options.namespaces = namespaces;
        let tools = (!functions.is_empty()).then_some(Value::Array(functions));
        let tool_choice = parse_tool_choice(&self.tool_choice)?;
        // 3. Sampling and format
        let effort = self.reasoning["effort"].as_str();
        let thinking = match effort {
            None => Thinking::Default,
            Some("none") => Thinking::Off,
            Some(_) => Thinking::On,
        };
        let mut extra = self.chat_template_kwargs;
        if let Some(effort) = effort.filter(|e| *e != "none") {
            extra.entry(EFFORT).or_insert(effort.into());
        }
        let sampling = SamplingFields {
            max_tokens: self.max_output_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            stop: self.stop,
            stream: self.stream.unwrap_or(false),
            cache_salt: self.cache_salt,
            ..SamplingFields::default()
        };
        let one_call = self.parallel_tool_calls == Some(false);
        let format = parse_format("text.format", &self.text["format"])?;
        if one_call && tool_choice == ToolChoice::Auto && format.is_none() && tools.is_some() && strict.is_empty() {
            note_ignored("parallel_tool_calls");
        }
        let budget = self.reasoning_budget.and_then(|tokens| usize::try_from(tokens).ok());
        let output =
            OutputSpec::new(tools, &tool_choice, !one_call, format, budget)?.with_strict_tools(strict, !one_call);
        let top = self.top_logprobs.unwrap_or(0);
        if top > MAX_TOP_LOGPROBS {
            return Err(ApiError::invalid(
                "top_logprobs",
                format!("top_logprobs is {top}; it must be at most {MAX_TOP_LOGPROBS}"),
            ));
        }
        let logprobs = options.with_logprobs.then_some(top);
        let chat = ChatRequest { messages, output, thinking, extra, logprobs, sampling, ..ChatRequest::default() };
        Ok((chat, options))
    }

    /// The model that it names.
    pub fn model(&self) -> Option<&str> {
        self.others.get("model").and_then(Value::as_str)
    }

    fn check_unknown_fields(&self) -> Result<(), ApiError> {
        for (field, value) in &self.others {
            let asks = !value.is_null() && *value != json!(false);
            match REFUSED.iter().find(|(name, _)| name == field) {
                Some((name, why)) if asks => return Err(ApiError::invalid_field(name, why)),
                Some(_) => {}
                None if field == "model" || value.is_null() => {}
                None => note_ignored(field),
            }
        }
        if !self.metadata.is_null() {
            note_ignored("metadata");
        }
        if !self.text["verbosity"].is_null() {
            note_ignored("text.verbosity");
        }
        let included = self.include.iter().flatten().filter(|name| ![THOUGHTS, LOGPROBS].contains(&name.as_str()));
        included.for_each(|name| note_ignored(&format!("include.{name}")));
        Ok(())
    }

    fn options(&self) -> ResponseOptions {
        let or = |value: &Value, default: Value| if value.is_null() { default } else { value.clone() };
        let echo = json!({
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens.filter(|most| *most < usize::MAX), "metadata": or(&self.metadata, json!({})),
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true), "temperature": self.temperature, "top_p": self.top_p,
            "tool_choice": or(&self.tool_choice, "auto".into()), "tools": self.tools.clone().unwrap_or_default(),
            "reasoning": or(&self.reasoning, json!({"effort": null, "summary": null})),
            "text": or(&self.text, json!({"format": {"type": "text"}})),
        });
        ResponseOptions {
            as_summary: !self.reasoning["summary"].is_null(),
            carries_thoughts: self.include.iter().flatten().any(|name| name == THOUGHTS),
            with_logprobs: self.include.iter().flatten().any(|name| name == LOGPROBS),
            echo: echo.as_object().cloned().unwrap_or_default(),
            namespaces: Namespaces::default(),
            tokenizer: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use sluice_engine::GrammarFormat;

    use super::*;
    use crate::api::messages::tool_call;
    use crate::openai::responses::thoughts::encode_thought;

    fn asked(request: Value) -> Result<(ChatRequest, ResponseOptions), ApiError> {
        serde_json::from_value::<ResponsesRequest>(request).unwrap().into_chat()
    }

    #[test]
    fn items_of_an_agent_become_what_templates_take() {
        let (chat, options) = asked(json!({
            "model": "any", "instructions": "Be brief.", "store": false, "stream": true, "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"}, "parallel_tool_calls": false, "prompt_cache_key": "k",
            "tool_choice": "auto", "text": {"verbosity": "low"}, "client_metadata": {"a": "b"}, "service_tier": "auto",
            "tools": [
                {"type": "function", "name": "shell", "description": "Runs.", "strict": false, "parameters": {"type": "object", "z": 1, "a": 2}},
                {"type": "web_search"}, {"type": "custom", "name": "apply_patch"},
            ],
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": encode_thought("long")},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{\"z\": 1, \"a\": [2]}"},
                {"type": "web_search_call", "status": "completed"},
                {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": "{\"z\": "},
                {"type": "function_call_output", "call_id": "c1", "output": "done"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "x"}, {"type": "input_image"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}], "encrypted_content": "gAAA"},
                {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "*** Begin"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "next"}]},
                {"type": "message", "role": "assistant", "content": "Done."},
            ],
        }))
        .unwrap();
        let shell = |id: &str, arguments: Value| tool_call(id, "shell", arguments);
        assert_eq!(
            chat.messages,
            [
                json!({"role": "system", "content": "Be brief."}),
                json!({"role": "developer", "content": "Rules."}),
                json!({"role": "user", "content": "a\nb"}),
                json!({"role": "assistant", "content": "I look.", "reasoning_content": "long",
                "tool_calls": [shell("c1", "{\"z\": 1, \"a\": [2]}".into()), shell("c2", "{\"z\": ".into())]}),
                json!({"role": "tool", "content": "done", "tool_call_id": "c1"}),
                json!({"role": "tool", "content": "x\n[input_image: it cannot be shown to this model]", "tool_call_id": "c2"}),
                json!({"role": "assistant", "content": "", "reasoning_content": "so",
                "tool_calls": [tool_call("c3", "apply_patch", json!({"input": "*** Begin"}))]}),
                json!({"role": "assistant", "content": "Done.", "reasoning_content": "next"}),
            ]
        );
        let function =
            json!({"name": "shell", "description": "Runs.", "parameters": {"type": "object", "z": 1, "a": 2}});
        assert_eq!(chat.output.tools, Some(json!([{"type": "function", "function": function}])));
        let spec = &chat.output.constraint;
        assert_eq!((chat.thinking, &spec.format, &spec.called), (Thinking::On, &GrammarFormat::Text, &None));
        assert!(options.as_summary && options.carries_thoughts && chat.sampling.stream);
        assert_eq!(options.echo["instructions"], "Be brief.");
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        for (field, value, part) in [
            ("previous_response_id", json!("resp_1"), "previous_response_id: no responses are stored"),
            ("conversation", json!({"id": "c"}), "conversation: "),
            ("background", json!(true), "background: "),
            ("input", json!(5), "input: must be a string"),
            ("input", json!(null), "input: is missing"),
            ("input", json!([{"type": "item_reference", "id": "x"}]), "input[0]: no items are stored"),
            ("input", json!([{"role": "king", "content": "x"}]), "input[0].role: \"king\""),
            (
                "input",
                json!([{"role": "user", "content": [{"type": "input_image"}]}]),
                "input[0].content[0]: parts of input_image",
            ),
            ("input", json!([{"type": "function_call", "name": "x"}]), "input[0]: a call needs"),
            ("tool_choice", json!({"type": "file_search"}), "tool_choice: "),
            ("tools", json!([{"type": "function"}]), "tools[0].name"),
            ("text", json!({"format": {"type": "poem"}}), "text.format: "),
        ] {
            let mut request = json!({"input": "x"});
            request[field] = value;
            let error = asked(request).err().unwrap();
            assert!(error.message.starts_with(part), "{}", error.message);
            assert_eq!(error.status.as_u16(), 400);
        }
        asked(json!({"input": "x", "previous_response_id": null, "background": false, "store": true})).unwrap();
        let (chat, _) =
            asked(json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}))
                .unwrap();
        assert_eq!(
            (chat.output.constraint.format, chat.output.blamed_field),
            (GrammarFormat::Schema(json!({})), "text.format")
        );
    }
}
