//! What Ollama's clients ask before they ask a model: which there are, what they are, which is in memory, which version of the API this is.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{parts, tagged};
use crate::app::{App, Body};
use crate::context::ignore;
use crate::error::ApiError;
use crate::model_manager::Entry;
use crate::models::rfc3339;
use crate::openapi::{OllamaAsking, OllamaReading, written};
use crate::reply::now;

/// The version of Ollama whose API is spoken here: some clients ask for a least one.
const VERSION: &str = "0.12.6";
/// Seconds until a model that is never dropped is said to be.
const NEVER: u64 = 100 * 365 * 86_400;

written! {
    OllamaDetails, uses [], {
        "type": "object",
        "required": ["parent_model", "format", "family", "families", "parameter_size", "quantization_level"],
        "properties": {
            "parent_model": {"type": "string"},
            "format": {"type": "string"},
            "family": {"type": "string"},
            "families": {"type": "array", "items": {"type": "string"}},
            "parameter_size": {"type": "string"},
            "quantization_level": {"type": "string"},
        },
    }
}

written! {
    OllamaTags, uses [OllamaDetails], {
        "type": "object",
        "required": ["models"],
        "properties": {"models": {"type": "array", "items": {
            "type": "object",
            "required": ["name", "model", "modified_at", "size", "digest", "details"],
            "properties": {
                "name": {"type": "string"},
                "model": {"type": "string"},
                "modified_at": {"type": "string", "format": "date-time"},
                "size": {"type": "integer", "description": "Bytes of its files."},
                "digest": {"type": "string"},
                "details": {"$ref": "#/components/schemas/OllamaDetails"},
            },
        }}},
    }
}

written! {
    OllamaRunning, uses [OllamaDetails], {
        "type": "object",
        "required": ["models"],
        "properties": {"models": {"type": "array", "items": {
            "type": "object",
            "required": ["name", "model", "size", "digest", "details", "expires_at", "size_vram", "context_length"],
            "properties": {
                "name": {"type": "string"},
                "model": {"type": "string"},
                "size": {"type": "integer", "description": "Bytes that it took in memory when it was loaded."},
                "digest": {"type": "string"},
                "details": {"$ref": "#/components/schemas/OllamaDetails"},
                "expires_at": {"type": "string", "format": "date-time"},
                "size_vram": {"type": "integer", "description": "Those of them that are a device's."},
                "context_length": {"type": "integer"},
            },
        }}},
    }
}

written! {
    OllamaShown, uses [OllamaDetails], {
        "type": "object",
        "required": ["modelfile", "parameters", "template", "details", "model_info", "capabilities", "modified_at"],
        "properties": {
            "modelfile": {"type": "string"},
            "parameters": {"type": "string"},
            "template": {"type": "string"},
            "details": {"$ref": "#/components/schemas/OllamaDetails"},
            "model_info": {"type": "object", "additionalProperties": true},
            "capabilities": {"type": "array", "items": {"type": "string", "enum": ["completion", "tools", "thinking"]}},
            "modified_at": {"type": "string", "format": "date-time"},
        },
    }
}

written! {
    OllamaVersion, uses [], {
        "type": "object",
        "required": ["version", "sluice"],
        "properties": {
            "version": {"type": "string", "description": "Of Ollama's API."},
            "sluice": {"type": "string", "description": "Of this server."},
        },
    }
}

#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaShowRequest)]
pub struct Show {
    /// Any name.
    #[serde(default)]
    model: Option<String>,
    /// The same under its older name.
    #[serde(default)]
    name: Option<String>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// `8.2B`, as Ollama writes it.
fn size(parameters: u64) -> String {
    let n = parameters as f64;
    match parameters {
        0..1_000 => parameters.to_string(),
        1_000..1_000_000 => format!("{:.2}K", n / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2}M", n / 1e6),
        _ => format!("{:.1}B", n / 1e9),
    }
}

fn details(entry: &Entry) -> Value {
    let facts = entry.facts;
    json!({
        "parent_model": "", "format": "safetensors", "family": facts.architecture, "families": [facts.architecture],
        "parameter_size": size(facts.parameters), "quantization_level": facts.stored,
    })
}

/// The models that are offered.
#[utoipa::path(get, path = "/api/tags", tag = "ollama", responses((status = 200, description = "All that are offered, the one in memory first.", body = OllamaTags), OllamaAsking))]
pub async fn tags(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.models.begun()?;
    let mut all = app.models.entries();
    all.sort_by_key(|entry| entry.status != "loaded");
    let one = |entry: &Entry| {
        let (name, facts) = (tagged(entry.name), entry.facts);
        json!({
            "name": name, "model": name, "modified_at": rfc3339(facts.modified), "size": facts.bytes, "digest": facts.digest,
            "details": details(entry),
        })
    };
    Ok(Json(json!({"models": all.iter().map(one).collect::<Vec<_>>()})))
}

/// The model in memory.
#[utoipa::path(get, path = "/api/ps", tag = "ollama", responses((status = 200, description = "The one in memory, if there is one.", body = OllamaRunning), OllamaAsking))]
pub async fn running(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.models.begun()?;
    let left = app.settings().idle_unload.map_or(NEVER, |time| time.as_secs());
    let one = |entry: &Entry| {
        let (name, (bytes, of_device)) = (tagged(entry.name), entry.memory?);
        Some(json!({
            "name": name, "model": name, "size": bytes, "digest": entry.facts.digest, "details": details(entry),
            "expires_at": rfc3339(now() + left), "size_vram": of_device, "context_length": entry.context,
        }))
    };
    Ok(Json(json!({"models": app.models.entries().iter().filter_map(one).collect::<Vec<_>>()})))
}

/// What a model is: the one that a request with this name would get.
#[utoipa::path(post, path = "/api/show", tag = "ollama", request_body = Show, responses((status = 200, description = "What it is.", body = OllamaShown), OllamaReading))]
pub async fn show(State(app): State<Arc<App>>, Body(request): Body<Show>) -> Result<Json<Value>, ApiError> {
    request.others.keys().for_each(|field| ignore(field));
    let all = app.models.entries();
    let name = request.model.or(request.name).unwrap_or_default();
    let named = app.models.named(&name).or_else(|| app.models.named(parts(&name).0));
    let resident = || all.iter().position(|entry| entry.status != "unloaded").unwrap_or(0);
    let entry = &all[named.unwrap_or_else(resident)];
    let facts = entry.facts;
    // Clients look for keys that begin with the architecture's name.
    let of = |key: &str| format!("{}.{key}", facts.architecture);
    let mut info = Map::new();
    info.insert("general.architecture".into(), facts.architecture.as_str().into());
    info.insert("general.basename".into(), entry.name.into());
    info.insert("general.parameter_count".into(), facts.parameters.into());
    info.insert(of("context_length"), entry.context.into());
    info.insert(of("embedding_length"), facts.hidden.into());
    info.insert(of("block_count"), facts.layers.into());
    let mut capabilities = vec!["completion"];
    if let Some(style) = entry.style {
        capabilities.extend(style.calls.map(|_| "tools"));
        capabilities.extend(style.thoughts.then_some("thinking"));
    }
    Ok(Json(json!({
        "modelfile": format!("FROM {}", entry.name), "parameters": "", "template": "", "details": details(entry),
        "model_info": info, "capabilities": capabilities, "modified_at": rfc3339(facts.modified),
    })))
}

/// The version of the API.
#[utoipa::path(get, path = "/api/version", tag = "ollama", responses((status = 200, description = "That of Ollama's API, and that of this server.", body = OllamaVersion), OllamaAsking))]
pub async fn version() -> Json<Value> {
    Json(json!({"version": VERSION, "sluice": env!("CARGO_PKG_VERSION")}))
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn parameters_are_written_as_ollama_writes_them() {
        let all = [12, 4_500, 134_520_000, 8_190_000_000].map(size);
        assert_eq!(all, ["12", "4.50K", "134.52M", "8.2B"]);
    }
}
