//! From the items of an input to messages.

use serde_json::{Value, json};

use crate::api::messages::{AssistantTurn, tool_call};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::openai::responses::thoughts::decode_thought;
use crate::openai::responses::tools::joined;

/// Appends the messages of an input. Consecutive items of the assistant become one message.
///
/// # Errors
/// An invalid item, by its place.
pub fn append_input(input: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let items = match input {
        Value::String(text) => {
            messages.push(json!({"role": "user", "content": text}));
            return Ok(());
        }
        Value::Array(items) => items,
        Value::Null => return Err(ApiError::invalid_field("input", "is missing")),
        _ => return Err(ApiError::invalid_field("input", "must be a string or a list of items")),
    };
    let mut turn = AssistantTurn::default();
    for (i, item) in items.iter().enumerate() {
        let name = format!("input[{i}]");
        // Messages may omit the type.
        let kind = item["type"].as_str().unwrap_or(if item["role"].is_string() { "message" } else { "" });
        match kind {
            "message" if item["role"] == "assistant" => turn.text += &content_text(&name, &item["content"], "")?,
            "message" => {
                turn.flush_into(messages);
                let role = item["role"].as_str().unwrap_or("");
                if !["user", "system", "developer"].contains(&role) {
                    let what = format!("{role:?} is not a role; it must be user, assistant, system or developer");
                    return Err(ApiError::invalid_field(&format!("{name}.role"), &what));
                }
                messages.push(json!({"role": role, "content": content_text(&name, &item["content"], "\n")?}));
            }
            "reasoning" => {
                if turn.has_answered() {
                    turn.flush_into(messages);
                }
                turn.thoughts += &reasoning_text(item);
            }
            "function_call" | "custom_tool_call" => turn.calls.push(function_call(&name, kind, item)?),
            "function_call_output" | "custom_tool_call_output" => {
                turn.flush_into(messages);
                let id = item["call_id"].as_str().ok_or_else(|| ApiError::invalid_field(&name, "has no call_id"))?;
                let content = output_text(&item["output"]);
                messages.push(json!({"role": "tool", "content": content, "tool_call_id": id}));
            }
            "item_reference" => {
                return Err(ApiError::invalid_field(&name, "no items are stored: send the item itself"));
            }
            // Records of tools that ran elsewhere.
            kind => note_ignored(&format!("input.{kind}")),
        }
    }
    turn.flush_into(messages);
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

/// The text of a message's content, with its parts joined by `separator`.
fn content_text(name: &str, content: &Value, separator: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Null => return Ok(String::new()),
        Value::Array(parts) => parts,
        _ => return Err(ApiError::invalid_field(&format!("{name}.content"), "must be a string or a list of parts")),
    };
    let one = |(i, part)| {
        let name = || format!("{name}.content[{i}]");
        text_of(part)
            .ok_or_else(|| ApiError::invalid_field(&name(), &format!("parts of {} are not supported", kind_of(part))))
    };
    Ok(parts.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>()?.join(separator))
}

/// The text of a tool's output. An image in it does not end the conversation; the model is told that it cannot see it.
fn output_text(output: &Value) -> String {
    let one = |part: &Value| {
        text_of(part).map_or_else(
            || {
                let kind = kind_of(part);
                note_ignored(&format!("output.{kind}"));
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

/// The text of a reasoning item: from `encrypted_content`, or else from its content or its summary.
fn reasoning_text(item: &Value) -> String {
    let parts = |field: &str| {
        let parts = item[field].as_array()?;
        let text: String = parts.iter().filter_map(text_of).collect();
        (!text.is_empty()).then_some(text)
    };
    let encrypted = item["encrypted_content"].as_str();
    let own = encrypted.and_then(decode_thought);
    if encrypted.is_some() && own.is_none() {
        note_ignored("input.reasoning.encrypted_content");
    }
    own.or_else(|| parts("content")).or_else(|| parts("summary")).unwrap_or_default()
}

fn function_call(name: &str, kind: &str, item: &Value) -> Result<Value, ApiError> {
    let (Some(id), Some(tool)) = (item["call_id"].as_str(), item["name"].as_str()) else {
        return Err(ApiError::invalid_field(name, "a call needs a call_id and a name"));
    };
    let tool = &joined(item["namespace"].as_str(), tool);
    if kind == "custom_tool_call" {
        return Ok(tool_call(id, tool, json!({"input": item["input"]})));
    }
    // Unchanged, so that what the model wrote is rendered exactly.
    let arguments = match &item["arguments"] {
        Value::String(text) if text.trim().is_empty() => json!({}),
        other => other.clone(),
    };
    Ok(tool_call(id, tool, arguments))
}
