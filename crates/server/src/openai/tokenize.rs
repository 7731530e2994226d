//! `/tokenize` and `/detokenize`, as vLLM and llama-server have them: requests may use the fields of either, and answers have the fields of both.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::text::Prompt;
use utoipa::ToSchema;

use crate::api::chat::ChatRequest;
use crate::api::fields;
use crate::api::output_spec::{OutputSpec, ToolChoice};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{BodyErrors, json_schema};
use crate::http::state::AppState;
use crate::models::loaded::LoadedModel;
use crate::openai::messages::chat_messages;
use crate::openai::output_fields::{ChatMessage, ChatTool};

/// A text, or messages that the chat template renders.
#[derive(Deserialize, ToSchema)]
#[schema(as = TokenizeRequest)]
pub struct TokenizeRequest {
    /// The text, under llama-server's name.
    #[serde(default, deserialize_with = "fields::string")]
    content: Option<String>,
    /// The text, under vLLM's name.
    #[serde(default, deserialize_with = "fields::string")]
    prompt: Option<String>,
    /// A conversation, which the chat template renders.
    #[serde(default, deserialize_with = "fields::objects")]
    #[schema(value_type = Option<Vec<ChatMessage>>)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Value>,
    #[serde(default, deserialize_with = "fields::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    /// Add the tokens that the tokenizer puts around a text. llama-server's name; the default for `content` is false.
    #[serde(default, deserialize_with = "fields::boolean")]
    add_special: Option<bool>,
    /// The same under vLLM's name; the default for `prompt` is true.
    #[serde(default, deserialize_with = "fields::boolean")]
    add_special_tokens: Option<bool>,
    /// Parse control tokens in the text.
    #[serde(default, deserialize_with = "fields::boolean")]
    #[schema(default = true)]
    parse_special: Option<bool>,
    /// Return each token with its text.
    #[serde(default, deserialize_with = "fields::boolean_or_false")]
    #[schema(value_type = Option<bool>)]
    with_pieces: bool,
    /// Return a list of the tokens' texts as well.
    #[serde(default, deserialize_with = "fields::boolean")]
    return_token_strs: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Tokens to convert to text.
#[derive(Deserialize, ToSchema)]
#[schema(as = DetokenizeRequest)]
pub struct DetokenizeRequest {
    #[serde(default, deserialize_with = "fields::token_ids")]
    #[schema(value_type = Vec<u32>, required)]
    tokens: Option<Vec<u32>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

fn note_unknown_fields(others: &Map<String, Value>) {
    others.keys().filter(|name| *name != "model").for_each(|name| note_ignored(name));
}

json_schema! {
    /// Tokens, with the fields of vLLM and llama-server.
    Tokens, uses [], {
        "type": "object",
        "required": ["tokens", "count", "max_model_len", "token_strs"],
        "properties": {
            "tokens": {"type": "array", "items": {"anyOf": [
                {"type": "integer"},
                {"type": "object", "required": ["id", "piece"], "properties": {"id": {"type": "integer"}, "piece": {"type": "string"}}},
            ]}},
            "count": {"type": "integer"},
            "max_model_len": {"type": "integer", "description": "Longest context in tokens: prompt and answer together."},
            "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
        },
    }
}

json_schema! {
    /// A text, with the fields of vLLM and llama-server.
    Detokenized, uses [], {
        "type": "object",
        "required": ["content", "prompt"],
        "properties": {"content": {"type": "string"}, "prompt": {"type": "string"}},
    }
}

/// Tokenizes a text or a conversation.
#[utoipa::path(post, path = "/tokenize", tag = "tokens", request_body = TokenizeRequest, responses((status = 200, description = "The tokens.", body = Tokens), BodyErrors))]
pub async fn tokenize(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<TokenizeRequest>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model(request.others.get("model").and_then(Value::as_str)).await?;
    note_unknown_fields(&request.others);
    let (pieces, strings) = (request.with_pieces, request.return_token_strs == Some(true));
    let special = request.add_special_tokens.or(request.add_special).unwrap_or(request.prompt.is_some());
    let tokens = match (request.content.or(request.prompt), request.messages) {
        (Some(text), None) => {
            let own = Arc::clone(&model);
            let work = move || {
                let tokenizer = &own.text.tokenizer;
                if request.parse_special.unwrap_or(true) {
                    tokenizer.encode_prompt(&Prompt::from(text), special)
                } else {
                    tokenizer.encode_plain(&text)
                }
            };
            let done = tokio::task::spawn_blocking(work).await.map_err(|e| ApiError::internal(e.to_string()))?;
            done.map_err(|e| ApiError::invalid("content", format!("{e:#}")))?
        }
        (None, Some(messages)) => {
            let messages = chat_messages(messages)?;
            let output = OutputSpec::new(request.tools, &ToolChoice::Auto, true, None, None)?;
            let mut chat =
                ChatRequest { messages, output, extra: request.chat_template_kwargs, ..ChatRequest::default() };
            chat.render(&model).await?.tokens
        }
        _ => return Err(ApiError::invalid("content", "the request needs either content (or prompt) or messages")),
    };
    let count = tokens.len();
    let piece = |id: &u32| piece(&model, *id);
    let strings = strings.then(|| tokens.iter().map(piece).collect::<Vec<_>>());
    let tokens = if pieces {
        tokens.iter().map(|id| json!({"id": id, "piece": piece(id)})).collect::<Vec<_>>().into()
    } else {
        json!(tokens)
    };
    Ok(Json(json!({"tokens": tokens, "count": count, "max_model_len": model.context, "token_strs": strings})))
}

fn piece(model: &LoadedModel, id: u32) -> String {
    model.text.tokenizer.decode(&[id], false).unwrap_or_default()
}

/// Converts tokens to text.
#[utoipa::path(post, path = "/detokenize", tag = "tokens", request_body = DetokenizeRequest, responses((status = 200, description = "The text.", body = Detokenized), BodyErrors))]
pub async fn detokenize(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<DetokenizeRequest>,
) -> Result<Json<Value>, ApiError> {
    let model = app.model(request.others.get("model").and_then(Value::as_str)).await?;
    note_unknown_fields(&request.others);
    let vocabulary = model.text.tokenizer.vocab_size();
    let tokens = request.tokens.ok_or_else(|| ApiError::invalid("tokens", "tokens is missing"))?;
    if let Some(bad) = tokens.iter().find(|t| **t as usize >= vocabulary) {
        return Err(ApiError::invalid("tokens", format!("token {bad} is not in the vocabulary of {vocabulary}")));
    }
    let text = model.text.tokenizer.decode(&tokens, false);
    let text = text.map_err(|e| ApiError::invalid("tokens", format!("{e:#}")))?;
    Ok(Json(json!({"content": text, "prompt": text})))
}
