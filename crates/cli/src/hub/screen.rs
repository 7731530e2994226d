//! What a terminal, or a program that reads lines of JSON, sees of a transfer.

use std::cell::RefCell;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use sluice_hub::{Error, Event, Model, ModelName, Planned, Watch};

use crate::interrupt::{self, Hold, Interrupted};
use crate::plan::expected;
use crate::progress::Progress;
use crate::terminal::{note, shown_json};
use crate::{folders, units};

/// The time over which the rate is taken.
const WINDOW: Duration = Duration::from_secs(5);
/// Time between two lines of JSON about progress.
const EACH: Duration = Duration::from_millis(500);

/// Who is told about a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Voice {
    /// People: lines and a bar on standard error.
    People,
    /// Nobody; only errors are reported.
    Quiet,
    /// A program: a line of JSON for each event on standard output.
    Json,
}

/// Shows a transfer. While it exists, Ctrl-C stops the transfer.
pub struct Screen {
    name: String,
    host: String,
    voice: Voice,
    what: &'static str,
    state: RefCell<State>,
    _hold: Hold,
}

#[derive(Default)]
struct State {
    progress: Option<Progress>,
    /// Bytes that were there at these times, the oldest first.
    seen: Vec<(Instant, u64)>,
    last: Option<(u64, u64)>,
    told: Option<Instant>,
}

impl Screen {
    /// For a command that is about models: `what` it does with one, in a word.
    pub fn new(name: &ModelName, host: &str, voice: Voice, what: &'static str) -> Screen {
        Screen {
            name: name.to_string(),
            host: host.to_owned(),
            voice,
            what,
            state: RefCell::default(),
            _hold: interrupt::hold(),
        }
    }

    /// For a command that needs a model.
    pub fn for_use(name: &ModelName, host: &str) -> Screen {
        Screen::new(name, host, Voice::People, "fetching")
    }

    /// The outcome, as the program reports it: after Ctrl-C with a line that says how to go on.
    pub fn ended<T>(self, outcome: Result<T, Error>) -> Result<T> {
        let mut state = self.state.borrow_mut();
        state.progress.take();
        match outcome {
            Ok(done) => Ok(done),
            Err(Error::Stopped) => {
                let kept = state.last.filter(|(done, _)| *done > 0).map_or(String::new(), |(done, all)| {
                    format!(" with {} of {}, which are kept", units::bytes(done), units::bytes(all))
                });
                if self.what == "fetching" {
                    note(&format!("{}: stopped{kept}; the same command goes on from there", self.name));
                }
                Err(Interrupted.into())
            }
            Err(Error::Space { folder, needed, free }) => {
                let (needed, free) = (units::bytes(needed), units::bytes(free));
                let folder = folders::shown(&folder);
                anyhow::bail!(
                    "{}: {needed} more are needed, and {folder} has {free} free: `sluice rm` removes models, HF_HUB_CACHE names another disk",
                    self.name
                )
            }
            Err(e) => Err(e.into()),
        }
    }

    fn planned(&self, planned: &Planned) {
        let bytes = |n| units::bytes(n);
        let expected = expected::of(planned.config, planned.all, planned.name);
        if self.voice == Voice::Json {
            let Planned { name, files, bytes, kept, all, free, .. } = *planned;
            let rate = expected.map(|expected| expected.tokens_per_second);
            return say(&json!({
                "event": "planned", "name": name, "files": files, "bytes": bytes, "kept": kept, "all": all, "free": free,
                "expected_tokens_per_second": rate,
            }));
        }
        let kept =
            if planned.kept > 0 { format!(", {} of them are there", bytes(planned.kept)) } else { String::new() };
        let files = if planned.files == 1 { "1 file".to_owned() } else { format!("{} files", planned.files) };
        note(&format!(
            "{}: fetching {} in {files}{kept}, from {} to {} ({} free)",
            planned.name,
            bytes(planned.bytes),
            self.host,
            folders::shown(planned.cache),
            bytes(planned.free)
        ));
        if let Some(expected) = expected {
            note(&format!("{}: {} (`sluice plan` says more)", planned.name, expected.text));
        }
    }

    fn progress(&self, done: u64, all: u64) {
        let mut state = self.state.borrow_mut();
        let now = Instant::now();
        state.last = Some((done, all));
        state.seen.push((now, done));
        let keep = state.seen.iter().position(|(at, _)| now - *at <= WINDOW).unwrap_or(0);
        state.seen.drain(..keep);
        let (begun, before) = state.seen[0];
        let seconds = (now - begun).as_secs_f64();
        let rate = (seconds > 0.2).then(|| done.saturating_sub(before) as f64 / seconds).filter(|rate| *rate > 0.0);
        let left = rate.map(|rate| all.saturating_sub(done) as f64 / rate);
        if self.voice == Voice::Json {
            if done == all || state.told.is_none_or(|told| now - told >= EACH) {
                state.told = Some(now);
                say(
                    &json!({"event": "progress", "done": done, "all": all, "bytes_per_second": rate, "seconds_left": left}),
                );
            }
            return;
        }
        let [done, all] = [done, all].map(|bytes| (bytes / 1_000_000) as usize);
        let what = self.what;
        let bar = state.progress.get_or_insert_with(|| Progress::new(what, "MB", all));
        bar.set(done, all);
        if let Some((rate, left)) = rate.zip(left) {
            bar.add(format!(", {}/s, {} left", units::bytes(rate as u64), time(left)));
        }
    }
}

impl Watch for Screen {
    fn event(&self, event: Event) {
        match (event, self.voice) {
            (Event::Note(_) | Event::Planned(_) | Event::Progress { .. }, Voice::Quiet) => {}
            (Event::Note(line), Voice::Json) => say(&json!({"event": "note", "text": line})),
            (Event::Note(line), Voice::People) => {
                // The bar is drawn again below the line.
                self.state.borrow_mut().progress.take();
                note(&line);
            }
            (Event::Planned(planned), _) => self.planned(&planned),
            (Event::Progress { done, all }, _) => self.progress(done, all),
        }
    }

    fn is_stopped(&self) -> bool {
        interrupt::pressed()
    }
}

/// Writes a line of JSON. A reader that has gone ends nothing: the model is wanted all the same.
pub fn say(line: &Value) {
    let _ = writeln!(io::stdout().lock(), "{}", shown_json(&line.to_string()));
}

/// The last line of JSON about a model.
pub fn done(model: &Model, seconds: f64) -> Value {
    let files: Vec<Value> = model.files.iter().map(|(file, bytes)| json!({"name": file, "bytes": bytes})).collect();
    json!({
        "event": "done", "name": model.name, "commit": model.commit, "path": model.path.display().to_string(),
        "bytes": model.bytes(), "fetched": model.fetched, "seconds": seconds, "files": files,
    })
}

/// Seconds for people: `40 s`, `3 min`, `2 h 5 min`.
pub fn time(seconds: f64) -> String {
    let seconds = seconds.min(1e9) as u64;
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min", seconds.div_ceil(60)),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_for_people() {
        for (seconds, text) in
            [(0.4, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (3600.0, "60 min"), (7500.0, "2 h 5 min")]
        {
            assert_eq!(time(seconds), text);
        }
    }
}
