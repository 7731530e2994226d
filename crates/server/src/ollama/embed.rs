//! `/api/embed`, and `/api/embeddings`, which is older and takes one text.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::options::common;
use super::{tagged, wanted};
use crate::app::{App, Body};
use crate::context::ignore;
use crate::embeddings::{Input, Wish, vectors};
use crate::error::ApiError;
use crate::openapi::{OllamaComputing, written};

#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaEmbedRequest)]
pub struct EmbedRequest {
    /// Any name.
    #[serde(default)]
    model: Option<String>,
    /// Without any the model is loaded, and that is all.
    #[serde(default)]
    input: Option<Input>,
    /// What does not fit the context is cut off: unless this says no.
    #[serde(default)]
    truncate: Option<bool>,
    /// So many elements, the first: they are scaled to length 1 again.
    #[serde(default)]
    dimensions: Option<usize>,
    #[serde(default)]
    #[schema(value_type = Option<super::options::OllamaOptions>)]
    options: Option<Map<String, Value>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaEmbeddingRequest)]
pub struct Older {
    /// Any name.
    #[serde(default)]
    model: Option<String>,
    /// Without one the model is loaded, and that is all.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    #[schema(value_type = Option<super::options::OllamaOptions>)]
    options: Option<Map<String, Value>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

written! {
    /// Durations are in nanoseconds.
    OllamaEmbeddings, uses [], {
        "type": "object",
        "required": ["model", "embeddings"],
        "properties": {
            "model": {"type": "string"},
            "embeddings": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            "total_duration": {"type": "integer"},
            "load_duration": {"type": "integer"},
            "prompt_eval_count": {"type": "integer"},
        },
    }
}

written! {
    OllamaEmbedding, uses [], {
        "type": "object",
        "required": ["embedding"],
        "properties": {"embedding": {"type": "array", "items": {"type": "number"}}},
    }
}

/// What has no effect is named; options are read for what is wrong with them.
fn check(options: Option<Map<String, Value>>, others: &Map<String, Value>) -> Result<(), ApiError> {
    others.iter().filter(|(_, value)| !value.is_null()).for_each(|(field, _)| ignore(field));
    common(options.unwrap_or_default()).map(|_| ())
}

/// Vectors of texts, of length 1.
#[utoipa::path(post, path = "/api/embed", tag = "ollama", request_body = EmbedRequest, responses(
    (status = 200, description = "A vector for each input.", body = OllamaEmbeddings), OllamaComputing,
))]
pub async fn embed(State(app): State<Arc<App>>, Body(request): Body<EmbedRequest>) -> Result<Json<Value>, ApiError> {
    let arrived = Instant::now();
    let ready = app.model(wanted(&app, request.model.as_deref())).await?;
    let (model, load) = (tagged(&ready.name), arrived.elapsed());
    check(request.options, &request.others)?;
    let Some(input) = request.input.filter(|input| !input.is_empty()) else {
        return Ok(Json(json!({"model": model, "embeddings": []})));
    };
    let (truncates, dimensions) = (request.truncate.unwrap_or(true), request.dimensions.filter(|d| *d > 0));
    let vectors = vectors(&ready, input, Wish { dimensions, truncates, normalised: true }).await?;
    let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Ok(Json(json!({
        "model": model, "embeddings": vectors.all, "total_duration": nanoseconds(arrived.elapsed()), "load_duration": nanoseconds(load),
        "prompt_eval_count": vectors.tokens,
    })))
}

/// The vector of one text, as it is made.
#[utoipa::path(post, path = "/api/embeddings", tag = "ollama", request_body = Older, responses(
    (status = 200, description = "Its vector.", body = OllamaEmbedding), OllamaComputing,
))]
pub async fn older(State(app): State<Arc<App>>, Body(request): Body<Older>) -> Result<Json<Value>, ApiError> {
    let ready = app.model(wanted(&app, request.model.as_deref())).await?;
    check(request.options, &request.others)?;
    let Some(prompt) = request.prompt.filter(|prompt| !prompt.is_empty()) else {
        return Ok(Json(json!({"embedding": []})));
    };
    let wish = Wish { truncates: true, ..Wish::default() };
    let vectors = vectors(&ready, Input::Text(prompt), wish).await?;
    Ok(Json(json!({"embedding": vectors.all.into_iter().next().unwrap_or_default()})))
}
