//! `/api/embed`, and the older `/api/embeddings`, which takes one text.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::embeddings::{self, EmbeddingInput, EmbeddingOptions};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{OllamaComputeErrors, json_schema};
use crate::http::state::AppState;
use crate::ollama::names::{requested, tagged};
use crate::ollama::options::{OllamaOptions, sampling_fields};

/// A request for embeddings.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaEmbedRequest)]
pub struct EmbedRequest {
    /// Ignored unless it names one of several models that the server offers.
    #[serde(default)]
    model: Option<String>,
    /// Without it, the request only loads the model.
    #[serde(default)]
    input: Option<EmbeddingInput>,
    /// Whether to truncate inputs that do not fit the context; by default they are truncated.
    #[serde(default)]
    truncate: Option<bool>,
    /// Keep only this many elements, and scale the vectors to length 1 again.
    #[serde(default)]
    dimensions: Option<usize>,
    #[serde(default)]
    #[schema(value_type = Option<OllamaOptions>)]
    options: Option<Map<String, Value>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A request for one embedding.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaEmbeddingRequest)]
pub struct EmbedOneRequest {
    /// Ignored unless it names one of several models that the server offers.
    #[serde(default)]
    model: Option<String>,
    /// Without it, the request only loads the model.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    #[schema(value_type = Option<OllamaOptions>)]
    options: Option<Map<String, Value>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

json_schema! {
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

json_schema! {
    OllamaEmbedding, uses [], {
        "type": "object",
        "required": ["embedding"],
        "properties": {"embedding": {"type": "array", "items": {"type": "number"}}},
    }
}

/// Records unknown fields as ignored, and checks options.
fn check_fields(options: Option<Map<String, Value>>, others: &Map<String, Value>) -> Result<(), ApiError> {
    others.iter().filter(|(_, value)| !value.is_null()).for_each(|(field, _)| note_ignored(field));
    sampling_fields(options.unwrap_or_default()).map(|_| ())
}

/// Computes embeddings of length 1.
#[utoipa::path(post, path = "/api/embed", tag = "ollama", request_body = EmbedRequest, responses(
    (status = 200, description = "A vector for each input.", body = OllamaEmbeddings), OllamaComputeErrors,
))]
pub async fn embed(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<EmbedRequest>,
) -> Result<Json<Value>, ApiError> {
    let arrived = Instant::now();
    let model = app.model(requested(&app, request.model.as_deref())).await?;
    let (name, load) = (tagged(&model.name), arrived.elapsed());
    check_fields(request.options, &request.others)?;
    let Some(input) = request.input.filter(|input| !input.is_empty()) else {
        return Ok(Json(json!({"model": name, "embeddings": []})));
    };
    let (truncate, dimensions) = (request.truncate.unwrap_or(true), request.dimensions.filter(|d| *d > 0));
    let options = EmbeddingOptions { dimensions, truncate, normalise: true };
    let embeddings = embeddings::embed(&model, input, options).await?;
    let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Ok(Json(json!({
        "model": name, "embeddings": embeddings.vectors, "total_duration": nanoseconds(arrived.elapsed()), "load_duration": nanoseconds(load),
        "prompt_eval_count": embeddings.tokens,
    })))
}

/// Computes the embedding of one text, not scaled.
#[utoipa::path(post, path = "/api/embeddings", tag = "ollama", request_body = EmbedOneRequest, responses(
    (status = 200, description = "The embedding.", body = OllamaEmbedding), OllamaComputeErrors,
))]
pub async fn embed_one(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<EmbedOneRequest>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model(requested(&app, request.model.as_deref())).await?;
    check_fields(request.options, &request.others)?;
    let Some(prompt) = request.prompt.filter(|prompt| !prompt.is_empty()) else {
        return Ok(Json(json!({"embedding": []})));
    };
    let options = EmbeddingOptions { truncate: true, ..EmbeddingOptions::default() };
    let embeddings = embeddings::embed(&model, EmbeddingInput::Text(prompt), options).await?;
    Ok(Json(json!({"embedding": embeddings.vectors.into_iter().next().unwrap_or_default()})))
}
