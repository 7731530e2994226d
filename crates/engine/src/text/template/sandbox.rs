//! Runs chat templates in a process of their own.
//!
//! An expression in a template can use any amount of memory. Comparing lists that contain the same list twice, nested many times, takes for ever. Only the kernel can limit
//! both, for a whole process. So a program that calls [`serve_templates`] is started a second time, with limits of memory and processor time. That process
//! compiles the templates and renders what it is sent. A template that exceeds its limits ends the process, which is an error here.
//!
//! Messages in both directions are a length (8 bytes, little-endian) and that many bytes. The renderer gets the templates as JSON, then jobs as JSON. It answers
//! each with a byte, 1 for success and 0 for an error, and a text. The caller reads no more than a prompt may have, waits no longer than [`Patience`], and
//! kills a process that it does not need any more before it waits for its end.

use super::jinja::{MAX_OUTPUT, Rendering, STACK, Templates};
use anyhow::{Result, bail};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::env;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// The argument that makes a program a renderer.
const ROLE: &str = "__render-chat-templates";
/// Bytes of memory for a rendering, beside its stack and what the process has from the start. Each byte that it is sent adds `MEMORY_PER_BYTE`.
const MEMORY: u64 = 256 << 20;
const MEMORY_PER_BYTE: u64 = 16;
/// Bytes that the allocator reserves, but does not use, for a second thread.
const RESERVED: u64 = 128 << 20;
/// Seconds of processor time for a rendering.
const SECONDS: u64 = 10;
/// The same by the clock, which is more on a busy machine.
const CLOCK: Duration = Duration::from_secs(60);
/// Bytes of a message, at most.
const MAX_MESSAGE: u64 = 1 << 30;
/// Environment variables that a renderer keeps: the time zone, and those of sanitizers.
const KEPT: [&str; 6] = ["TZ", "TZDIR", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS"];

static POSSIBLE: AtomicBool = AtomicBool::new(false);

/// Call this first in `main` of a program that renders untrusted templates. If the program was started as a renderer, this renders and returns the exit code. Otherwise
/// it returns `None`, and from now on templates run in a process of their own.
pub fn serve_templates() -> Option<ExitCode> {
    if env::args_os().nth(1).is_some_and(|role| role == ROLE) {
        return Some(if serve().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    POSSIBLE.store(true, Ordering::Relaxed);
    None
}

/// Whether [`serve_templates`] was called.
pub(super) fn is_possible() -> bool {
    POSSIBLE.load(Ordering::Relaxed)
}

/// Templates in a process of their own, which is restarted if a template ended it.
pub(super) struct Apart {
    /// The first message.
    templates: Vec<u8>,
    renderer: Mutex<Option<Renderer>>,
}

impl Apart {
    /// # Errors
    /// The outer error: the process could not be started. The inner one: the templates do not compile.
    pub fn start(templates: &[(String, String)]) -> Result<Result<Apart, String>> {
        let templates = serde_json::to_vec(templates)?;
        match Renderer::start()?.ask(&templates, Patience::default()) {
            Ok((renderer, Ok(_))) => Ok(Ok(Apart { templates, renderer: Mutex::new(Some(renderer)) })),
            Ok((_, Err(why))) | Err(End::Template(why)) => Ok(Err(why)),
            Err(End::Process(e)) => Err(e),
        }
    }

    /// [`Templates::run`] within `patience`.
    pub fn run(&self, rendering: &Rendering, patience: Patience) -> Result<String, String> {
        #[derive(Serialize)]
        struct RenderRequest<'a> {
            seconds: u64,
            rendering: &'a Rendering,
        }
        let asked = RenderRequest { seconds: patience.processor_seconds, rendering };
        let asked = serde_json::to_vec(&asked).map_err(|e| format!(": {e}"))?;
        let mut place = self.renderer.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |e: &dyn std::fmt::Display| format!(": its process cannot be used: {e}");
        let said = |end: End| match end {
            End::Template(why) => format!(": {why}"),
            End::Process(e) => failed(&e),
        };
        let renderer = match place.take() {
            Some(renderer) => renderer,
            None => {
                let renderer = Renderer::start().map_err(|e| failed(&e))?;
                let (renderer, compiled) = renderer.ask(&self.templates, Patience::default()).map_err(said)?;
                compiled.map_err(|e| format!(": {e}"))?;
                renderer
            }
        };
        let (renderer, answer) = renderer.ask(&asked, patience).map_err(said)?;
        *place = Some(renderer);
        answer
    }
}

/// How long a template may take for one rendering.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Processor time.
    pub processor_seconds: u64,
    /// Time by the clock, because a process may also hang.
    pub clock: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { processor_seconds: SECONDS, clock: CLOCK }
    }
}

/// Why a renderer ended.
enum End {
    /// The template exceeded a limit.
    Template(String),
    Process(anyhow::Error),
}

/// The process. When it ends, for whatever reason, its end of the pipes closes.
struct Renderer {
    child: Child,
    to: ChildStdin,
    from: ChildStdout,
}

impl Renderer {
    fn start() -> Result<Renderer> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("sluice").arg(ROLE).env_clear().current_dir("/");
        command.envs(KEPT.iter().filter_map(|name| Some((name, env::var_os(name)?))));
        // In a process group of its own, because Ctrl-C at the terminal is meant for the caller.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(to), Some(from)) => Ok(Renderer { child, to, from }),
            _ => bail!("no pipes"),
        }
    }

    /// Sends a message and waits for the answer. If there is none, the process has ended afterwards.
    fn ask(mut self, message: &[u8], patience: Patience) -> Result<(Renderer, Result<String, String>), End> {
        let is_late = AtomicBool::new(false);
        let pid = Pid::from_child(&self.child);
        let answer = thread::scope(|scope| {
            // It kills the process, which closes the pipes, so that reads and writes return. The process is only waited for after this thread has ended, so its
            // id is not reused.
            let (done, wait) = mpsc::channel::<()>();
            let is_late = &is_late;
            let watch = move || {
                if wait.recv_timeout(patience.clock) == Err(mpsc::RecvTimeoutError::Timeout) {
                    is_late.store(true, Ordering::Relaxed);
                    let _ = kill_process(pid, Signal::KILL);
                }
            };
            thread::Builder::new().name("template-clock".into()).spawn_scoped(scope, watch)?;
            let answer = self.exchange(message);
            drop(done);
            answer
        });
        match answer {
            Ok(answer) => Ok((self, answer)),
            Err(_) if is_late.into_inner() => {
                Err(End::Template(format!("takes more than {} s", patience.clock.as_secs_f64())))
            }
            Err(e) => Err(self.end(e, patience)),
        }
    }

    fn exchange(&mut self, message: &[u8]) -> io::Result<Result<String, String>> {
        send(&mut self.to, &[message])?;
        let answer = receive(&mut self.from, MAX_OUTPUT as u64 + 1)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(io::Error::other);
        match answer.split_first() {
            Some((1, rest)) => Ok(Ok(text(rest)?)),
            Some((_, rest)) => Ok(Err(text(rest)?)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Ends the process after this error, and returns the reason.
    fn end(mut self, error: io::Error, patience: Patience) -> End {
        const ABORT: i32 = 6;
        const KILL: i32 = 9;
        const SEGMENT: i32 = 11;
        const TIME: i32 = 24;
        // A process that still writes would never end. One that has ended already keeps the signal that ended it.
        let _ = self.child.kill();
        let signal = self.child.wait().ok().and_then(|status| status.signal());
        match signal {
            Some(TIME) => End::Template(format!("takes more than {} s of processor time", patience.processor_seconds)),
            Some(ABORT | SEGMENT) => {
                End::Template(format!("takes more than {} MB of memory, or nests values too deeply", MEMORY >> 20))
            }
            None | Some(KILL) => End::Process(error.into()),
            Some(other) => End::Template(format!("its process was ended by signal {other}")),
        }
    }
}

impl Drop for Renderer {
    fn drop(&mut self) {
        // The process has ended already, or waits for a message.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send(to: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    to.write_all(&(len as u64).to_le_bytes())?;
    parts.iter().try_for_each(|part| to.write_all(part))?;
    to.flush()
}

/// The next message; `None` at the end.
fn receive(from: &mut impl Read, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 8];
    match from.read_exact(&mut len) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let len = u64::from_le_bytes(len);
    if len > limit {
        return Err(io::Error::other("a message above its limit"));
    }
    let mut message = Vec::new();
    from.take(len).read_to_end(&mut message)?;
    if message.len() as u64 == len { Ok(Some(message)) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Runs the renderer.
fn serve() -> Result<()> {
    let (mut from, mut to) = (io::stdin().lock(), io::stdout().lock());
    let begun_with = address_space()?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    let Some(message) = receive(&mut from, MAX_MESSAGE)? else { return Ok(()) };
    limit(begun_with, message.len(), SECONDS)?;
    let templates: Vec<(String, String)> = serde_json::from_slice(&message)?;
    let templates = match Templates::compile(&templates) {
        Ok(templates) => templates,
        Err(e) => return Ok(send(&mut to, &[&[0], e.as_bytes()])?),
    };
    #[derive(Deserialize)]
    struct RenderRequest {
        seconds: u64,
        rendering: Rendering,
    }
    send(&mut to, &[&[1]])?;
    while let Some(message) = receive(&mut from, MAX_MESSAGE)? {
        let sent = message.len();
        limit(begun_with, sent, SECONDS)?;
        let RenderRequest { seconds, rendering } = serde_json::from_slice(&message)?;
        drop(message);
        limit(begun_with, sent, seconds)?;
        match templates.run(&rendering) {
            Ok(text) => send(&mut to, &[&[1], text.as_bytes()])?,
            Err(e) => send(&mut to, &[&[0], e.as_bytes()])?,
        }
    }
    Ok(())
}

/// Sets limits for the next job: memory for a message of `len` bytes, and seconds of processor time from now.
fn limit(begun_with: u64, len: usize, seconds: u64) -> Result<()> {
    let soft = |resource, current: u64| {
        let maximum = getrlimit(resource).maximum;
        setrlimit(resource, Rlimit { current: Some(maximum.map_or(current, |most| most.min(current))), maximum })
    };
    soft(Resource::As, begun_with + STACK as u64 + RESERVED + MEMORY + MEMORY_PER_BYTE * len as u64)?;
    let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec as u64;
    Ok(soft(Resource::Cpu, used + 1 + seconds)?)
}

/// Bytes of this process's address space.
fn address_space() -> Result<u64> {
    let text = fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(pages * rustix::param::page_size() as u64)
}
