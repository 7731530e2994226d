//! From the words of Responses to what every dialect asks for.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::text::Tokenizer;
use utoipa::ToSchema;

use super::brought_back;
use super::namespaces::{Namespaces, functions, joined};
use crate::context::ignore;
use crate::error::ApiError;
use crate::given;
use crate::openai::chat::MOST_LOGPROBS;
use crate::openai::chat_fields::allowed_tools;
use crate::openai::{SamplingFields, Stop};
use crate::openapi::{ANY, written};
use crate::output_spec::{OutputSpec, ToolChoice, format_of, strict_names};
use crate::request::{ChatRequest, Thinking, Turn, tool_call};

#[derive(Deserialize, ToSchema)]
#[schema(as = ResponseRequest)]
pub struct ResponsesRequest {
    #[serde(default)]
    #[schema(value_type = ResponseInput)]
    input: Value,
    #[serde(default, deserialize_with = "given::text")]
    instructions: Option<String>,
    #[serde(default, deserialize_with = "given::list")]
    #[schema(value_type = Option<Vec<ResponseTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    #[schema(value_type = ResponseToolChoice)]
    tool_choice: Value,
    #[serde(default, deserialize_with = "given::flag")]
    parallel_tool_calls: Option<bool>,
    #[serde(default, deserialize_with = "given::limit")]
    #[schema(value_type = Option<i64>, minimum = -1)]
    max_output_tokens: Option<usize>,
    #[serde(default, deserialize_with = "given::number")]
    temperature: Option<f32>,
    #[serde(default, deserialize_with = "given::number")]
    top_p: Option<f32>,
    #[serde(default, deserialize_with = "given::flag")]
    stream: Option<bool>,
    #[serde(default)]
    #[schema(value_type = ResponseReasoning)]
    reasoning: Value,
    /// `reasoning.encrypted_content`: thoughts come back with the client. `message.output_text.logprobs`: how likely each token of the text was.
    #[serde(default, deserialize_with = "given::texts")]
    include: Option<Vec<String>>,
    #[serde(default)]
    #[schema(value_type = ResponseText)]
    text: Value,
    #[serde(default)]
    metadata: Value,
    /// With each token's likelihood so many of the likeliest: 20 at most.
    #[serde(default, deserialize_with = "given::whole")]
    #[schema(maximum = 20)]
    top_logprobs: Option<usize>,
    // What OpenAI does not know and our users want.
    #[serde(default, deserialize_with = "given::whole")]
    top_k: Option<i64>,
    #[serde(default, deserialize_with = "given::number")]
    min_p: Option<f32>,
    #[serde(default, deserialize_with = "given::number")]
    presence_penalty: Option<f32>,
    #[serde(default, deserialize_with = "given::number")]
    frequency_penalty: Option<f32>,
    #[serde(default, deserialize_with = "given::number")]
    repetition_penalty: Option<f32>,
    #[serde(default, deserialize_with = "given::seed")]
    seed: Option<i64>,
    #[serde(default)]
    stop: Option<Stop>,
    /// What is kept of prompts is shared among those of the same salt.
    #[serde(default, deserialize_with = "given::text")]
    cache_salt: Option<String>,
    /// Tokens of thoughts at most; below 0: any number.
    #[serde(default, deserialize_with = "given::whole", alias = "thinking_budget", alias = "thinking_token_budget")]
    reasoning_budget: Option<i64>,
    /// More names that the template may look at.
    #[serde(default, deserialize_with = "given::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

written! {
    /// A text, or items of a conversation.
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

written! {
    /// A function that may be called. Tools of other types have no effect.
    ResponseTool, uses [], {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string"},
            "name": {"type": "string", "minLength": 1, "maxLength": 128},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
            "strict": {"type": ["boolean", "null"], "description": "Its calls keep to the schema, also where the model is free to call it or not."},
        },
    }
}

written! {
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
                    "tools": {"type": "array", "items": {"type": "object"}, "description": "Of each the type and the name."},
                },
            },
        ],
    }
}

written! {
    /// Whether to think, and whether thoughts are shown as their own summary.
    ResponseReasoning, uses [], {
        "type": ["object", "null"],
        "properties": {
            "effort": {"type": ["string", "null"], "description": "none: no thinking."},
            "summary": {"type": ["string", "null"]},
        },
    }
}

written! {
    /// What the text of the answer is.
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
            "verbosity": {"type": ANY, "description": "It has no effect."},
        },
    }
}

/// How the answer is to be told.
#[derive(Default)]
pub struct Wishes {
    /// Thoughts are shown as their own summary.
    pub as_summary: bool,
    /// Thoughts travel with the client.
    pub carried: bool,
    /// How likely the tokens of its text were is told.
    pub with_logprobs: bool,
    /// Which is the one that names those tokens.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Fields of the request that the answer repeats.
    pub echo: Map<String, Value>,
    /// Where the functions are that may be called.
    pub namespaces: Namespaces,
}

/// Fields that would change the answer if they were obeyed, and why they are not.
const REFUSED: [(&str, &str); 4] = [
    ("previous_response_id", "no responses are stored here: send the whole conversation as input"),
    ("conversation", "no conversations are stored here: send the whole conversation as input"),
    ("prompt", "no prompts are stored here: send it as instructions and input"),
    ("background", "responses are not computed in the background"),
];

const CARRY: &str = "reasoning.encrypted_content";
const LOGPROBS: &str = "message.output_text.logprobs";

pub fn invalid(field: &str, what: &str) -> ApiError {
    ApiError::invalid(field, format!("{field}: {what}"))
}

impl ResponsesRequest {
    /// # Errors
    /// What cannot be what it is, and what cannot be obeyed, by name.
    pub fn asked(self) -> Result<(ChatRequest, Wishes), ApiError> {
        self.check_others()?;
        let mut wishes = self.wishes();
        // 1. What was said
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions.filter(|i| !i.is_empty()) {
            messages.push(json!({"role": "system", "content": instructions}));
        }
        take_input(&self.input, &mut messages)?;
        // 2. Tools
        let tools = self.tools.unwrap_or_default();
        let strict = strict_functions(&tools);
        let (functions, namespaces) = functions(&tools)?;
        wishes.namespaces = namespaces;
        let tools = (!functions.is_empty()).then_some(Value::Array(functions));
        let tool_choice = tool_choice(&self.tool_choice)?;
        // 3. The answer
        let effort = self.reasoning["effort"].as_str();
        let thinking = match effort {
            None => Thinking::Default,
            Some("none") => Thinking::Off,
            Some(_) => Thinking::On,
        };
        let mut extra = self.chat_template_kwargs;
        if let Some(effort) = effort.filter(|e| *e != "none") {
            extra.entry("reasoning_effort").or_insert(effort.into());
        }
        let common = SamplingFields {
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
        let format = format_of("text.format", &self.text["format"])?;
        if one_call && tool_choice == ToolChoice::Auto && format.is_none() && tools.is_some() && strict.is_empty() {
            ignore("parallel_tool_calls");
        }
        let budget = self.reasoning_budget.and_then(|tokens| usize::try_from(tokens).ok());
        let demanded = OutputSpec::new(tools, &tool_choice, !one_call, format, budget)?.strictly(strict, !one_call);
        let top = self.top_logprobs.unwrap_or(0);
        if top > MOST_LOGPROBS {
            return Err(ApiError::invalid(
                "top_logprobs",
                format!("top_logprobs is {top}; it must be at most {MOST_LOGPROBS}"),
            ));
        }
        let logprobs = wishes.with_logprobs.then_some(top);
        Ok((ChatRequest { messages, demanded, thinking, extra, logprobs, common }, wishes))
    }

    /// Which model it names.
    pub fn model(&self) -> Option<&str> {
        self.others.get("model").and_then(Value::as_str)
    }

    fn check_others(&self) -> Result<(), ApiError> {
        for (field, value) in &self.others {
            let asks = !value.is_null() && *value != json!(false);
            match REFUSED.iter().find(|(name, _)| name == field) {
                Some((name, why)) if asks => return Err(invalid(name, why)),
                Some(_) => {}
                None if field == "model" || value.is_null() => {}
                None => ignore(field),
            }
        }
        if !self.metadata.is_null() {
            ignore("metadata");
        }
        if !self.text["verbosity"].is_null() {
            ignore("text.verbosity");
        }
        let included = self.include.iter().flatten().filter(|name| ![CARRY, LOGPROBS].contains(&name.as_str()));
        included.for_each(|name| ignore(&format!("include.{name}")));
        Ok(())
    }

    fn wishes(&self) -> Wishes {
        let or = |value: &Value, default: Value| if value.is_null() { default } else { value.clone() };
        let echo = json!({
            "instructions": self.instructions, "max_output_tokens": self.max_output_tokens.filter(|most| *most < usize::MAX), "metadata": or(&self.metadata, json!({})),
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true), "temperature": self.temperature, "top_p": self.top_p,
            "tool_choice": or(&self.tool_choice, "auto".into()), "tools": self.tools.clone().unwrap_or_default(),
            "reasoning": or(&self.reasoning, json!({"effort": null, "summary": null})),
            "text": or(&self.text, json!({"format": {"type": "text"}})),
        });
        Wishes {
            as_summary: !self.reasoning["summary"].is_null(),
            carried: self.include.iter().flatten().any(|name| name == CARRY),
            with_logprobs: self.include.iter().flatten().any(|name| name == LOGPROBS),
            echo: echo.as_object().cloned().unwrap_or_default(),
            namespaces: Namespaces::default(),
            tokenizer: None,
        }
    }
}

/// Puts what was said behind `messages`. What the assistant thought, said and called without being spoken to is one message.
fn take_input(input: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let items = match input {
        Value::String(text) => {
            messages.push(json!({"role": "user", "content": text}));
            return Ok(());
        }
        Value::Array(items) => items,
        Value::Null => return Err(invalid("input", "it is missing")),
        _ => return Err(invalid("input", "neither a text nor a list of items")),
    };
    let mut turn = Turn::default();
    for (i, item) in items.iter().enumerate() {
        let name = format!("input[{i}]");
        // Messages may do without a type.
        let kind = item["type"].as_str().unwrap_or(if item["role"].is_string() { "message" } else { "" });
        match kind {
            "message" if item["role"] == "assistant" => turn.text += &words(&name, &item["content"], "")?,
            "message" => {
                turn.end(messages);
                let role = item["role"].as_str().unwrap_or("");
                if !["user", "system", "developer"].contains(&role) {
                    let what = format!("{role:?} is none of user, assistant, system and developer");
                    return Err(invalid(&format!("{name}.role"), &what));
                }
                messages.push(json!({"role": role, "content": words(&name, &item["content"], "\n")?}));
            }
            "reasoning" => {
                if turn.has_answered() {
                    turn.end(messages);
                }
                turn.thoughts += &thought(item);
            }
            "function_call" | "custom_tool_call" => turn.calls.push(call(&name, kind, item)?),
            "function_call_output" | "custom_tool_call_output" => {
                turn.end(messages);
                let id = item["call_id"].as_str().ok_or_else(|| invalid(&name, "it has no call_id"))?;
                let content = output(&item["output"]);
                messages.push(json!({"role": "tool", "content": content, "tool_call_id": id}));
            }
            "item_reference" => return Err(invalid(&name, "no items are stored here: send the item itself")),
            // What other tools did, elsewhere.
            kind => ignore(&format!("input.{kind}")),
        }
    }
    turn.end(messages);
    Ok(())
}

fn text_of(part: &Value) -> Option<&str> {
    match part["type"].as_str()? {
        "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" => part["text"].as_str(),
        "refusal" => part["refusal"].as_str(),
        _ => None,
    }
}

fn kind_of(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("no type")
}

/// A message's content, which may be words alone.
fn words(name: &str, content: &Value, between: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Null => return Ok(String::new()),
        Value::Array(parts) => parts,
        _ => return Err(invalid(&format!("{name}.content"), "neither a text nor a list of parts")),
    };
    let one = |(i, part)| {
        let name = || format!("{name}.content[{i}]");
        text_of(part).ok_or_else(|| invalid(&name(), &format!("parts of {} are not supported", kind_of(part))))
    };
    Ok(parts.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>()?.join(between))
}

/// What a tool gave. A conversation goes on where it was a picture; the model is told that it cannot see it.
fn output(output: &Value) -> String {
    let one = |part: &Value| {
        text_of(part).map_or_else(
            || {
                let kind = kind_of(part);
                ignore(&format!("output.{kind}"));
                format!("[{kind}: it cannot be shown to this model]")
            },
            str::to_owned,
        )
    };
    match output {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        Value::Array(parts) => parts.iter().map(one).collect::<Vec<_>>().join("\n"),
        other => other.to_string(),
    }
}

/// The text of a thought: as it was carried by the client, as it was shown, or as it was summed up.
fn thought(item: &Value) -> String {
    let parts = |field: &str| {
        let parts = item[field].as_array()?;
        let text: String = parts.iter().filter_map(text_of).collect();
        (!text.is_empty()).then_some(text)
    };
    let carried = item["encrypted_content"].as_str();
    let own = carried.and_then(brought_back);
    if carried.is_some() && own.is_none() {
        ignore("input.reasoning.encrypted_content");
    }
    own.or_else(|| parts("content")).or_else(|| parts("summary")).unwrap_or_default()
}

fn call(name: &str, kind: &str, item: &Value) -> Result<Value, ApiError> {
    let (Some(id), Some(tool)) = (item["call_id"].as_str(), item["name"].as_str()) else {
        return Err(invalid(name, "a call needs a call_id and a name"));
    };
    let tool = &joined(item["namespace"].as_str(), tool);
    if kind == "custom_tool_call" {
        return Ok(tool_call(id, tool, json!({"input": item["input"]})));
    }
    // As it came: what the model wrote is rendered to the letter.
    let arguments = match &item["arguments"] {
        Value::String(text) if text.trim().is_empty() => json!({}),
        other => other.clone(),
    };
    Ok(tool_call(id, tool, arguments))
}

/// What models call those of the functions that are strict.
fn strict_functions(tools: &[Value]) -> Vec<String> {
    let within = |space: &Value| {
        let namespace = space["name"].as_str();
        let own = strict_names(space["tools"].as_array().into_iter().flatten());
        own.into_iter().map(move |name| joined(namespace, &name)).collect::<Vec<_>>()
    };
    let spaces = tools.iter().filter(|tool| tool["type"] == "namespace");
    strict_names(tools.iter().filter(|tool| tool["type"] == "function"))
        .into_iter()
        .chain(spaces.flat_map(within))
        .collect()
}

fn tool_choice(choice: &Value) -> Result<ToolChoice, ApiError> {
    match (choice.as_str().or_else(|| choice["type"].as_str()), choice["name"].as_str()) {
        (None, _) if choice.is_null() => Ok(ToolChoice::Auto),
        (Some("auto"), _) => Ok(ToolChoice::Auto),
        (Some("none"), _) => Ok(ToolChoice::None),
        (Some("required"), _) => Ok(ToolChoice::Required),
        (Some("function"), Some(name)) => Ok(ToolChoice::Named(joined(choice["namespace"].as_str(), name))),
        (Some("allowed_tools"), _) => {
            let one = |tool: &Value| Some(joined(tool["namespace"].as_str(), tool["name"].as_str()?));
            let names = choice["tools"].as_array().and_then(|all| all.iter().map(one).collect());
            let wrong =
                || invalid("tool_choice", "allowed tools are a mode (auto or required) and a list of functions");
            allowed_tools(&choice["mode"], names).ok_or_else(wrong)
        }
        _ => {
            let shown: String = choice.to_string().chars().take(60).collect();
            Err(invalid("tool_choice", &format!("{shown} is not supported: auto, none, required or a function")))
        }
    }
}

#[cfg(test)]
mod tests {
    use sluice_engine::GrammarFormat;

    use super::*;
    use crate::openai::responses::carried;

    fn asked(request: Value) -> Result<(ChatRequest, Wishes), ApiError> {
        serde_json::from_value::<ResponsesRequest>(request).unwrap().asked()
    }

    #[test]
    fn items_of_an_agent_become_what_templates_take() {
        let (asked, wishes) = asked(json!({
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
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": carried("long")},
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
            asked.messages,
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
        assert_eq!(asked.demanded.tools, Some(json!([{"type": "function", "function": function}])));
        let demand = &asked.demanded.demand;
        assert_eq!((asked.thinking, &demand.form, &demand.called), (Thinking::On, &GrammarFormat::Text, &None));
        assert!(wishes.as_summary && wishes.carried && asked.common.stream);
        assert_eq!(wishes.echo["instructions"], "Be brief.");
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        for (field, value, part) in [
            ("previous_response_id", json!("resp_1"), "previous_response_id: no responses are stored"),
            ("conversation", json!({"id": "c"}), "conversation: "),
            ("background", json!(true), "background: "),
            ("input", json!(5), "input: neither"),
            ("input", json!(null), "input: it is missing"),
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
        let (asked, _) =
            asked(json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}))
                .unwrap();
        assert_eq!(
            (asked.demanded.demand.form, asked.demanded.blame),
            (GrammarFormat::Schema(json!({})), "text.format")
        );
    }
}
