//! From messages of OpenAI's dialect to what chat templates take.

use serde_json::{Map, Value, json};

use crate::http::error::ApiError;

/// Converts messages: content in parts becomes one string, and missing content of an assistant or a tool becomes an empty one.
///
/// # Errors
/// A missing role; content that is not text; invalid tool calls.
pub fn chat_messages(all: Vec<Map<String, Value>>) -> Result<Vec<Value>, ApiError> {
    let one = |(i, mut message): (usize, Map<String, Value>)| {
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(ApiError::invalid(&format!("messages[{i}].role"), format!("messages[{i}] has no role")));
        }
        if let Some(Value::Array(parts)) = message.get("content") {
            let mut text = String::new();
            let marked = parts.iter().any(|part| part.get("cache_control").is_some_and(|c| !c.is_null()));
            for part in parts {
                match (part["type"].as_str(), part["text"].as_str()) {
                    (Some("text"), Some(part)) => text += part,
                    (kind, text) => {
                        let message = match (kind, text) {
                            (Some("text"), None) => format!("messages[{i}].content: a text part has no text"),
                            _ => format!(
                                "messages[{i}].content: parts of {} are not supported",
                                kind.unwrap_or("no type")
                            ),
                        };
                        return Err(ApiError::invalid(&format!("messages[{i}].content"), message));
                    }
                }
            }
            message.insert("content".into(), Value::String(text));
            if marked {
                // A part has the mark, but it applies to the whole message.
                message.insert("cache_control".into(), json!({}));
            }
        }
        let is = |role: &str| message["role"] == role;
        if is("assistant") {
            check_calls(i, &message)?;
        }
        let nothing_said = message.get("content").is_none_or(Value::is_null);
        if nothing_said && ["assistant", "tool", "function"].iter().any(|role| is(role)) {
            message.insert("content".into(), "".into());
        } else if !message.get("content").is_some_and(Value::is_string) {
            let field = format!("messages[{i}].content");
            return Err(ApiError::invalid(&field, format!("{field} must be a string or a list of parts")));
        }
        Ok(Value::Object(message))
    };
    all.into_iter().enumerate().map(one).collect()
}

fn check_calls(i: usize, message: &Map<String, Value>) -> Result<(), ApiError> {
    let field = format!("messages[{i}].tool_calls");
    let wrong = |what: &str| ApiError::invalid(&field, format!("{field} {what}"));
    let calls = match message.get("tool_calls") {
        None | Some(Value::Null) => return Ok(()),
        Some(calls) => calls.as_array().ok_or_else(|| wrong("is not a list"))?,
    };
    for call in calls {
        if !call["function"]["name"].is_string() {
            return Err(wrong("has a call without function.name"));
        }
        if !matches!(call["function"]["arguments"], Value::Null | Value::String(_) | Value::Object(_)) {
            return Err(wrong("has arguments that are neither an object nor a string"));
        }
    }
    Ok(())
}
