//! From a prompt's text to its tokens.

use std::sync::Arc;

use sluice_engine::text::Prompt;

use crate::http::error::ApiError;
use crate::models::loaded::LoadedModel;

/// Encodes a text on a blocking thread: a long one takes a while.
///
/// # Errors
/// A text that the tokenizer refuses.
pub async fn encode(model: &Arc<LoadedModel>, text: String) -> Result<Vec<u32>, ApiError> {
    let own = Arc::clone(model);
    let encoded =
        tokio::task::spawn_blocking(move || own.text.tokenizer.encode_prompt(&Prompt::from(text), true)).await;
    let encoded = encoded.map_err(|e| ApiError::internal(e.to_string()))?;
    encoded.map_err(|e| ApiError::invalid("prompt", format!("{e:#}")))
}
