//! Messages, tools and calls in the form that chat templates take.

use serde_json::{Value, json};

/// A tool as templates and parsers take it. A description that is not a string is dropped; missing parameters become an empty schema.
pub fn function(name: &str, description: Option<&Value>, parameters: Option<&Value>) -> Value {
    let mut function = json!({"name": name});
    if let Some(description) = description.filter(|d| d.is_string()) {
        function["description"] = description.clone();
    }
    function["parameters"] =
        parameters.filter(|p| p.is_object()).cloned().unwrap_or_else(|| json!({"type": "object", "properties": {}}));
    json!({"type": "function", "function": function})
}

/// A tool call as templates take it.
pub fn tool_call(id: &str, name: &str, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Collects the parts of one assistant turn, which dialects send separately, into one message.
#[derive(Default)]
pub struct AssistantTurn {
    /// Concatenated thoughts.
    pub thoughts: String,
    /// Concatenated text.
    pub text: String,
    /// Tool calls, as [`tool_call`] makes them.
    pub calls: Vec<Value>,
    /// Whether the client wants the prompt cached up to here.
    pub has_cache_control: bool,
}

impl AssistantTurn {
    /// Whether there is text or a call.
    pub fn has_answered(&self) -> bool {
        !(self.text.is_empty() && self.calls.is_empty())
    }

    /// Appends the turn to the messages, unless it is empty, and starts a new one.
    pub fn flush_into(&mut self, messages: &mut Vec<Value>) {
        let turn = std::mem::take(self);
        if turn.thoughts.is_empty() && !turn.has_answered() {
            return;
        }
        let mut message = json!({"role": "assistant", "content": turn.text});
        if !turn.thoughts.is_empty() {
            message["reasoning_content"] = turn.thoughts.into();
        }
        if !turn.calls.is_empty() {
            message["tool_calls"] = turn.calls.into();
        }
        if turn.has_cache_control {
            message["cache_control"] = json!({});
        }
        messages.push(message);
    }
}
