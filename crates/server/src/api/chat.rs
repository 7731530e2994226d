//! A chat request once its dialect has parsed it. From here on dialects do not differ.

use std::sync::{Arc, Once};

use serde_json::{Map, Value};
use sluice_engine::Constraint;
use sluice_engine::text::{ModelText, Reading};

use crate::api::conversation::{Conversation, Rendered, with_one_system_message};
use crate::api::output_spec::OutputSpec;
use crate::api::pending::Pending;
use crate::api::sampling::SamplingFields;
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::log::note;
use crate::models::loaded::LoadedModel;

/// The template's variable for how much to think.
pub const EFFORT: &str = "reasoning_effort";

/// Whether the model thinks before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// As the chat template has it.
    #[default]
    Default,
    /// Thinking is off.
    Off,
    /// Thinking is on.
    On,
}

/// A chat request.
#[derive(Debug, Default)]
pub struct ChatRequest {
    /// Messages as chat templates take them: `role`; `content`, a string; `reasoning_content`; `tool_calls`, with arguments as a string or as an object that
    /// keeps the order of its fields; `tool_call_id`; and `cache_control` if the client wants the prompt cached up to the end of the message.
    pub messages: Vec<Value>,
    /// Tools, and the form of the answer.
    pub output: OutputSpec,
    /// Whether to think.
    pub thinking: Thinking,
    /// More variables for the template.
    pub extra: Map<String, Value>,
    /// How much to think, for templates that know `reasoning_effort`, and the field that said it.
    pub effort: Option<(&'static str, String)>,
    /// Set if log-probabilities are wanted: how many of the most likely tokens to list beside each token.
    pub logprobs: Option<usize>,
    /// What the answer may be.
    pub prediction: Option<String>,
    /// Sampling, stop strings, length, streaming.
    pub sampling: SamplingFields,
}

impl ChatRequest {
    /// Whether the client asks for any caching.
    pub fn has_cache_control(&self) -> bool {
        self.messages.iter().any(|message| !message["cache_control"].is_null())
    }

    /// Renders and tokenizes the prompt, on a blocking thread.
    ///
    /// # Errors
    /// As [`ChatRequest::take_conversation`], and what the template refuses.
    pub async fn render(&mut self, model: &Arc<LoadedModel>) -> Result<Rendered, ApiError> {
        if let Some((field, effort)) = self.effort.take() {
            match model.text.template.as_ref().is_some_and(|template| template.has_efforts()) {
                true => drop(self.extra.entry(EFFORT).or_insert(effort.into())),
                false => note_ignored(field),
            }
        }
        let (own, conversation) = (Arc::clone(model), self.take_conversation()?);
        let done = tokio::task::spawn_blocking(move || conversation.render(&own.text, own.has_states)).await;
        let rendered: Rendered = done.map_err(|e| ApiError::internal(e.to_string()))??;
        if rendered.has_reminders {
            note_reminders();
        }
        Ok(rendered)
    }

    /// Takes out what goes through the template.
    ///
    /// # Errors
    /// When there are no messages.
    pub fn take_conversation(&mut self) -> Result<Conversation, ApiError> {
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
        Ok(Conversation { messages, tools: self.output.prompt_tools(), extra: std::mem::take(&mut self.extra) })
    }

    /// Hands the request to the engine.
    ///
    /// # Errors
    /// An invalid request; a full queue.
    pub async fn submit(mut self, model: &Arc<LoadedModel>) -> Result<Pending, ApiError> {
        // 1. Render the prompt and compile the grammar, on blocking threads
        let Rendered { tokens, marks, .. } = self.render(model).await?;
        let calls = model.text.template.as_ref().and_then(|template| template.style().calls);
        self.output.drop_strictness_unless(calls.is_some() && model.text.tokenizer.is_byte_level());
        if self.prediction.is_some() && !model.drafts {
            note_ignored("prediction");
        }
        let predicted = self.prediction.take().filter(|_| model.drafts);
        let is_predicted = predicted.is_some();
        let (own, output) = (Arc::clone(model), self.output);
        let prepared = tokio::task::spawn_blocking(move || {
            let (tokens, reading, constraint) = prepare(&own.text, &output, tokens)?;
            let prediction = predicted.map_or(Ok(Vec::new()), |text| own.text.tokenizer.encode_plain(&text));
            let prediction = prediction.map_err(|e| ApiError::invalid("prediction", format!("prediction: {e:#}")))?;
            Ok::<_, ApiError>((tokens, reading, constraint, prediction))
        });
        let prepared = prepared.await;
        let (tokens, reading, constraint, prediction) = prepared.map_err(|e| ApiError::internal(e.to_string()))??;
        // 2. Submit it
        let mut generation = self.sampling.generation(&model.text, tokens.len(), model.context)?;
        generation.logprobs = self.logprobs;
        generation.snapshot_points = marks;
        generation.prediction = prediction;
        generation.constraint = constraint.map(Arc::new);
        let mut pending = Pending::submit(model, tokens, generation, &self.sampling)?;
        pending.answer.parse_with(&reading, &model.text.tokenizer);
        pending.answer.is_predicted = is_predicted;
        Ok(pending)
    }
}

/// The prompt, how its answers are parsed, and the grammar that they must follow.
fn prepare(
    text: &ModelText,
    output: &OutputSpec,
    prompt: Vec<u32>,
) -> Result<(Vec<u32>, Reading, Option<Constraint>), ApiError> {
    let reading = Reading::new(text, output.tools.as_ref().filter(|_| output.parses_calls), &prompt);
    let constraint = Constraint::new(text, &output.constraint, reading.opened());
    let wrong = |e: anyhow::Error| ApiError::invalid(output.blamed_field, format!("{}: {e:#}", output.blamed_field));
    Ok((prompt, reading, constraint.map_err(wrong)?))
}

/// Reports that later system messages became reminders: once to the log, and to the client each time.
fn note_reminders() {
    static NOTED: Once = Once::new();
    NOTED.call_once(|| {
        note("the chat template takes a system message only at the beginning: later ones become reminders in the user's turn");
    });
    note_ignored("messages[].role");
}
