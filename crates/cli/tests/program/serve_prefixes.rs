//! A conversation with tools in each dialect, by a client that sends back what it was given: every request finds what was computed for the ones before it.

use crate::support;

use serde_json::{Value, json};
use support::server::Server;
use support::{demo_with, sluice};

/// Like Qwen3.5's template: calls in XML, and thoughts, which are dropped up to the user's last message unless `preserve_thinking` is set.
const TEMPLATE: &str = "{%- set ns = namespace(last=-1) %}\
    {%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
    {%- if tools %}{{- '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{%- endif %}\
    {%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' }}\
    {%- if m.role == 'assistant' and (loop.index0 > ns.last or preserve_thinking) %}{{- '<think>\\n' ~ (m.reasoning_content or '') ~ '\\n</think>\\n\\n' }}{%- endif %}\
    {{- m.content }}\
    {%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}\
    {%- for name, value in c.function.arguments | items %}{{- '<parameter=' ~ name ~ '>\\n' ~ (value | string) ~ '\\n</parameter>\\n' }}{%- endfor %}\
    {{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{{- '<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n' }}{%- endif %}";
const SPECIAL: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];

/// Names and forms of a dialect.
struct Dialect {
    path: &'static str,
    /// The field with the conversation.
    said: &'static str,
    tools: Value,
    /// Forces the model to call a tool, or not to.
    must: [Value; 2],
    most: &'static str,
    /// Fields that limit a thought.
    budget: Value,
    /// The field of a thought.
    thought: &'static str,
    user: fn(&str) -> Value,
    /// What the client sends back of an answer, and the id of its call.
    echo: fn(&Value) -> (Vec<Value>, Option<Value>),
    result: fn(&Value, &str) -> Value,
    /// Prompt tokens, and how many of them were cached.
    usage: fn(&Value) -> (u64, u64),
}

fn schema() -> Value {
    let path = json!({"type": "string", "maxLength": 12});
    json!({"type": "object", "properties": {"path": path, "lines": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["path", "lines"], "additionalProperties": false})
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

fn chat() -> Dialect {
    Dialect {
        path: "/v1/chat/completions",
        said: "messages",
        tools: json!([{"type": "function", "function": {"name": "read", "parameters": schema()}}]),
        must: [json!("required"), json!("none")],
        most: "max_tokens",
        budget: json!({"reasoning_budget": 6}),
        thought: "reasoning_content",
        user: |text| json!({"role": "user", "content": text}),
        echo: |answer| {
            let message = &answer["choices"][0]["message"];
            (vec![message.clone()], message["tool_calls"][0].get("id").cloned())
        },
        result: |id, text| json!({"role": "tool", "tool_call_id": id, "content": text}),
        usage: |answer| {
            let usage = &answer["usage"];
            (count(&usage["prompt_tokens"]), count(&usage["prompt_tokens_details"]["cached_tokens"]))
        },
    }
}

fn responses() -> Dialect {
    Dialect {
        path: "/v1/responses",
        said: "input",
        tools: json!([{"type": "function", "name": "read", "parameters": schema()}]),
        must: [json!("required"), json!("none")],
        most: "max_output_tokens",
        budget: json!({"reasoning_budget": 6, "include": ["reasoning.encrypted_content"]}),
        thought: "encrypted_content",
        user: |text| json!({"role": "user", "content": [{"type": "input_text", "text": text}]}),
        echo: |answer| {
            let items = answer["output"].as_array().unwrap();
            let call = items.iter().find(|item| item["type"] == "function_call");
            (items.clone(), call.map(|call| call["call_id"].clone()))
        },
        result: |id, text| json!({"type": "function_call_output", "call_id": id, "output": text}),
        usage: |answer| {
            let usage = &answer["usage"];
            (count(&usage["input_tokens"]), count(&usage["input_tokens_details"]["cached_tokens"]))
        },
    }
}

fn messages() -> Dialect {
    Dialect {
        path: "/v1/messages",
        said: "messages",
        tools: json!([{"name": "read", "input_schema": schema()}]),
        must: [json!({"type": "any", "disable_parallel_tool_use": true}), json!({"type": "none"})],
        most: "max_tokens",
        budget: json!({"thinking": {"type": "enabled", "budget_tokens": 6}}),
        thought: "signature",
        user: |text| json!({"role": "user", "content": text}),
        echo: |answer| {
            let blocks = answer["content"].as_array().unwrap();
            let call = blocks.iter().find(|block| block["type"] == "tool_use");
            (vec![json!({"role": "assistant", "content": blocks})], call.map(|call| call["id"].clone()))
        },
        result: |id, text| json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]}),
        usage: |answer| {
            let usage = &answer["usage"];
            let read = count(&usage["cache_read_input_tokens"]);
            (count(&usage["input_tokens"]) + count(&usage["cache_creation_input_tokens"]) + read, read)
        },
    }
}

/// What happens to thoughts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Thoughts {
    None,
    /// They stay in the conversation.
    Kept,
    /// They are dropped with the user's next message.
    Stripped,
}

/// Three questions, each with two calls and an answer.
fn converse(dialect: &Dialect, thoughts: Thoughts) {
    let Some(folder) = demo_with(TEMPLATE, &SPECIAL) else { return };
    let server = Server::of(sluice(&["serve", folder.path().to_str().unwrap(), "--port", "0"]));
    let thinks = thoughts != Thoughts::None;
    let mut said: Vec<Value> = Vec::new();
    // Tokens of the last prompt, and of the one right after the user's last message.
    let (mut before, mut asked) = (0, 0);
    for turn in 0..3 {
        said.push((dialect.user)(&format!("What does part {turn} say?")));
        for step in 0..3 {
            let calls = step < 2;
            let mut body = json!({
                "tools": dialect.tools, "tool_choice": dialect.must[usize::from(!calls)], "parallel_tool_calls": false, "temperature": 0,
                "chat_template_kwargs": {"thinks": thinks, "preserve_thinking": thoughts != Thoughts::Stripped},
            });
            body[dialect.said] = said.clone().into();
            body[dialect.most] = (if calls { 160 } else { 24 }).into();
            if thinks {
                body.as_object_mut().unwrap().extend(dialect.budget.as_object().unwrap().clone());
            }
            let (status, answer) = server.post(dialect.path, &body);
            assert_eq!(status, 200, "{answer}");
            let (prompt, cached) = (dialect.usage)(&answer);
            let what = format!("{} {thoughts:?}, question {turn}, step {step}: {cached} of {prompt}", dialect.path);
            if thoughts == Thoughts::Stripped && step == 0 {
                // Where the conversations diverge: after the user's last message, which the start of an answer followed.
                assert!(cached + 8 >= asked, "{what} were there, and {asked} at the last question");
            } else {
                assert!(cached + 1 >= before, "{what} were there, and {before} at the last request");
            }
            if step == 0 {
                asked = prompt;
            }
            before = prompt;
            // What a client sends back
            let (echo, id) = (dialect.echo)(&answer);
            assert_eq!(id.is_some(), calls, "{answer}");
            if thinks {
                assert!(Value::from(echo.clone()).to_string().contains(dialect.thought), "{answer}");
            }
            said.extend(echo);
            said.extend(id.map(|id| (dialect.result)(&id, &format!("Line {step} of part {turn}: a fox."))));
        }
    }
}

#[test]
fn a_conversation_in_chat_completions_finds_its_prefix() {
    [Thoughts::None, Thoughts::Kept, Thoughts::Stripped].into_iter().for_each(|thoughts| converse(&chat(), thoughts));
}

#[test]
fn a_conversation_in_responses_finds_its_prefix() {
    [Thoughts::None, Thoughts::Kept, Thoughts::Stripped]
        .into_iter()
        .for_each(|thoughts| converse(&responses(), thoughts));
}

#[test]
fn a_conversation_in_messages_finds_its_prefix() {
    [Thoughts::None, Thoughts::Kept, Thoughts::Stripped]
        .into_iter()
        .for_each(|thoughts| converse(&messages(), thoughts));
}

/// Like gpt-oss's template: messages with channels, in which calls are written in another way than the model's.
const HARMONY: &str = "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>\
    {%- if tools %}{{- '<|start|>developer<|message|>' ~ (tools | tojson) ~ '<|end|>' }}{%- endif %}\
    {%- set last = namespace(name='') %}\
    {%- for m in messages %}\
    {%- if m.role == 'assistant' and m.tool_calls %}{%- set c = m.tool_calls[0].function %}{%- set last.name = c.name %}\
    {{- '<|start|>assistant to=functions.' ~ c.name ~ '<|channel|>commentary json<|message|>' ~ (c.arguments | tojson) ~ '<|call|>' }}\
    {%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}\
    {%- elif m.role == 'tool' %}{{- '<|start|>functions.' ~ last.name ~ ' to=assistant<|channel|>commentary<|message|>' ~ (m.content | tojson) ~ '<|end|>' }}\
    {%- else %}{{- '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{%- endif %}{%- endfor %}\
    {%- if add_generation_prompt %}<|start|>assistant{%- endif %}";
const MARKS: [&str; 7] =
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"];

/// Questions with calls in the harmony format. After a call the prompt before it is found; after an answer, all up to the last question.
fn converse_in_harmony(dialect: &Dialect) {
    let Some(folder) = demo_with(HARMONY, &MARKS) else { return };
    let server = Server::of(sluice(&["serve", folder.path().to_str().unwrap(), "--port", "0"]));
    let mut said: Vec<Value> = Vec::new();
    let (mut before, mut asked) = (0, 0);
    for turn in 0..2 {
        said.push((dialect.user)(&format!("What does part {turn} say?")));
        for step in 0..3 {
            let calls = step < 2;
            let mut body = json!({
                "tools": dialect.tools, "tool_choice": dialect.must[usize::from(!calls)], "parallel_tool_calls": false, "temperature": 1,
            });
            body[dialect.said] = said.clone().into();
            body[dialect.most] = (if calls { 160 } else { 24 }).into();
            // A model that was not trained for it may think for ever.
            let found = (0..60).find_map(|seed| {
                body["seed"] = seed.into();
                let (status, answer) = server.post(dialect.path, &body);
                assert_eq!(status, 200, "{answer}");
                let (echo, id) = (dialect.echo)(&answer);
                let first = (seed == 0).then(|| (dialect.usage)(&answer));
                if let Some((prompt, cached)) = first {
                    let what = format!("{} question {turn}, step {step}: {cached} of {prompt}", dialect.path);
                    match step {
                        0 => assert!(cached + 8 >= asked, "{what} were there, and {asked} at the last question"),
                        _ => assert!(cached + 1 >= before, "{what} were there, and {before} at the last request"),
                    }
                    asked = if step == 0 { prompt } else { asked };
                    before = prompt;
                }
                assert!(!answer.to_string().contains("<|"), "{answer}");
                (id.is_some() == calls).then_some((echo, id))
            });
            let (echo, id) = found.unwrap_or_else(|| panic!("{}: no call", dialect.path));
            said.extend(echo);
            said.extend(id.map(|id| (dialect.result)(&id, &format!("Line {step} of part {turn}: a fox."))));
        }
    }
}

#[test]
fn a_conversation_in_the_harmony_format_finds_its_prefix() {
    [chat(), responses(), messages()].iter().for_each(converse_in_harmony);
}
