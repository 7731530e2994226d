//! `/v1/responses`, as clients use it that keep their conversations themselves: nothing is stored, and all that was said comes with each request.

mod namespaces;
mod reply;
pub mod request;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use self::reply::{ResponseEvent, ResponseObject, Responses};
use self::request::ResponsesRequest;
use crate::app::{App, Body};
use crate::error::ApiError;
use crate::openapi::{Computing, Reading, written};
use crate::reply as sending;

/// Answers a conversation that comes whole with each request: nothing is stored.
#[utoipa::path(post, path = "/v1/responses", tag = "openai", request_body = ResponsesRequest, responses(
    (status = 200, description = "The response; with `stream` its events, each named by its `type`. Where a prompt takes long, white space comes before it.",
        content((ResponseObject = "application/json"), (ResponseEvent = "text/event-stream"))),
    Computing,
))]
pub async fn responses(
    State(app): State<Arc<App>>,
    Body(request): Body<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let ready = app.model(request.model()).await?;
    let (asked, mut wishes) = request.asked()?;
    wishes.tokenizer = wishes.with_logprobs.then(|| Arc::clone(&ready.text.tokenizer));
    let streamed = asked.common.stream;
    let pending = asked.submit(&ready).await?;
    let wire = Responses::new(ready.name.clone(), wishes);
    Ok(sending::send(pending, wire, streamed).await)
}

written! {
    InputTokens, uses [], {
        "type": "object",
        "required": ["object", "input_tokens"],
        "properties": {
            "object": {"type": "string", "enum": ["response.input_tokens"]},
            "input_tokens": {"type": "integer"},
        },
    }
}

/// How many tokens a conversation has, with all that the template puts around it.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "openai", request_body = ResponsesRequest, responses(
    (status = 200, description = "Its tokens.", body = InputTokens), Reading,
))]
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    Body(request): Body<ResponsesRequest>,
) -> Result<Json<Value>, ApiError> {
    let ready = app.model(request.model()).await?;
    let (mut asked, _) = request.asked()?;
    let rendered = asked.rendered(&ready).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": rendered.tokens.len()})))
}

/// Of a thought that travels with a client as `encrypted_content`. Nothing is hidden in it: the text itself must come back, since no thought is kept here.
const CARRIED: &str = "sluice1.";

fn carried(thought: &str) -> String {
    CARRIED.to_owned() + &STANDARD.encode(thought)
}

/// The thought; `None` where somebody else has made it.
fn brought_back(content: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(content.strip_prefix(CARRIED)?).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thought_comes_back_as_it_went() {
        for thought in ["", "Let me see.\n\n\"é\" 🚀\u{0}"] {
            assert_eq!(brought_back(&carried(thought)).as_deref(), Some(thought));
        }
        for other in ["", "gAAAAABo", "sluice1.%%%", "sluice1./w=="] {
            assert_eq!(brought_back(other), None);
        }
    }
}
