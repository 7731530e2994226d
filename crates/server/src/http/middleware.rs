//! Middleware around every handler: who may use the server, and what every answer carries. This is the only place that words errors in a request's dialect, so
//! handlers, extractors and access checks need not know it.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use crate::http::context::{CURRENT, IGNORED_HEADER, RequestContext};
use crate::http::error::ApiError;
use crate::http::state::AppState;
use crate::{anthropic, ollama};

/// The dialect in which a client expects its errors.
#[derive(Clone, Copy)]
enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    fn of(request: &Request) -> Dialect {
        let path = request.uri().path();
        if ollama::error::applies_to(path) {
            Dialect::Ollama
        } else if anthropic::error::applies_to(path, request.headers()) {
            Dialect::Anthropic
        } else {
            Dialect::OpenAi
        }
    }

    /// The body of an error; `None` where [`ApiError`]'s own response is already in the dialect's words.
    fn error_json(self, error: &ApiError, request_id: &str) -> Option<Value> {
        match self {
            Dialect::OpenAi => None,
            Dialect::Anthropic => Some(anthropic::error::error_json(error, request_id)),
            Dialect::Ollama => Some(ollama::error::error_json(error)),
        }
    }
}

/// The outermost layer: gives the request an id and a context, words errors in the request's dialect, and lists ignored fields in a header.
pub async fn with_context(State(app): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let dialect = Dialect::of(&request);
    let context = Arc::new(RequestContext::new(&request, app.settings.log_requests));
    let mut response = CURRENT.scope(Arc::clone(&context), next.run(request)).await;
    let error = response.extensions_mut().remove::<Arc<ApiError>>();
    if let Some(body) = error.and_then(|error| dialect.error_json(&error, &context.id)) {
        // Headers that other layers have set stay.
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = Body::from(body.to_string());
    }
    context.set_status(response.status());
    let ignored = context.ignored_fields();
    let headers = response.headers_mut();
    set(headers, "x-request-id", &context.id);
    set(headers, "request-id", &context.id);
    if !ignored.is_empty() {
        set(headers, IGNORED_HEADER, &ignored);
    }
    response
}

fn set(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// Refuses requests that the access settings do not allow, and compressed bodies.
pub async fn check_access(State(app): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let allowed = app.settings.access.check(&request, app.on_loopback);
    match allowed.and_then(|()| check_encoding(request.headers())) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            let needs_key = error.status == StatusCode::UNAUTHORIZED;
            let mut response = error.into_response();
            if response.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE {
                response.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            }
            if needs_key {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            response
        }
    }
}

/// Refuses compressed bodies.
fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let plain = |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity");
    match headers.get_all(header::CONTENT_ENCODING).iter().find(|value| !plain(value)) {
        None => Ok(()),
        Some(value) => {
            let name: String = String::from_utf8_lossy(value.as_bytes()).chars().take(40).collect();
            let message = format!("content-encoding {name} is not supported: send the body uncompressed");
            Err(ApiError { status: StatusCode::UNSUPPORTED_MEDIA_TYPE, ..ApiError::invalid("", message) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_bodies_are_refused() {
        let found = |values: &[&'static str]| {
            let name = |value: &&'static str| (header::CONTENT_ENCODING, HeaderValue::from_static(value));
            check_encoding(&values.iter().map(name).collect()).map_or_else(|e| e.status.as_u16(), |()| 200)
        };
        assert_eq!([found(&[]), found(&["identity"]), found(&[" Identity"])], [200; 3]);
        assert_eq!([found(&["gzip"]), found(&["identity, br"]), found(&[""])], [415; 3]);
    }
}
