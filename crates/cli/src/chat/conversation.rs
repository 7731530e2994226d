//! The messages of a conversation, and how a new prompt continues what the engine has computed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use sluice_engine::text::{Message, Prompt, parse_messages};
use sluice_store::{AtomicFile, read_small};

/// A conversation under way.
pub struct Conversation {
    /// All messages, the system message first.
    pub messages: Vec<Message>,
    /// What the engine's sequence holds, exactly: the last prompt and its answer. `None` if that is not known.
    pub fed: Option<(Prompt, String)>,
}

/// How to get from the engine's sequence to a new prompt.
#[derive(Debug, PartialEq)]
pub struct Continuation {
    /// How many of its tokens stay.
    pub keep: usize,
    /// The tokens to append; at least one.
    pub new: Vec<u32>,
}

impl Conversation {
    /// An empty conversation with this system message.
    pub fn new(system: Option<String>) -> Conversation {
        let messages = system.into_iter().map(|text| Message::new("system", text)).collect();
        Conversation { messages, fed: None }
    }

    /// Replaces or removes the system message.
    pub fn set_system(&mut self, text: Option<String>) {
        self.messages.retain(|m| m.role != "system");
        if let Some(text) = text {
            self.messages.insert(0, Message::new("system", text));
        }
    }

    /// Removes the user's last message and everything after it, and returns its text.
    pub fn undo(&mut self) -> Option<String> {
        let at = self.messages.iter().rposition(|m| m.role == "user")?;
        self.messages.drain(at..).next().map(|m| m.content)
    }

    /// How to get from the engine's `known` tokens to the prompt `rendered`. If the prompt continues the text fed so far, only the rest is encoded, so an answer keeps
    /// its generated tokens, which encoding its text might not give. Otherwise the longest common prefix stays. `encode(prompt, at_start)` encodes a piece.
    /// longest common beginning stays. `encode(prompt, at_start)` gives the tokens of a piece.
    pub fn continuation(
        &self,
        rendered: &Prompt,
        known: &[u32],
        encode: impl Fn(&Prompt, bool) -> Result<Vec<u32>>,
    ) -> Result<Continuation> {
        if let Some((prompt, answer)) = &self.fed
            && let Some(rest) = rendered.after(prompt, answer)
        {
            let new = encode(&rest, false)?;
            if !new.is_empty() {
                return Ok(Continuation { keep: known.len(), new });
            }
        }
        let mut new = encode(rendered, true)?;
        // The last token is always computed, since the next one comes from its logits.
        let common = new.iter().zip(known).take_while(|(a, b)| a == b).count().min(new.len().saturating_sub(1));
        new.drain(..common);
        if new.is_empty() {
            bail!("the prompt has no tokens");
        }
        Ok(Continuation { keep: common, new })
    }
}

/// Writes messages as a JSON list of `{"role": .., "content": ..}`. The file appears complete or not at all.
pub fn save(messages: &[Message], path: &Path) -> Result<()> {
    let list = Value::Array(messages.iter().map(Message::to_json).collect());
    let mut file = AtomicFile::create(path)?;
    file.write_all(format!("{list:#}\n").as_bytes())?;
    Ok(file.commit()?)
}

/// Whether saving to `path` would replace a file that is not a conversation and not empty.
pub fn is_foreign(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0) && load(path).is_err()
}

/// Most bytes of a saved conversation: some ten million tokens.
const MAX_CHAT: u64 = 64 << 20;

/// Reads what [`save`] has written, or any list of such messages.
///
/// # Errors
/// Not such a list; not a regular file, since a pipe may never end; more than 64 MiB.
pub fn load(path: &Path) -> Result<Vec<Message>> {
    parse_messages(&read_small(path, MAX_CHAT)?).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// One token per character.
    fn encode(prompt: &Prompt, _: bool) -> Result<Vec<u32>> {
        Ok(tokens(prompt.text()))
    }

    fn tokens(text: &str) -> Vec<u32> {
        text.chars().map(u32::from).collect()
    }

    fn text(text: &str) -> Prompt {
        Prompt::from(text.to_owned())
    }

    fn conversation(prompt: &str, answer: &str) -> Conversation {
        Conversation { messages: vec![], fed: Some((text(prompt), answer.to_owned())) }
    }

    #[test]
    fn a_prompt_that_goes_on_keeps_all_tokens_as_they_were_generated() {
        // Three tokens for "<u>hi<a>hello" that encoding would never give.
        let found =
            conversation("<u>hi<a>", "hello").continuation(&text("<u>hi<a>hello<u>x"), &[7, 8, 9], encode).unwrap();
        assert_eq!(found, Continuation { keep: 3, new: tokens("<u>x") });
    }

    #[test]
    fn a_prompt_that_parts_keeps_the_common_beginning() {
        let known = tokens("abcdef");
        let found = conversation("abc", "def").continuation(&text("abcxyz"), &known, encode).unwrap();
        assert_eq!(found, Continuation { keep: 3, new: tokens("xyz") });
        // The fed text is not known, so tokens decide.
        assert_eq!(Conversation::new(None).continuation(&text("abcxyz"), &known, encode).unwrap().keep, 3);
    }

    #[test]
    fn the_last_token_is_always_computed_anew() {
        let known = tokens("abcdef");
        for prompt in ["abc", "abcdef"] {
            let found = conversation("abc", "def").continuation(&text(prompt), &known, encode).unwrap();
            assert_eq!((found.keep, found.new.len()), (prompt.len() - 1, 1));
        }
        Conversation::new(None).continuation(&text(""), &known, encode).unwrap_err();
    }

    #[test]
    fn undo_takes_a_message_and_its_answer() {
        let mut c = Conversation::new(Some("S".into()));
        assert_eq!(c.undo(), None);
        c.messages.extend([("user", "a"), ("assistant", "b")].map(|(r, t)| Message::new(r, t)));
        assert_eq!((c.undo(), c.messages.len()), (Some("a".into()), 1));
        c.set_system(None);
        assert!(c.messages.is_empty());
    }

    #[test]
    fn saved_messages_are_loaded_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.json");
        let messages = vec![Message::new("system", "S"), Message::new("user", "say \"é\"\n\u{1F680}")];
        save(&messages, &path).unwrap();
        assert_eq!(load(&path).unwrap(), messages);
        for bad in ["", "{}", "[1]", r#"[{"role": "user"}]"#, r#"[{"role": "root", "content": ""}]"#] {
            fs::write(&path, bad).unwrap();
            assert!(format!("{:#}", load(&path).unwrap_err()).contains("chat.json"), "{bad}");
        }
        fs::write(&path, "").unwrap();
        assert!(!is_foreign(&path) && !is_foreign(&dir.path().join("none")));
        fs::write(&path, "notes").unwrap();
        assert!(is_foreign(&path));
        // Reading a pipe would wait for a writer forever, and a device may never end.
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for other in [&pipe, dir.path(), Path::new("/dev/zero")] {
            assert!(format!("{:#}", load(other).unwrap_err()).contains("not a regular file"));
        }
        let missing = dir.path().join("no/chat.json");
        assert!(format!("{:#}", save(&messages, &missing).unwrap_err()).contains("chat.json"));
    }
}
