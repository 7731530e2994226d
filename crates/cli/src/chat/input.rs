//! Reads the lines of a chat: with an editor and history on a terminal, as plain lines otherwise.
//!
//! What is typed or pasted during an answer is kept for the lines after it. So on a terminal, its own line editing stays off during the whole chat: it holds only 4 KiB
//! of a line, and when the editor takes over in the middle of one, it drops the rest.

use std::cell::RefCell;
use std::env;
use std::io::{self, BufRead, ErrorKind, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result};
use rustix::termios::{InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{
    Cmd, ConditionalEventHandler, Editor, Event, EventContext, EventHandler, Helper, KeyEvent, Movement, RepeatCount,
};

use signal_hook::consts::{SIGHUP, SIGQUIT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::{emulate_default_handler, pipe};

use crate::interrupt::{self, Hold};
use crate::{folders, terminal};

const PROMPT: &str = "> ";
/// Terminals that the editor cannot draw on.
const PLAIN: [&str; 3] = ["dumb", "cons25", "emacs"];
const LEAVING: &str = "[Ctrl-C again or Ctrl-D leaves]";

/// A source of lines.
pub enum Input {
    Terminal(Box<Terminal>),
    /// Lines are read as they come, after this prompt.
    Lines(&'static str),
}

impl Input {
    /// The terminal, if input and output are the same one.
    pub fn open() -> Input {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Input::Lines("");
        }
        // The editor leaves editing to these themselves.
        if env::var("TERM").is_ok_and(|term| PLAIN.iter().any(|plain| plain.eq_ignore_ascii_case(&term))) {
            return Input::Lines(PROMPT);
        }
        match Terminal::open() {
            Ok(terminal) => Input::Terminal(Box::new(terminal)),
            Err(e) => {
                terminal::note(&format!("no line editing: {e}"));
                Input::Lines(PROMPT)
            }
        }
    }

    /// The terminal's mode from before; `None` without a terminal.
    pub fn mode_before(&self) -> Option<Mode> {
        match self {
            Input::Terminal(terminal) => Some(terminal.mode.before.clone()),
            Input::Lines(_) => None,
        }
    }

    /// Whether a user types the lines.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next line; `None` if the user leaves.
    pub fn next(&mut self) -> Result<Option<String>> {
        match self {
            Input::Terminal(terminal) => {
                let line = terminal.line(PROMPT)?;
                if let Some(line) = &line {
                    terminal.remember(line);
                }
                Ok(line)
            }
            Input::Lines(prompt) => {
                print!("{prompt}");
                io::stdout().flush().context("standard output")?;
                plain_line()
            }
        }
    }

    /// The line that answers a question.
    pub fn ask(&mut self, question: &str) -> Result<Option<String>> {
        match self {
            Input::Terminal(terminal) => terminal.line(&terminal::shown(question)),
            Input::Lines(_) => {
                terminal::say(question);
                plain_line()
            }
        }
    }
}

fn plain_line() -> Result<Option<String>> {
    let mut line = Vec::new();
    let read = io::stdin().lock().read_until(b'\n', &mut line).context("standard input")?;
    Ok((read > 0).then(|| String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned()))
}

/// The editor, with its terminal mode. As long as it exists, Ctrl-C does not end the program: at the prompt it is a key, and otherwise it sets
/// [`interrupt::pressed`].
pub struct Terminal {
    editor: Editor<Typed, FileHistory>,
    history: Option<PathBuf>,
    ctrl_c: Arc<CtrlC>,
    mode: Quiet,
    _hold: Hold,
}

impl Terminal {
    fn open() -> rustyline::Result<Terminal> {
        let mut editor = Editor::new()?;
        editor.set_helper(Some(Typed::default()));
        let ctrl_c = Arc::<CtrlC>::default();
        let clear_or_leave = ClearOrLeave(Arc::clone(&ctrl_c));
        editor.bind_sequence(KeyEvent::ctrl('C'), EventHandler::Conditional(Box::new(clear_or_leave)));
        let history = folders::chat_history();
        if let Some(path) = &history {
            // There is no history the first time.
            let _ = editor.load_history(path);
        }
        let hold = interrupt::hold();
        let mode = Quiet::begin()?;
        restore_at_the_end(mode.before.clone())?;
        Ok(Terminal { editor, history, ctrl_c, mode, _hold: hold })
    }

    fn line(&mut self, prompt: &str) -> Result<Option<String>> {
        self.mode.keys.set().context("standard input")?;
        let line = self.edited_line(prompt);
        self.mode.signals.set().context("standard input")?;
        line
    }

    fn edited_line(&mut self, prompt: &str) -> Result<Option<String>> {
        if interrupt::take() {
            // It came too late to stop the answer.
            terminal::say("[Ctrl-C twice or Ctrl-D leaves]");
        }
        let mut begun = (String::new(), String::new());
        loop {
            match self.editor.readline_with_initial(prompt, (&begun.0, &begun.1)) {
                Ok(_) if self.ctrl_c.on_empty.swap(false, Ordering::Relaxed) => {
                    if self.ctrl_c.asked.swap(true, Ordering::Relaxed) {
                        return Ok(None);
                    }
                    terminal::say(LEAVING);
                    begun = Default::default();
                }
                Ok(line) => {
                    self.ctrl_c.asked.store(false, Ordering::Relaxed);
                    return Ok(Some(line));
                }
                Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Io(e)) if e.kind() == ErrorKind::InvalidData => {
                    terminal::note(
                        "a byte that is not UTF-8 was dropped, with what came at the same moment (is the terminal set to UTF-8?)",
                    );
                    begun = self.editor.helper().map(|typed| typed.0.take()).unwrap_or_default();
                }
                Err(e) => return Err(e).context("reading from the terminal"),
            }
        }
    }

    fn remember(&mut self, line: &str) {
        if self.editor.add_history_entry(line).unwrap_or(false)
            && let Some(path) = &self.history
        {
            let _ = self.editor.append_history(path);
        }
    }
}

/// The current line before and after the cursor. The editor drops it when it fails on an invalid byte.
#[derive(Default)]
struct Typed(RefCell<(String, String)>);

impl Helper for Typed {}
impl Validator for Typed {}
impl Highlighter for Typed {}

impl Completer for Typed {
    type Candidate = String;
}

impl Hinter for Typed {
    type Hint = String;

    /// Called at every change of the line; never gives a hint.
    fn hint(&self, line: &str, at: usize, _: &rustyline::Context<'_>) -> Option<String> {
        let (before, behind) = line.split_at_checked(at).unwrap_or((line, ""));
        *self.0.borrow_mut() = (before.to_owned(), behind.to_owned());
        None
    }
}

#[derive(Default)]
struct CtrlC {
    /// Ctrl-C came on an empty line.
    on_empty: AtomicBool,
    /// The last key was Ctrl-C on an empty line.
    asked: AtomicBool,
}

/// Ctrl-C clears the line; on an empty line, a second one leaves.
struct ClearOrLeave(Arc<CtrlC>);

impl ConditionalEventHandler for ClearOrLeave {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        if context.line().is_empty() {
            // Ends the line as if entered, since the editor forgets what it has read ahead when a line is aborted.
            self.0.on_empty.store(true, Ordering::Relaxed);
            return Some(Cmd::AcceptLine);
        }
        self.0.asked.store(false, Ordering::Relaxed);
        Some(Cmd::Kill(Movement::WholeBuffer))
    }
}

/// A terminal's mode.
#[derive(Clone)]
pub struct Mode(Termios);

impl Mode {
    /// Sets the terminal to this mode.
    pub fn set(&self) -> io::Result<()> {
        Ok(tcsetattr(io::stdin(), OptionalActions::Drain, &self.0)?)
    }
}

/// Signals that end the program.
const ENDS: [i32; 3] = [SIGTERM, SIGHUP, SIGQUIT];

/// Makes these signals restore the terminal before they end the program as usual.
fn restore_at_the_end(before: Mode) -> io::Result<()> {
    let (mut told, tell) = UnixStream::pair()?;
    let which = Arc::<AtomicUsize>::default();
    for signal in ENDS {
        flag::register_usize(signal, Arc::clone(&which), signal as usize)?;
        pipe::register(signal, tell.try_clone()?)?;
    }
    let work = move || {
        let mut one = [0];
        if told.read_exact(&mut one).is_ok() {
            // If there is no terminal any more, there is nothing to restore.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before.0);
            let _ = emulate_default_handler(which.load(Ordering::SeqCst) as i32);
        }
    };
    thread::Builder::new().name("terminal".into()).spawn(work)?;
    Ok(())
}

/// Between lines, the terminal neither edits nor echoes what is typed.
struct Quiet {
    /// The original mode, restored at the end.
    before: Mode,
    /// Ctrl-C is a key for the editor. Used from the end of an answer on, so that no Ctrl-C is lost before the editor sets its own mode.
    keys: Mode,
    /// Ctrl-C is a signal. Used during an answer.
    signals: Mode,
}

impl Quiet {
    fn begin() -> io::Result<Quiet> {
        let before = tcgetattr(io::stdin())?;
        let mut quiet = before.clone();
        quiet.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        quiet.input_modes -= InputModes::ICRNL;
        quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
        quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
        let signals = Mode(quiet.clone());
        quiet.local_modes -= LocalModes::ISIG;
        let keys = Mode(quiet);
        keys.set()?;
        Ok(Quiet { before: Mode(before), keys, signals })
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let _ = self.before.set();
    }
}
