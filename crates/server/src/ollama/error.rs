//! Errors in Ollama's format.

use serde_json::{Value, json};

use crate::http::error::ApiError;

/// Whether a path belongs to Ollama's API.
pub fn applies_to(path: &str) -> bool {
    path.starts_with("/api/")
}

/// The body of an error.
pub fn error_json(error: &ApiError) -> Value {
    json!({"error": match error.overflow {
        Some((tokens, most)) => format!("the input length exceeds the context length: {tokens} tokens > {most} maximum"),
        None => error.message.clone(),
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_said_in_ollamas_words() {
        let said = error_json(&ApiError::too_long(300, 64));
        assert_eq!(said, json!({"error": "the input length exceeds the context length: 300 tokens > 63 maximum"}));
        assert_eq!(error_json(&ApiError::not_found("/api/x")), json!({"error": "/api/x: no such path"}));
        assert!(applies_to("/api/chat") && !applies_to("/v1/messages") && !applies_to("/apis"));
    }
}
