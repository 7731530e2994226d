//! Parses lines typed in a chat.

use std::path::PathBuf;

use crate::folders;

/// What `/help` shows.
pub const HELP: &str = "\
/reset        start again; the system message stays (also /clear)
/undo         take back the last message and its answer
/regenerate   answer the last message again, with another seed
/system TEXT  set the system message (without TEXT: remove it)
/stats        statistics of the last answer: speeds, memory, context, seed
/save FILE    write the conversation to a file (JSON)
/load FILE    continue a saved conversation
/help         show this (also /?)
/exit         leave (also /quit, /bye, Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer and keeps what there is of it. A line that begins with a space is never a command.";

/// A line's meaning.
#[derive(Debug, PartialEq)]
pub enum ChatCommand<'a> {
    /// A message to the model.
    Say(&'a str),
    Reset,
    Undo,
    Regenerate,
    Stats,
    Save(PathBuf),
    Load(PathBuf),
    System(Option<String>),
    Help,
    Exit,
    /// A line that looks like a command but is none; the text is what to reply.
    Wrong(String),
}

/// The meaning of a line; `None` if it is empty.
pub fn parse(line: &str) -> Option<ChatCommand<'_>> {
    let text = line.trim();
    if text.is_empty() {
        return None;
    }
    // Pasted paths and comments also begin with a slash; a space in front marks them as text.
    if !line.starts_with('/') {
        return Some(ChatCommand::Say(text));
    }
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let rest = rest.trim();
    let file = |make: fn(PathBuf) -> ChatCommand<'static>| match rest {
        "" => ChatCommand::Wrong(format!("{name} needs a file name")),
        path => make(expand(&unquoted(path))),
    };
    let alone = |command| match rest {
        "" => command,
        _ => ChatCommand::Wrong(format!("{name} takes no argument")),
    };
    Some(match name {
        "/save" => file(ChatCommand::Save),
        "/load" => file(ChatCommand::Load),
        "/system" => ChatCommand::System(Some(rest.to_owned()).filter(|s| !s.is_empty())),
        "/reset" | "/clear" => alone(ChatCommand::Reset),
        "/undo" => alone(ChatCommand::Undo),
        "/regenerate" => alone(ChatCommand::Regenerate),
        "/stats" => alone(ChatCommand::Stats),
        "/help" | "/?" => alone(ChatCommand::Help),
        "/exit" | "/quit" | "/bye" => alone(ChatCommand::Exit),
        _ => ChatCommand::Wrong(format!(
            "unknown command {name} (/help lists them; a space in front makes it a message)"
        )),
    })
}

/// Removes quotes around a file name, or backslashes before its spaces, as shells and file managers write them. Other quotes and backslashes are part of the name.
fn unquoted(path: &str) -> String {
    let inside = |quote: char| path.strip_prefix(quote)?.strip_suffix(quote).filter(|p| !p.is_empty());
    match ['"', '\''].into_iter().find_map(inside) {
        Some(inside) => inside.to_owned(),
        None => path.replace("\\ ", " "),
    }
}

/// Expands `~/x` to the user's home, as shells do.
fn expand(path: &str) -> PathBuf {
    match path.strip_prefix("~/").zip(folders::home()) {
        Some((rest, home)) => home.join(rest),
        None => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_commands_or_mistakes() {
        assert_eq!(parse("  \n"), None);
        assert_eq!(parse("hello /reset"), Some(ChatCommand::Say("hello /reset")));
        assert_eq!(parse(" /etc/hosts is a file"), Some(ChatCommand::Say("/etc/hosts is a file")));
        assert_eq!(parse("/undo  "), Some(ChatCommand::Undo));
        assert_eq!(parse("/save my chat.json"), Some(ChatCommand::Save("my chat.json".into())));
        assert_eq!(parse("/system be kind"), Some(ChatCommand::System(Some("be kind".into()))));
        assert_eq!(parse("/system"), Some(ChatCommand::System(None)));
        for (typed, meant) in [
            ("/bye", ChatCommand::Exit),
            ("/?", ChatCommand::Help),
            ("/clear", ChatCommand::Reset),
            ("/regenerate", ChatCommand::Regenerate),
        ] {
            assert_eq!(parse(typed), Some(meant), "{typed}");
        }
        for wrong in ["/save", "/reset all", "/rest"] {
            assert!(matches!(parse(wrong), Some(ChatCommand::Wrong(_))), "{wrong}");
        }
    }

    #[test]
    fn file_names_may_be_quoted() {
        for typed in ["my chat.json", "\"my chat.json\"", "'my chat.json'", "my\\ chat.json", " 'my chat.json' "] {
            assert_eq!(parse(&format!("/load {typed}")), Some(ChatCommand::Load("my chat.json".into())), "{typed}");
        }
        for name in ["bob's chat.json", "\"", "\"a\" and b"] {
            assert_eq!(parse(&format!("/save {name}")), Some(ChatCommand::Save(name.into())));
        }
    }
}
