//! Ollama's dialect: `/api/chat`, `/api/generate`, `/api/embed`, and what its clients ask of the server and its models.

pub mod catalog;
pub mod embed;
mod options;
mod reply;
pub mod request;

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use self::reply::{Answering, ChatAnswer, GenerateAnswer, ReplyKind};
use self::request::{Chat, Generate, Prompted};
use crate::app::{App, Body, LoadedModel};
use crate::error::ApiError;
use crate::openai::completions::text_prompt;
use crate::openapi::OllamaComputing;
use crate::reply as sending;

/// Answers a conversation.
#[utoipa::path(post, path = "/api/chat", tag = "ollama", request_body = Chat, responses(
    (status = 200, description = "The answer in lines of JSON, the last of them with `done`; without `stream` one object. Where a prompt takes long, white space comes before it.",
        content((ChatAnswer = "application/json"), (ChatAnswer = "application/x-ndjson"))),
    OllamaComputing,
))]
pub async fn chat(State(app): State<Arc<App>>, Body(request): Body<Chat>) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let ready = app.model(wanted(&app, request.model())).await?;
    let answering = Answering::new(ReplyKind::Chat, tagged(&ready.name), arrived);
    if request.asks_nothing() {
        return Ok(Json(answering.loaded()).into_response());
    }
    let streamed = request.is_streamed();
    let asked = request.asked(thinks(&ready))?;
    let pending = asked.submit(&ready).await?;
    Ok(sending::send(pending, answering, streamed).await)
}

/// Answers a prompt.
#[utoipa::path(post, path = "/api/generate", tag = "ollama", request_body = Generate, responses(
    (status = 200, description = "The answer in lines of JSON, the last of them with `done`; without `stream` one object. Where a prompt takes long, white space comes before it.",
        content((GenerateAnswer = "application/json"), (GenerateAnswer = "application/x-ndjson"))),
    OllamaComputing,
))]
pub async fn generate(State(app): State<Arc<App>>, Body(request): Body<Generate>) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let ready = app.model(wanted(&app, request.model())).await?;
    let answering = Answering::new(ReplyKind::Generate, tagged(&ready.name), arrived);
    if request.asks_nothing() {
        return Ok(Json(answering.loaded()).into_response());
    }
    let streamed = request.is_streamed();
    let pending = match request.asked(ready.text.template.is_some(), thinks(&ready))? {
        Prompted::Conversation(asked) => asked.submit(&ready).await?,
        Prompted::Text(text, common) => {
            let prompt = text_prompt(&ready, text).await?;
            let mut generation = common.generation(&ready.text, prompt.len(), ready.context)?;
            generation.snapshot_points = vec![prompt.len().saturating_sub(1)];
            ready.submit(prompt, generation, &common)?
        }
    };
    Ok(sending::send(pending, answering, streamed).await)
}

fn thinks(ready: &LoadedModel) -> bool {
    ready.text.template.as_ref().is_some_and(|template| template.style().thoughts)
}

/// A model's name as Ollama's clients know it: with a tag.
fn tagged(name: &str) -> String {
    if parts(name).1.is_some() { name.to_owned() } else { format!("{name}:latest") }
}

/// A name and its tag, which stands behind its last part.
fn parts(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (name, None),
    }
}

/// The name that a client means: a tag that no model here has is dropped.
fn wanted<'a>(app: &App, name: Option<&'a str>) -> Option<&'a str> {
    name.map(|name| if app.models.named(name).is_some() { name } else { parts(name).0 })
}

/// Whether a path is one of Ollama's.
pub fn speaks(path: &str) -> bool {
    path.starts_with("/api/")
}

/// An error in this dialect's words.
pub fn error_json(error: &ApiError) -> Value {
    json!({"error": match error.overflow {
        Some((tokens, most)) => format!("the input length exceeds the context length: {tokens} tokens > {most} maximum"),
        None => error.message.clone(),
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_tags() {
        for (name, expected) in [("a", "a:latest"), ("a:4b", "a:4b"), ("host:80/a", "host:80/a:latest")] {
            assert_eq!(tagged(name), expected);
        }
        assert_eq!(parts("org/a:latest"), ("org/a", Some("latest")));
        assert_eq!(parts("host:80/a"), ("host:80/a", None));
    }

    #[test]
    fn errors_are_said_in_ollamas_words() {
        let said = error_json(&ApiError::too_long(300, 64));
        assert_eq!(said, json!({"error": "the input length exceeds the context length: 300 tokens > 63 maximum"}));
        assert_eq!(error_json(&ApiError::not_found("/api/x")), json!({"error": "/api/x: no such path"}));
        assert!(speaks("/api/chat") && !speaks("/v1/messages") && !speaks("/apis"));
    }
}
