//! What goes wrong with a request, in the words of OpenAI's API. Responses carry the error itself as well, for dialects that say it otherwise.

use std::sync::Arc;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::runtime::Refused;

#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub code: Option<&'static str>,
    /// The field that is wrong.
    pub param: Option<String>,
    pub message: String,
    pub retry_after: Option<u64>,
    /// Of a prompt that is too long: its tokens, and the most that it may have.
    pub overflow: Option<(u32, u32)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, kind, code: None, param: None, message: message.into(), retry_after: None, overflow: None }
    }

    /// A field that cannot be what it is.
    pub fn invalid(param: &str, message: impl Into<String>) -> ApiError {
        let param = (!param.is_empty()).then(|| param.to_owned());
        ApiError { param, ..ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message) }
    }

    pub fn too_long(tokens: usize, context: usize) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your messages resulted in {tokens} tokens. Please reduce the length of the messages."
        );
        let code = Some("context_length_exceeded");
        // A token of the answer is to fit as well.
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let overflow = Some((count(tokens), count(context.saturating_sub(1))));
        ApiError { code, overflow, ..ApiError::invalid("messages", message) }
    }

    /// A text to make a vector of that is too long.
    pub fn input_too_long(tokens: usize, context: usize) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens, however you requested {tokens} tokens ({tokens} in your prompt; 0 for the completion). Please reduce your prompt; or completion length."
        );
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let overflow = Some((count(tokens), count(context)));
        ApiError { code: Some("context_length_exceeded"), overflow, ..ApiError::invalid("input", message) }
    }

    pub fn unauthorized(message: impl Into<String>) -> ApiError {
        let code = Some("invalid_api_key");
        ApiError { code, ..ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message) }
    }

    pub fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// The time of a request is up.
    pub fn timed_out(message: impl Into<String>) -> ApiError {
        ApiError { code: Some("timeout"), ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message) }
    }

    pub fn method_not_allowed(method: &str, path: &str) -> ApiError {
        let message = format!("{path} cannot be asked with {method}");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    pub fn not_found(what: &str) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("{what}: no such path"))
    }

    /// Nothing that is wrong with the request.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message)
    }

    /// The model is not there yet.
    pub fn loading() -> ApiError {
        ApiError { retry_after: Some(1), ..ApiError::unavailable("Loading model") }
    }

    /// What is wrong here and not with the request. Where this server has its files is for its own log.
    pub fn internal(message: impl Into<String>) -> ApiError {
        let message = message.into();
        let told = without_folders(&message);
        if told != message {
            crate::note(&message);
        }
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", told)
    }

    /// A model that is not offered.
    pub fn no_such_model(name: &str, offered: &[&str]) -> ApiError {
        let name: String = name.chars().take(100).collect();
        let message = format!("there is no model {name:?} here, but {}", offered.join(", "));
        let code = Some("model_not_found");
        ApiError { status: StatusCode::NOT_FOUND, code, ..ApiError::invalid("model", message) }
    }

    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

/// The message with each path in it cut to the name of its file.
fn without_folders(message: &str) -> String {
    let one = |word: &str| {
        let path = word.trim_matches(|c: char| c.is_ascii_punctuation() && !"/.~_-".contains(c));
        let path = path.trim_end_matches(['/', '.']);
        let begins = ["/", "./", "../", "~/"].iter().any(|begin| path.starts_with(begin));
        match path.rsplit_once('/') {
            Some((folders, file))
                if !path.contains("://") && (begins || folders.contains('/') || file.contains('.')) =>
            {
                word.replacen(path, file, 1)
            }
            _ => word.to_owned(),
        }
    };
    message.split(' ').map(one).collect::<Vec<_>>().join(" ")
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        match refused {
            Refused::Full(waiting) => ApiError {
                retry_after: Some(1 + waiting as u64 / 8),
                code: Some("rate_limit_exceeded"),
                ..ApiError::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_error",
                    format!("{waiting} requests are waiting already; try again later"),
                )
            },
            Refused::Stopping => ApiError::unavailable("the server is shutting down"),
            Refused::Dead(why) => ApiError::unavailable(format!("the engine has ended: {why}")),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_files_lie_is_not_told() {
        for (message, told) in [
            ("/srv/models/big/model.safetensors: no such file", "model.safetensors: no such file"),
            (
                "big cannot be loaded: models/big/config.json: \"x\" is missing",
                "big cannot be loaded: config.json: \"x\" is missing",
            ),
            ("cannot read \"./a/b\" (../c.bin).", "cannot read \"b\" (c.bin)."),
            ("2.5 GB/s and/or https://example.org/a/b", "2.5 GB/s and/or https://example.org/a/b"),
        ] {
            assert_eq!(without_folders(message), told);
        }
    }
}
