//! Messages as files have them: a JSON list of `{"role": .., "content": ..}`.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    pub content: String,
}

impl Message {
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        Message { role: role.to_owned(), content: content.into() }
    }

    /// As templates and files have it.
    pub fn to_json(&self) -> Value {
        json!({"role": self.role, "content": self.content})
    }
}

/// The messages in `json`; what else an entry has is left out.
///
/// # Errors
/// What is no list of messages, and a role that is none of the three.
pub fn parse_messages(json: &[u8]) -> Result<Vec<Message>> {
    let wanted = "not a list of messages with a role (system, user or assistant) and a content";
    let messages: Vec<Message> = serde_json::from_slice(json).context(wanted)?;
    ensure!(messages.iter().all(|m| ["system", "user", "assistant"].contains(&m.role.as_str())), wanted);
    Ok(messages)
}
