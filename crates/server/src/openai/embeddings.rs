//! `/v1/embeddings`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::{App, Body};
use crate::context::ignore;
use crate::embeddings::{Input, Wish, vectors};
use crate::error::ApiError;
use crate::openapi::{Computing, written};

#[derive(Deserialize, ToSchema)]
#[schema(as = EmbeddingRequest)]
pub struct EmbeddingRequest {
    /// Any name.
    #[serde(default)]
    model: Option<String>,
    /// 2,048 at most.
    input: Input,
    #[serde(default)]
    encoding_format: Option<Encoding>,
    /// So many elements, the first: they are scaled to length 1 again.
    #[serde(default)]
    #[schema(minimum = 1)]
    dimensions: Option<usize>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq, Eq, ToSchema)]
#[schema(as = EmbeddingEncoding)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    /// Of little-endian f32.
    Base64,
}

written! {
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

impl Encoding {
    fn write(self, vector: &[f32]) -> Value {
        match self {
            Encoding::Float => json!(vector),
            Encoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                STANDARD.encode(bytes).into()
            }
        }
    }
}

/// Vectors of texts.
#[utoipa::path(post, path = "/v1/embeddings", tag = "openai", request_body = EmbeddingRequest, responses(
    (status = 200, description = "A vector for each input.", body = EmbeddingList), Computing,
))]
pub async fn embeddings(
    State(app): State<Arc<App>>,
    Body(request): Body<EmbeddingRequest>,
) -> Result<Json<Value>, ApiError> {
    let ready = app.model(request.model.as_deref()).await?;
    request.others.iter().filter(|(_, value)| !value.is_null()).for_each(|(field, _)| ignore(field));
    let wish = Wish { dimensions: request.dimensions, ..Wish::default() };
    let vectors = vectors(&ready, request.input, wish).await?;
    let encoding = request.encoding_format.unwrap_or_default();
    let one = |(index, vector): (usize, &Vec<f32>)| json!({"object": "embedding", "index": index, "embedding": encoding.write(vector)});
    let data: Vec<Value> = vectors.all.iter().enumerate().map(one).collect();
    let usage = json!({"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens});
    Ok(Json(json!({"object": "list", "data": data, "model": ready.name, "usage": usage})))
}
