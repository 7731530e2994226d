//! Errors in Anthropic's format.

use axum::http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::http::error::ApiError;

/// Whether a request comes from one of Anthropic's clients.
pub fn applies_to(path: &str, headers: &HeaderMap) -> bool {
    path.starts_with("/v1/messages") || headers.contains_key("anthropic-version")
}

/// The body of an error.
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
    let mut body = json!({"type": kind, "message": message});
    if error.code == Some(NO_THREADS) {
        // Anthropic's SDKs then go on without a thread and send the whole conversation.
        body["details"] = json!({"error_code": NO_THREADS, "unsupported": ["thread"]});
    }
    json!({"type": "error", "error": body, "request_id": request_id})
}

/// The code of the error that threads are not supported.
pub const NO_THREADS: &str = "thread_unsupported_request";

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
