//! What a line typed into a conversation means.

use std::path::PathBuf;

use crate::folders;

pub const HELP: &str = "\
/reset        begin anew; the system message stays (also /clear)
/undo         take back the last message and its answer
/regenerate   answer the last message again, with another seed
/system TEXT  tell the model something before the conversation (without TEXT: nothing)
/stats        figures of the last answer: speeds, memory, context, seed
/save FILE    write the conversation to a file (JSON)
/load FILE    go on with a conversation that was saved
/help         this (also /?)
/exit         leave (also /quit, /bye, Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer; what there is of it stays. A line that begins with a space is never a command.";

/// A line's meaning.
#[derive(Debug, PartialEq)]
pub enum Command<'a> {
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
    /// What to say about a line that is no command but looks like one.
    Wrong(String),
}

/// `None` for an empty line.
pub fn parse(line: &str) -> Option<Command<'_>> {
    let text = line.trim();
    if text.is_empty() {
        return None;
    }
    // A path or a comment pasted in begins with a slash too; a space in front of it says that it is meant as text.
    if !line.starts_with('/') {
        return Some(Command::Say(text));
    }
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let rest = rest.trim();
    let file = |make: fn(PathBuf) -> Command<'static>| match rest {
        "" => Command::Wrong(format!("{name} needs a file name")),
        path => make(expand(&unquoted(path))),
    };
    let alone = |command| match rest {
        "" => command,
        _ => Command::Wrong(format!("{name} takes nothing behind it")),
    };
    Some(match name {
        "/save" => file(Command::Save),
        "/load" => file(Command::Load),
        "/system" => Command::System(Some(rest.to_owned()).filter(|s| !s.is_empty())),
        "/reset" | "/clear" => alone(Command::Reset),
        "/undo" => alone(Command::Undo),
        "/regenerate" => alone(Command::Regenerate),
        "/stats" => alone(Command::Stats),
        "/help" | "/?" => alone(Command::Help),
        "/exit" | "/quit" | "/bye" => alone(Command::Exit),
        _ => Command::Wrong(format!("unknown command {name} (/help lists them; a space in front makes it a message)")),
    })
}

/// A file name as it was meant: in quotes, or with a backslash in front of its spaces, as shells and file managers write it. Any other quote or backslash is
/// part of the name.
fn unquoted(path: &str) -> String {
    let inside = |quote: char| path.strip_prefix(quote)?.strip_suffix(quote).filter(|p| !p.is_empty());
    match ['"', '\''].into_iter().find_map(inside) {
        Some(inside) => inside.to_owned(),
        None => path.replace("\\ ", " "),
    }
}

/// `~/x` in the user's home, as a shell has it.
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
        assert_eq!(parse("hello /reset"), Some(Command::Say("hello /reset")));
        assert_eq!(parse(" /etc/hosts is a file"), Some(Command::Say("/etc/hosts is a file")));
        assert_eq!(parse("/undo  "), Some(Command::Undo));
        assert_eq!(parse("/save my chat.json"), Some(Command::Save("my chat.json".into())));
        assert_eq!(parse("/system be kind"), Some(Command::System(Some("be kind".into()))));
        assert_eq!(parse("/system"), Some(Command::System(None)));
        for (typed, meant) in [
            ("/bye", Command::Exit),
            ("/?", Command::Help),
            ("/clear", Command::Reset),
            ("/regenerate", Command::Regenerate),
        ] {
            assert_eq!(parse(typed), Some(meant), "{typed}");
        }
        for wrong in ["/save", "/reset all", "/rest"] {
            assert!(matches!(parse(wrong), Some(Command::Wrong(_))), "{wrong}");
        }
    }

    #[test]
    fn file_names_may_be_quoted() {
        for typed in ["my chat.json", "\"my chat.json\"", "'my chat.json'", "my\\ chat.json", " 'my chat.json' "] {
            assert_eq!(parse(&format!("/load {typed}")), Some(Command::Load("my chat.json".into())), "{typed}");
        }
        for name in ["bob's chat.json", "\"", "\"a\" and b"] {
            assert_eq!(parse(&format!("/save {name}")), Some(Command::Save(name.into())));
        }
    }
}
