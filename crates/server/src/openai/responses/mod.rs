//! `/v1/responses`, as clients use it that keep their conversations themselves: nothing is stored, and all that was said comes with each request.

mod namespaces;
mod reply;
mod request;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use self::reply::Responses;
use self::request::Request;
use crate::app::{App, Body};
use crate::error::ApiError;
use crate::reply as sending;

pub async fn responses(State(app): State<Arc<App>>, Body(request): Body<Request>) -> Result<Response, ApiError> {
    let ready = app.model(request.model()).await?;
    let (asked, wishes) = request.asked()?;
    let streamed = asked.common.stream;
    let pending = asked.submit(&ready).await?;
    let wire = Responses::new(ready.name.clone(), wishes);
    Ok(sending::send(pending, wire, streamed).await)
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
