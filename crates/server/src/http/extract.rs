//! Extractors: a JSON body, and a name in the path. Both report errors as [`ApiError`]s, which each dialect words in its own way.

use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::api::fields;
use crate::http::context;
use crate::http::error::ApiError;
use crate::http::settings::permits;
use crate::http::state::AppState;

/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

/// A JSON body, whatever `content-type` the client declares: some declare none, or a form.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<AppState>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<AppState>) -> Result<JsonBody<T>, ApiError> {
        app.models.check_started()?;
        let max = app.max_body();
        let too_large = || ApiError {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            ..ApiError::invalid("", format!("the request has more than {max} bytes"))
        };
        // 1. Reserve memory before reading; without a content-length, for the largest body
        let declared = request.body().size_hint().exact();
        let expected = declared.map_or(max, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if expected > max {
            return Err(too_large());
        }
        let mut memory = app.reserve_body(expected).await?;
        // 2. Read the body
        let bytes = timeout(BODY_TIME, axum::body::to_bytes(request.into_body(), max)).await;
        let too_slow = |_| ApiError {
            status: StatusCode::REQUEST_TIMEOUT,
            ..ApiError::timed_out(format!("the request's body did not arrive within {} s", BODY_TIME.as_secs()))
        };
        // A body with a content-length is never longer than that.
        let broken = |_| match declared {
            Some(_) => ApiError::invalid("", "the request's body ends before its content-length"),
            None => too_large(),
        };
        let bytes = bytes.map_err(too_slow)?.map_err(broken)?;
        // 3. Give back what it does not need, and keep the rest until the request has no body any more
        drop(memory.split(memory.num_permits().saturating_sub(permits(bytes.len()))));
        if let Some(context) = context::current() {
            context.hold_body_memory(Some(memory));
        }
        fields::parse_request(&bytes).map(JsonBody)
    }
}

/// The parameter `name` of the path.
pub struct PathName(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathName {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<PathName, ApiError> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        name.map(|Path(name)| PathName(name)).map_err(|_| ApiError::invalid("name", "name is not valid UTF-8"))
    }
}
