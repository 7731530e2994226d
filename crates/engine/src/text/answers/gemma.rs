//! Gemma 4's notation of calls: `call:NAME{key:<|"|>text<|"|>,other:[1,true,{a:2}]}` between marks. Names are bare, and the quotes are tokens of their own. Clients get
//! JSON, which is written back in the notation, in the order and with the numbers that the model wrote.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::json;
use super::marks::GEMMA_QUOTE;
use super::stand_in::Written;

/// Values may be nested this deeply.
const DEPTH: usize = 100;

/// The name and the arguments, as JSON, of what stands between the marks of a call.
pub(super) fn call(text: &str) -> Option<(String, String)> {
    let rest = text.trim().strip_prefix("call:")?;
    let (name, arguments) = rest.split_at(rest.find('{')?);
    let name = name.trim();
    let mut arguments = Notation { rest: arguments };
    let mut json = String::new();
    arguments.value(&mut json, DEPTH)?;
    (!name.is_empty() && arguments.rest.trim().is_empty()).then(|| (name.to_owned(), json))
}

/// What is left of a text in the notation.
struct Notation<'a> {
    rest: &'a str,
}

impl<'a> Notation<'a> {
    fn take(&mut self, mark: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(mark)?;
        Some(())
    }

    /// Text between quotes.
    fn quoted(&mut self) -> Option<&'a str> {
        self.take(GEMMA_QUOTE)?;
        let (text, rest) = self.rest.split_once(GEMMA_QUOTE)?;
        self.rest = rest;
        Some(text)
    }

    /// Text without quotes up to one of these.
    fn bare(&mut self, ends: &[char]) -> &'a str {
        let (text, rest) = self.rest.split_at(self.rest.find(ends).unwrap_or(self.rest.len()));
        self.rest = rest;
        text.trim()
    }

    /// Appends a value as JSON, with a space behind each comma and colon.
    fn value(&mut self, json: &mut String, depth: usize) -> Option<()> {
        self.rest = self.rest.trim_start();
        let depth = depth.checked_sub(1)?;
        match self.rest.chars().next()? {
            '{' => {
                self.take("{")?;
                json.push('{');
                let mut first = true;
                while self.take("}").is_none() {
                    if !first {
                        self.take(",")?;
                        json.push_str(", ");
                    }
                    first = false;
                    self.rest = self.rest.trim_start();
                    let name = if self.rest.starts_with(GEMMA_QUOTE) { self.quoted()? } else { self.bare(&[':']) };
                    self.take(":")?;
                    json.push_str(&format!("\"{}\": ", json::escaped(name)));
                    self.value(json, depth)?;
                }
                json.push('}');
            }
            '[' => {
                self.take("[")?;
                json.push('[');
                let mut first = true;
                while self.take("]").is_none() {
                    if !first {
                        self.take(",")?;
                        json.push_str(", ");
                    }
                    first = false;
                    self.value(json, depth)?;
                }
                json.push(']');
            }
            _ if self.rest.starts_with(GEMMA_QUOTE) => {
                json.push_str(&format!("\"{}\"", json::escaped(self.quoted()?)));
            }
            _ => match self.bare(&[',', '}', ']']) {
                "None" => json.push_str("null"),
                "True" => json.push_str("true"),
                "False" => json.push_str("false"),
                said if !said.starts_with('"') && json::is_json(said) => json.push_str(said),
                "" => return None,
                // A text whose quotes the model forgot.
                said => json.push_str(&format!("\"{}\"", json::escaped(said))),
            },
        }
        Some(())
    }
}

/// Translates arguments, a JSON object, to the notation without the outer braces: templates print arguments that are text as they are. `None`: they are no object.
pub(super) fn written(arguments: &str) -> Option<Vec<Written>> {
    let mut parts = Parts::default();
    parts.fields(arguments, DEPTH)?;
    Some(parts.finish())
}

/// Text of the notation in pieces: markup, and what stands between quotes.
#[derive(Default)]
struct Parts {
    parts: Vec<Written>,
    markup: String,
}

impl Parts {
    fn finish(mut self) -> Vec<Written> {
        self.parts.push(Written::Markup(std::mem::take(&mut self.markup)));
        self.parts
    }

    fn said(&mut self, text: String) {
        self.parts.push(Written::Markup(std::mem::take(&mut self.markup)));
        self.parts.push(Written::Said(text));
    }

    fn fields(&mut self, object: &str, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        for (i, (name, value)) in json::fields(object)?.into_iter().enumerate() {
            self.markup.push_str(if i > 0 { "," } else { "" });
            self.said(name);
            self.markup.push(':');
            self.value(value, depth)?;
        }
        Some(())
    }

    fn value(&mut self, value: &str, depth: usize) -> Option<()> {
        match value.as_bytes().first()? {
            b'{' => {
                self.markup.push('{');
                self.fields(value, depth)?;
                self.markup.push('}');
            }
            b'[' => {
                self.markup.push('[');
                for (i, value) in json::items(value)?.into_iter().enumerate() {
                    self.markup.push_str(if i > 0 { "," } else { "" });
                    self.value(value, depth.checked_sub(1)?)?;
                }
                self.markup.push(']');
            }
            b'"' => {
                self.markup.push_str(GEMMA_QUOTE);
                self.said(serde_json::from_str(value).ok()?);
                self.markup.push_str(GEMMA_QUOTE);
            }
            _ => self.markup.push_str(value),
        }
        Some(())
    }
}

/// Moves the answers of tools into the message that called them, as the templates want it. The text that the model wrote after the answers moves, too: it is the same turn
/// of the model.
pub(super) fn gather_answers(messages: &mut Vec<Value>) {
    let mut names: HashMap<String, Value> = HashMap::new();
    let mut gathered: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages.drain(..) {
        let calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let name = call.get("function").unwrap_or(call)["name"].clone();
            names.extend(call["id"].as_str().map(|id| (id.to_owned(), name)));
        }
        let before = gathered.last_mut().filter(|before| before["tool_calls"].is_array());
        match (message["role"].as_str(), before) {
            (Some("tool"), Some(before)) => {
                let named = message["tool_call_id"].as_str().and_then(|id| names.get(id)).cloned();
                let name = message.get("name").cloned().or(named).unwrap_or_else(|| json!("unknown"));
                let content = &message["content"];
                let object = content.as_str().and_then(|text| serde_json::from_str(text).ok());
                let response = object.filter(Value::is_object).unwrap_or_else(|| content.clone());
                let response = json!({"name": name, "response": response});
                match before.get_mut("tool_responses").and_then(Value::as_array_mut) {
                    Some(all) => all.push(response),
                    None => before["tool_responses"] = json!([response]),
                }
            }
            (Some("assistant"), Some(before))
                if !calls
                    && before["tool_responses"].is_array()
                    && before["content"].as_str().is_none_or(|text| text.trim().is_empty()) =>
            {
                before["content"] = message["content"].clone();
            }
            _ => gathered.push(message),
        }
    }
    *messages = gathered;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(parts: &[Written]) -> String {
        let one = |part: &Written| match part {
            Written::Markup(text) | Written::Said(text) => text.clone(),
        };
        parts.iter().map(one).collect()
    }

    #[test]
    fn calls_are_read_and_written_again() {
        for (arguments, json) in [
            ("", "{}"),
            (r#"city:<|"|>Ürümqi, "north"<|"|>,days:3"#, r#"{"city": "Ürümqi, \"north\"", "days": 3}"#),
            (
                "z:1.50,a:[1,-2e3,[],{}],m:{b:true,c:null}",
                r#"{"z": 1.50, "a": [1, -2e3, [], {}], "m": {"b": true, "c": null}}"#,
            ),
        ] {
            let (name, read) = call(&format!("call:get_weather{{{arguments}}}")).unwrap();
            assert_eq!((&*name, &*read), ("get_weather", json));
            assert_eq!(text(&written(json).unwrap()), arguments);
        }
        // What the model may write and templates do not.
        assert_eq!(call("call:f{ a : None, b:hot }").unwrap().1, r#"{"a": null, "b": "hot"}"#);
        assert_eq!(call(r#"call:f{<|"|>a b<|"|>:1}"#).unwrap().1, r#"{"a b": 1}"#);
    }

    #[test]
    fn what_is_no_call_is_refused() {
        for wrong in
            ["", "call:", "call:{}", "f{}", "call:f{", "call:f{a}", "call:f{a:}", "call:f{a:1}x", "call:f{a:[1}"]
        {
            assert_eq!(call(wrong), None, "{wrong}");
        }
        assert_eq!(call(&format!("call:f{{a:{}", "[".repeat(100_000))), None);
        assert_eq!(written(&format!("{{\"a\": {}{}}}", "[".repeat(120), "]".repeat(120))), None);
        assert_eq!(written("[1]"), None);
    }

    #[test]
    fn answers_of_tools_join_the_turn_that_called_them() {
        let call = |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": "{}"}});
        let mut messages = vec![
            json!({"role": "user", "content": "go"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call("a", "f"), call("b", "g")]}),
            json!({"role": "tool", "tool_call_id": "b", "content": "{\"n\": 1}"}),
            json!({"role": "tool", "tool_call_id": "a", "content": "fine"}),
            json!({"role": "assistant", "content": "done"}),
            json!({"role": "user", "content": "more"}),
        ];
        gather_answers(&mut messages);
        assert_eq!(messages.len(), 3);
        let responses = json!([{"name": "g", "response": {"n": 1}}, {"name": "f", "response": "fine"}]);
        assert_eq!((&messages[1]["tool_responses"], &messages[1]["content"]), (&responses, &json!("done")));
    }
}
