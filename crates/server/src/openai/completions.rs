//! `/v1/completions`: its request, its schemas, and the encoding of its answers.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};
use sluice_engine::sampling::Logprobs;
use sluice_engine::text::Tokenizer;
use utoipa::ToSchema;

use crate::api::answer::Delta;
use crate::api::fields;
use crate::api::pending::Pending;
use crate::api::sampling::SamplingFields;
use crate::clock::now;
use crate::http::context::fresh_id;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{ComputeErrors, json_schema};
use crate::http::state::AppState;
use crate::openai::chunks::{self, ChatUsage, ChunkEncoder, finish_reason};
use crate::openai::logprobs::LogprobLists;
use crate::openai::prompt::{MAX_PROMPTS, PromptField, encode_one};

/// The request.
#[derive(Deserialize, ToSchema)]
#[schema(as = CompletionRequest)]
pub struct CompletionRequest {
    #[serde(default)]
    #[schema(value_type = PromptField, required)]
    prompt: Option<PromptField>,
    /// Begin each text with its prompt. Not supported together with `logprobs`.
    #[serde(default, deserialize_with = "fields::boolean_or_false")]
    #[schema(value_type = Option<bool>)]
    echo: bool,
    /// Report log-probabilities, with this many of the most likely tokens; at most 5.
    #[serde(default, deserialize_with = "fields::integer")]
    #[schema(maximum = 5)]
    logprobs: Option<usize>,
    #[serde(flatten)]
    sampling: SamplingFields,
}

/// How many of the most likely tokens a request may ask for.
const MAX_TOP_LOGPROBS: usize = 5;

impl CompletionRequest {
    /// Splits it into prompts, the number of most likely tokens, and sampling.
    ///
    /// # Errors
    /// A field that is invalid or not supported, by name.
    pub fn into_parts(self) -> Result<(PromptField, Option<usize>, SamplingFields), ApiError> {
        self.sampling.check_unknown_fields()?;
        if self.echo && self.logprobs.is_some() {
            let message = "echo with logprobs is not supported: log-probabilities of prompts are not computed";
            return Err(ApiError::invalid("echo", message));
        }
        let prompt = self.prompt.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
        if let Some(top) = self.logprobs.filter(|top| *top > MAX_TOP_LOGPROBS) {
            let message = format!("logprobs is {top}; it must be at most {MAX_TOP_LOGPROBS}");
            return Err(ApiError::invalid("logprobs", message));
        }
        Ok((prompt, self.logprobs, self.sampling))
    }
}

json_schema! {
    Completion, uses [CompletionChoice, ChatUsage], {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["text_completion"]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {"$ref": "#/components/schemas/CompletionChoice"}},
            "usage": {"$ref": "#/components/schemas/ChatUsage"},
        },
    }
}

json_schema! {
    /// An event of a stream. The last event is `[DONE]`.
    CompletionChunk, uses [CompletionChoice, ChatUsage], {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["text_completion"]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {"$ref": "#/components/schemas/CompletionChoice"}},
            "usage": {"$ref": "#/components/schemas/ChatUsage"},
        },
    }
}

json_schema! {
    CompletionChoice, uses [], {
        "type": "object",
        "required": ["index", "text", "logprobs", "finish_reason"],
        "properties": {
            "index": {"type": "integer"},
            "text": {"type": "string"},
            "logprobs": {
                "type": ["object", "null"],
                "required": ["tokens", "token_logprobs", "top_logprobs", "text_offset"],
                "properties": {
                    "tokens": {"type": "array", "items": {"type": "string"}},
                    "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
                    "top_logprobs": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": ["number", "null"]}}},
                    "text_offset": {"type": "array", "items": {"type": "integer"}},
                },
            },
            "finish_reason": {"type": ["string", "null"], "enum": ["stop", "length", null]},
        },
    }
}

/// Continues a text.
#[utoipa::path(post, path = "/v1/completions", tag = "openai", request_body = CompletionRequest, responses(
    (status = 200, description = "The completion; with `stream`, its events. If it takes long, white space is sent before it.",
        content((Completion = "application/json"), (CompletionChunk = "text/event-stream"))),
    ComputeErrors,
))]
pub async fn completions(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<CompletionRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(request.sampling.model.as_deref()).await?;
    let echo = request.echo;
    let (prompts, logprobs, sampling) = request.into_parts()?;
    let choices = sampling.choices()?;
    let prompts = prompts.split()?;
    if prompts.len() * choices > MAX_PROMPTS {
        let message = format!(
            "{} prompts with {choices} choices each; at most {MAX_PROMPTS} choices in all are accepted",
            prompts.len()
        );
        return Err(ApiError::invalid("prompt", message));
    }
    // 1. Encode all prompts first: an error in one refuses the request
    let mut encoded = Vec::with_capacity(prompts.len());
    let mut echoed = Vec::new();
    for prompt in prompts {
        let text = if let (PromptField::Text(text), true) = (&prompt, echo) { Some(text.clone()) } else { None };
        let tokens = encode_one(&model, prompt).await?;
        if echo {
            let decoded = || model.text.tokenizer.decode(&tokens, false).unwrap_or_default();
            echoed.extend(std::iter::repeat_n(text.unwrap_or_else(decoded), choices));
        }
        let mut generation = sampling.generation(&model.text, tokens.len(), model.context)?;
        generation.logprobs = logprobs;
        generation.snapshot_points = vec![tokens.len().saturating_sub(1)];
        encoded.push((tokens, generation));
    }
    // 2. Submit them as one request
    let all = encoded.into_iter().map(|(tokens, generation)| Pending::submit(&model, tokens, generation, &sampling));
    let mut all = all.collect::<Result<VecDeque<Pending>, ApiError>>()?;
    let choices = choices * all.len();
    let mut pending = all.pop_front().ok_or_else(|| ApiError::invalid("prompt", "prompt is an empty list"))?;
    pending.siblings = all.into();
    let encoder = CompletionEncoder {
        id: format!("cmpl-{}", fresh_id()),
        created: now(),
        model: model.name.clone(),
        tokenizer: Arc::clone(&model.text.tokenizer),
        with_logprobs: logprobs.is_some(),
        collected: (0..choices).map(|_| CollectedCompletion::default()).collect(),
        lists: LogprobLists::new(choices * LOGPROB_FIELDS.len()),
        offsets: vec![0; choices],
        echoed,
    };
    Ok(chunks::send(pending, encoder, sampling.stream, sampling.wants_usage()).await)
}

/// Fields of a choice's log-probabilities: each is a list with an element for each token.
const LOGPROB_FIELDS: [&str; 4] = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];

/// A choice, for a whole answer.
#[derive(Default)]
struct CollectedCompletion {
    text: String,
    finish: Option<&'static str>,
}

struct CompletionEncoder {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    with_logprobs: bool,
    collected: Vec<CollectedCompletion>,
    /// By choice and field, for a whole answer.
    lists: LogprobLists,
    /// By choice: number of characters so far.
    offsets: Vec<usize>,
    /// By choice: the prompt to begin its text with; empty without `echo`.
    echoed: Vec<String>,
}

impl CompletionEncoder {
    /// The prompt that the choice's text must still begin with.
    fn take_echo(&mut self, choice: usize) -> String {
        self.echoed.get_mut(choice).map(std::mem::take).unwrap_or_default()
    }

    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices,
        })
    }

    fn logprobs<'a>(&self, tokens: impl Iterator<Item = (u32, &'a Logprobs)>, mut offset: usize) -> Value {
        if !self.with_logprobs {
            return Value::Null;
        }
        let text = |id: u32| self.tokenizer.decode(&[id], false).unwrap_or_default();
        let (mut names, mut chosen, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
        for (token, logprobs) in tokens {
            let name = text(token);
            offsets.push(offset);
            offset += name.chars().count();
            names.push(name);
            chosen.push(logprobs.chosen);
            tops.push(Value::Object(logprobs.top.iter().map(|(id, p)| (text(*id), json!(p))).collect()));
        }
        json!({"tokens": names, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets})
    }
}

impl ChunkEncoder for CompletionEncoder {
    fn events(&mut self, delta: &Delta) -> Vec<Value> {
        let echo = self.take_echo(delta.choice);
        if echo.is_empty() && delta.text.is_empty() && delta.finish.is_none() && !self.with_logprobs {
            return Vec::new();
        }
        let offset = self.offsets[delta.choice];
        let tokens = delta.tokens.iter().filter_map(|(id, p)| Some((*id, p.as_ref()?)));
        let logprobs = self.logprobs(tokens, offset);
        self.offsets[delta.choice] += delta.text.chars().count();
        vec![self.object(json!([{
            "index": delta.choice, "text": echo + &delta.text, "logprobs": logprobs,
            "finish_reason": delta.finish.map(finish_reason),
        }]))]
    }

    fn keep_alive(&self) -> Value {
        self.object(json!([{"index": 0, "text": "", "logprobs": null, "finish_reason": null}]))
    }

    fn usage_event(&self, usage: Value) -> Value {
        let mut object = self.object(json!([]));
        object["usage"] = usage;
        object
    }

    fn collect_delta(&mut self, delta: Delta) {
        let echo = self.take_echo(delta.choice);
        let collected = &mut self.collected[delta.choice];
        collected.text += &(echo + &delta.text);
        collected.finish = delta.finish.map(finish_reason).or(collected.finish);
        let tokens = delta.tokens.iter().filter_map(|(id, p)| Some((*id, p.as_ref()?)));
        let logprobs = self.logprobs(tokens, self.offsets[delta.choice]);
        for (number, field) in LOGPROB_FIELDS.iter().enumerate() {
            for element in logprobs[*field].as_array().into_iter().flatten() {
                self.lists.push(delta.choice * LOGPROB_FIELDS.len() + number, element);
            }
        }
        let characters = |name: &Value| name.as_str().map_or(0, |name| name.chars().count());
        self.offsets[delta.choice] +=
            logprobs["tokens"].as_array().into_iter().flatten().map(characters).sum::<usize>();
    }

    fn kept_bytes(&self) -> usize {
        self.lists.bytes()
    }

    fn complete(&mut self, usage: Value) -> String {
        let choice = |(index, g): (usize, &CollectedCompletion)| {
            let list = |number: usize| self.lists.placeholder(index * LOGPROB_FIELDS.len() + number);
            let lists = LOGPROB_FIELDS.iter().enumerate().map(|(number, field)| ((*field).to_owned(), list(number)));
            let logprobs = if self.with_logprobs { Value::Object(lists.collect()) } else { Value::Null };
            json!({"index": index, "text": g.text, "logprobs": logprobs, "finish_reason": g.finish})
        };
        let choices: Vec<Value> = self.collected.iter().enumerate().map(choice).collect();
        let mut object = self.object(json!(choices));
        object["usage"] = usage;
        self.lists.write(&object)
    }
}
