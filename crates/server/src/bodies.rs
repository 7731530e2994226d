//! Requests' bodies without a server: what becomes of one up to where the model would be asked. For those who try bodies of all kinds.

use serde_json::json;
use sluice_engine::text::{ModelText, Reading};

use crate::error::ApiError;
use crate::given;
use crate::ollama::request::Prompted;
use crate::openai::{chat, completions, responses};
use crate::request::ChatRequest;
use crate::{anthropic, ollama};

/// Reads a body as the handler of `path` does: the conversation goes through the template and the tokenizer of `text`, all but grammars is checked. Tokens of the prompt.
///
/// # Errors
/// The status that the request would be answered with, and why.
pub fn read(text: &ModelText, path: &str, body: &[u8], context: usize) -> Result<usize, (u16, String)> {
    let asked = || -> Result<ChatRequest, ApiError> {
        match path {
            "/v1/chat/completions" => given::read::<chat::ChatCompletionRequest>(body)?.asked(),
            "/v1/responses" => Ok(given::read::<responses::request::ResponsesRequest>(body)?.asked()?.0),
            "/v1/messages" => given::read::<anthropic::request::MessagesRequest>(body)?.asked(),
            "/api/chat" => given::read::<ollama::request::Chat>(body)?.asked(true),
            "/api/generate" => {
                Ok(match given::read::<ollama::request::Generate>(body)?.asked(text.template.is_some(), true)? {
                    Prompted::Conversation(asked) => *asked,
                    Prompted::Text(prompt, common) => ChatRequest {
                        messages: vec![json!({"role": "user", "content": prompt})],
                        common: *common,
                        ..ChatRequest::default()
                    },
                })
            }
            "/v1/completions" => {
                let (_, _, common) = given::read::<completions::CompletionRequest>(body)?.parts()?;
                Ok(ChatRequest { common, ..ChatRequest::default() })
            }
            _ => Err(ApiError::not_found(path)),
        }
    };
    let done = || -> Result<usize, ApiError> {
        let mut asked = asked()?;
        let common = std::mem::take(&mut asked.common);
        common.choices()?;
        common.stops()?;
        let tokens = if path == "/v1/completions" {
            Vec::new()
        } else {
            let tokens = asked.conversation()?.rendered(text, true)?.tokens;
            Reading::new(text, asked.demanded.tools.as_ref(), &tokens).parser();
            tokens
        };
        common.generation(text, tokens.len(), context)?;
        Ok(tokens.len())
    };
    done().map_err(|e| (e.status.as_u16(), e.message))
}
