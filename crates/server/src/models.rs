//! `/v1/models`: the models that can be had, in the words of OpenAI's list, of Anthropic's, and of the one that Codex looks for beside them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::{App, Name};
use crate::error::ApiError;
use crate::model_manager::Entry;
use crate::openapi::{Asking, Error, written};

written! {
    /// A model, in the words of OpenAI's clients and of Anthropic's.
    Model, uses [], {
        "type": "object",
        "required": ["id", "object", "created", "owned_by", "max_model_len", "type", "display_name", "created_at", "max_input_tokens", "status", "capabilities"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["model"]},
            "created": {"type": "integer", "description": "When it was loaded, in seconds since 1970; 0 where it is not."},
            "owned_by": {"type": "string"},
            "max_model_len": {"type": "integer", "description": "Tokens of prompt and answer."},
            "type": {"type": "string", "enum": ["model"]},
            "display_name": {"type": "string"},
            "created_at": {"type": "string", "format": "date-time"},
            "max_input_tokens": {"type": "integer"},
            "status": {"type": "string", "enum": ["loaded", "loading", "unloaded"]},
            "capabilities": {"type": "array", "items": {"type": "string", "enum": ["completion", "chat", "structured_output", "tools", "thinking"]}},
        },
    }
}

written! {
    /// The models, in three dialects.
    Models, uses [Model], {
        "type": "object",
        "required": ["object", "data", "has_more", "first_id", "last_id", "models"],
        "properties": {
            "object": {"type": "string", "enum": ["list"]},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
            "has_more": {"type": "boolean"},
            "first_id": {"type": "string"},
            "last_id": {"type": "string"},
            "models": {"type": "array", "description": "What Codex wants to know.", "items": {
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

/// What can be asked of a model.
fn capabilities(entry: &Entry) -> Vec<&'static str> {
    let mut all = vec!["completion"];
    if let Some(style) = entry.style {
        all.extend(["chat", "structured_output"]);
        all.extend(style.calls.map(|_| "tools"));
        all.extend(style.thoughts.then_some("thinking"));
    }
    all
}

/// What OpenAI's clients and Anthropic's know of a model.
fn entry(entry: &Entry) -> Value {
    let created = entry.loaded.unwrap_or(0);
    json!({
        "id": entry.name, "object": "model", "created": created, "owned_by": "sluice", "max_model_len": entry.context,
        "type": "model", "display_name": entry.name, "created_at": rfc3339(created), "max_input_tokens": entry.context,
        "status": entry.status, "capabilities": capabilities(entry),
    })
}

/// What Codex wants to know of a model: it compacts a conversation before the context is full, which it can only where it is told how long that is.
fn codex_entry(entry: &Entry) -> Value {
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

/// All that are offered, the one in memory first: clients that take any take that one.
#[utoipa::path(get, path = "/v1/models", tag = "openai", responses((status = 200, description = "All that are offered.", body = Models), Asking))]
pub async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.models.begun()?;
    let mut all = app.models.entries();
    all.sort_by_key(|entry| entry.status != "loaded");
    let name = |entry: Option<&Entry>| entry.map(|e| e.name.to_owned());
    Ok(Json(json!({
        "object": "list", "data": all.iter().map(entry).collect::<Vec<_>>(), "has_more": false,
        "first_id": name(all.first()), "last_id": name(all.last()), "models": all.iter().map(codex_entry).collect::<Vec<_>>(),
    })))
}

/// The one of this name.
#[utoipa::path(get, path = "/v1/models/{*name}", tag = "openai",
    params(("name" = String, Path, description = "A model's name, with its publisher's before it or without.")),
    responses(
        (status = 200, description = "The model of this name.", body = Model),
        (status = 400, description = "The name is no text.", body = Error),
        (status = 404, description = "There is none of this name (`model_not_found`). A request that names it is answered all the same, by the model in memory.", body = Error),
        Asking,
    ),
)]
pub async fn one(State(app): State<Arc<App>>, Name(name): Name) -> Result<Json<Value>, ApiError> {
    app.models.begun()?;
    let all = app.models.entries();
    let names = || all.iter().map(|entry| entry.name).collect::<Vec<_>>();
    let at = app.models.named(&name).ok_or_else(|| ApiError::no_such_model(&name, &names()))?;
    Ok(Json(entry(&all[at])))
}

/// `2026-11-22T14:00:00Z`, from seconds since 1970.
pub fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March have their odd day at their end.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_735_689_599), "2024-12-31T23:59:59Z");
        assert_eq!(rfc3339(4_102_444_800), "2100-01-01T00:00:00Z");
    }
}
