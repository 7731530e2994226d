//! `/v1/models`: the models that can be had, in the words of OpenAI's list, of Anthropic's, and of the one that Codex looks for beside them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::resident::Entry;

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

/// All of them, the one in memory first: clients that take any take that one.
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

/// The one that a request with this name would get.
pub async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    app.models.begun()?;
    let all = app.models.entries();
    let resident = || all.iter().position(|entry| entry.status != "unloaded").unwrap_or(0);
    Ok(Json(entry(&all[app.models.named(&name).unwrap_or_else(resident)])))
}

/// `2026-11-22T14:00:00Z`, from seconds since 1970.
fn rfc3339(seconds: u64) -> String {
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
