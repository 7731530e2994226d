//! `/v1/models`: the model that there is, in the words of OpenAI's list, of Anthropic's, and of the one that Codex looks for beside them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::{App, Ready};
use crate::error::ApiError;

/// What OpenAI's clients and Anthropic's know of a model.
fn entry(ready: &Ready) -> Value {
    json!({
        "id": ready.name, "object": "model", "created": ready.created, "owned_by": "sluice", "max_model_len": ready.context,
        "type": "model", "display_name": ready.name, "created_at": rfc3339(ready.created), "max_input_tokens": ready.context,
    })
}

/// What Codex wants to know of a model: it compacts a conversation before the context is full, which it can only where it is told how long that is.
fn codex_entry(ready: &Ready) -> Value {
    json!({
        "slug": ready.name, "display_name": ready.name, "description": "served by sluice",
        "context_window": ready.context, "max_context_window": ready.context,
        "supported_reasoning_levels": [], "shell_type": "shell_command", "visibility": "list", "supported_in_api": true, "priority": 0,
        "availability_nux": null, "upgrade": null,
        "supports_reasoning_summaries": false, "support_verbosity": false, "default_verbosity": null,
        "apply_patch_tool_type": null, "truncation_policy": {"mode": "tokens", "limit": (ready.context / 8).max(256)},
        "supports_parallel_tool_calls": true, "experimental_supported_tools": [], "input_modalities": ["text"],
    })
}

pub async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let ready = app.ready()?;
    Ok(Json(json!({
        "object": "list", "data": [entry(&ready)], "has_more": false, "first_id": ready.name, "last_id": ready.name,
        "models": [codex_entry(&ready)],
    })))
}

/// Every name is served by the model that there is.
pub async fn one(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    Ok(Json(entry(&*app.ready()?)))
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
