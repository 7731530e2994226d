//! Where a conversation's lines come from: an editor with history on a terminal, plain lines otherwise.
//!
//! What is typed or pasted while an answer is given is kept for the lines that follow. On a terminal that means that its own line editing is off as long
//! as the conversation lasts: it holds 4 KiB of a line, and when the editor takes over in the middle of one, it drops what does not fit.

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
/// Terminals that the editor does not know how to draw on.
const PLAIN: [&str; 3] = ["dumb", "cons25", "emacs"];
const LEAVING: &str = "[Ctrl-C again or Ctrl-D leaves]";

pub enum Input {
    Terminal(Box<Terminal>),
    /// Read as they come, behind this prompt.
    Lines(&'static str),
}

impl Input {
    /// The terminal, where both ends are one.
    pub fn open() -> Input {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Input::Lines("");
        }
        // The editor leaves these to edit their lines themselves.
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

    /// The mode that the terminal had before; `None` where there is no terminal.
    pub fn mode_before(&self) -> Option<Mode> {
        match self {
            Input::Terminal(terminal) => Some(terminal.mode.before.clone()),
            Input::Lines(_) => None,
        }
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next line; `None` where the user leaves.
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

/// The editor, and the terminal as it keeps it. From its beginning to its end Ctrl-C does not leave: at the prompt it is a key, elsewhere it is
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
            // The first time there is none.
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
                        "a byte that is no UTF-8 was left out, with what came in the same moment (is the terminal set to UTF-8?)",
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

/// The line as it stands, before and behind the cursor: the editor drops it when it gives up on a byte.
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

    /// Called at every change of the line; it never hints.
    fn hint(&self, line: &str, at: usize, _: &rustyline::Context<'_>) -> Option<String> {
        let (before, behind) = line.split_at_checked(at).unwrap_or((line, ""));
        *self.0.borrow_mut() = (before.to_owned(), behind.to_owned());
        None
    }
}

#[derive(Default)]
struct CtrlC {
    /// It came on an empty line.
    on_empty: AtomicBool,
    /// The last thing typed was Ctrl-C on an empty line.
    asked: AtomicBool,
}

/// Ctrl-C while typing takes the line away; on an empty line it leaves, the second time.
struct ClearOrLeave(Arc<CtrlC>);

impl ConditionalEventHandler for ClearOrLeave {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        if context.line().is_empty() {
            // As an entered line, since the editor forgets what it has read beyond one that is broken off.
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
    pub fn set(&self) -> io::Result<()> {
        Ok(tcsetattr(io::stdin(), OptionalActions::Drain, &self.0)?)
    }
}

/// What ends the program without asking it first.
const ENDS: [i32; 3] = [SIGTERM, SIGHUP, SIGQUIT];

/// From here on these signals end the program as they always do, and leave the terminal as it was before.
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
            // Where there is no terminal any more, there is nothing to leave as it was.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before.0);
            let _ = emulate_default_handler(which.load(Ordering::SeqCst) as i32);
        }
    };
    thread::Builder::new().name("terminal".into()).spawn(work)?;
    Ok(())
}

/// Between two lines the terminal neither edits nor shows what is typed.
struct Quiet {
    /// How it was, and is again at the end.
    before: Mode,
    /// Ctrl-C is a key, which waits for the editor: from the end of an answer on, so that none falls between that and the editor's own mode.
    keys: Mode,
    /// Ctrl-C is a signal: while an answer is given.
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
