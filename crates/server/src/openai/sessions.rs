//! `/v1/sessions`: conversations of the prompt cache by name, so that they are gone on with after a restart without being computed again.

use std::sync::Arc;

use anyhow::Result;
use axum::Json;
use axum::extract::{FromRequestParts, Query, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::{Generation, Session, Sessions};
use tokio::sync::oneshot;
use utoipa::{IntoParams, ToSchema};

use super::chat::messages;
use super::chat_fields::{ChatMessage, ChatTool};
use super::completions::{PromptField, one_prompt};
use super::fields::SamplingFields;
use crate::app::{App, Body, LoadedModel, Name};
use crate::error::ApiError;
use crate::given;
use crate::openapi::{Asking, Computing, Error, written};
use crate::output_spec::{OutputSpec, ToolChoice};
use crate::request::{ChatRequest, Rendered};

/// A conversation, or a text, to be kept under a name.
#[derive(Deserialize, ToSchema)]
#[schema(as = SessionRequest)]
#[serde(deny_unknown_fields)]
pub struct SessionRequest {
    #[serde(default, deserialize_with = "given::text")]
    #[schema(value_type = String, required)]
    name: Option<String>,
    /// Which model's: where it is left out, that of the model in memory.
    #[serde(default, deserialize_with = "given::text")]
    model: Option<String>,
    #[serde(default, deserialize_with = "given::objects")]
    #[schema(value_type = Option<Vec<ChatMessage>>)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    prompt: Option<PromptField>,
    #[serde(default)]
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Value>,
    #[serde(default, deserialize_with = "given::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(default, deserialize_with = "given::text")]
    cache_salt: Option<String>,
}

/// Whose sessions are meant: another salt has others.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Whose {
    model: Option<String>,
    #[param(required = false)]
    cache_salt: String,
}

impl<S: Send + Sync> FromRequestParts<S> for Whose {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Whose, ApiError> {
        let given = Query::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        let Query(given) = given.map_err(|_| ApiError::invalid("", "the query is no list of names and values"))?;
        let (mut model, mut salt) = (None, None);
        for (name, value) in given {
            let name: String = name.chars().take(100).collect();
            let field = match name.as_str() {
                "model" => &mut model,
                "cache_salt" => &mut salt,
                _ => {
                    let message = format!("{name:?} is no parameter of sessions: model and cache_salt are");
                    return Err(ApiError::invalid(&name, message));
                }
            };
            if field.replace(value).is_some() {
                return Err(ApiError::invalid(&name, format!("{name} is given more than once")));
            }
        }
        Ok(Whose { model, cache_salt: salt.unwrap_or_default() })
    }
}

written! {
    SessionFacts, uses [], {
        "type": "object",
        "required": ["object", "name", "tokens", "created"],
        "properties": {
            "object": {"type": "string", "enum": ["session"]},
            "name": {"type": "string"},
            "tokens": {"type": "integer"},
            "created": {"type": "integer", "description": "In seconds since 1970."},
        },
    }
}

written! {
    SessionList, uses [SessionFacts], {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"type": "string", "enum": ["list"]},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/SessionFacts"}},
        },
    }
}

written! {
    /// A session with its tokens.
    LoadedSession, uses [], {
        "type": "object",
        "required": ["object", "name", "tokens", "prompt"],
        "properties": {
            "object": {"type": "string", "enum": ["session"]},
            "name": {"type": "string"},
            "tokens": {"type": "integer"},
            "prompt": {"type": "array", "items": {"type": "integer"}},
        },
    }
}

written! {
    DeletedSession, uses [], {
        "type": "object",
        "required": ["object", "name", "deleted"],
        "properties": {
            "object": {"type": "string", "enum": ["session.deleted"]},
            "name": {"type": "string"},
            "deleted": {"type": "boolean"},
        },
    }
}

fn to_json(session: &Session) -> Value {
    json!({"object": "session", "name": session.name, "tokens": session.tokens, "created": session.created})
}

fn sessions(ready: &LoadedModel) -> Result<Sessions, ApiError> {
    let without =
        || ApiError::invalid("", "sessions are kept in the prompt cache: start the server with --prompt-cache");
    ready.sessions.clone().ok_or_else(without)
}

/// By a thread that may wait for the disk.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(|e| ApiError::internal(e.to_string()))?;
    done.map_err(|e| ApiError::internal(format!("{e:#}")))
}

/// Sessions that are kept.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions", params(Whose), responses(
    (status = 200, description = "All of them.", body = SessionList),
    (status = 400, description = "There is no prompt cache, or a parameter is not known.", body = Error), Asking,
))]
pub async fn list(State(app): State<Arc<App>>, whose: Whose) -> Result<Json<Value>, ApiError> {
    let sessions = sessions(&*app.model(whose.model.as_deref()).await?)?;
    let all = apart(move || sessions.list(whose.cache_salt.as_bytes())).await?;
    Ok(Json(json!({"object": "list", "data": all.iter().map(to_json).collect::<Vec<_>>()})))
}

/// Computes what is missing of a conversation, and has it written and named.
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", request_body = SessionRequest, responses(
    (status = 200, description = "It is kept.", body = SessionFacts), Computing,
))]
pub async fn save(State(app): State<Arc<App>>, Body(request): Body<SessionRequest>) -> Result<Json<Value>, ApiError> {
    let ready = app.model(request.model.as_deref()).await?;
    sessions(&ready)?;
    let name = request.name.ok_or_else(|| ApiError::invalid("name", "name is missing"))?;
    // 1. Its tokens
    let (tokens, marks) = match (request.messages, request.prompt) {
        (Some(all), None) => {
            let demanded = OutputSpec::new(request.tools, &ToolChoice::Auto, true, None, None)?;
            let extra = request.chat_template_kwargs;
            let mut asked = ChatRequest { messages: messages(all)?, demanded, extra, ..ChatRequest::default() };
            let Rendered { tokens, marks, .. } = asked.rendered(&ready).await?;
            (tokens, marks)
        }
        (None, Some(prompt)) => {
            let tokens = one_prompt(&ready, prompt).await?;
            let marks = vec![tokens.len().saturating_sub(1)];
            (tokens, marks)
        }
        _ => return Err(ApiError::invalid("messages", "a session needs either messages or a prompt")),
    };
    // 2. They are computed as for a request: one token is generated, and nobody's
    let common = SamplingFields {
        cache_salt: request.cache_salt,
        max_tokens: Some(1),
        ignore_eos: true,
        ..SamplingFields::default()
    };
    let generation = common.generation(&ready.text, tokens.len(), ready.context)?;
    let mut pending = ready.submit(tokens.clone(), Generation { snapshot_points: marks, ..generation }, &common)?;
    while pending.next().await?.is_some() {}
    drop(pending);
    // 3. And written
    let (tell, told) = oneshot::channel();
    let saved = Box::new(|session| _ = tell.send(session));
    ready.save_session(name, common.cache_salt.unwrap_or_default().into_bytes(), tokens, saved);
    let session = told.await.map_err(|_| ApiError::internal("the prompt cache is not in use any more"))?;
    let session = session.map_err(|e| ApiError::invalid("name", format!("{e:#}")))?;
    Ok(Json(to_json(&session)))
}

fn unknown(name: &str) -> ApiError {
    ApiError { status: StatusCode::NOT_FOUND, ..ApiError::invalid("name", format!("{name}: no such session")) }
}

/// Its tokens; they are read into memory while nothing else is to be done.
#[utoipa::path(post, path = "/v1/sessions/{name}/load", tag = "sessions", params(("name" = String, Path), Whose), responses(
    (status = 200, description = "What was kept.", body = LoadedSession),
    (status = 400, description = "There is no prompt cache, or a parameter is not known.", body = Error),
    (status = 404, description = "There is none of this name.", body = Error), Asking,
))]
pub async fn load(State(app): State<Arc<App>>, Name(name): Name, whose: Whose) -> Result<Json<Value>, ApiError> {
    let ready = app.model(whose.model.as_deref()).await?;
    let (sessions, own) = (sessions(&ready)?, name.clone());
    let loaded =
        apart(move || sessions.load(whose.cache_salt.as_bytes(), &own)).await?.ok_or_else(|| unknown(&name))?;
    ready.read_ahead(loaded.ahead);
    Ok(Json(json!({"object": "session", "name": name, "tokens": loaded.tokens.len(), "prompt": loaded.tokens})))
}

/// Forgets a session.
#[utoipa::path(delete, path = "/v1/sessions/{name}", tag = "sessions", params(("name" = String, Path), Whose), responses(
    (status = 200, description = "It is forgotten.", body = DeletedSession),
    (status = 400, description = "There is no prompt cache, or a parameter is not known.", body = Error),
    (status = 404, description = "There is none of this name.", body = Error), Asking,
))]
pub async fn delete(State(app): State<Arc<App>>, Name(name): Name, whose: Whose) -> Result<Json<Value>, ApiError> {
    let (sessions, own) = (sessions(&*app.model(whose.model.as_deref()).await?)?, name.clone());
    if !apart(move || sessions.delete(whose.cache_salt.as_bytes(), &own)).await? {
        return Err(unknown(&name));
    }
    Ok(Json(json!({"object": "session.deleted", "name": name, "deleted": true})))
}
