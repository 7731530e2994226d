//! The messages of a conversation, and how a new prompt relates to what the engine has computed already.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use sluice_engine::text::{Prompt, parse_messages};
use sluice_store::{AtomicFile, read_small};

use crate::prompt::Message;

/// A conversation under way.
pub struct Conversation {
    pub messages: Vec<Message>,
    /// What the engine's sequence holds, exactly: the last prompt, and the answer to it. `None` where that is not known.
    pub fed: Option<(Prompt, String)>,
}

/// How the engine's sequence goes on to a new prompt.
#[derive(Debug, PartialEq)]
pub struct Continuation {
    /// So many of its tokens stay.
    pub keep: usize,
    /// These follow; at least one.
    pub new: Vec<u32>,
}

impl Conversation {
    pub fn new(system: Option<String>) -> Conversation {
        let messages = system.into_iter().map(|text| Message::new("system", text)).collect();
        Conversation { messages, fed: None }
    }

    /// Replaces the system message, or takes it away.
    pub fn set_system(&mut self, text: Option<String>) {
        self.messages.retain(|m| m.role != "system");
        if let Some(text) = text {
            self.messages.insert(0, Message::new("system", text));
        }
    }

    /// Takes the last message of the user and all after it back, and returns its text.
    pub fn undo(&mut self) -> Option<String> {
        let at = self.messages.iter().rposition(|m| m.role == "user")?;
        self.messages.drain(at..).next().map(|m| m.content)
    }

    /// How the engine gets from its `known` tokens to those of the prompt `rendered`. Where the prompt goes on from the text fed so far,
    /// only the rest is encoded: the tokens of an answer stay the ones that were generated, which encoding its text again may not give. Else the
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
        // The last token has to be computed in any case: what comes next is read off it.
        let common = new.iter().zip(known).take_while(|(a, b)| a == b).count().min(new.len().saturating_sub(1));
        new.drain(..common);
        if new.is_empty() {
            bail!("the prompt has no tokens");
        }
        Ok(Continuation { keep: common, new })
    }
}

/// Writes messages as a JSON list of `{"role": .., "content": ..}`; the file appears complete or not at all.
pub fn save(messages: &[Message], path: &Path) -> Result<()> {
    let list = Value::Array(messages.iter().map(Message::to_json).collect());
    let mut file = AtomicFile::create(path)?;
    file.write_all(format!("{list:#}\n").as_bytes())?;
    Ok(file.commit()?)
}

/// Whether saving to `path` would take the place of a file that somebody else wrote: one with something in it that is no conversation.
pub fn is_foreign(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0) && load(path).is_err()
}

/// Bytes that a saved conversation may have: some ten million tokens.
const MAX_CHAT: u64 = 64 << 20;

/// Reads what [`save`] wrote, or anybody's list of such messages.
///
/// # Errors
/// What is no such list; what is no regular file, since a pipe may never come to its end; more than 64 MiB.
pub fn load(path: &Path) -> Result<Vec<Message>> {
    let messages = parse_messages(&read_small(path, MAX_CHAT)?).with_context(|| path.display().to_string())?;
    Ok(messages.into_iter().map(|m| Message::new(&m.role, m.content)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A token for each character.
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
        // Nothing is known of the text fed: tokens decide.
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
        // Reading a pipe would wait for a writer, for ever; a device may never end.
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for other in [&pipe, dir.path(), Path::new("/dev/zero")] {
            assert!(format!("{:#}", load(other).unwrap_err()).contains("not a regular file"));
        }
        let missing = dir.path().join("no/chat.json");
        assert!(format!("{:#}", save(&messages, &missing).unwrap_err()).contains("chat.json"));
    }
}
