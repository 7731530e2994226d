//! `/v1/completions`

use std::collections::VecDeque;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use sluice_engine::text::{Prompt, Tokenizer};
use utoipa::ToSchema;

use super::fields::SamplingFields;
use super::reply::{self, ChatUsage, Dialect, finish_reason, now};
use crate::answer::Delta;
use crate::app::{App, Body, LoadedModel};
use crate::context::fresh_id;
use crate::error::ApiError;
use crate::given::{self, Texts};
use crate::openapi::{Computing, written};
use crate::reply::Pending;

#[derive(Deserialize, ToSchema)]
#[schema(as = CompletionRequest)]
pub struct CompletionRequest {
    #[serde(default)]
    #[schema(value_type = PromptField, required)]
    prompt: Option<PromptField>,
    /// Each text begins with its prompt. Not with `logprobs`.
    #[serde(default, deserialize_with = "given::flag_or_false")]
    #[schema(value_type = Option<bool>)]
    echo: bool,
    /// How likely each token was, with so many of the likeliest: 5 at most.
    #[serde(default, deserialize_with = "given::whole")]
    #[schema(maximum = 5)]
    logprobs: Option<usize>,
    #[serde(flatten)]
    common: SamplingFields,
}

/// Likeliest tokens that may be asked for.
const MOST_LOGPROBS: usize = 5;
/// Prompts of one request at most, each of their choices counted.
const MOST_PROMPTS: usize = 128;

impl CompletionRequest {
    /// The prompts, the likeliest tokens that are asked for, and the rest.
    ///
    /// # Errors
    /// What cannot be obeyed, by name.
    pub fn parts(self) -> Result<(PromptField, Option<usize>, SamplingFields), ApiError> {
        self.common.check_others()?;
        if self.echo && self.logprobs.is_some() {
            let message = "echo with logprobs is not supported: how likely a prompt's own tokens are is not computed";
            return Err(ApiError::invalid("echo", message));
        }
        let prompt = self.prompt.ok_or_else(|| ApiError::invalid("prompt", "prompt is missing"))?;
        if let Some(top) = self.logprobs.filter(|top| *top > MOST_LOGPROBS) {
            let message = format!("logprobs is {top}; it must be at most {MOST_LOGPROBS}");
            return Err(ApiError::invalid("logprobs", message));
        }
        Ok((prompt, self.logprobs, self.common))
    }
}

/// A text, or token ids; or a list of either: 128 prompts at most, whose choices follow one another.
#[derive(ToSchema)]
#[schema(as = Prompt)]
#[serde(untagged)]
pub enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PromptField, D::Error> {
        Ok(match Texts::of(Value::deserialize(deserializer)?) {
            Some(Texts::One(text)) => PromptField::Text(text),
            Some(Texts::Many(all)) => PromptField::Texts(all),
            Some(Texts::Tokens(tokens)) => PromptField::Tokens(tokens),
            Some(Texts::TokenLists(all)) => PromptField::TokenLists(all),
            None => {
                return Err(D::Error::custom(
                    "must be a text, a list of texts, token ids, or a list of lists of those",
                ));
            }
        })
    }
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
#[utoipa::path(post, path = "/v1/completions", tag = "openai", request_body = CompletionRequest, responses(
    (status = 200, description = "The completion; with `stream` its events. Where a prompt takes long, white space comes before it.",
        content((Completion = "application/json"), (CompletionChunk = "text/event-stream"))),
    Computing,
))]
pub async fn completions(
    State(app): State<Arc<App>>,
    Body(request): Body<CompletionRequest>,
) -> Result<Response, ApiError> {
    let ready = app.model(request.common.model.as_deref()).await?;
    let echo = request.echo;
    let (prompts, logprobs, common) = request.parts()?;
    let choices = common.choices()?;
    let prompts = prompts.each()?;
    if prompts.len() * choices > MOST_PROMPTS {
        let message =
            format!("{} prompts of {choices} choices each; {MOST_PROMPTS} of all are accepted", prompts.len());
        return Err(ApiError::invalid("prompt", message));
    }
    // 1. All prompts first: what is wrong with one is wrong with the request
    let mut encoded = Vec::with_capacity(prompts.len());
    let mut echoed = Vec::new();
    for prompt in prompts {
        let text = if let (PromptField::Text(text), true) = (&prompt, echo) { Some(text.clone()) } else { None };
        let tokens = one_prompt(&ready, prompt).await?;
        if echo {
            let decoded = || ready.text.tokenizer.decode(&tokens, false).unwrap_or_default();
            echoed.extend(std::iter::repeat_n(text.unwrap_or_else(decoded), choices));
        }
        let mut generation = common.generation(&ready.text, tokens.len(), ready.context)?;
        generation.logprobs = logprobs;
        generation.snapshot_points = vec![tokens.len().saturating_sub(1)];
        encoded.push((tokens, generation));
    }
    // 2. One request of them
    let all = encoded.into_iter().map(|(tokens, generation)| ready.submit(tokens, generation, &common));
    let mut all = all.collect::<Result<VecDeque<Pending>, ApiError>>()?;
    let choices = choices * all.len();
    let mut pending = all.pop_front().ok_or_else(|| ApiError::invalid("prompt", "prompt is an empty list"))?;
    pending.beside = all.into();
    let dialect = Completions {
        id: format!("cmpl-{}", fresh_id()),
        created: now(),
        model: ready.name.clone(),
        tokenizer: Arc::clone(&ready.text.tokenizer),
        with_logprobs: logprobs.is_some(),
        gathered: (0..choices).map(|_| Gathered::default()).collect(),
        offsets: vec![0; choices],
        echoed,
    };
    Ok(reply::send(pending, dialect, common.stream, common.wants_usage()).await)
}

impl PromptField {
    /// Prompts one by one.
    fn each(self) -> Result<Vec<PromptField>, ApiError> {
        let all: Vec<PromptField> = match self {
            PromptField::Texts(all) => all.into_iter().map(PromptField::Text).collect(),
            PromptField::TokenLists(all) => all.into_iter().map(PromptField::Tokens).collect(),
            one => vec![one],
        };
        let most = |n: usize| ApiError::invalid("prompt", format!("{n} prompts; {MOST_PROMPTS} are accepted"));
        if all.len() > MOST_PROMPTS { Err(most(all.len())) } else { Ok(all) }
    }
}

/// The tokens of a prompt.
pub(super) async fn one_prompt(ready: &Arc<LoadedModel>, prompt: PromptField) -> Result<Vec<u32>, ApiError> {
    let many = |n: usize| ApiError::invalid("prompt", format!("prompt is {n} prompts; it must be one"));
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
pub async fn text_prompt(ready: &Arc<LoadedModel>, text: String) -> Result<Vec<u32>, ApiError> {
    let own = Arc::clone(ready);
    let encoded =
        tokio::task::spawn_blocking(move || own.text.tokenizer.encode_prompt(&Prompt::from(text), true)).await;
    let encoded = encoded.map_err(|e| ApiError::internal(e.to_string()))?;
    encoded.map_err(|e| ApiError::invalid("prompt", format!("{e:#}")))
}

#[derive(Default)]
struct Gathered {
    text: String,
    logprobs: Vec<(u32, sluice_engine::sampling::Logprobs)>,
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
    /// By choice: the prompt that its text begins with; none where that is not asked for.
    echoed: Vec<String>,
}

impl Completions {
    /// The prompt, where the choice's text is to begin with it and has not.
    fn echo(&mut self, choice: usize) -> String {
        self.echoed.get_mut(choice).map(std::mem::take).unwrap_or_default()
    }

    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model, "choices": choices,
        })
    }

    fn logprobs<'a>(
        &self,
        tokens: impl Iterator<Item = (u32, &'a sluice_engine::sampling::Logprobs)>,
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
        let echo = self.echo(delta.choice);
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

    fn sign_of_life(&self) -> Value {
        self.object(json!([{"index": 0, "text": "", "logprobs": null, "finish_reason": null}]))
    }

    fn usage_event(&self, usage: Value) -> Value {
        let mut object = self.object(json!([]));
        object["usage"] = usage;
        object
    }

    fn gather(&mut self, delta: Delta) {
        let echo = self.echo(delta.choice);
        let gathered = &mut self.gathered[delta.choice];
        gathered.text += &(echo + &delta.text);
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
