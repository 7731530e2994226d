//! What Ollama's clients ask about the server: its models, their details, which one is in memory, and the version of the API.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::clock::{now, rfc3339};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{OllamaBodyErrors, OllamaQueryErrors, json_schema};
use crate::http::state::AppState;
use crate::models::manager::ModelEntry;
use crate::ollama::names::{split_tag, tagged};

/// The version of Ollama whose API this is; some clients require a minimum.
const VERSION: &str = "0.12.6";
/// Seconds until a model expires that is never unloaded.
const NEVER: u64 = 100 * 365 * 86_400;

json_schema! {
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

json_schema! {
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

json_schema! {
    OllamaRunning, uses [OllamaDetails], {
        "type": "object",
        "required": ["models"],
        "properties": {"models": {"type": "array", "items": {
            "type": "object",
            "required": ["name", "model", "size", "digest", "details", "expires_at", "size_vram", "context_length"],
            "properties": {
                "name": {"type": "string"},
                "model": {"type": "string"},
                "size": {"type": "integer", "description": "Bytes of memory that it took when it was loaded."},
                "digest": {"type": "string"},
                "details": {"$ref": "#/components/schemas/OllamaDetails"},
                "expires_at": {"type": "string", "format": "date-time"},
                "size_vram": {"type": "integer", "description": "Bytes of them on devices other than the host."},
                "context_length": {"type": "integer"},
            },
        }}},
    }
}

json_schema! {
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

json_schema! {
    OllamaVersion, uses [], {
        "type": "object",
        "required": ["version", "sluice"],
        "properties": {
            "version": {"type": "string", "description": "The version of Ollama's API."},
            "sluice": {"type": "string", "description": "The version of this server."},
        },
    }
}

/// Asks about a model.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaShowRequest)]
pub struct ShowRequest {
    /// The model's name; an unknown one means the model in memory.
    #[serde(default)]
    model: Option<String>,
    /// The same under an older name.
    #[serde(default)]
    name: Option<String>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A number of parameters as Ollama writes it: `8.2B`.
fn parameter_size(parameters: u64) -> String {
    let n = parameters as f64;
    match parameters {
        0..1_000 => parameters.to_string(),
        1_000..1_000_000 => format!("{:.2}K", n / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2}M", n / 1e6),
        _ => format!("{:.1}B", n / 1e9),
    }
}

fn details(entry: &ModelEntry) -> Value {
    let facts = entry.facts;
    json!({
        "parent_model": "", "format": "safetensors", "family": facts.architecture, "families": [facts.architecture],
        "parameter_size": parameter_size(facts.parameters), "quantization_level": facts.stored,
    })
}

/// Lists the offered models.
#[utoipa::path(get, path = "/api/tags", tag = "ollama", responses((status = 200, description = "All offered models, the one in memory first.", body = OllamaTags), OllamaQueryErrors))]
pub async fn tags(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    app.models.check_started()?;
    let mut all = app.models.entries();
    all.sort_by_key(|entry| entry.status != "loaded");
    let one = |entry: &ModelEntry| {
        let (name, facts) = (tagged(entry.name), entry.facts);
        json!({
            "name": name, "model": name, "modified_at": rfc3339(facts.modified), "size": facts.bytes, "digest": facts.digest,
            "details": details(entry),
        })
    };
    Ok(Json(json!({"models": all.iter().map(one).collect::<Vec<_>>()})))
}

/// Describes the model in memory.
#[utoipa::path(get, path = "/api/ps", tag = "ollama", responses((status = 200, description = "The model in memory, if there is one.", body = OllamaRunning), OllamaQueryErrors))]
pub async fn running(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    app.models.check_started()?;
    let left = app.settings.idle_unload.map_or(NEVER, |time| time.as_secs());
    let one = |entry: &ModelEntry| {
        let (name, memory) = (tagged(entry.name), entry.memory?);
        Some(json!({
            "name": name, "model": name, "size": memory.total, "digest": entry.facts.digest, "details": details(entry),
            "expires_at": rfc3339(now() + left), "size_vram": memory.device, "context_length": entry.context,
        }))
    };
    Ok(Json(json!({"models": app.models.entries().iter().filter_map(one).collect::<Vec<_>>()})))
}

/// Describes the model that a request with this name would get.
#[utoipa::path(post, path = "/api/show", tag = "ollama", request_body = ShowRequest, responses((status = 200, description = "The model.", body = OllamaShown), OllamaBodyErrors))]
pub async fn show(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<ShowRequest>,
) -> Result<Json<Value>, ApiError> {
    request.others.keys().for_each(|field| note_ignored(field));
    let all = app.models.entries();
    let name = request.model.or(request.name).unwrap_or_default();
    let named = app.models.find(&name).or_else(|| app.models.find(split_tag(&name).0));
    let resident = || all.iter().position(|entry| entry.status != "unloaded").unwrap_or(0);
    let entry = &all[named.unwrap_or_else(resident)];
    let facts = entry.facts;
    // Clients expect keys with the architecture's name as their prefix.
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

/// Tells the version of the API.
#[utoipa::path(get, path = "/api/version", tag = "ollama", responses((status = 200, description = "The versions of Ollama's API and of this server.", body = OllamaVersion), OllamaQueryErrors))]
pub async fn version() -> Json<Value> {
    Json(json!({"version": VERSION, "sluice": env!("CARGO_PKG_VERSION")}))
}

#[cfg(test)]
mod tests {
    use super::parameter_size;

    #[test]
    fn parameters_are_written_as_ollama_writes_them() {
        let all = [12, 4_500, 134_520_000, 8_190_000_000].map(parameter_size);
        assert_eq!(all, ["12", "4.50K", "134.52M", "8.2B"]);
    }
}
