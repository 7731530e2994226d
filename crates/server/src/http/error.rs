//! Errors of requests, worded as in OpenAI's API. Responses also carry the [`ApiError`] itself, so that middleware can word it in another dialect.

use std::sync::Arc;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::log::note;
use crate::models::runtime::thread::Refused;

/// An error of a request.
#[derive(Clone, Debug)]
pub struct ApiError {
    /// Status of the response.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
    /// The field that is wrong.
    pub param: Option<String>,
    /// What is wrong, for the client's user.
    pub message: String,
    /// Seconds after which a retry may succeed.
    pub retry_after: Option<u64>,
    /// For a prompt that is too long: how many tokens it has, and how many it may have.
    pub overflow: Option<(u32, u32)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, kind, code: None, param: None, message: message.into(), retry_after: None, overflow: None }
    }

    /// An invalid request. `param`: the field that is wrong; empty if it is not a field's fault.
    pub fn invalid(param: &str, message: impl Into<String>) -> ApiError {
        let param = (!param.is_empty()).then(|| param.to_owned());
        ApiError { param, ..ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message) }
    }

    /// An invalid field; the message begins with its name.
    pub fn invalid_field(field: &str, message: &str) -> ApiError {
        ApiError::invalid(field, format!("{field}: {message}"))
    }

    /// A prompt that is too long.
    pub fn too_long(tokens: usize, context: usize) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your messages resulted in {tokens} tokens. Please reduce the length of the messages."
        );
        let code = Some("context_length_exceeded");
        // One token of the answer must fit as well.
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let overflow = Some((count(tokens), count(context.saturating_sub(1))));
        ApiError { code, overflow, ..ApiError::invalid("messages", message) }
    }

    /// An input for an embedding that is too long.
    pub fn input_too_long(tokens: usize, context: usize) -> ApiError {
        let message = format!(
            "This model's maximum context length is {context} tokens, however you requested {tokens} tokens ({tokens} in your prompt; 0 for the completion). Please reduce your prompt; or completion length."
        );
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let overflow = Some((count(tokens), count(context)));
        ApiError { code: Some("context_length_exceeded"), overflow, ..ApiError::invalid("input", message) }
    }

    /// A missing or wrong API key.
    pub fn unauthorized(message: impl Into<String>) -> ApiError {
        let code = Some("invalid_api_key");
        ApiError { code, ..ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", message) }
    }

    /// A host or an origin that is not allowed.
    pub fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// Something took too long.
    pub fn timed_out(message: impl Into<String>) -> ApiError {
        ApiError { code: Some("timeout"), ..ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message) }
    }

    /// A method that the path does not support.
    pub fn method_not_allowed(method: &str, path: &str) -> ApiError {
        let message = format!("{path} does not support {method}");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    /// A path that does not exist.
    pub fn not_found(what: &str) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("{what}: no such path"))
    }

    /// The server cannot take the request now.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", message)
    }

    /// The disk has no room for what the request wants to keep.
    pub fn no_storage(message: impl Into<String>) -> ApiError {
        let code = Some("insufficient_storage");
        ApiError { code, ..ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "server_error", message) }
    }

    /// The model is still loading.
    pub fn loading() -> ApiError {
        ApiError { retry_after: Some(1), ..ApiError::unavailable("Loading model") }
    }

    /// A fault of the server. Paths of files go only to the server's own log.
    pub fn internal(message: impl Into<String>) -> ApiError {
        let message = message.into();
        let public = without_folders(&message);
        if public != message {
            note(&message);
        }
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", public)
    }

    /// A model that the server does not offer.
    pub fn no_such_model(name: &str, offered: &[&str]) -> ApiError {
        let name: String = name.chars().take(100).collect();
        let message = format!("there is no model {name:?}; the server has {}", offered.join(", "));
        let code = Some("model_not_found");
        ApiError { status: StatusCode::NOT_FOUND, code, ..ApiError::invalid("model", message) }
    }

    /// The error as an object, in OpenAI's words.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

/// Cuts each path in a message to its file name.
pub fn without_folders(message: &str) -> String {
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
            Refused::Failed(why) => ApiError::unavailable(format!("the engine has ended: {why}")),
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
    fn messages_do_not_reveal_folders() {
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
