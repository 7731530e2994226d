//! Renders earlier answers as the model wrote them. Chat templates write calls in another way, and one call at most. So the template gets a stand-in for each of the
//! assistant's messages, and the whole message that it writes around it is replaced. All else is the template's.
//!
//! Thoughts are rendered as the template has them: those before a call, until an answer without one follows. So a conversation is computed anew from the question
//! before its last answer at most.

use std::ops::Range;

use serde_json::{Value, json};

use super::marks::{CALL, CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, RETURN, START};
use crate::text::answers::stand_in::{Written, stand_in};

/// The messages for a template, in which each of the assistant's is a stand-in, and what replaces these with the message around them.
pub fn history(messages: &[Value]) -> (Vec<Value>, Vec<Vec<Written>>) {
    let mut written = Vec::new();
    let mut rendered = Vec::with_capacity(messages.len());
    let messages = in_turns(messages);
    for (i, message) in messages.iter().enumerate() {
        if message["role"] != "assistant" {
            rendered.push(message.clone());
            continue;
        }
        let call = call_of(message);
        let is_answered = messages[i + 1..].iter().any(|m| m["role"] == "assistant" && call_of(m).is_none());
        let place = stand_in(written.len());
        rendered.push(match call {
            // A template takes the name of a result's tool from the call before it.
            Some(call) => json!({"role": "assistant", "tool_calls": [
                {"type": "function", "function": {"name": call["name"], "arguments": place}},
            ]}),
            None => json!({"role": "assistant", "content": place}),
        });
        written.push(message_text(message, call, call.is_some() && !is_answered));
    }
    (rendered, written)
}

/// The message in a rendered text that has this place in it: from its beginning to the mark that ends it.
pub fn message_around(rendered: &str, place: &Range<usize>) -> Option<Range<usize>> {
    let start = rendered[..place.start].rfind(START)?;
    let behind = &rendered[place.end..];
    let ends = [END, CALL, RETURN].into_iter().filter_map(|mark| Some(behind.find(mark)? + mark.len()));
    Some(start..place.end + ends.min()?)
}

/// One call in each message: further ones follow with their results, by the ids of these, or in order.
fn in_turns(messages: &[Value]) -> Vec<Value> {
    let mut turns = Vec::with_capacity(messages.len());
    let mut rest = messages.iter().peekable();
    while let Some(message) = rest.next() {
        let calls = message["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
        if calls.len() < 2 {
            turns.push(message.clone());
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = rest.next_if(|m| m["role"] == "tool") {
            results.push(result);
        }
        for (i, call) in calls.iter().enumerate() {
            let mut turn = if i == 0 { message.clone() } else { json!({"role": "assistant"}) };
            turn["tool_calls"] = json!([call]);
            turns.push(turn);
            let id = &call["id"];
            let own = results.iter().position(|result| !id.is_null() && result["tool_call_id"] == *id);
            let own = own.or_else(|| results.iter().position(|result| result["tool_call_id"].is_null()));
            turns.extend(own.map(|own| results.remove(own).clone()));
        }
        turns.extend(results.into_iter().cloned());
    }
    turns
}

/// The function that a message calls.
fn call_of(message: &Value) -> Option<&Value> {
    let call = message["tool_calls"].as_array()?.first()?;
    Some(call.get("function").unwrap_or(call))
}

/// A message of the assistant, or several: a thought if it `thinks`, and a text with a call after it.
fn message_text(message: &Value, call: Option<&Value>, thinks: bool) -> Vec<Written> {
    let mark = |parts: &[&str]| Written::Markup(parts.concat());
    let said = |text: &str| Written::Said(text.to_owned());
    let text = |name: &str| message[name].as_str().filter(|text| !text.is_empty());
    let thought = ["reasoning_content", "thinking", "reasoning"].into_iter().find_map(text).filter(|_| thinks);
    let next = [END, START, "assistant"];
    let mut all = vec![mark(&[START, "assistant"])];
    if let Some(thought) = thought {
        all.extend([mark(&[CHANNEL, "analysis", MESSAGE]), said(thought), mark(&next)]);
    }
    let content = message["content"].as_str().unwrap_or_default();
    let Some(call) = call else {
        all.extend([mark(&[CHANNEL, "final", MESSAGE]), said(content), mark(&[END])]);
        return all;
    };
    if !content.is_empty() {
        all.extend([mark(&[CHANNEL, "commentary", MESSAGE]), said(content), mark(&next)]);
    }
    let arguments = match &call["arguments"] {
        Value::String(json) => json.clone(),
        Value::Null => "{}".to_owned(),
        // As the model writes it: without spaces.
        other => other.to_string(),
    };
    all.extend([
        mark(&[CHANNEL, "commentary to=", FUNCTIONS]),
        said(call["name"].as_str().unwrap_or_default()),
        mark(&[" ", CONSTRAIN, "json", MESSAGE]),
        said(&arguments),
        mark(&[CALL]),
    ]);
    all
}
