//! A conversation on its way through the chat template, and what happens to system messages that the template does not take.

use anyhow::Context;
use serde_json::{Map, Value, json};
use sluice_engine::text::{Dialogue, ModelText};

use crate::http::error::ApiError;

/// A rendered prompt.
pub struct Rendered {
    /// Later system messages became reminders in the user's turn, because the template refuses them.
    pub has_reminders: bool,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Positions where later prompts may diverge from this one; recurrent states are kept there.
    pub marks: Vec<usize>,
}

/// What goes through the chat template.
pub struct Conversation {
    /// See [`ChatRequest::messages`](crate::api::chat::ChatRequest::messages).
    pub messages: Vec<Value>,
    /// A list of tools.
    pub tools: Option<Value>,
    /// More variables for the template.
    pub extra: Map<String, Value>,
}

impl Conversation {
    /// Renders and tokenizes the prompt.
    ///
    /// # Errors
    /// What the template refuses.
    pub fn render(&self, text: &ModelText, with_marks: bool) -> Result<Rendered, ApiError> {
        let done = self.render_messages(&self.messages, text, with_marks).or_else(|error| {
            // Some templates take a system message only at the beginning.
            let messages = with_reminders(&self.messages).ok_or(error)?;
            Ok(Rendered { has_reminders: true, ..self.render_messages(&messages, text, with_marks)? })
        });
        let message = |e: &anyhow::Error| text.template.as_ref().map_or_else(|| format!("{e:#}"), |t| t.told(e));
        done.map_err(|e| ApiError::invalid("messages", format!("messages: {}", message(&e))))
    }

    fn render_messages(&self, messages: &[Value], text: &ModelText, with_marks: bool) -> anyhow::Result<Rendered> {
        let ModelText { template, tokenizer, .. } = text;
        let template = Some(template.as_ref().context("this model has no chat template")?);
        let dialogue = Dialogue { template, tokenizer, messages, tools: self.tools.as_ref(), extra: &self.extra };
        let tokens = dialogue.tokens()?;
        let marks = if with_marks { dialogue.snapshot_points(&tokens) } else { Vec::new() };
        Ok(Rendered { tokens, marks, has_reminders: false })
    }
}

/// The tags around a reminder, as coding agents write them themselves.
const REMINDER: [&str; 2] = ["<system-reminder>", "</system-reminder>"];

fn is_system(message: &Value) -> bool {
    matches!(message["role"].as_str(), Some("system" | "developer"))
}

/// Merges the system messages at the beginning into one. `developer` messages become system messages, since templates know no others.
pub fn with_one_system_message(messages: Vec<Value>) -> Vec<Value> {
    let leading = messages.iter().take_while(|m| is_system(m)).count();
    let (system, rest) = messages.split_at(leading);
    let mut all = Vec::with_capacity(rest.len() + 1);
    if !system.is_empty() {
        let texts: Vec<&str> = system.iter().filter_map(|m| m["content"].as_str()).filter(|t| !t.is_empty()).collect();
        let mut one = json!({"role": "system", "content": texts.join("\n\n")});
        if let Some(mark) = system.iter().map(|m| &m["cache_control"]).find(|mark| !mark.is_null()) {
            one["cache_control"] = mark.clone();
        }
        all.push(one);
    }
    all.extend(rest.iter().cloned().map(|mut message| {
        if is_system(&message) {
            message["role"] = "system".into();
        }
        message
    }));
    all
}

/// Turns later system messages into reminders in the turns around them; `None` if there are none.
///
/// Separate user messages would not do: many templates want roles to alternate, and drop the thoughts of a turn that goes on with tools once the user says
/// something. So a reminder is appended to the user's or tool's message before it, or else put before the user's message after it. The tokens of everything
/// before the reminder stay the same.
fn with_reminders(messages: &[Value]) -> Option<Vec<Value>> {
    if !messages.iter().skip(1).any(is_system) {
        return None;
    }
    let mut all: Vec<Value> = Vec::with_capacity(messages.len());
    // A reminder for the next message, if that is the user's.
    let mut waiting: Option<Value> = None;
    for (i, message) in messages.iter().enumerate() {
        if i > 0 && is_system(message) {
            let reminder = reminder(message);
            let can_append = |last: &&mut Value| {
                matches!(last["role"].as_str(), Some("user" | "tool"))
                    && (last["content"].is_string() || last["content"].is_null())
            };
            match (&mut waiting, all.last_mut().filter(can_append)) {
                (Some(first), _) => *first = joined(first, &reminder),
                (None, Some(last)) => *last = joined(last, &reminder),
                (None, None) => waiting = Some(reminder),
            }
            continue;
        }
        match waiting.take() {
            Some(reminder) if message["role"] == "user" && message["content"].is_string() => {
                let both = joined(&reminder, message);
                let mut message = message.clone();
                message["content"] = both["content"].clone();
                if let Some(mark) = both.get("cache_control") {
                    message["cache_control"] = mark.clone();
                }
                all.push(message);
            }
            Some(reminder) => all.extend([reminder, message.clone()]),
            None => all.push(message.clone()),
        }
    }
    all.extend(waiting);
    Some(all)
}

/// A system message as a reminder of the user's.
fn reminder(message: &Value) -> Value {
    let said = message["content"].as_str().unwrap_or_default().trim();
    let is_marked_up = said.starts_with(REMINDER[0]) && said.ends_with(REMINDER[1]);
    let text = if is_marked_up { said.to_owned() } else { format!("{}\n{said}\n{}", REMINDER[0], REMINDER[1]) };
    let mut reminder = json!({"role": "user", "content": text});
    if let Some(mark) = message.get("cache_control") {
        reminder["cache_control"] = mark.clone();
    }
    reminder
}

/// The first message with the content of the second appended.
fn joined(first: &Value, second: &Value) -> Value {
    let texts = [first, second].map(|m| m["content"].as_str().unwrap_or_default());
    let mut message = first.clone();
    message["content"] = texts.into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("\n\n").into();
    if let Some(mark) = second.get("cache_control") {
        message["cache_control"] = mark.clone();
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_messages_at_the_beginning_become_one() {
        let messages = vec![
            json!({"role": "system", "content": "a"}),
            json!({"role": "developer", "content": "b", "cache_control": {}}),
            json!({"role": "user", "content": "c"}),
            json!({"role": "developer", "content": "d"}),
        ];
        let all = with_one_system_message(messages);
        let one = json!({"role": "system", "content": "a\n\nb", "cache_control": {}});
        let rest = [json!({"role": "user", "content": "c"}), json!({"role": "system", "content": "d"})];
        assert_eq!(all[0], one);
        assert_eq!(all[1..], rest);
        assert_eq!(with_reminders(&all[..2]), None);
    }

    #[test]
    fn later_system_messages_become_reminders_in_the_turn_that_they_belong_to() {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let reminders = with_reminders(&[
            message("system", "s"),
            message("user", "a"),
            json!({"role": "system", "content": "b", "cache_control": {}}),
            message("assistant", "c"),
            message("system", "<system-reminder>\nd\n</system-reminder>"),
            message("system", " e "),
            message("user", "f"),
            json!({"role": "assistant", "content": "", "tool_calls": []}),
            message("tool", "g"),
            message("system", "h"),
            message("assistant", "i"),
            message("system", "j"),
            message("assistant", "k"),
            message("system", "l"),
        ]);
        let said = |text: &str| format!("<system-reminder>\n{text}\n</system-reminder>");
        let expected = [
            message("system", "s"),
            json!({"role": "user", "content": format!("a\n\n{}", said("b")), "cache_control": {}}),
            message("assistant", "c"),
            message("user", &format!("{}\n\n{}\n\nf", said("d"), said("e"))),
            json!({"role": "assistant", "content": "", "tool_calls": []}),
            message("tool", &format!("g\n\n{}", said("h"))),
            message("assistant", "i"),
            message("user", &said("j")),
            message("assistant", "k"),
            message("user", &said("l")),
        ];
        assert_eq!(reminders.unwrap(), expected);
    }

    /// A template that, like Qwen3.5's, refuses later system messages; and one that takes them anywhere.
    const REFUSES: &str = "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}\
        {{- raise_exception('System message must be at the beginning.') }}{%- endif %}\
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}";
    const TAKES: &str =
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}";

    #[test]
    fn only_templates_that_refuse_later_system_messages_get_reminders() {
        let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let folder = std::env::temp_dir().join(format!("sluice-reminders-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(demo.join(file), folder.join(file)).unwrap();
        }
        let rendered = |template: &str, messages: &[Value]| {
            std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
            let text = ModelText::load(&folder, None).unwrap();
            let conversation = Conversation { messages: messages.to_vec(), tools: None, extra: Map::new() };
            let rendered = conversation.render(&text, true).map_err(|e| e.message.clone())?;
            Ok::<_, String>((
                text.tokenizer.decode(&rendered.tokens, false).unwrap(),
                rendered.has_reminders,
                rendered.tokens,
            ))
        };
        let messages = [
            json!({"role": "system", "content": "S"}),
            json!({"role": "user", "content": "a"}),
            json!({"role": "assistant", "content": "b"}),
            json!({"role": "user", "content": "c"}),
            json!({"role": "system", "content": "d"}),
        ];
        let (text, has_reminders, tokens) = rendered(REFUSES, &messages).unwrap();
        assert!(
            has_reminders && text.ends_with("user\nc\n\n<system-reminder>\nd\n</system-reminder><|im_end|>\n"),
            "{text}"
        );
        // Messages before the reminder keep their tokens.
        let (_, has_reminders, before) = rendered(REFUSES, &messages[..3]).unwrap();
        assert!(!has_reminders && tokens.starts_with(&before));

        let (text, has_reminders, _) = rendered(TAKES, &messages).unwrap();
        assert!(!has_reminders && text.ends_with("<|im_start|>system\nd<|im_end|>\n"), "{text}");
        let error = rendered("{{ raise_exception('never') }}", &messages).unwrap_err();
        assert!(error.ends_with("never"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
