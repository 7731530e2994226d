//! `/v1/embeddings`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::embeddings::{EmbeddingInput, EmbeddingOptions, embed};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{ComputeErrors, json_schema};
use crate::http::state::AppState;

/// The request.
#[derive(Deserialize, ToSchema)]
#[schema(as = EmbeddingRequest)]
pub struct EmbeddingRequest {
    /// Ignored unless it names one of several models that the server offers.
    #[serde(default)]
    model: Option<String>,
    /// At most 2,048 inputs.
    input: EmbeddingInput,
    #[serde(default)]
    encoding_format: Option<VectorEncoding>,
    /// Keep only this many elements, and scale the vector to length 1 again.
    #[serde(default)]
    #[schema(minimum = 1)]
    dimensions: Option<usize>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq, Eq, ToSchema)]
#[schema(as = EmbeddingEncoding)]
#[serde(rename_all = "lowercase")]
enum VectorEncoding {
    #[default]
    Float,
    /// Base64 of little-endian f32.
    Base64,
}

json_schema! {
    EmbeddingList, uses [], {
        "type": "object",
        "required": ["object", "data", "model", "usage"],
        "properties": {
            "object": {"type": "string", "enum": ["list"]},
            "data": {"type": "array", "items": {
                "type": "object",
                "required": ["object", "index", "embedding"],
                "properties": {
                    "object": {"type": "string", "enum": ["embedding"]},
                    "index": {"type": "integer"},
                    "embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
                },
            }},
            "model": {"type": "string"},
            "usage": {
                "type": "object",
                "required": ["prompt_tokens", "total_tokens"],
                "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
            },
        },
    }
}

impl VectorEncoding {
    fn write(self, vector: &[f32]) -> Value {
        match self {
            VectorEncoding::Float => json!(vector),
            VectorEncoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                STANDARD.encode(bytes).into()
            }
        }
    }
}

/// Computes embeddings.
#[utoipa::path(post, path = "/v1/embeddings", tag = "openai", request_body = EmbeddingRequest, responses(
    (status = 200, description = "A vector for each input.", body = EmbeddingList), ComputeErrors,
))]
pub async fn embeddings(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<EmbeddingRequest>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    request.others.iter().filter(|(_, value)| !value.is_null()).for_each(|(field, _)| note_ignored(field));
    let options = EmbeddingOptions { dimensions: request.dimensions, ..EmbeddingOptions::default() };
    let embeddings = embed(&model, request.input, options).await?;
    let encoding = request.encoding_format.unwrap_or_default();
    let one = |(index, vector): (usize, &Vec<f32>)| json!({"object": "embedding", "index": index, "embedding": encoding.write(vector)});
    let data: Vec<Value> = embeddings.vectors.iter().enumerate().map(one).collect();
    let usage = json!({"prompt_tokens": embeddings.tokens, "total_tokens": embeddings.tokens});
    Ok(Json(json!({"object": "list", "data": data, "model": model.name, "usage": usage})))
}
