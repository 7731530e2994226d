//! Where a conversation's lines come from: an editor with history on a terminal, plain lines otherwise.

use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustyline::error::ReadlineError;
use rustyline::{
    Cmd, ConditionalEventHandler, DefaultEditor, Event, EventContext, EventHandler, KeyEvent, Movement, RepeatCount,
};

use crate::{folders, interrupt, terminal};

pub enum Input {
    Terminal { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Lines,
}

impl Input {
    /// The terminal, where both ends are one.
    pub fn open() -> Input {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Input::Lines;
        }
        let editor = match DefaultEditor::new() {
            Ok(editor) => editor,
            Err(e) => {
                terminal::note(&format!("no line editing: {e}"));
                return Input::Lines;
            }
        };
        let mut editor = Box::new(editor);
        editor.bind_sequence(KeyEvent::ctrl('C'), EventHandler::Conditional(Box::new(ClearOrLeave)));
        let history = folders::chat_history();
        if let Some(path) = &history {
            // The first time there is none.
            let _ = editor.load_history(path);
        }
        Input::Terminal { editor, history }
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal { .. })
    }

    /// The next line; `None` where the user leaves.
    pub fn next(&mut self) -> Result<Option<String>> {
        match self {
            Input::Terminal { editor, history } => {
                // The editor reads Ctrl-C as a key. Leaving by signal would leave the terminal in its raw mode.
                let _hold = interrupt::hold();
                let line = match editor.readline("> ") {
                    Ok(line) => line,
                    Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(None),
                    Err(e) => return Err(e).context("reading from the terminal"),
                };
                if editor.add_history_entry(&line).unwrap_or(false)
                    && let Some(path) = history
                {
                    let _ = editor.append_history(path);
                }
                Ok(Some(line))
            }
            Input::Lines => {
                let mut line = Vec::new();
                let read = io::stdin().lock().read_until(b'\n', &mut line).context("standard input")?;
                Ok((read > 0).then(|| String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned()))
            }
        }
    }
}

/// Ctrl-C while typing takes the line away; on an empty line it leaves.
struct ClearOrLeave;

impl ConditionalEventHandler for ClearOrLeave {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        Some(if context.line().is_empty() { Cmd::Interrupt } else { Cmd::Kill(Movement::WholeBuffer) })
    }
}
