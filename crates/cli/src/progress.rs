//! A progress line for long waits. It is shown only on a terminal, only after half a second, and is removed at the end.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};
use sluice_engine::LoadProgress;

/// What is shown beside a load and what follows it: how far a download has come.
pub static ALSO: OnceLock<fn() -> Option<String>> = OnceLock::new();

const PATIENCE: Duration = Duration::from_millis(500);
const REDRAW: Duration = Duration::from_millis(100);

/// A progress line on standard error.
pub struct Progress {
    bar: ProgressBar,
    /// The bar now shows the work itself, and no longer the loading before it.
    reached: Arc<AtomicBool>,
    /// Shows the line after a delay; ends when its channel is closed.
    shower: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Progress of `what`, such as "reading the prompt": `total` of `unit`, such as "tokens".
    pub fn new(what: &'static str, unit: &'static str, total: usize) -> Progress {
        Progress::after_loading(None, what, unit, total)
    }

    /// The same, after a load that is still running; the load is shown first.
    pub fn after_loading(load: Option<LoadProgress>, what: &'static str, unit: &'static str, total: usize) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::hidden());
        let reached = Arc::new(AtomicBool::new(load.is_none()));
        style(&bar, what, unit);
        let shower = io::stderr().is_terminal().then(|| {
            let (sender, receiver) = mpsc::channel::<()>();
            let (bar, reached) = (bar.clone(), Arc::clone(&reached));
            let show = move || {
                let waited = |time| receiver.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
                if !waited(PATIENCE) {
                    return;
                }
                let also = || {
                    let text = ALSO.get().and_then(|text| text());
                    text.into_iter().for_each(|text| bar.set_prefix(text));
                };
                let is_loading = load.is_some();
                let target = || ProgressDrawTarget::term_like(Box::new(Narrow(Term::stderr())));
                if let Some(load) = load {
                    if !load.is_over() {
                        style(&bar, "loading", "MB");
                        bar.set_draw_target(target());
                        bar.enable_steady_tick(REDRAW);
                    }
                    while !load.is_over() {
                        let (done, all) = load.bytes();
                        bar.set_length(all / 1_000_000);
                        bar.set_position(done / 1_000_000);
                        also();
                        if !waited(REDRAW) {
                            return;
                        }
                    }
                    style(&bar, what, unit);
                    bar.set_length(total as u64);
                    bar.set_position(0);
                    reached.store(true, Ordering::Relaxed);
                }
                bar.set_draw_target(target());
                bar.enable_steady_tick(REDRAW);
                while is_loading && ALSO.get().is_some() && waited(REDRAW) {
                    also();
                }
            };
            (sender, thread::spawn(show))
        });
        Progress { bar, reached, shower }
    }

    /// Sets how much is done, and the total. Ignored while a load is being shown.
    pub fn set(&self, done: usize, total: usize) {
        if !self.reached.load(Ordering::Relaxed) {
            return;
        }
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
    }

    /// Shows a text after the elapsed time: a rate, say.
    pub fn add(&self, text: String) {
        self.bar.set_prefix(text);
    }

    /// Removes the line.
    pub fn finish(&mut self) {
        if let Some((sender, thread)) = self.shower.take() {
            drop(sender);
            let _ = thread.join();
            self.bar.finish_and_clear();
        }
    }
}

fn style(bar: &ProgressBar, what: &'static str, unit: &str) {
    let shape = format!("{{msg}} {{bar:30}} {{pos}} of {{len}} {unit}, {{elapsed}}{{prefix}}");
    if let Ok(style) = ProgressStyle::with_template(&shape) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what);
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

/// A terminal whose last columns stay empty. Lines are padded to the full width, and a `^C` that the terminal prints after them would start a new line that the next
/// redraw cannot reach.
#[derive(Debug)]
struct Narrow(Term);

impl TermLike for Narrow {
    fn width(&self) -> u16 {
        self.0.size().1.saturating_sub(4)
    }
    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_up(n)
    }
    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_down(n)
    }
    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_right(n)
    }
    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.0.move_cursor_left(n)
    }
    fn write_line(&self, s: &str) -> io::Result<()> {
        self.0.write_line(s)
    }
    fn write_str(&self, s: &str) -> io::Result<()> {
        self.0.write_str(s)
    }
    fn clear_line(&self) -> io::Result<()> {
        self.0.clear_line()
    }
    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
}
