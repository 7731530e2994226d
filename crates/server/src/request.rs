//! What every dialect asks for, once its own words are understood: a conversation, tools, how to choose tokens. From here on dialects do not differ.

use std::sync::{Arc, Once};

use anyhow::Context;
use serde_json::{Map, Value, json};
use sluice_engine::Constraint;
use sluice_engine::text::{Dialogue, ModelText, Reading};

use crate::app::LoadedModel;
use crate::context::ignore;
use crate::error::ApiError;
use crate::openai::SamplingFields;
use crate::output_spec::OutputSpec;
use crate::reply::Pending;

/// Whether the model thinks before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// As its template has it.
    #[default]
    Default,
    Off,
    On,
}

/// What is asked for.
#[derive(Debug, Default)]
pub struct ChatRequest {
    /// As chat templates take them: `role`, `content` (a text), `reasoning_content`, `tool_calls` with arguments as objects whose fields are in the order in
    /// which they came, or as their text, `tool_call_id`; `cache_control` where the client wants to keep what is computed up to the message's end.
    pub messages: Vec<Value>,
    /// Tools, and what the answer must be.
    pub demanded: OutputSpec,
    pub thinking: Thinking,
    /// More names that the template may look at.
    pub extra: Map<String, Value>,
    /// How likely each token was is wanted, and so many of the likeliest.
    pub logprobs: Option<usize>,
    /// Sampling, stop strings, the number of tokens, whether it is streamed.
    pub common: SamplingFields,
}

/// A prompt's tokens, and where prompts may part that begin like it: recurrent states are kept there.
pub struct Rendered {
    /// Later system messages are reminders of the user's: the template refuses them.
    pub is_folded: bool,
    pub tokens: Vec<u32>,
    pub marks: Vec<usize>,
}

impl ChatRequest {
    /// Whether the client wants to keep something.
    pub fn is_marked(&self) -> bool {
        self.messages.iter().any(|message| !message["cache_control"].is_null())
    }

    /// The prompt, by a thread that may take its time.
    ///
    /// # Errors
    /// What the template refuses.
    pub async fn rendered(&mut self, ready: &Arc<LoadedModel>) -> Result<Rendered, ApiError> {
        let (own, conversation) = (Arc::clone(ready), self.conversation()?);
        let done = tokio::task::spawn_blocking(move || conversation.rendered(&own.text, own.has_states)).await;
        let rendered: Rendered = done.map_err(|e| ApiError::internal(e.to_string()))??;
        if rendered.is_folded {
            say_folded();
        }
        Ok(rendered)
    }

    /// What of it goes through the template.
    ///
    /// # Errors
    /// There is nothing.
    pub fn conversation(&mut self) -> Result<Conversation, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "messages is empty"));
        }
        let enables = match self.thinking {
            Thinking::Default => None,
            Thinking::Off => Some(false),
            Thinking::On => Some(true),
        };
        if let Some(on) = enables {
            self.extra.entry("enable_thinking").or_insert(on.into());
        }
        let messages = with_one_system_message(std::mem::take(&mut self.messages));
        Ok(Conversation { messages, tools: self.demanded.listed(), extra: std::mem::take(&mut self.extra) })
    }

    /// Hands it to the engine.
    ///
    /// # Errors
    /// What is wrong with it; a queue that is full.
    pub async fn submit(mut self, ready: &Arc<LoadedModel>) -> Result<Pending, ApiError> {
        // 1. The prompt, and what its answer must be, by threads that may take their time
        let Rendered { tokens, marks, .. } = self.rendered(ready).await?;
        let calls = ready.text.template.as_ref().and_then(|template| template.style().calls);
        self.demanded.without_strictness(calls.is_some() && ready.text.tokenizer.is_byte_level());
        let (own, demanded) = (Arc::clone(ready), self.demanded);
        let prepared = tokio::task::spawn_blocking(move || prepared(&own.text, &demanded, tokens)).await;
        let (tokens, reading, constraint) = prepared.map_err(|e| ApiError::internal(e.to_string()))??;
        // 2. Its answer
        let mut generation = self.common.generation(&ready.text, tokens.len(), ready.context)?;
        generation.logprobs = self.logprobs;
        generation.snapshot_points = marks;
        generation.constraint = constraint.map(Arc::new);
        let mut pending = ready.submit(tokens, generation, &self.common)?;
        pending.answer.read_as(&reading, &ready.text.tokenizer);
        Ok(pending)
    }
}

/// How the answers to a prompt are read, and what they must be.
fn prepared(
    text: &ModelText,
    demanded: &OutputSpec,
    prompt: Vec<u32>,
) -> Result<(Vec<u32>, Reading, Option<Constraint>), ApiError> {
    let reading = Reading::new(text, demanded.tools.as_ref().filter(|_| demanded.reads_calls), &prompt);
    let constraint = Constraint::new(text, &demanded.demand, reading.opened());
    let wrong = |e: anyhow::Error| ApiError::invalid(demanded.blame, format!("{}: {e:#}", demanded.blame));
    Ok((prompt, reading, constraint.map_err(wrong)?))
}

/// What a template is given.
pub struct Conversation {
    messages: Vec<Value>,
    tools: Option<Value>,
    extra: Map<String, Value>,
}

impl Conversation {
    /// # Errors
    /// What the template refuses.
    pub fn rendered(&self, text: &ModelText, with_marks: bool) -> Result<Rendered, ApiError> {
        let done = self.with(&self.messages, text, with_marks).or_else(|error| {
            // Some templates take a system message at the beginning alone.
            let folded = as_reminders(&self.messages).ok_or(error)?;
            Ok(Rendered { is_folded: true, ..self.with(&folded, text, with_marks)? })
        });
        let told = |e: &anyhow::Error| text.template.as_ref().map_or_else(|| format!("{e:#}"), |t| t.told(e));
        done.map_err(|e| ApiError::invalid("messages", format!("messages: {}", told(&e))))
    }

    fn with(&self, messages: &[Value], text: &ModelText, with_marks: bool) -> anyhow::Result<Rendered> {
        let ModelText { template, tokenizer, .. } = text;
        let template = Some(template.as_ref().context("this model has no chat template")?);
        let dialogue = Dialogue { template, tokenizer, messages, tools: self.tools.as_ref(), extra: &self.extra };
        let tokens = dialogue.tokens()?;
        let marks = if with_marks { dialogue.snapshot_points(&tokens) } else { Vec::new() };
        Ok(Rendered { tokens, marks, is_folded: false })
    }
}

/// Around what the system says in the user's turn, as coding agents write it themselves.
const REMINDER: [&str; 2] = ["<system-reminder>", "</system-reminder>"];

fn is_system(message: &Value) -> bool {
    matches!(message["role"].as_str(), Some("system" | "developer"))
}

/// System messages at the beginning become one, and developers' are system messages: templates know no others.
fn with_one_system_message(messages: Vec<Value>) -> Vec<Value> {
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

/// The conversation with what the system says in its midst as reminders in the turn that it belongs to; `None` where it says nothing there.
///
/// A message of the user's own would not do: many templates want roles to alternate, and drop the thoughts of a turn that goes on with tools once the user says
/// something. So a reminder is put behind the text of the user or the tool in front of it, else before the user's text behind it. What comes before it keeps its tokens.
fn as_reminders(messages: &[Value]) -> Option<Vec<Value>> {
    if !messages.iter().skip(1).any(is_system) {
        return None;
    }
    let mut all: Vec<Value> = Vec::with_capacity(messages.len());
    // What waits for the user's next message, if that is the next at all.
    let mut waiting: Option<Value> = None;
    for (i, message) in messages.iter().enumerate() {
        if i > 0 && is_system(message) {
            let reminder = reminder(message);
            let goes_behind = |last: &&mut Value| {
                matches!(last["role"].as_str(), Some("user" | "tool"))
                    && (last["content"].is_string() || last["content"].is_null())
            };
            match (&mut waiting, all.last_mut().filter(goes_behind)) {
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

/// What a system message says, as the user says it.
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

/// The first message with what the second says behind it.
fn joined(first: &Value, second: &Value) -> Value {
    let texts = [first, second].map(|m| m["content"].as_str().unwrap_or_default());
    let mut message = first.clone();
    message["content"] = texts.into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join("\n\n").into();
    if let Some(mark) = second.get("cache_control") {
        message["cache_control"] = mark.clone();
    }
    message
}

/// Says what has become of system messages.
fn say_folded() {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        crate::note("the chat template takes a system message at the beginning alone: later ones are reminders in the user's turn");
    });
    ignore("messages[].role");
}

/// A tool as templates and parsers take it.
pub fn function(name: &str, description: Option<&Value>, parameters: Option<&Value>) -> Value {
    let mut function = json!({"name": name});
    if let Some(description) = description.filter(|d| d.is_string()) {
        function["description"] = description.clone();
    }
    function["parameters"] =
        parameters.filter(|p| p.is_object()).cloned().unwrap_or_else(|| json!({"type": "object", "properties": {}}));
    json!({"type": "function", "function": function})
}

/// A call as templates take it.
pub fn tool_call(id: &str, name: &str, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// What the assistant thought, said and called since it was last spoken to, from parts that come one by one.
#[derive(Default)]
pub struct Turn {
    pub thoughts: String,
    pub text: String,
    pub calls: Vec<Value>,
    pub is_marked: bool,
}

impl Turn {
    pub fn has_answered(&self) -> bool {
        !(self.text.is_empty() && self.calls.is_empty())
    }

    /// Puts the turn behind the messages, if there was any.
    pub fn end(&mut self, messages: &mut Vec<Value>) {
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
        if turn.is_marked {
            message["cache_control"] = json!({});
        }
        messages.push(message);
    }
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
        assert_eq!(as_reminders(&all[..2]), None);
    }

    #[test]
    fn later_system_messages_become_reminders_in_the_turn_that_they_belong_to() {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let folded = as_reminders(&[
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
        assert_eq!(folded.unwrap(), expected);
    }

    /// As Qwen3.5's, in what matters here; and one that takes the system's words anywhere.
    const REFUSES: &str = "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}\
        {{- raise_exception('System message must be at the beginning.') }}{%- endif %}\
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}";
    const TAKES: &str =
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}";

    #[test]
    fn only_templates_that_refuse_later_system_messages_have_them_folded() {
        let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let folder = std::env::temp_dir().join(format!("sluice-folded-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(demo.join(file), folder.join(file)).unwrap();
        }
        let rendered = |template: &str, messages: &[Value]| {
            std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
            let text = ModelText::load(&folder, None).unwrap();
            let conversation = Conversation { messages: messages.to_vec(), tools: None, extra: Map::new() };
            let rendered = conversation.rendered(&text, true).map_err(|e| e.message.clone())?;
            Ok::<_, String>((
                text.tokenizer.decode(&rendered.tokens, false).unwrap(),
                rendered.is_folded,
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
        let (text, is_folded, tokens) = rendered(REFUSES, &messages).unwrap();
        assert!(
            is_folded && text.ends_with("user\nc\n\n<system-reminder>\nd\n</system-reminder><|im_end|>\n"),
            "{text}"
        );
        // What was said before keeps its tokens.
        let (_, is_folded, before) = rendered(REFUSES, &messages[..3]).unwrap();
        assert!(!is_folded && tokens.starts_with(&before));

        let (text, is_folded, _) = rendered(TAKES, &messages).unwrap();
        assert!(!is_folded && text.ends_with("<|im_start|>system\nd<|im_end|>\n"), "{text}");
        let error = rendered("{{ raise_exception('never') }}", &messages).unwrap_err();
        assert!(error.ends_with("never"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
