//! Handlers of `/v1/responses`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use crate::api::stream;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{BodyErrors, ComputeErrors, json_schema};
use crate::http::state::AppState;
use crate::openai::responses::encoder::ResponseEncoder;
use crate::openai::responses::request::ResponsesRequest;
use crate::openai::responses::schema::{ResponseEvent, ResponseObject};

/// Answers a conversation. Nothing is stored, so each request has the whole conversation.
#[utoipa::path(post, path = "/v1/responses", tag = "openai", request_body = ResponsesRequest, responses(
    (status = 200, description = "The response; with `stream`, its events, each named by its `type`. If it takes long, white space is sent before it.",
        content((ResponseObject = "application/json"), (ResponseEvent = "text/event-stream"))),
    ComputeErrors,
))]
pub async fn responses(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(request.model()).await?;
    let (chat, mut options) = request.into_chat()?;
    options.tokenizer = options.with_logprobs.then(|| Arc::clone(&model.text.tokenizer));
    let streamed = chat.sampling.stream;
    let pending = chat.submit(&model).await?;
    let encoder = ResponseEncoder::new(model.name.clone(), options);
    Ok(stream::send(pending, encoder, streamed).await)
}

json_schema! {
    InputTokens, uses [], {
        "type": "object",
        "required": ["object", "input_tokens"],
        "properties": {
            "object": {"type": "string", "enum": ["response.input_tokens"]},
            "input_tokens": {"type": "integer"},
        },
    }
}

/// Counts the tokens of a conversation, including those of the chat template.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "openai", request_body = ResponsesRequest, responses(
    (status = 200, description = "The number of tokens.", body = InputTokens), BodyErrors,
))]
pub async fn input_tokens(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<ResponsesRequest>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model(request.model()).await?;
    let (mut chat, _) = request.into_chat()?;
    let rendered = chat.render(&model).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": rendered.tokens.len()})))
}
