//! Handlers of `/api/chat` and `/api/generate`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};

use crate::api::pending::Pending;
use crate::api::{prompt, stream};
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::OllamaComputeErrors;
use crate::http::state::AppState;
use crate::models::loaded::LoadedModel;
use crate::ollama::encoder::{ChatAnswer, GenerateAnswer, OllamaEncoder, ReplyKind};
use crate::ollama::names::{requested, tagged};
use crate::ollama::request::{OllamaChat, OllamaGenerate, OllamaPrompt};

/// Answers a conversation.
#[utoipa::path(post, path = "/api/chat", tag = "ollama", request_body = OllamaChat, responses(
    (status = 200, description = "The answer as lines of JSON, the last one with `done`; without `stream`, as one object. If it takes long, white space is sent before it.",
        content((ChatAnswer = "application/json"), (ChatAnswer = "application/x-ndjson"))),
    OllamaComputeErrors,
))]
pub async fn chat(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<OllamaChat>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let model = app.model(requested(&app, request.shared.model())).await?;
    let encoder = OllamaEncoder::new(ReplyKind::Chat, tagged(&model.name), arrived);
    if request.is_empty() {
        return Ok(Json(encoder.loaded()).into_response());
    }
    let streamed = request.shared.is_streamed();
    let pending = request.into_chat(can_think(&model))?.submit(&model).await?;
    Ok(stream::send(pending, encoder, streamed).await)
}

/// Answers a prompt.
#[utoipa::path(post, path = "/api/generate", tag = "ollama", request_body = OllamaGenerate, responses(
    (status = 200, description = "The answer as lines of JSON, the last one with `done`; without `stream`, as one object. If it takes long, white space is sent before it.",
        content((GenerateAnswer = "application/json"), (GenerateAnswer = "application/x-ndjson"))),
    OllamaComputeErrors,
))]
pub async fn generate(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<OllamaGenerate>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let model = app.model(requested(&app, request.shared.model())).await?;
    let encoder = OllamaEncoder::new(ReplyKind::Generate, tagged(&model.name), arrived);
    if request.is_empty() {
        return Ok(Json(encoder.loaded()).into_response());
    }
    let streamed = request.shared.is_streamed();
    let pending = match request.into_prompt(model.text.template.is_some(), can_think(&model))? {
        OllamaPrompt::Conversation(chat) => chat.submit(&model).await?,
        OllamaPrompt::Text(text, sampling) => {
            let tokens = prompt::encode(&model, text).await?;
            let mut generation = sampling.generation(&model.text, tokens.len(), model.context)?;
            generation.snapshot_points = vec![tokens.len().saturating_sub(1)];
            Pending::submit(&model, tokens, generation, &sampling)?
        }
    };
    Ok(stream::send(pending, encoder, streamed).await)
}

/// Whether the model's template has thoughts.
fn can_think(model: &LoadedModel) -> bool {
    model.text.template.as_ref().is_some_and(|template| template.style().thoughts)
}
