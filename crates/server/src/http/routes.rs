//! All routes, and the OpenAPI document that is made from them.

use std::sync::{Arc, LazyLock};

use anyhow::Result;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::error::ApiError;
use crate::http::middleware::{check_access, with_context};
use crate::http::openapi::{self, PublicErrors, QueryErrors, json_schema};
use crate::http::page;
use crate::http::state::AppState;
use crate::{anthropic, models, ollama, openai};

/// All routes with their descriptions.
fn routes() -> OpenApiRouter<Arc<AppState>> {
    OpenApiRouter::with_openapi(openapi::base())
        .routes(routes!(openai::chat::chat))
        .routes(routes!(openai::completions::completions))
        .routes(routes!(openai::responses::endpoints::responses))
        .routes(routes!(openai::responses::endpoints::input_tokens))
        .routes(routes!(openai::embeddings::embeddings))
        .routes(routes!(models::list::list))
        .routes(routes!(models::list::one))
        .routes(routes!(anthropic::endpoints::messages))
        .routes(routes!(anthropic::endpoints::count_tokens))
        .routes(routes!(ollama::endpoints::chat))
        .routes(routes!(ollama::endpoints::generate))
        .routes(routes!(ollama::embed::embed))
        .routes(routes!(ollama::embed::embed_one))
        .routes(routes!(ollama::catalog::tags))
        .routes(routes!(ollama::catalog::show))
        .routes(routes!(ollama::catalog::running))
        .routes(routes!(ollama::catalog::version))
        .routes(routes!(openai::tokenize::tokenize))
        .routes(routes!(openai::tokenize::detokenize))
        .routes(routes!(openai::sessions::list, openai::sessions::save))
        .routes(routes!(openai::sessions::delete))
        .routes(routes!(openai::sessions::load))
        .routes(routes!(health))
        .routes(routes!(metrics))
        .routes(routes!(document))
        .routes(routes!(page::index))
        .routes(routes!(page::named))
}

/// The service: all routes inside their layers.
///
/// # Errors
/// A CORS origin that is not valid.
pub fn router(app: Arc<AppState>) -> Result<Router> {
    let cors = app.settings.access.cors()?;
    let mut router = Router::from(routes())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        // Each layer encloses the ones before it.
        .layer(from_fn_with_state(Arc::clone(&app), check_access));
    if let Some(cors) = cors {
        router = router.layer(cors);
    }
    Ok(router.layer(from_fn_with_state(Arc::clone(&app), with_context)).with_state(app))
}

async fn not_found(uri: Uri) -> ApiError {
    ApiError::not_found(uri.path())
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::method_not_allowed(method.as_str(), uri.path())
}

json_schema! {
    Health, uses [], {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"type": "string", "description": "ok, loading model, or why the engine has failed"}},
    }
}

/// Whether the server is ready for requests.
#[utoipa::path(get, path = "/health", tag = "server", security(()), responses(
    (status = 200, description = "It is ready.", body = Health),
    (status = 503, description = "The model is still loading, or the engine has failed and the server is about to end.", body = Health),
    PublicErrors,
))]
async fn health(State(app): State<Arc<AppState>>) -> Response {
    let state = |status, text: &str| (status, Json(json!({"status": text}))).into_response();
    match (app.models.check_started(), app.models.failure()) {
        (Err(e), _) => state(e.status, "loading model"),
        (_, Some(why)) => state(StatusCode::SERVICE_UNAVAILABLE, &why),
        _ => state(StatusCode::OK, "ok"),
    }
}

/// Metrics in the OpenMetrics text format, as Prometheus reads it.
#[utoipa::path(get, path = "/metrics", tag = "server", responses(
    (status = 200, description = "Counters, gauges and histograms.", body = String, content_type = "application/openmetrics-text"), QueryErrors,
))]
async fn metrics(State(app): State<Arc<AppState>>) -> impl IntoResponse {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], app.metrics.text())
}

static DOCUMENT: LazyLock<String> = LazyLock::new(|| openapi::complete(routes().into_openapi()));

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "server", responses(
    (status = 200, description = "The OpenAPI description of this server.", body = Value, content_type = "application/json"), QueryErrors,
))]
async fn document() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    fn parsed() -> Value {
        serde_json::from_str(&DOCUMENT).unwrap()
    }

    #[test]
    fn every_route_is_described_and_nothing_else_is() {
        let document = parsed();
        let described: BTreeSet<&str> = document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
        // Only the debug output of a router lists its routes.
        let shown = format!("{:?}", Router::from(routes()));
        let named = shown.split('"').filter(|part| part.starts_with('/')).map(|path| path.replace("{*", "{"));
        let routes: BTreeSet<String> = named.filter(|path| !path.contains("__private__")).collect();
        let routes: BTreeSet<&str> = routes.iter().map(String::as_str).collect();
        assert_eq!(described, routes);
        for path in ["/v1/chat/completions", "/v1/messages", "/v1/models/{name}", "/openapi.json", "/page/{name}"] {
            assert!(described.contains(path), "{path}");
        }
    }

    #[test]
    fn whatever_is_referred_to_is_there() {
        fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
            match value {
                Value::Object(fields) => {
                    found.extend(fields.get("$ref").and_then(Value::as_str));
                    fields.values().for_each(|value| references(value, found));
                }
                Value::Array(all) => all.iter().for_each(|value| references(value, found)),
                _ => {}
            }
        }
        let document = parsed();
        assert_eq!(document["openapi"], "3.1.0");
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(found.len() > 30);
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert!(schemas.keys().all(|name| name.bytes().all(|b| b.is_ascii_alphanumeric())));
    }

    #[test]
    fn operations_say_who_may_ask_and_what_goes_wrong() {
        let document = parsed();
        assert_eq!(document["security"], json!([{"bearer": []}, {"x-api-key": []}, {}]));
        let chat = &document["paths"]["/v1/chat/completions"]["post"];
        assert!(chat["responses"]["200"]["content"]["text/event-stream"].is_object());
        for status in ["400", "401", "403", "408", "413", "429", "500", "503", "504"] {
            let schema = |path: &str| {
                document["paths"][path]["post"]["responses"][status]["content"]["application/json"]["schema"]["$ref"]
                    .clone()
            };
            assert_eq!(schema("/v1/chat/completions"), "#/components/schemas/Error", "{status}");
            assert_eq!(schema("/v1/messages"), "#/components/schemas/AnthropicError", "{status}");
        }
        let operations =
            document["paths"].as_object().unwrap().values().flat_map(|item| item.as_object().unwrap().values());
        let ids: Vec<&Value> = operations.map(|operation| &operation["operationId"]).collect();
        let different: BTreeSet<&str> = ids.iter().map(|id| id.as_str().unwrap()).collect();
        assert_eq!(different.len(), ids.len(), "{ids:?}");
        // The health check needs no key.
        assert_eq!(document["paths"]["/health"]["get"]["security"], json!([{}]));
    }
}
