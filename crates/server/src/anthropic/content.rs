//! From messages and their blocks to what chat templates take.

use serde_json::{Map, Value, json};

use crate::anthropic::tools::OfferedTools;
use crate::api::messages::{AssistantTurn, tool_call};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;

/// A message as chat templates take it. `marked`: it has `cache_control`.
pub fn message(role: &str, content: String, marked: bool) -> Value {
    let mut message = json!({"role": role, "content": content});
    if marked {
        message["cache_control"] = json!({});
    }
    message
}

/// Whether a `cache_control` is set.
pub fn is_marked(value: Option<&Value>) -> bool {
    value.is_some_and(|v| !v.is_null())
}

/// The blocks of a content; a string is one block.
fn blocks(content: &Value) -> Option<Vec<Value>> {
    match content {
        Value::String(text) => Some(vec![json!({"type": "text", "text": text})]),
        Value::Array(blocks) => Some(blocks.clone()),
        _ => None,
    }
}

/// The text of a content that may have only text blocks, and whether one of them is marked. `first` converts the first block.
///
/// # Errors
/// A block without text, by its place.
pub fn text_blocks(name: &str, content: &Value, first: fn(&str) -> String) -> Result<(String, bool), ApiError> {
    let blocks =
        blocks(content).ok_or_else(|| ApiError::invalid_field(name, "must be a string or a list of blocks"))?;
    let mut all = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let name = format!("{name}.{i}");
        let text = text_of(block).ok_or_else(|| unsupported(&name, block))?;
        all.push(if i == 0 { first(&text) } else { text });
    }
    Ok((all.join("\n"), blocks.iter().any(|block| is_marked(block.get("cache_control")))))
}

fn unsupported(name: &str, block: &Value) -> ApiError {
    if kind_of(block) == "text" {
        return ApiError::invalid_field(name, "has no text");
    }
    ApiError::invalid_field(name, &format!("blocks of {} are not supported", kind_of(block)))
}

fn kind_of(block: &Value) -> &str {
    block["type"].as_str().unwrap_or("no type")
}

/// The text of a block; `None` if it is not text.
fn text_of(block: &Value) -> Option<String> {
    match kind_of(block) {
        "text" => block["text"].as_str().map(str::to_owned),
        "document" if block["source"]["type"] == "text" => block["source"]["data"].as_str().map(str::to_owned),
        "document" if block["source"]["type"] == "content" => {
            text_blocks("", &block["source"]["content"], str::to_owned).ok().map(|(text, _)| text)
        }
        "search_result" => text_blocks("", &block["content"], str::to_owned).ok().map(|(text, _)| text),
        _ => None,
    }
}

/// Appends a message. Blocks of the assistant collect in `turn`, which ends with the next message of somebody else.
///
/// # Errors
/// An invalid block, by its place.
pub fn append_message(
    i: usize,
    source: &Map<String, Value>,
    turn: &mut AssistantTurn,
    offered: &mut OfferedTools,
    messages: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let name = format!("messages.{i}.content");
    let blocks = source
        .get("content")
        .and_then(blocks)
        .ok_or_else(|| ApiError::invalid_field(&name, "must be a string or a list of blocks"))?;
    match source.get("role").and_then(Value::as_str).unwrap_or_default() {
        "assistant" => {
            for (at, block) in blocks.iter().enumerate() {
                append_assistant_block(&format!("{name}.{at}"), block, turn)?;
            }
        }
        "user" => {
            turn.flush_into(messages);
            let mut words: Option<(String, bool)> = None;
            for (at, block) in blocks.iter().enumerate() {
                let name = format!("{name}.{at}");
                let marked = is_marked(block.get("cache_control"));
                if kind_of(block) == "tool_result" {
                    messages.extend(words.take().map(|(text, marked)| message("user", text, marked)));
                    messages.push(tool_result(&name, block, marked, offered)?);
                    continue;
                }
                let text = text_of(block).ok_or_else(|| unsupported(&name, block))?;
                let (all, is_marked) = words.get_or_insert_default();
                if !all.is_empty() {
                    all.push('\n');
                }
                *all += &text;
                *is_marked |= marked;
            }
            messages.extend(words.map(|(text, marked)| message("user", text, marked)));
        }
        "system" => {
            turn.flush_into(messages);
            let mut words = Vec::new();
            for (at, block) in blocks.iter().enumerate() {
                let name = format!("{name}.{at}");
                let text = text_of(block).map_or_else(|| offered.change(&name, block), |text| Ok(Some(text)))?;
                words.push(text.ok_or_else(|| unsupported(&name, block))?);
            }
            let marked = blocks.iter().any(|block| is_marked(block.get("cache_control")));
            messages.push(message("system", words.join("\n"), marked));
        }
        role => {
            return Err(ApiError::invalid_field(
                &format!("messages.{i}.role"),
                &format!("{role:?} is not a role; it must be user, assistant or system"),
            ));
        }
    }
    Ok(())
}

/// Appends a block of the assistant's message.
fn append_assistant_block(name: &str, block: &Value, turn: &mut AssistantTurn) -> Result<(), ApiError> {
    turn.has_cache_control |= is_marked(block.get("cache_control"));
    match kind_of(block) {
        "text" => turn.text += block["text"].as_str().ok_or_else(|| ApiError::invalid_field(name, "has no text"))?,
        "thinking" => {
            turn.thoughts +=
                block["thinking"].as_str().ok_or_else(|| ApiError::invalid_field(name, "has no thinking"))?
        }
        "tool_use" => {
            let (Some(id), Some(tool)) = (block["id"].as_str(), block["name"].as_str()) else {
                return Err(ApiError::invalid_field(name, "a tool_use needs an id and a name"));
            };
            let arguments = block.get("input").filter(|v| v.is_object()).cloned().unwrap_or_else(|| json!({}));
            turn.calls.push(tool_call(id, tool, arguments));
        }
        // Readable only for the server that made them, or records of tools that ran elsewhere.
        kind => note_ignored(&format!("messages.content.{kind}")),
    }
    Ok(())
}

fn tool_result(name: &str, block: &Value, marked: bool, offered: &mut OfferedTools) -> Result<Value, ApiError> {
    let id = block["tool_use_id"]
        .as_str()
        .ok_or_else(|| ApiError::invalid_field(name, "a tool_result needs a tool_use_id"))?;
    let content = block.get("content").filter(|c| !c.is_null());
    let blocks = content.map_or_else(|| Some(Vec::new()), blocks);
    let blocks =
        blocks.ok_or_else(|| ApiError::invalid_field(name, "its content must be a string or a list of blocks"))?;
    let mut words = |block: &Value| {
        let found = block["tool_name"].as_str().filter(|_| kind_of(block) == "tool_reference");
        let known = text_of(block).or_else(|| offered.refer(found?));
        known.unwrap_or_else(|| {
            // An image in a result does not end the conversation; the model is told that it cannot see it.
            let kind = kind_of(block);
            note_ignored(&format!("tool_result.content.{kind}"));
            format!("[{kind}: it cannot be shown to this model]")
        })
    };
    let text: Vec<String> = blocks.iter().map(&mut words).collect();
    let marked = marked || blocks.iter().any(|b| is_marked(b.get("cache_control")));
    let mut message = message("tool", text.join("\n"), marked);
    message["tool_call_id"] = id.into();
    if block["is_error"] == true {
        message["is_error"] = true.into();
    }
    Ok(message)
}
