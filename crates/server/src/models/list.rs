//! `/v1/models`: the offered models, in one object that is OpenAI's list, Anthropic's list and the list that Codex looks for.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::extract::PathName;
use crate::http::openapi::{Error, QueryErrors, json_schema};
use crate::http::state::AppState;
use crate::models::manager::ModelEntry;

json_schema! {
    /// A model, for OpenAI's clients and Anthropic's.
    Model, uses [], {
        "type": "object",
        "required": ["id", "object", "created", "owned_by", "max_model_len", "type", "display_name", "created_at", "max_input_tokens", "status", "capabilities"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["model"]},
            "created": {"type": "integer", "description": "When it was loaded, in seconds since 1970; 0 if it is not loaded."},
            "owned_by": {"type": "string"},
            "max_model_len": {"type": "integer", "description": "Longest context in tokens: prompt and answer together."},
            "type": {"type": "string", "enum": ["model"]},
            "display_name": {"type": "string"},
            "created_at": {"type": "string", "format": "date-time"},
            "max_input_tokens": {"type": "integer"},
            "status": {"type": "string", "enum": ["loaded", "loading", "unloaded"]},
            "capabilities": {"type": "array", "items": {"type": "string", "enum": ["completion", "chat", "structured_output", "tools", "thinking"]}},
        },
    }
}

json_schema! {
    /// The models, for three kinds of clients.
    Models, uses [Model], {
        "type": "object",
        "required": ["object", "data", "has_more", "first_id", "last_id", "models"],
        "properties": {
            "object": {"type": "string", "enum": ["list"]},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
            "has_more": {"type": "boolean"},
            "first_id": {"type": "string"},
            "last_id": {"type": "string"},
            "models": {"type": "array", "description": "For Codex.", "items": {
                "type": "object",
                "required": ["slug", "display_name", "context_window"],
                "properties": {
                    "slug": {"type": "string"},
                    "display_name": {"type": "string"},
                    "context_window": {"type": "integer"},
                },
                "additionalProperties": true,
            }},
        },
    }
}

/// What a model can be used for.
fn capabilities(entry: &ModelEntry) -> Vec<&'static str> {
    let mut all = vec!["completion"];
    if let Some(style) = entry.style {
        all.extend(["chat", "structured_output"]);
        all.extend(style.calls.map(|_| "tools"));
        all.extend(style.thoughts.then_some("thinking"));
    }
    all
}

/// A model for OpenAI's clients and Anthropic's.
fn model_json(entry: &ModelEntry) -> Value {
    let created = entry.loaded.unwrap_or(0);
    json!({
        "id": entry.name, "object": "model", "created": created, "owned_by": "sluice", "max_model_len": entry.context,
        "type": "model", "display_name": entry.name, "created_at": rfc3339(created), "max_input_tokens": entry.context,
        "status": entry.status, "capabilities": capabilities(entry),
    })
}

/// A model for Codex, which needs the context's length: it compacts a conversation before the context is full.
fn codex_json(entry: &ModelEntry) -> Value {
    json!({
        "slug": entry.name, "display_name": entry.name, "description": "served by sluice",
        "context_window": entry.context, "max_context_window": entry.context,
        "supported_reasoning_levels": [], "shell_type": "shell_command", "visibility": "list", "supported_in_api": true, "priority": 0,
        "availability_nux": null, "upgrade": null,
        "supports_reasoning_summaries": false, "support_verbosity": false, "default_verbosity": null,
        "apply_patch_tool_type": null, "truncation_policy": {"mode": "tokens", "limit": (entry.context / 8).max(256)},
        "supports_parallel_tool_calls": true, "experimental_supported_tools": [], "input_modalities": ["text"],
    })
}

/// Lists the offered models. The one in memory is first, because clients without a preference take the first.
#[utoipa::path(get, path = "/v1/models", tag = "openai", responses((status = 200, description = "All offered models.", body = Models), QueryErrors))]
pub async fn list(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    app.models.check_started()?;
    let mut all = app.models.entries();
    all.sort_by_key(|entry| entry.status != "loaded");
    let name = |entry: Option<&ModelEntry>| entry.map(|e| e.name.to_owned());
    Ok(Json(json!({
        "object": "list", "data": all.iter().map(model_json).collect::<Vec<_>>(), "has_more": false,
        "first_id": name(all.first()), "last_id": name(all.last()), "models": all.iter().map(codex_json).collect::<Vec<_>>(),
    })))
}

/// Describes one model.
#[utoipa::path(get, path = "/v1/models/{*name}", tag = "openai",
    params(("name" = String, Path, description = "The model's name, with or without its publisher.")),
    responses(
        (status = 200, description = "The model of this name.", body = Model),
        (status = 400, description = "The name is not valid UTF-8.", body = Error),
        (status = 404, description = "No model has this name (`model_not_found`). Requests that name it are answered anyway, by the model in memory.", body = Error),
        QueryErrors,
    ),
)]
pub async fn one(State(app): State<Arc<AppState>>, PathName(name): PathName) -> Result<Json<Value>, ApiError> {
    app.models.check_started()?;
    let all = app.models.entries();
    let names = || all.iter().map(|entry| entry.name).collect::<Vec<_>>();
    let at = app.models.find(&name).ok_or_else(|| ApiError::no_such_model(&name, &names()))?;
    Ok(Json(model_json(&all[at])))
}
