//! Anthropic's dialect: `/v1/messages` and `/v1/messages/count_tokens`.

mod offered;
mod reply;
pub mod request;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use self::reply::{Message, MessageEvent, Messages};
use self::request::MessagesRequest;
use crate::app::{App, Body};
use crate::error::ApiError;
use crate::openapi::{AnthropicComputing, AnthropicReading, written};
use crate::reply as sending;

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/messages", tag = "anthropic", request_body = MessagesRequest, responses(
    (status = 200, description = "The answer; with `stream` its events, each named by its `type`. Where a prompt takes long, white space comes before it.",
        content((Message = "application/json"), (MessageEvent = "text/event-stream"))),
    AnthropicComputing,
))]
pub async fn messages(State(app): State<Arc<App>>, Body(request): Body<MessagesRequest>) -> Result<Response, ApiError> {
    let ready = app.model(request.model()).await?;
    let asked = request.asked()?;
    let (streamed, is_marked) = (asked.common.stream, asked.is_marked());
    let pending = asked.submit(&ready).await?;
    let wire = Messages::new(ready.name.clone(), is_marked);
    Ok(sending::send(pending, wire, streamed).await)
}

written! {
    TokenCount, uses [], {
        "type": "object",
        "required": ["input_tokens"],
        "properties": {"input_tokens": {"type": "integer"}},
    }
}

/// How many tokens a conversation has, with all that the template puts around it.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "anthropic", request_body = MessagesRequest, responses(
    (status = 200, description = "Its tokens.", body = TokenCount), AnthropicReading,
))]
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    Body(request): Body<MessagesRequest>,
) -> Result<Json<Value>, ApiError> {
    let ready = app.model(request.model()).await?;
    let rendered = request.asked()?.rendered(&ready).await?;
    Ok(Json(json!({"input_tokens": rendered.tokens.len()})))
}

/// Whether a request is one of Anthropic's clients'.
pub fn speaks(path: &str, headers: &HeaderMap) -> bool {
    path.starts_with("/v1/messages") || headers.contains_key("anthropic-version")
}

/// An error in this dialect's words.
pub fn error_json(error: &ApiError, request_id: &str) -> Value {
    let kind = match error.status {
        StatusCode::BAD_REQUEST | StatusCode::UNSUPPORTED_MEDIA_TYPE => "invalid_request_error",
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => "timeout_error",
        _ => "api_error",
    };
    let message = match error.overflow {
        Some((tokens, most)) => format!("prompt is too long: {tokens} tokens > {most} maximum"),
        None => error.message.clone(),
    };
    let mut said = json!({"type": kind, "message": message});
    if error.code == Some(NO_THREADS) {
        // Anthropic's SDKs go on without a thread then, and send the whole conversation.
        said["details"] = json!({"error_code": NO_THREADS, "unsupported": ["thread"]});
    }
    json!({"type": "error", "error": said, "request_id": request_id})
}

/// The code of an error: conversations are not kept here.
const NO_THREADS: &str = "thread_unsupported_request";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_said_in_anthropics_words() {
        let said = error_json(&ApiError::too_long(300, 64), "req_1");
        let message = "prompt is too long: 300 tokens > 63 maximum";
        let error = json!({"type": "invalid_request_error", "message": message});
        assert_eq!(said, json!({"type": "error", "error": error, "request_id": "req_1"}));
        let said = error_json(&ApiError::unauthorized("no"), "req_2");
        assert_eq!(said["error"], json!({"type": "authentication_error", "message": "no"}));
    }
}
