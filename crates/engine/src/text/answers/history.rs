//! Prepares messages for a template, so that it renders an earlier answer to exactly the text that was generated.
//!
//! Clients send calls back with their arguments as JSON. If these are spaced as the model wrote them, the template gets a stand-in, which is replaced by the arguments in the
//! rendered text. So they come out the same whether a template prints strings as they are or as JSON. If they are compact, the client has rewritten them, and the
//! template prints the object with the spaces that the model was trained with. The same holds for each parameter of a call in XML.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use super::dsml;
use super::gemma;
use super::harmony;
use super::json as text;
use super::marks::{CALL, CALLED, LIST, XTML_JSON, XTML_JSON_END};
use super::stand_in::{STAND_IN, Written, stand_in};
use super::style::{Calls, Style};
use super::xtml;
use crate::text::template::tojson::dumps;

/// The input of a template.
pub struct TemplateHistory {
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
    /// What replaces the stand-ins in the messages.
    pub written: Vec<Vec<Written>>,
    /// It replaces the whole messages that the template writes around them (the harmony format).
    pub whole_messages: bool,
}

impl TemplateHistory {
    /// Unchanged messages.
    pub fn plain(messages: &[Value]) -> TemplateHistory {
        TemplateHistory { messages: messages.to_vec(), tools: None, written: Vec::new(), whole_messages: false }
    }

    /// For templates that use arguments as objects.
    pub fn new(style: Style, messages: &[Value], tools: Option<&Value>) -> TemplateHistory {
        if !style.native && style.calls.is_some() {
            return TemplateHistory::plain(&written(messages, tools));
        }

        let mut echo = TemplateHistory { tools: tools.cloned(), ..TemplateHistory::plain(messages) };
        name_calls(style, &mut echo.messages);
        each_arguments(&mut echo.messages, |arguments| match style.calls {
            Some(Calls::Xml | Calls::Keys | Calls::Invokes) => xml(arguments),
            // DeepSeek's templates join texts.
            Some(Calls::DeepSeek) => match object(arguments) {
                Value::Object(object) => dumps(&Value::Object(object)).into(),
                other => other,
            },
            Some(Calls::Dsml(_)) => named(arguments),
            _ => object(arguments),
        });
        echo
    }

    /// For templates that print arguments as they are, and for the harmony format; `None` if there is nothing for which that makes a difference.
    pub fn verbatim(style: Style, messages: &[Value], tools: Option<&Value>) -> Option<TemplateHistory> {
        let is_ambiguous = || messages.iter().any(|m| m.to_string().contains(STAND_IN));
        if style.is_harmony() {
            let (messages, written) = harmony::history(messages);
            let history = TemplateHistory { messages, tools: tools.cloned(), written, whole_messages: true };
            return Some(history).filter(|history| !history.written.is_empty() && !is_ambiguous());
        }
        let as_json = matches!(
            style.calls,
            Some(
                Calls::Json
                    | Calls::Mistral
                    | Calls::List
                    | Calls::DeepSeek
                    | Calls::Dsml(_)
                    | Calls::Kimi
                    | Calls::Xtml
                    | Calls::Gemma
            )
        );
        if !style.native || !as_json {
            return None;
        }
        let mut echo = TemplateHistory { tools: tools.cloned(), ..TemplateHistory::plain(messages) };
        name_calls(style, &mut echo.messages);
        let mut kept: Vec<Vec<Written>> = Vec::new();
        each_arguments(&mut echo.messages, |arguments| match arguments {
            Value::String(_) | Value::Object(_) if style.calls == Some(Calls::Gemma) => {
                // Its templates sort names.
                let json = arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned);
                match gemma::written(&json) {
                    Some(written) => {
                        kept.push(written);
                        Value::String(stand_in(kept.len() - 1))
                    }
                    None => object(arguments),
                }
            }
            Value::String(json) if matches!(style.calls, Some(Calls::Dsml(_))) => match dsml::written(json) {
                Some(written) => {
                    kept.push(written);
                    Value::String(stand_in(kept.len() - 1))
                }
                None => named(arguments),
            },
            Value::String(json) if style.is_xtml() => match xtml::written(json) {
                Some(written) => {
                    kept.push(written);
                    Value::String(stand_in(kept.len() - 1))
                }
                None => object(arguments),
            },
            Value::String(json) if text::is_spaced(json) && text::fields(json).is_some() => {
                kept.push(vec![Written::Said(json.trim().to_owned())]);
                Value::String(stand_in(kept.len() - 1))
            }
            other => object(other),
        });
        if kept.is_empty() || is_ambiguous() {
            return None;
        }
        echo.written = kept;
        Some(echo)
    }

    /// For templates that explain tools and write no calls (Granite 3): calls are the end of the text. `None`: there are none.
    pub fn calls_in_text(style: Style, messages: &[Value], tools: Option<&Value>) -> Option<TemplateHistory> {
        if style.calls != Some(Calls::List) || messages.iter().any(|m| m.to_string().contains(STAND_IN)) {
            return None;
        }
        let mut echo = TemplateHistory { tools: tools.cloned(), ..TemplateHistory::plain(messages) };
        for message in &mut echo.messages {
            let Some(calls) = message["tool_calls"].as_array().filter(|calls| !calls.is_empty()) else { continue };
            let calls: Vec<String> = calls.iter().map(call).collect();
            let list = Written::Said(format!("[{}]", calls.join(", ")));
            let text = message["content"].as_str().unwrap_or_default().to_owned() + &stand_in(echo.written.len());
            echo.written.push(vec![Written::Markup(LIST.to_owned()), list]);
            message["content"] = text.into();
            message.as_object_mut().map(|fields| fields.shift_remove("tool_calls"));
        }
        (!echo.written.is_empty()).then_some(echo)
    }

    /// Replaces the stand-ins in a rendered text.
    ///
    /// # Errors
    /// When a stand-in does not occur exactly once.
    pub fn filled(&self, mut rendered: String, texts: &[String]) -> Result<String> {
        for (i, text) in texts.iter().enumerate() {
            let stand_in = stand_in(i);
            let mut found = rendered.match_indices(&stand_in).map(|(at, _)| at);
            let (first, second) = (found.next(), found.next());
            ensure!(second.is_none(), "the chat template writes a part of an answer twice");
            let Some(at) = first else { anyhow::bail!("the chat template leaves out a part of an answer") };
            let mut range = at..at + stand_in.len();
            if self.whole_messages {
                let whole = harmony::message_around(&rendered, &range);
                range = whole.context("the chat template writes an answer in an unknown way")?;
            } else if rendered[..at].ends_with('"') && rendered[range.end..].starts_with('"') {
                range = range.start - 1..range.end + 1;
            } else if rendered[..at].ends_with(XTML_JSON) && rendered[range.end..].starts_with(XTML_JSON_END) {
                // As templates write arguments that they cannot take apart.
                range = range.start - XTML_JSON.len()..range.end + XTML_JSON_END.len();
            }
            rendered.replace_range(range, text);
        }
        Ok(rendered)
    }
}

fn each_arguments(messages: &mut [Value], mut replace: impl FnMut(&Value) -> Value) {
    let calls = messages.iter_mut().filter_map(|m| m.get_mut("tool_calls")?.as_array_mut()).flatten();
    for call in calls {
        let function = if call.get("function").is_some() { &mut call["function"] } else { call };
        if let Some(arguments) = function.get_mut("arguments") {
            *arguments = replace(arguments);
        }
    }
}

/// Ids of calls, and messages of tools, as the family's templates want them.
fn name_calls(style: Style, messages: &mut Vec<Value>) {
    match style.calls {
        Some(Calls::Gemma) => gemma::gather_answers(messages),
        Some(Calls::Mistral) => shorten_ids(messages),
        Some(Calls::Kimi) => number_calls(messages),
        _ => {}
    }
}

/// Kimi's templates write a call's id in place of its name: `functions.NAME:0`, with the number of the call in the conversation.
fn number_calls(messages: &mut [Value]) {
    let mut known: HashMap<String, Value> = HashMap::new();
    let mut count = 0;
    for message in messages {
        let own = message.get("tool_call_id").and_then(Value::as_str).and_then(|id| known.get(id)).cloned();
        if let Some(id) = own {
            message["tool_call_id"] = id;
        }
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let function = call.get("function").unwrap_or(call);
            let id = Value::from(format!("functions.{}:{count}", function["name"].as_str().unwrap_or_default()));
            count += 1;
            let Some(call) = call.as_object_mut() else { continue };
            if let Some(Value::String(old)) = call.insert("id".to_owned(), id.clone()) {
                known.insert(old, id);
            }
        }
    }
}

/// Mistral's templates refuse ids of calls that are not nine letters or digits.
fn shorten_ids(messages: &mut [Value]) {
    let short = |id: &mut Value| {
        let Some(text) = id.as_str() else { return };
        if text.len() == 9 && text.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return;
        }
        // FNV-1a: the same id is the same everywhere.
        let mut hash =
            text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let digit = |_| {
            let digit = char::from_digit((hash % 36) as u32, 36).expect("below 36");
            hash /= 36;
            digit
        };
        *id = (0..9).map(digit).collect::<String>().into();
    };
    for message in messages {
        message.get_mut("tool_call_id").map(short);
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
        calls.filter_map(|call| call.get_mut("id")).for_each(short);
    }
}

/// Arguments as an object, if they are one.
fn object(arguments: &Value) -> Value {
    match arguments {
        Value::String(json) if json.trim().is_empty() => json!({}),
        Value::String(json) => match serde_json::from_str(json) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ => arguments.clone(),
        },
        other => other.clone(),
    }
}

/// Arguments by name; those that are no object, for example of a call that was cut off, become a single argument.
fn named(arguments: &Value) -> Value {
    let object = object(arguments);
    if object.is_object() { object } else { json!({"arguments": object}) }
}

/// Arguments by name, with numbers and spaced values as they were written. Templates of this family iterate over the names.
fn xml(arguments: &Value) -> Value {
    let Some(fields) = arguments.as_str().and_then(text::fields) else {
        return named(arguments);
    };
    let value = |json: &str| match serde_json::from_str(json) {
        Ok(Value::Number(_)) => Value::from(json),
        Ok(Value::Array(_) | Value::Object(_)) if text::is_spaced(json) => Value::from(json),
        Ok(value) => value,
        Err(_) => Value::from(json),
    };
    Value::Object(fields.into_iter().map(|(name, json)| (name, value(json))).collect())
}

/// For templates without tools: writes tools and calls into messages, in the format of Hermes.
fn written(messages: &[Value], tools: Option<&Value>) -> Vec<Value> {
    let mut written: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let tools: Vec<String> = tools.and_then(Value::as_array).into_iter().flatten().map(dumps).collect();
    if !tools.is_empty() {
        let system = messages.first().filter(|m| m["role"] == "system" || m["role"] == "developer");
        let said = system.and_then(|m| m["content"].as_str()).unwrap_or_default();
        let gap = if said.is_empty() { "" } else { "\n\n" };
        let mut message = system.cloned().unwrap_or_else(|| json!({"role": "system"}));
        message["content"] = format!(
            "{said}{gap}# Tools\n\nYou may call these functions to answer the user, each described by a JSON schema:\n<tools>\n{}\n</tools>\n\n\
             For each call, write a JSON object with the function's name and arguments between marks:\n\
             {CALL}\n{{\"name\": NAME, \"arguments\": ARGUMENTS}}\n{CALLED}",
            tools.join("\n")
        )
        .into();
        written.push(message);
    }
    let described = usize::from(
        !tools.is_empty() && messages.first().is_some_and(|m| m["role"] == "system" || m["role"] == "developer"),
    );
    let mut before = "";
    for message in &messages[described..] {
        let content = message["content"].as_str().unwrap_or_default();
        let role = message["role"].as_str().unwrap_or_default();
        match message["tool_calls"].as_array().filter(|calls| !calls.is_empty()) {
            _ if role == "tool" => {
                let result = format!("<tool_response>\n{content}\n</tool_response>");
                match written.last_mut().filter(|_| before == "tool") {
                    Some(last) => {
                        let text = format!("{}\n{result}", last["content"].as_str().unwrap_or_default());
                        last["content"] = text.into();
                    }
                    None => written.push(json!({"role": "user", "content": result})),
                }
            }
            Some(calls) => {
                let texts = (!content.is_empty()).then(|| content.to_owned()).into_iter();
                let marked = |one: &Value| format!("{CALL}\n{}\n{CALLED}", call(one));
                let text: Vec<String> = texts.chain(calls.iter().map(marked)).collect();
                let mut message: Map<String, Value> = message.as_object().cloned().unwrap_or_default();
                message.shift_remove("tool_calls");
                message.insert("content".into(), text.join("\n").into());
                written.push(Value::Object(message));
            }
            None => written.push(message.clone()),
        }
        before = role;
    }
    written
}

/// For templates that take thoughts as parts of a message's content (Mistral). `None`: there are no thoughts.
pub fn thoughts_in_parts(style: Style, messages: &[Value]) -> Option<Vec<Value>> {
    if style.calls != Some(Calls::Mistral) || !style.thoughts {
        return None;
    }
    let mut messages = messages.to_vec();
    let mut any = false;
    for message in messages.iter_mut().filter(|m| m["role"] == "assistant") {
        let thought = ["reasoning_content", "reasoning", "thinking"].iter().find_map(|name| message[*name].as_str());
        let Some(thought) = thought.filter(|thought| !thought.is_empty()) else { continue };
        let mut parts = vec![json!({"type": "thinking", "thinking": thought})];
        let text = message["content"].as_str().filter(|text| !text.is_empty());
        parts.extend(text.map(|text| json!({"type": "text", "text": text})));
        message["content"] = parts.into();
        any = true;
    }
    any.then_some(messages)
}

fn call(call: &Value) -> String {
    let function = call.get("function").unwrap_or(call);
    let arguments = &function["arguments"];
    let arguments = match arguments.as_str().filter(|json| text::is_spaced(json)) {
        Some(json) => json.trim().to_owned(),
        None => dumps(&object(arguments)),
    };
    format!("{{\"name\": {}, \"arguments\": {arguments}}}", dumps(&function["name"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kimis_calls_are_named_by_their_numbers() {
        let call = |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": "{}"}});
        let mut messages = vec![
            json!({"role": "assistant", "tool_calls": [call("call_a", "f"), call("call_b", "g")]}),
            json!({"role": "tool", "tool_call_id": "call_b"}),
            json!({"role": "assistant", "tool_calls": [call("call_c", "f")]}),
            json!({"role": "tool", "tool_call_id": "another"}),
        ];
        number_calls(&mut messages);
        let id = |m: usize, c: usize| messages[m]["tool_calls"][c]["id"].clone();
        assert_eq!([id(0, 0), id(0, 1), id(2, 0)], ["functions.f:0", "functions.g:1", "functions.f:2"]);
        assert_eq!([&messages[1]["tool_call_id"], &messages[3]["tool_call_id"]], ["functions.g:1", "another"]);
    }

    #[test]
    fn arguments_of_a_call_that_was_cut_are_one_argument() {
        assert_eq!(xml(&json!(r#"{"path": "a"}"#)), json!({"path": "a"}));
        assert_eq!(xml(&json!("")), json!({}));
        let cut = r#"{"path": "a"#;
        assert_eq!(xml(&json!(cut)), json!({"arguments": cut}));
    }
}
