//! `/tokenize` and `/detokenize`, as vLLM and llama-server have them: what either asks for is understood, and the answer has the fields of both.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::text::Prompt;

use crate::app::{App, Body, Ready};
use crate::demand::{Demanded, ToolChoice};
use crate::error::ApiError;
use crate::exchange::ignore;
use crate::request::Asked;

#[derive(Deserialize)]
pub struct Tokenize {
    /// A text: llama-server's name for it, and vLLM's.
    content: Option<String>,
    prompt: Option<String>,
    /// Rendered by the template.
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    tools: Option<Value>,
    #[serde(default)]
    chat_template_kwargs: Map<String, Value>,
    /// Tokens that the tokenizer puts around a text are added: llama-server's name for it, which adds none where nothing is said, and vLLM's, which does.
    add_special: Option<bool>,
    add_special_tokens: Option<bool>,
    /// Control tokens that are spelled out are taken as such.
    #[serde(default = "yes")]
    parse_special: bool,
    #[serde(default)]
    with_pieces: bool,
    #[serde(default)]
    return_token_strs: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
pub struct Detokenize {
    tokens: Vec<u32>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

fn yes() -> bool {
    true
}

fn name_others(others: &Map<String, Value>) {
    others.keys().filter(|name| *name != "model").for_each(|name| ignore(name));
}

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
                if request.parse_special {
                    tokenizer.encode_prompt(&Prompt::from(text), special)
                } else {
                    tokenizer.encode_plain(&text)
                }
            };
            let done = tokio::task::spawn_blocking(work).await.map_err(|e| ApiError::internal(e.to_string()))?;
            done.map_err(|e| ApiError::invalid("content", format!("{e:#}")))?
        }
        (None, Some(messages)) => {
            let messages = messages.into_iter().map(Value::Object).collect();
            let demanded = Demanded::new(request.tools, &ToolChoice::Auto, true, None, None)?;
            let mut asked = Asked { messages, demanded, extra: request.chat_template_kwargs, ..Asked::default() };
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

fn piece(ready: &Ready, id: u32) -> String {
    ready.text.tokenizer.decode(&[id], false).unwrap_or_default()
}

pub async fn detokenize(State(app): State<Arc<App>>, Body(request): Body<Detokenize>) -> Result<Json<Value>, ApiError> {
    let ready = app.model(request.others.get("model").and_then(Value::as_str)).await?;
    name_others(&request.others);
    let vocabulary = ready.text.tokenizer.vocab_size();
    if let Some(bad) = request.tokens.iter().find(|t| **t as usize >= vocabulary) {
        return Err(ApiError::invalid("tokens", format!("token {bad} is not in the vocabulary of {vocabulary}")));
    }
    let text = ready.text.tokenizer.decode(&request.tokens, false);
    let text = text.map_err(|e| ApiError::invalid("tokens", format!("{e:#}")))?;
    Ok(Json(json!({"content": text, "prompt": text})))
}
