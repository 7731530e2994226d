//! `/v1/sessions`: named conversations in the prompt cache, which can be continued after a restart without being computed again.

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequestParts, Query, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::{Generation, Session, SessionError, Sessions};
use tokio::sync::oneshot;
use utoipa::{IntoParams, ToSchema};

use crate::api::chat::ChatRequest;
use crate::api::conversation::Rendered;
use crate::api::fields;
use crate::api::output_spec::{OutputSpec, ToolChoice};
use crate::api::pending::Pending;
use crate::api::sampling::SamplingFields;
use crate::http::error::{ApiError, without_folders};
use crate::http::extract::{JsonBody, PathName};
use crate::http::openapi::{ComputeErrors, Error, QueryErrors, json_schema};
use crate::http::state::AppState;
use crate::models::loaded::LoadedModel;
use crate::openai::messages::chat_messages;
use crate::openai::output_fields::{ChatMessage, ChatTool};
use crate::openai::prompt::{PromptField, encode_one};

/// A conversation or a text to save under a name.
#[derive(Deserialize, ToSchema)]
#[schema(as = SessionRequest)]
#[serde(deny_unknown_fields)]
pub struct SessionRequest {
    #[serde(default, deserialize_with = "fields::string")]
    #[schema(value_type = String, required)]
    name: Option<String>,
    /// The model it belongs to; by default the model in memory.
    #[serde(default, deserialize_with = "fields::string")]
    model: Option<String>,
    #[serde(default, deserialize_with = "fields::objects")]
    #[schema(value_type = Option<Vec<ChatMessage>>)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    prompt: Option<PromptField>,
    #[serde(default)]
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Value>,
    #[serde(default, deserialize_with = "fields::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(default, deserialize_with = "fields::string")]
    cache_salt: Option<String>,
}

/// Which sessions are meant: each model, and each salt, has its own.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
pub struct SessionQuery {
    model: Option<String>,
    #[param(required = false)]
    cache_salt: String,
}

impl<S: Send + Sync> FromRequestParts<S> for SessionQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<SessionQuery, ApiError> {
        let given = Query::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        let Query(given) = given.map_err(|_| ApiError::invalid("", "the query is not a list of names and values"))?;
        let (mut model, mut salt) = (None, None);
        for (name, value) in given {
            let name: String = name.chars().take(100).collect();
            let field = match name.as_str() {
                "model" => &mut model,
                "cache_salt" => &mut salt,
                _ => {
                    let message =
                        format!("{name:?} is not a parameter of sessions; the parameters are model and cache_salt");
                    return Err(ApiError::invalid(&name, message));
                }
            };
            if field.replace(value).is_some() {
                return Err(ApiError::invalid(&name, format!("{name} is given more than once")));
            }
        }
        Ok(SessionQuery { model, cache_salt: salt.unwrap_or_default() })
    }
}

json_schema! {
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

json_schema! {
    SessionList, uses [SessionFacts], {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"type": "string", "enum": ["list"]},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/SessionFacts"}},
        },
    }
}

json_schema! {
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

json_schema! {
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

fn sessions(model: &LoadedModel) -> Result<Sessions, ApiError> {
    let without = || ApiError::invalid("", "sessions need the prompt cache: start the server with --prompt-cache");
    model.sessions.clone().ok_or_else(without)
}

/// The model that is meant, and the result of `work` on its sessions and the salt. The work waits for the disk, so it has a blocking thread.
async fn with_sessions<T: Send + 'static>(
    app: &AppState,
    query: SessionQuery,
    work: impl FnOnce(&Sessions, &[u8]) -> Result<T, SessionError> + Send + 'static,
) -> Result<(Arc<LoadedModel>, T), ApiError> {
    let model = app.model(query.model.as_deref()).await?;
    let sessions = sessions(&model)?;
    let done = tokio::task::spawn_blocking(move || work(&sessions, query.cache_salt.as_bytes())).await;
    let done = done.map_err(|e| ApiError::internal(e.to_string()))?.map_err(refused)?;
    Ok((model, done))
}

fn refused(error: SessionError) -> ApiError {
    match error {
        SessionError::BadName => ApiError::invalid("name", error.to_string()),
        SessionError::TooShort { .. } => ApiError::invalid("", error.to_string()),
        SessionError::NoRoom => ApiError::no_storage(error.to_string()),
        SessionError::NotInUse(why) => ApiError::unavailable(without_folders(&why)),
        SessionError::Failed(e) => ApiError::internal(format!("{:#}", anyhow::Error::new(e))),
    }
}

/// Lists saved sessions.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions", params(SessionQuery), responses(
    (status = 200, description = "All sessions.", body = SessionList),
    (status = 400, description = "The server has no prompt cache, or a parameter is unknown.", body = Error), QueryErrors,
))]
pub async fn list(State(app): State<Arc<AppState>>, query: SessionQuery) -> Result<Json<Value>, ApiError> {
    let (_, all) = with_sessions(&app, query, |sessions, salt| sessions.list(salt)).await?;
    Ok(Json(json!({"object": "list", "data": all.iter().map(to_json).collect::<Vec<_>>()})))
}

/// Saves a session: computes what is not cached yet, and writes it.
#[utoipa::path(post, path = "/v1/sessions", tag = "sessions", request_body = SessionRequest, responses(
    (status = 200, description = "The session is saved.", body = SessionFacts),
    (status = 507, description = "The prompt cache has no room for the session (`insufficient_storage`).", body = Error), ComputeErrors,
))]
pub async fn save(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<SessionRequest>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    sessions(&model)?;
    let name = request.name.ok_or_else(|| ApiError::invalid("name", "name is missing"))?;
    // 1. Get the tokens
    let (tokens, marks) = match (request.messages, request.prompt) {
        (Some(all), None) => {
            let output = OutputSpec::new(request.tools, &ToolChoice::Auto, true, None, None)?;
            let extra = request.chat_template_kwargs;
            let mut chat = ChatRequest { messages: chat_messages(all)?, output, extra, ..ChatRequest::default() };
            let Rendered { tokens, marks, .. } = chat.render(&model).await?;
            (tokens, marks)
        }
        (None, Some(prompt)) => {
            let tokens = encode_one(&model, prompt).await?;
            let marks = vec![tokens.len().saturating_sub(1)];
            (tokens, marks)
        }
        _ => return Err(ApiError::invalid("messages", "a session needs either messages or a prompt")),
    };
    // 2. Compute them like a request, with one generated token that is dropped
    let sampling = SamplingFields {
        cache_salt: request.cache_salt,
        max_tokens: Some(1),
        ignore_eos: true,
        ..SamplingFields::default()
    };
    let generation = sampling.generation(&model.text, tokens.len(), model.context)?;
    let mut pending =
        Pending::submit(&model, tokens.clone(), Generation { snapshot_points: marks, ..generation }, &sampling)?;
    while pending.next().await?.is_some() {}
    drop(pending);
    // 3. Write them
    let (sender, receiver) = oneshot::channel();
    let saved = Box::new(|session| _ = sender.send(session));
    model.engine.save_session(name, sampling.cache_salt.unwrap_or_default().into_bytes(), tokens, saved);
    let session = receiver.await.map_err(|_| ApiError::unavailable("the engine has ended"))?.map_err(refused)?;
    Ok(Json(to_json(&session)))
}

fn no_such_session(name: &str) -> ApiError {
    ApiError { status: StatusCode::NOT_FOUND, ..ApiError::invalid("name", format!("{name}: no such session")) }
}

/// Returns a session's tokens, and reads it into memory as soon as the engine is idle.
#[utoipa::path(post, path = "/v1/sessions/{name}/load", tag = "sessions", params(("name" = String, Path), SessionQuery), responses(
    (status = 200, description = "The session.", body = LoadedSession),
    (status = 400, description = "The server has no prompt cache, or a parameter is unknown.", body = Error),
    (status = 404, description = "No session has this name.", body = Error), QueryErrors,
))]
pub async fn load(
    State(app): State<Arc<AppState>>,
    PathName(name): PathName,
    query: SessionQuery,
) -> Result<Json<Value>, ApiError> {
    let own = name.clone();
    let (model, loaded) = with_sessions(&app, query, move |sessions, salt| sessions.load(salt, &own)).await?;
    let loaded = loaded.ok_or_else(|| no_such_session(&name))?;
    model.engine.read_ahead(loaded.ahead);
    Ok(Json(json!({"object": "session", "name": name, "tokens": loaded.tokens.len(), "prompt": loaded.tokens})))
}

/// Deletes a session.
#[utoipa::path(delete, path = "/v1/sessions/{name}", tag = "sessions", params(("name" = String, Path), SessionQuery), responses(
    (status = 200, description = "The session is deleted.", body = DeletedSession),
    (status = 400, description = "The server has no prompt cache, or a parameter is unknown.", body = Error),
    (status = 404, description = "No session has this name.", body = Error), QueryErrors,
))]
pub async fn delete(
    State(app): State<Arc<AppState>>,
    PathName(name): PathName,
    query: SessionQuery,
) -> Result<Json<Value>, ApiError> {
    let own = name.clone();
    let (_, was_there) = with_sessions(&app, query, move |sessions, salt| sessions.delete(salt, &own)).await?;
    if !was_there {
        return Err(no_such_session(&name));
    }
    Ok(Json(json!({"object": "session.deleted", "name": name, "deleted": true})))
}
