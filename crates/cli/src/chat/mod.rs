//! `sluice chat [MODEL]`: a conversation. Each turn computes only what is new; everything before it stays in the engine.

mod command;
mod conversation;
mod input;

use std::fmt;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use sluice_engine::text::{Message, ModelText};
use sluice_engine::{Engine, Finish, Generation, LoadProgress, Loading, Options, SequenceId};

use crate::engine_args::EngineArgs;
use crate::generate::{self, Answer, Decoding, End, Piece};
use crate::hub::DownloadArgs;
use crate::load;
use crate::progress::Progress;
use crate::prompt::PromptArgs;
use crate::prompt_cache_args::{self, PromptCacheArgs};
use crate::sampling_args::SamplingArgs;
use crate::stats::{self, RunMeasurements};
use crate::{hub, interrupt, terminal};
use command::ChatCommand;
use conversation::Conversation;
use input::{Input, Mode};

#[derive(Args)]
pub struct ChatArgs {
    /// The model's folder (default: the demo model)
    #[arg(value_name = "MODEL")]
    folder: Option<PathBuf>,
    /// The model's folder
    #[arg(short, long, value_name = "MODEL", conflicts_with = "folder")]
    model: Option<PathBuf>,
    /// Print statistics after each answer
    #[arg(long)]
    stats: bool,
    /// Continue the conversation in this file, if it exists, and save it after each answer; with --prompt-cache it is not computed again
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    prompt_cache: PromptCacheArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    download: DownloadArgs,
}

/// Recurrent states kept, if the model has any: at the ends of the last answers and prompts, for `/undo` and `/regenerate`.
const SNAPSHOTS: usize = 4;

/// Most time that writing to the prompt cache may take after an answer.
const KEEPING: Duration = Duration::from_millis(200);

/// Runs a chat until its input ends.
pub fn run(args: ChatArgs) -> Result<()> {
    let folder = hub::started(args.folder.or(args.model).as_deref(), &args.download, &args.engine, &args.prompt_cache)?;
    let before = args.session.as_deref().map_or(Ok(None), session)?;
    let options = Options {
        snapshots: SNAPSHOTS,
        prompt_cache: args.prompt_cache.options()?,
        ..args.engine.answering_options()?
    };
    let loaded = load::model(&folder, &args.engine, options)?;
    let (mut engine, text) = (loaded.engine, loaded.text);
    let generation = args.sampling.generation(&text.defaults, &text.stop_ids)?;
    let sequence = engine.add_sequence();
    let measured = RunMeasurements {
        model: folder.display().to_string(),
        weights_time: loaded.weights_time,
        text_time: loaded.text_time,
        first_from_start: None,
        first_from_request: None,
        context: 0,
        seed: generation.sampling.seed,
    };
    let mut input = Input::open();
    let mut chat = Chat {
        has_template: args.prompt.has_template(&text),
        conversation: Conversation::new(args.prompt.system.clone()),
        prompt: &args.prompt,
        stop_strings: args.sampling.stop_strings(),
        text: &text,
        engine,
        sequence,
        generation,
        measured,
        last: None,
        with_stats: args.stats,
        session: args.session,
        mode_before: input.mode_before(),
    };
    if let Some(messages) = before {
        chat.conversation.messages = messages;
        if args.prompt.system.is_some() {
            chat.conversation.set_system(args.prompt.system.clone());
        }
    }
    if input.is_terminal() {
        let (name, context) = (folder.display(), chat.engine.max_context());
        terminal::say(&format!("{name}, {context} tokens of context. /help for commands, Ctrl-D to leave."));
    }
    let mut next = input.next()?;
    while let Some(line) = next {
        next = match command::parse(&line) {
            None => input.next()?,
            Some(ChatCommand::Exit) => break,
            Some(ChatCommand::Save(path)) => match chat.save(&path, &mut input)? {
                None => input.next()?,
                line => line,
            },
            Some(command) => {
                chat.obey(command)?;
                chat.write_session();
                input.next()?
            }
        };
    }
    // The step that failed has reported it.
    let _ = chat.engine.save();
    prompt_cache_args::say_notes(&mut chat.engine);
    hub::leave();
    Ok(())
}

/// The messages of a saved session; `None` if the file does not exist yet.
///
/// # Errors
/// The file is something else.
fn session(path: &Path) -> Result<Option<Vec<Message>>> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() || found.len() > 0 => conversation::load(path).map(Some).context("--session"),
        _ => Ok(None),
    }
}

struct Chat<'a> {
    conversation: Conversation,
    has_template: bool,
    prompt: &'a PromptArgs,
    stop_strings: &'a [String],
    text: &'a ModelText,
    engine: Engine,
    sequence: SequenceId,
    generation: Generation,
    measured: RunMeasurements,
    last: Option<Answer>,
    /// Print statistics after each answer.
    with_stats: bool,
    /// The file of the session.
    session: Option<PathBuf>,
    /// The mode to restore the terminal to, if there is one.
    mode_before: Option<Mode>,
}

impl Chat<'_> {
    /// Answers one message. Returns whether there is an answer. Errors are reported and the message is taken back; only a closed output is returned as an error.
    fn turn(&mut self, message: &str) -> Result<bool> {
        self.conversation.messages.push(Message::new("user", message));
        match self.answer() {
            Ok(answer) => {
                let begun = !answer.tokens.is_empty();
                if begun {
                    self.conversation.messages.push(Message::new("assistant", answer.content.clone()));
                } else {
                    self.conversation.messages.pop();
                }
                self.say_end(&answer.end, begun);
                if self.last.is_none() {
                    load::say_notes(&self.engine);
                }
                self.last = Some(answer);
                if self.with_stats {
                    self.print_stats();
                }
                self.keep();
                Ok(begun)
            }
            Err(e) if e.is::<OutputGone>() => Err(e),
            Err(e) => {
                self.conversation.messages.pop();
                terminal::note(&format!("{e:#}"));
                Ok(false)
            }
        }
    }

    /// Saves the conversation to the session's file.
    fn write_session(&self) {
        if let Some(path) = &self.session
            && let Err(e) = conversation::save(&self.conversation.messages, path)
        {
            terminal::note(&format!("--session: {e:#}"));
        }
    }

    /// Writes what is new to the prompt cache for a short time; the rest is written at the end.
    fn keep(&mut self) {
        let begun = Instant::now();
        while begun.elapsed() < KEEPING && self.engine.flush_idle().unwrap_or(false) {}
        prompt_cache_args::say_notes(&mut self.engine);
    }

    fn say_end(&self, end: &End, begun: bool) {
        match end {
            End::Engine(Finish::Cancelled) if begun => terminal::say("[stopped]"),
            End::Engine(Finish::Cancelled) => {
                terminal::say("[stopped before the answer began; the message is taken back]")
            }
            End::Engine(Finish::ContextFull) => {
                terminal::say(&format!("[the context of {} tokens is full: {WAYS_OUT}]", self.engine.max_context()));
            }
            End::Engine(Finish::Length) => terminal::say("[as many tokens as --max-tokens allows]"),
            // A failure is an error, and has been reported.
            End::Engine(Finish::Stop | Finish::Failed) | End::StopString(_) => {}
        }
    }

    fn answer(&mut self) -> Result<Answer> {
        // 1. Find what is new to the engine
        let request = Instant::now();
        let tokenizer = &self.text.tokenizer;
        let rendering = self.prompt.rendering(self.text, &self.conversation.messages);
        let rendered = rendering.prompt()?;
        if let Some(message) = self.conversation.messages.last() {
            self.prompt.say_raw_tokens(tokenizer, &message.content);
        }
        let known = self.engine.tokens(self.sequence)?;
        // A rendered template has its special tokens already.
        let special = !self.has_template;
        let next = self
            .conversation
            .continuation(&rendered, known, |prompt, at_start| tokenizer.encode_prompt(prompt, special && at_start))?;
        let (total, max) = (next.keep + next.new.len(), self.engine.max_context());
        if total >= max {
            bail!("{total} tokens leave no room for an answer in a context of {max}: {WAYS_OUT}");
        }

        // The ends of answers are kept anyway.
        let all: Vec<u32> = known[..next.keep].iter().chain(&next.new).copied().collect();
        let marks = if self.engine.model().state_len() > 0 { rendering.snapshot_points(&all) } else { Vec::new() };

        // 2. Drop what no longer applies, and generate
        if next.keep < known.len() {
            self.engine.truncate(self.sequence, next.keep)?;
        }
        self.conversation.fed = None;
        // A step that waits for weights cannot be stopped, so while they load, Ctrl-C ends the program.
        let load = self.engine.loading().map(Loading::progress);
        let is_loaded = load.as_ref().is_none_or(LoadProgress::is_over);
        let mut hold = is_loaded.then(interrupt::hold);
        let leaving = (self.engine.loading().map(Loading::progress).filter(|_| !is_loaded))
            .zip(self.mode_before.clone())
            .map(|(load, mode)| LeaveWhileLoading::begin(load, mode));
        let mut progress = Progress::after_loading(load, "reading the prompt", "tokens", next.new.len());
        let mut out = io::stdout().lock();
        let mut each = |piece: Piece| -> Result<ControlFlow<()>> {
            hold.get_or_insert_with(interrupt::hold);
            match piece {
                Piece::Reading { done, total } if done < total => progress.set(done, total),
                Piece::Reading { .. } => progress.finish(),
                Piece::Text(shown) => put(&mut out, shown)?,
            }
            Ok(if interrupt::pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        let (generation, stops) = (Generation { snapshot_points: marks, ..self.generation.clone() }, self.stop_strings);
        let (engine, decoding) = (&mut self.engine, Decoding::new(self.text, self.has_template));
        let answer = generate::answer(engine, self.sequence, &next.new, generation, stops, &decoding, &mut each)?;
        progress.finish();
        drop(leaving);
        if answer.end == End::Engine(Finish::Cancelled) {
            interrupt::take();
        }
        drop(hold);
        if !answer.tokens.is_empty() || io::stdout().is_terminal() {
            put(&mut out, "\n")?;
        }

        // 3. Remember what the engine holds now, as text
        self.conversation.fed = Some((rendered, self.text.tokenizer.decode(&answer.tokens, false)?));
        let m = &mut self.measured;
        m.first_from_request = answer.first_token.map(|t| t - request);
        m.context = self.engine.tokens(self.sequence)?.len();
        Ok(answer)
    }

    fn obey(&mut self, command: ChatCommand) -> Result<()> {
        let messages = &mut self.conversation.messages;
        match command {
            ChatCommand::Say(message) => {
                self.turn(message)?;
            }
            // The caller handles these.
            ChatCommand::Exit | ChatCommand::Save(_) => {}
            ChatCommand::Help => terminal::say(command::HELP),
            ChatCommand::Reset => {
                messages.retain(|m| m.role == "system");
                self.forget();
                terminal::say("[a new conversation]");
            }
            // The engine notices in the next turn, by comparing prompts.
            ChatCommand::Undo => match self.conversation.undo() {
                Some(message) => terminal::say(&format!("[taken back: {}]", first_line(&message))),
                None => terminal::note("there is nothing to take back"),
            },
            ChatCommand::Regenerate => self.regenerate()?,
            ChatCommand::Stats => self.print_stats(),
            ChatCommand::System(text) => {
                self.conversation.set_system(text);
                terminal::say("[the system message holds from the next turn on]");
            }
            ChatCommand::Load(path) => match conversation::load(&path) {
                Ok(loaded) => {
                    terminal::say(&format!("[{} messages loaded from {}]", loaded.len(), path.display()));
                    *messages = loaded;
                    self.forget();
                }
                Err(e) => terminal::note(&format!("{e:#}")),
            },
            ChatCommand::Wrong(why) => terminal::note(&why),
        }
        Ok(())
    }

    /// Saves the conversation to a file. Asks before it replaces a file that is not a conversation; returns the line if it was not an answer to that.
    fn save(&mut self, path: &Path, input: &mut Input) -> Result<Option<String>> {
        let messages = &self.conversation.messages;
        if conversation::is_foreign(path) {
            let question = format!("{} is not a saved conversation. Overwrite it? [y/N] ", path.display());
            let line = input.ask(&question)?;
            let answer = line.as_deref().unwrap_or("").trim().to_lowercase();
            if !["y", "yes"].contains(&answer.as_str()) {
                terminal::say("[not saved]");
                // Text typed ahead or piped in is not an answer.
                return Ok(line.filter(|_| !["", "n", "no"].contains(&answer.as_str())));
            }
        }
        match conversation::save(messages, path) {
            Ok(()) => terminal::say(&format!("[{} messages saved to {}]", messages.len(), path.display())),
            Err(e) => terminal::note(&format!("{e:#}")),
        }
        Ok(None)
    }

    /// Answers the last message again. The same seed would give the same answer, so the next one is used from here on. Without a new answer the old one
    /// stays.
    fn regenerate(&mut self) -> Result<()> {
        let before = self.conversation.messages.clone();
        let Some(message) = self.conversation.undo() else {
            terminal::note("there is no answer yet");
            return Ok(());
        };
        let seed = &mut self.generation.sampling.seed;
        *seed = seed.wrapping_add(1);
        self.measured.seed = *seed;
        if !self.turn(&message)? {
            self.conversation.messages = before;
        }
        Ok(())
    }

    /// Frees what the engine holds of the conversation.
    fn forget(&mut self) {
        self.conversation.fed = None;
        self.last = None;
        if let Err(e) = self.engine.truncate(self.sequence, 0) {
            terminal::note(&format!("{e:#}"));
        }
    }

    fn print_stats(&mut self) {
        match &self.last {
            Some(answer) => terminal::say(&stats::to_text(&mut self.engine, answer, &self.measured)),
            None => terminal::note("there is no answer yet"),
        }
    }
}

/// On a terminal, Ctrl-C does not end the program by itself. While weights load, this does so, after restoring the terminal.
struct LeaveWhileLoading(Option<(Sender<()>, JoinHandle<()>)>);

impl LeaveWhileLoading {
    const POLL: Duration = Duration::from_millis(20);

    fn begin(load: LoadProgress, mode: Mode) -> LeaveWhileLoading {
        let (end, ended) = mpsc::channel();
        let watch = move || {
            while !load.is_over() && ended.recv_timeout(LeaveWhileLoading::POLL) == Err(RecvTimeoutError::Timeout) {
                if interrupt::pressed() {
                    let _ = mode.set();
                    std::process::exit(interrupt::STATUS.into());
                }
            }
        };
        LeaveWhileLoading(Some((end, thread::spawn(watch))))
    }
}

impl Drop for LeaveWhileLoading {
    fn drop(&mut self) {
        if let Some((end, watch)) = self.0.take() {
            drop(end);
            let _ = watch.join();
        }
    }
}

/// The output is closed: the only error that ends a chat.
#[derive(Debug)]
struct OutputGone;

impl fmt::Display for OutputGone {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("standard output")
    }
}

fn put(out: &mut impl Write, text: &str) -> Result<()> {
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context(OutputGone)
}

const WAYS_OUT: &str =
    "/undo takes the last turn back, /reset begins anew, --max-context N at the start gives more room";

fn first_line(text: &str) -> String {
    let line: String = text.lines().next().unwrap_or("").chars().take(60).collect();
    if line.len() < text.len() { line + " .." } else { line }
}
