//! Checks request bodies without a server or a model, for fuzzing.

use serde_json::json;
use sluice_engine::text::{ModelText, Reading};

use crate::api::chat::ChatRequest;
use crate::api::fields;
use crate::http::error::ApiError;
use crate::ollama::request::OllamaPrompt;
use crate::openai::{completions, responses};
use crate::{anthropic, ollama, openai};

/// Parses and checks a body as the handler of `path` does, except for grammars. A conversation goes through the chat template and the tokenizer of `text`. Returns
/// the number of tokens of the prompt.
///
/// # Errors
/// The status of the answer, and the message.
pub fn check_request(text: &ModelText, path: &str, body: &[u8], context: usize) -> Result<usize, (u16, String)> {
    let parse = || -> Result<ChatRequest, ApiError> {
        match path {
            "/v1/chat/completions" => fields::parse_request::<openai::chat::ChatCompletionRequest>(body)?.into_chat(),
            "/v1/responses" => Ok(fields::parse_request::<responses::request::ResponsesRequest>(body)?.into_chat()?.0),
            "/v1/messages" => fields::parse_request::<anthropic::request::MessagesRequest>(body)?.into_chat(),
            "/api/chat" => fields::parse_request::<ollama::request::OllamaChat>(body)?.into_chat(true),
            "/api/generate" => Ok(
                match fields::parse_request::<ollama::request::OllamaGenerate>(body)?
                    .into_prompt(text.template.is_some(), true)?
                {
                    OllamaPrompt::Conversation(chat) => *chat,
                    OllamaPrompt::Text(prompt, sampling) => ChatRequest {
                        messages: vec![json!({"role": "user", "content": prompt})],
                        sampling: *sampling,
                        ..ChatRequest::default()
                    },
                },
            ),
            "/v1/completions" => {
                let (_, _, sampling) = fields::parse_request::<completions::CompletionRequest>(body)?.into_parts()?;
                Ok(ChatRequest { sampling, ..ChatRequest::default() })
            }
            _ => Err(ApiError::not_found(path)),
        }
    };
    let done = || -> Result<usize, ApiError> {
        let mut chat = parse()?;
        let sampling = std::mem::take(&mut chat.sampling);
        sampling.choices()?;
        sampling.stops()?;
        let tokens = if path == "/v1/completions" {
            Vec::new()
        } else {
            let tokens = chat.take_conversation()?.render(text, true)?.tokens;
            Reading::new(text, chat.output.tools.as_ref(), &tokens).parser();
            tokens
        };
        sampling.generation(text, tokens.len(), context)?;
        Ok(tokens.len())
    };
    done().map_err(|e| (e.status.as_u16(), e.message))
}
