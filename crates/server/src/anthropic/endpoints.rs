//! Handlers of Anthropic's dialect.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use crate::anthropic::encoder::{Message, MessageEncoder, MessageEvent};
use crate::anthropic::request::MessagesRequest;
use crate::api::stream;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{AnthropicBodyErrors, AnthropicComputeErrors, json_schema};
use crate::http::state::AppState;

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/messages", tag = "anthropic", request_body = MessagesRequest, responses(
    (status = 200, description = "The answer; with `stream`, its events, each named by its `type`. If it takes long, white space is sent before it.",
        content((Message = "application/json"), (MessageEvent = "text/event-stream"))),
    AnthropicComputeErrors,
))]
pub async fn messages(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<MessagesRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(request.model()).await?;
    let chat = request.into_chat()?;
    let (streamed, has_cache_control) = (chat.sampling.stream, chat.has_cache_control());
    let pending = chat.submit(&model).await?;
    let encoder = MessageEncoder::new(model.name.clone(), has_cache_control);
    Ok(stream::send(pending, encoder, streamed).await)
}

json_schema! {
    TokenCount, uses [], {
        "type": "object",
        "required": ["input_tokens"],
        "properties": {"input_tokens": {"type": "integer"}},
    }
}

/// Counts the tokens of a conversation, including those of the chat template.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "anthropic", request_body = MessagesRequest, responses(
    (status = 200, description = "The number of tokens.", body = TokenCount), AnthropicBodyErrors,
))]
pub async fn count_tokens(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<MessagesRequest>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model(request.model()).await?;
    let rendered = request.into_chat()?.render(&model).await?;
    Ok(Json(json!({"input_tokens": rendered.tokens.len()})))
}
