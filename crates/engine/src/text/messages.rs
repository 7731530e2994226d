//! Messages as files have them: a JSON list of `{"role": .., "content": ..}`.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// A message with this role and text.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        Message { role: role.to_owned(), content: content.into() }
    }

    /// The message as templates and files have it.
    pub fn to_json(&self) -> Value {
        json!({"role": self.role, "content": self.content})
    }
}

/// Reads a list of messages. Other fields of a message are ignored.
///
/// # Errors
/// JSON that is not a list of messages, or another role.
pub fn parse_messages(json: &[u8]) -> Result<Vec<Message>> {
    let wanted = "not a list of messages with a role (system, user or assistant) and a content";
    let messages: Vec<Message> = serde_json::from_slice(json).context(wanted)?;
    ensure!(messages.iter().all(|m| ["system", "user", "assistant"].contains(&m.role.as_str())), wanted);
    Ok(messages)
}
