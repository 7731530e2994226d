//! `/v1/completions`

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};
use sluice_engine::text::{Prompt, Tokenizer};
use utoipa::ToSchema;

use super::fields::Common;
use super::reply::{self, ChatUsage, Dialect, finish_reason, now};
use crate::answer::Delta;
use crate::app::{App, Body, Ready};
use crate::error::ApiError;
use crate::openapi::{Computing, written};

#[derive(Deserialize, ToSchema)]
#[schema(as = CompletionRequest)]
pub struct Request {
    prompt: PromptField,
    /// Refused.
    #[serde(default)]
    echo: bool,
    /// How likely each token was, with so many of the likeliest.
    #[serde(default)]
    logprobs: Option<usize>,
    #[serde(flatten)]
    common: Common,
}

impl Request {
    /// The prompt, the likeliest tokens that are asked for, and the rest.
    ///
    /// # Errors
    /// What cannot be obeyed, by name.
    pub fn parts(self) -> Result<(PromptField, Option<usize>, Common), ApiError> {
        self.common.check_others()?;
        if self.echo {
            return Err(ApiError::invalid("echo", "echo is not supported"));
        }
        Ok((self.prompt, self.logprobs, self.common))
    }
}

/// A text, or token ids: of one prompt.
#[derive(Deserialize, ToSchema)]
#[schema(as = Prompt)]
#[serde(untagged)]
pub enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

written! {
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

written! {
    /// An event of a stream, which ends with `[DONE]`.
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

written! {
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

/// Goes on with a text.
#[utoipa::path(post, path = "/v1/completions", tag = "openai", request_body = Request, responses(
    (status = 200, description = "The completion; with `stream` its events. Where a prompt takes long, white space comes before it.",
        content((Completion = "application/json"), (CompletionChunk = "text/event-stream"))),
    Computing,
))]
pub async fn completions(State(app): State<Arc<App>>, Body(request): Body<Request>) -> Result<Response, ApiError> {
    let ready = app.model(request.common.model.as_deref()).await?;
    let (prompt, logprobs, common) = request.parts()?;
    let prompt = one_prompt(&ready, prompt).await?;
    let mut generation = common.generation(&ready.text, prompt.len(), ready.context)?;
    generation.logprobs = logprobs;
    generation.marks = vec![prompt.len().saturating_sub(1)];
    let pending = ready.submit(prompt, generation, &common)?;
    let dialect = Completions {
        id: format!("cmpl-{}", app.next_id()),
        created: now(),
        model: ready.name.clone(),
        tokenizer: Arc::clone(&ready.text.tokenizer),
        with_logprobs: logprobs.is_some(),
        gathered: (0..common.choices()?).map(|_| Gathered::default()).collect(),
        offsets: vec![0; common.choices()?],
    };
    Ok(reply::send(pending, dialect, common.stream, common.wants_usage()).await)
}

/// The tokens of a prompt.
pub(super) async fn one_prompt(ready: &Arc<Ready>, prompt: PromptField) -> Result<Vec<u32>, ApiError> {
    let many =
        |n: usize| ApiError::invalid("prompt", format!("{n} prompts in one request are not supported: send one each"));
    Ok(match prompt {
        PromptField::Text(text) => text_prompt(ready, text).await?,
        PromptField::Tokens(tokens) => tokens,
        PromptField::Texts(mut all) if all.len() == 1 => text_prompt(ready, all.remove(0)).await?,
        PromptField::TokenLists(mut all) if all.len() == 1 => all.remove(0),
        PromptField::Texts(all) => return Err(many(all.len())),
        PromptField::TokenLists(all) => return Err(many(all.len())),
    })
}

/// Encodes on a thread of its own kind: a long text takes a while.
pub async fn text_prompt(ready: &Arc<Ready>, text: String) -> Result<Vec<u32>, ApiError> {
    let own = Arc::clone(ready);
    let encoded =
        tokio::task::spawn_blocking(move || own.text.tokenizer.encode_prompt(&Prompt::from(text), true)).await;
    let encoded = encoded.map_err(|e| ApiError::internal(e.to_string()))?;
    encoded.map_err(|e| ApiError::invalid("prompt", format!("{e:#}")))
}

#[derive(Default)]
struct Gathered {
    text: String,
    logprobs: Vec<(u32, sluice_engine::sampler::Logprobs)>,
    finish: Option<&'static str>,
}

struct Completions {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    with_logprobs: bool,
    gathered: Vec<Gathered>,
    /// By choice: characters of text so far.
    offsets: Vec<usize>,
}

impl Completions {
    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices,
        })
    }

    fn logprobs<'a>(
        &self,
        tokens: impl Iterator<Item = (u32, &'a sluice_engine::sampler::Logprobs)>,
        mut offset: usize,
    ) -> Value {
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

impl Dialect for Completions {
    fn events(&mut self, delta: &Delta) -> Vec<Value> {
        if delta.text.is_empty() && delta.finish.is_none() && !self.with_logprobs {
            return Vec::new();
        }
        let offset = self.offsets[delta.choice];
        let tokens = delta.tokens.iter().filter_map(|(id, p)| Some((*id, p.as_ref()?)));
        let logprobs = self.logprobs(tokens, offset);
        self.offsets[delta.choice] += delta.text.chars().count();
        vec![self.object(json!([{
            "index": delta.choice, "text": delta.text, "logprobs": logprobs,
            "finish_reason": delta.finish.map(finish_reason),
        }]))]
    }

    fn sign_of_life(&self) -> Value {
        self.object(json!([{"index": 0, "text": "", "logprobs": null, "finish_reason": null}]))
    }

    fn usage_event(&self, usage: Value) -> Value {
        let mut object = self.object(json!([]));
        object["usage"] = usage;
        object
    }

    fn gather(&mut self, delta: Delta) {
        let gathered = &mut self.gathered[delta.choice];
        gathered.text += &delta.text;
        gathered.logprobs.extend(delta.tokens.into_iter().filter_map(|(id, p)| Some((id, p?))));
        gathered.finish = delta.finish.map(finish_reason).or(gathered.finish);
    }

    fn whole(&mut self, usage: Value) -> Value {
        let choice = |(index, g): (usize, &Gathered)| {
            let logprobs = self.logprobs(g.logprobs.iter().map(|(id, p)| (*id, p)), 0);
            json!({"index": index, "text": g.text, "logprobs": logprobs, "finish_reason": g.finish})
        };
        let choices: Vec<Value> = self.gathered.iter().enumerate().map(choice).collect();
        let mut object = self.object(json!(choices));
        object["usage"] = usage;
        object
    }
}
