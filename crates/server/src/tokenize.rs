//! `/tokenize` and `/detokenize`, as vLLM and llama-server have them: what either asks for is understood, and the answer has the fields of both.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::text::Prompt;
use utoipa::ToSchema;

use crate::app::{App, Body, LoadedModel};
use crate::context::ignore;
use crate::error::ApiError;
use crate::given;
use crate::openai::chat::messages as messages_of;
use crate::openai::chat_fields::{ChatMessage, ChatTool};
use crate::openapi::{Reading, written};
use crate::output_spec::{OutputSpec, ToolChoice};
use crate::request::ChatRequest;

/// A text, or messages that the template renders.
#[derive(Deserialize, ToSchema)]
#[schema(as = TokenizeRequest)]
pub struct Tokenize {
    /// A text: llama-server's name for it, and vLLM's.
    #[serde(default, deserialize_with = "given::text")]
    content: Option<String>,
    #[serde(default, deserialize_with = "given::text")]
    prompt: Option<String>,
    /// Rendered by the template.
    #[serde(default, deserialize_with = "given::objects")]
    #[schema(value_type = Option<Vec<ChatMessage>>)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    #[schema(value_type = Option<Vec<ChatTool>>)]
    tools: Option<Value>,
    #[serde(default, deserialize_with = "given::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    /// Tokens that the tokenizer puts around a text are added: llama-server's name for it, which adds none where nothing is said, and vLLM's, which does.
    #[serde(default, deserialize_with = "given::flag")]
    add_special: Option<bool>,
    #[serde(default, deserialize_with = "given::flag")]
    add_special_tokens: Option<bool>,
    /// Control tokens that are spelled out are taken as such.
    #[serde(default, deserialize_with = "given::flag")]
    #[schema(default = true)]
    parse_special: Option<bool>,
    /// Each token with its text.
    #[serde(default, deserialize_with = "given::flag_or_false")]
    #[schema(value_type = Option<bool>)]
    with_pieces: bool,
    /// The tokens' texts beside them.
    #[serde(default, deserialize_with = "given::flag")]
    return_token_strs: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = DetokenizeRequest)]
pub struct Detokenize {
    #[serde(default, deserialize_with = "given::token_ids")]
    #[schema(value_type = Vec<u32>, required)]
    tokens: Option<Vec<u32>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

fn name_others(others: &Map<String, Value>) {
    others.keys().filter(|name| *name != "model").for_each(|name| ignore(name));
}

written! {
    /// The tokens, in the words of vLLM and llama-server.
    Tokens, uses [], {
        "type": "object",
        "required": ["tokens", "count", "max_model_len", "token_strs"],
        "properties": {
            "tokens": {"type": "array", "items": {"anyOf": [
                {"type": "integer"},
                {"type": "object", "required": ["id", "piece"], "properties": {"id": {"type": "integer"}, "piece": {"type": "string"}}},
            ]}},
            "count": {"type": "integer"},
            "max_model_len": {"type": "integer", "description": "Tokens of prompt and answer."},
            "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
        },
    }
}

written! {
    /// The text, in the words of vLLM and llama-server.
    Detokenized, uses [], {
        "type": "object",
        "required": ["content", "prompt"],
        "properties": {"content": {"type": "string"}, "prompt": {"type": "string"}},
    }
}

/// Tokens of a text or of a conversation.
#[utoipa::path(post, path = "/tokenize", tag = "tokens", request_body = Tokenize, responses((status = 200, description = "Its tokens.", body = Tokens), Reading))]
pub async fn tokenize(State(app): State<Arc<App>>, Body(request): Body<Tokenize>) -> Result<Json<Value>, ApiError> {
    let ready = app.model(request.others.get("model").and_then(Value::as_str)).await?;
    name_others(&request.others);
    let (pieces, strings) = (request.with_pieces, request.return_token_strs == Some(true));
    let special = request.add_special_tokens.or(request.add_special).unwrap_or(request.prompt.is_some());
    let tokens = match (request.content.or(request.prompt), request.messages) {
        (Some(text), None) => {
            let own = Arc::clone(&ready);
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
            let messages = messages_of(messages)?;
            let demanded = OutputSpec::new(request.tools, &ToolChoice::Auto, true, None, None)?;
            let mut asked =
                ChatRequest { messages, demanded, extra: request.chat_template_kwargs, ..ChatRequest::default() };
            asked.rendered(&ready).await?.tokens
        }
        _ => return Err(ApiError::invalid("content", "either content (or prompt), or messages")),
    };
    let count = tokens.len();
    let piece = |id: &u32| piece(&ready, *id);
    let strings = strings.then(|| tokens.iter().map(piece).collect::<Vec<_>>());
    let tokens = if pieces {
        tokens.iter().map(|id| json!({"id": id, "piece": piece(id)})).collect::<Vec<_>>().into()
    } else {
        json!(tokens)
    };
    Ok(Json(json!({"tokens": tokens, "count": count, "max_model_len": ready.context, "token_strs": strings})))
}

fn piece(ready: &LoadedModel, id: u32) -> String {
    ready.text.tokenizer.decode(&[id], false).unwrap_or_default()
}

/// The text of tokens.
#[utoipa::path(post, path = "/detokenize", tag = "tokens", request_body = Detokenize, responses((status = 200, description = "Their text.", body = Detokenized), Reading))]
pub async fn detokenize(State(app): State<Arc<App>>, Body(request): Body<Detokenize>) -> Result<Json<Value>, ApiError> {
    let ready = app.model(request.others.get("model").and_then(Value::as_str)).await?;
    name_others(&request.others);
    let vocabulary = ready.text.tokenizer.vocab_size();
    let tokens = request.tokens.ok_or_else(|| ApiError::invalid("tokens", "tokens is missing"))?;
    if let Some(bad) = tokens.iter().find(|t| **t as usize >= vocabulary) {
        return Err(ApiError::invalid("tokens", format!("token {bad} is not in the vocabulary of {vocabulary}")));
    }
    let text = ready.text.tokenizer.decode(&tokens, false);
    let text = text.map_err(|e| ApiError::invalid("tokens", format!("{e:#}")))?;
    Ok(Json(json!({"content": text, "prompt": text})))
}
