//! A model that is computed with while it arrives: the transfer on a thread of its own, and what the program has to know of it.
//!
//! The hub's sums are of whole files, so until the end nothing that was computed is sure. Until then nothing of it is kept (the prompt cache is off), and where a sum
//! is wrong the program says so and ends. So does a transfer that fails: weights that will not come are waited for by nobody.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use clap::Args;
use serde_json::{Value, json};
use sluice_front::named_at;
use sluice_hub::{Arrival, ArrivingFile, Client, Error, Event, Extent, ModelName, Settings, Watch};
use sluice_store::arriving::{self, Arriving, ArrivingHere};

use super::resolved;
use super::screen::Screen;
use crate::engine_args::EngineArgs;
use crate::prompt_cache_args::PromptCacheArgs;
use crate::terminal::note;
use crate::{default_model, progress, units};

/// Bytes of each file that are waited for before it is opened: what tells its kind.
const KIND: u64 = 4096;
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// The longest time that leaving waits for the transfer to stop.
const STOPPING: Duration = Duration::from_secs(2);
/// The program's exit code for errors.
const FAILED: i32 = 2;

/// How a model comes that is not here.
#[derive(Args, Clone, Debug, Default)]
pub struct DownloadArgs {
    /// Fetch a model completely before computing with it. By default computing begins while it arrives, what is needed first; an answer counts once the rest has arrived and
    /// its checksums are right
    #[arg(long, help_heading = "Engine")]
    wait_for_download: bool,
}

/// The transfer that runs beside computing.
struct Transfer {
    name: ModelName,
    host: String,
    done: AtomicU64,
    all: AtomicU64,
    stop: AtomicBool,
    /// Whether it went to its end; set once.
    ended: OnceLock<bool>,
    /// Bytes that were not there yet at the first token.
    missing_at_first: OnceLock<u64>,
    /// What has to live as long as the model is read.
    held: Mutex<Option<(Arrival, Vec<ArrivingHere>)>>,
}

static TRANSFER: OnceLock<Arc<Transfer>> = OnceLock::new();

/// What the program hears of a transfer that began.
enum Start {
    /// The model can be opened.
    Arriving(Arrival),
    /// The model is here, or will not be.
    Over(Result<PathBuf>),
}

/// Who hears of the transfer: a screen until computing begins, and from then on only numbers.
struct Ears {
    screen: Mutex<Option<Screen>>,
    transfer: Arc<Transfer>,
}

impl Ears {
    fn screen(&self) -> std::sync::MutexGuard<'_, Option<Screen>> {
        self.screen.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Watch for Ears {
    fn event(&self, event: Event) {
        match (&*self.screen(), event) {
            (Some(screen), event) => screen.event(event),
            (None, Event::Progress { done, all }) => {
                self.transfer.done.store(done, Ordering::Relaxed);
                self.transfer.all.store(all, Ordering::Relaxed);
            }
            (None, Event::Note(line)) => note(&line),
            (None, Event::Planned(_)) => {}
        }
    }

    fn is_stopped(&self) -> bool {
        self.transfer.stop.load(Ordering::Relaxed) || self.screen().as_ref().is_some_and(Screen::is_stopped)
    }
}

/// Lets readers of weights wait for what the hub brings.
#[derive(Debug)]
struct Bringer(ArrivingFile);

/// The program ends with the transfer's own error: readers need not repeat it, but must not wait for ever either.
fn ended<T>(outcome: Result<T, String>) -> Result<T, String> {
    if outcome.is_err() && TRANSFER.get().is_some_and(|transfer| transfer.ended.get().is_none()) {
        thread::sleep(STOPPING);
    }
    outcome
}

impl Arriving for Bringer {
    fn has(&self, part: &Range<u64>) -> Result<bool, String> {
        ended(self.0.has(part))
    }

    fn ask(&self, part: &Range<u64>, waits: bool) {
        self.0.ask(part, waits);
    }

    fn is_whole(&self) -> Result<bool, String> {
        ended(self.0.is_whole())
    }
}

/// What to open for the model that the command line names, or a setting, or else the demo model's folder. A model of the hub's that is not in the cache is opened while
/// it is fetched, if its weights go to memory that the CPU reads, and nothing is kept for later that was computed from bytes that are not checked yet.
///
/// # Errors
/// As for [`resolved`].
pub fn started(
    named: Option<&Path>,
    download: &DownloadArgs,
    engine: &EngineArgs,
    prompt_cache: &PromptCacheArgs,
) -> Result<PathBuf> {
    let Some(named) = named.or(default_model::configured()) else { return default_model::demo_folder() };
    if download.wait_for_download || named.as_os_str().is_empty() || named.exists() || TRANSFER.get().is_some() {
        return resolved(named);
    }
    let settings = Settings::from_env()?;
    let name = named_at(named, &settings)?;
    if settings.offline || sluice_hub::find(&settings, &name, Extent::Whole).is_some() {
        return resolved(named);
    }
    let whole = match prompt_cache.options()? {
        Some(_) => Some("--prompt-cache".to_owned()),
        None if !engine.device().is_host() => Some(format!("--device {}", engine.device())),
        None => None,
    };
    if let Some(why) = whole {
        note(&format!("{name}: {why}: fetched whole before it is computed with"));
        return resolved(named);
    }
    let host = settings.host().to_owned();
    let transfer = Arc::new(Transfer {
        name,
        host,
        done: AtomicU64::new(0),
        all: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        ended: OnceLock::new(),
        missing_at_first: OnceLock::new(),
        held: Mutex::new(None),
    });
    let (sender, receiver) = mpsc::channel();
    let own = Arc::clone(&transfer);
    thread::Builder::new().name("pull".into()).spawn(move || fetch(&own, settings, &sender))?;
    match receiver.recv().map_err(|_| anyhow!("the thread that fetches has ended"))? {
        Start::Over(path) => path,
        Start::Arriving(arrival) => opened(&transfer, arrival),
    }
}

fn fetch(transfer: &Arc<Transfer>, settings: Settings, start: &Sender<Start>) {
    let screen = Screen::for_use(&transfer.name, &transfer.host);
    let ears = Ears { screen: Mutex::new(Some(screen)), transfer: Arc::clone(transfer) };
    let mut begun = |arrival: Arrival| {
        // From here on Ctrl-C is the business of whoever computes.
        drop(ears.screen().take());
        let _ = start.send(Start::Arriving(arrival));
    };
    let client = Arc::new(Client::new(settings));
    let outcome = sluice_hub::pull_in_use(&client, &transfer.name, Extent::Whole, &ears, Some(&mut begun));
    if let Some(screen) = ears.screen().take() {
        let _ = start.send(Start::Over(screen.ended(outcome).map(|model| model.path)));
        return;
    }
    match outcome {
        Ok(_) => drop(transfer.ended.set(true)),
        Err(Error::Stopped) => drop(transfer.ended.set(false)),
        Err(e) => {
            note(&format!("{}: {e}", transfer.name));
            if matches!(e, Error::Corrupt { .. }) {
                note("whatever was answered was computed from wrong bytes: do not use it");
            }
            std::process::exit(FAILED);
        }
    }
}

/// Keeps what arrives open, and waits for what has to be there before it is opened: files beside the weights, and the beginning of each file of weights.
fn opened(transfer: &Arc<Transfer>, arrival: Arrival) -> Result<PathBuf> {
    let register = |file: &ArrivingFile| arriving::register(file.file(), Arc::new(Bringer(file.clone())));
    let here = arrival.files.iter().map(register).collect::<std::io::Result<Vec<_>>>()?;
    let _ = TRANSFER.set(Arc::clone(transfer));
    let _ = progress::ALSO.set(line);
    note(&format!(
        "{}: computing begins while it arrives; what is answered counts once all of it is here and checked (--wait-for-download waits first)",
        transfer.name
    ));
    let is_open = || -> Result<bool, String> {
        for file in &arrival.before {
            if !file.is_whole()? {
                return Ok(false);
            }
        }
        for file in &arrival.files {
            if !file.has(&(0..KIND.min(file.size())))? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    while !ended(is_open()).map_err(|why| anyhow!("{}: {why}", transfer.name))? {
        thread::sleep(LOOK_AGAIN);
    }
    let path = arrival.path.clone();
    *transfer.held.lock().unwrap_or_else(|e| e.into_inner()) = Some((arrival, here));
    Ok(path)
}

/// The transfer, as long as it runs.
fn running() -> Option<&'static Arc<Transfer>> {
    TRANSFER.get().filter(|transfer| transfer.ended.get().is_none())
}

/// What a progress line says beside its own.
fn line() -> Option<String> {
    let transfer = running()?;
    let [done, all] = [&transfer.done, &transfer.all].map(|n| units::bytes(n.load(Ordering::Relaxed)));
    Some(format!(", fetched {done} of {all}"))
}

/// Notes how much is there when the first token is.
pub fn first_token() {
    if let Some(transfer) = TRANSFER.get() {
        let held = transfer.held.lock().unwrap_or_else(|e| e.into_inner());
        let missing = held.iter().flat_map(|(arrival, _)| &arrival.files).map(ArrivingFile::missing).sum();
        let _ = transfer.missing_at_first.set(missing);
    }
}

/// Bytes of the model, and how many of them were there at the first token; `None` if it was here from the beginning.
pub fn figures() -> Option<Value> {
    let transfer = TRANSFER.get()?;
    let all = transfer.all.load(Ordering::Relaxed);
    let there = transfer.missing_at_first.get().map(|missing| all.saturating_sub(*missing));
    Some(json!({"bytes": all, "at_first_token": there}))
}

/// Waits until the rest has arrived and is right. Ctrl-C stops the transfer.
///
/// # Errors
/// Ctrl-C. Where something is wrong, the program ends here.
pub fn finish() -> Result<()> {
    let Some(transfer) = running() else { return Ok(()) };
    let screen = Screen::for_use(&transfer.name, &transfer.host);
    while transfer.ended.get().is_none() {
        if screen.is_stopped() {
            transfer.stop.store(true, Ordering::Relaxed);
        }
        let [done, all] = [&transfer.done, &transfer.all].map(|n| n.load(Ordering::Relaxed));
        screen.event(Event::Progress { done, all });
        thread::sleep(LOOK_AGAIN);
    }
    let is_whole = transfer.ended.get() == Some(&true);
    drop(transfer.held.lock().unwrap_or_else(|e| e.into_inner()).take());
    screen.ended(if is_whole { Ok(()) } else { Err(Error::Stopped) })
}

/// Stops a transfer whose model is no longer wanted.
pub fn leave() {
    let Some(transfer) = running() else { return };
    transfer.stop.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    while transfer.ended.get().is_none() && begun.elapsed() < STOPPING {
        thread::sleep(LOOK_AGAIN);
    }
    if transfer.ended.get() != Some(&true) {
        let [done, all] = [&transfer.done, &transfer.all].map(|n| units::bytes(n.load(Ordering::Relaxed)));
        note(&format!(
            "{}: stopped with {done} of {all}, which are kept; what was answered is not checked, since the rest has not arrived",
            transfer.name
        ));
    }
    drop(transfer.held.lock().unwrap_or_else(|e| e.into_inner()).take());
}
