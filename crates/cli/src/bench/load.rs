//! `sluice bench load`: each way of reading a model, cold and warm, compared with the disk's own speed. Every case is a process of its own. Load times are of loading
//! alone; first tokens are of a start that computes while it loads.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use sluice_engine::{Engine, LoadMode, Loading, source};
use sluice_store::load::measure_disk;

use super::case::{self, figure};
use super::cold::State;
use super::figures::Figures;
use super::subject::{token, tokens};
use crate::engine_args::{EngineArgs, model_or_demo};
use crate::load;
use sluice_front::machine;

#[derive(Args, Debug)]
pub struct LoadArgs {
    /// Folder of the model (config.json and safetensors) [default: the demo model]
    model: Option<PathBuf>,
    /// Ways of reading
    #[arg(long, value_delimiter = ',', default_value = "mmap,pread,direct,auto", value_parser = mode_arg, value_name = "WAY,..")]
    modes: Vec<LoadMode>,
    /// States of the page cache
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cold,warm", value_name = "STATE,..")]
    states: Vec<State>,
    /// Number of measurements; the median counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    rounds: usize,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 34, value_name = "N")]
    prompt: usize,
    /// Tokens to generate; 0 measures only loading
    #[arg(long, default_value_t = 200, value_name = "N")]
    tokens: usize,
    /// Bytes per request [default: the fastest measured]
    #[arg(long, value_name = "BYTES")]
    request: Option<usize>,
    /// Requests in flight at once with io_uring [default: the fastest measured]
    #[arg(long, value_name = "N")]
    depth: Option<usize>,
    /// Threads with an io_uring each [default: the fastest measured]
    #[arg(long, value_name = "N")]
    rings: Option<usize>,
    /// Threads that read without io_uring [default: the fastest measured]
    #[arg(long, value_name = "N")]
    readers: Option<usize>,
    /// Copy files with small pages
    #[arg(long)]
    small_pages: bool,
    /// Print one line of JSON for each way and state
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
    #[arg(long, hide = true)]
    case: Option<String>,
}

fn mode_arg(name: &str) -> Result<LoadMode, String> {
    let all = [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct, LoadMode::Auto];
    all.into_iter().find(|m| m.name() == name).ok_or("expected mmap, pread, direct or auto".into())
}

/// Runs the benchmark and prints a row for each way and state. `start`: when the program started.
pub fn run(args: &LoadArgs, start: Instant) -> Result<()> {
    if let Some(case) = &args.case {
        return run_case(args, case, start);
    }
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    ensure!(args.prompt > 0, "--prompt must be at least 1");
    if let Some(request) = args.request {
        ensure!(request.is_power_of_two() && request >= 4096, "--request must be a power of two from 4096 on");
    }
    let folder = model_or_demo(args.model.as_deref())?;
    let source = source::open(&folder).map_err(|e| load::naming(&folder, e))?;
    let tensors = source.tensors().map_err(|e| load::naming(&folder, e.into()))?;
    let sizes = tensors.checkpoint().file_sizes();
    let files: Vec<PathBuf> = sizes.iter().map(|(name, _)| folder.join(name)).collect();
    let bytes: u64 = sizes.iter().map(|(_, size)| size).sum();
    drop(tensors);
    let mut rows: Vec<Row> = Vec::new();
    for &state in &args.states {
        rows.extend(args.modes.iter().map(|&mode| Row::new(state, mode)));
    }
    for _ in 0..args.rounds {
        for row in &mut rows {
            row.measure(args, &files, bytes)?;
        }
    }
    let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
    if args.json {
        rows.iter().for_each(|row| println!("{}", row.to_json(&name, bytes)));
    } else {
        print(&rows, &name, bytes);
    }
    Ok(())
}

/// Measurements of one way of reading in one state. Entries with the same index are from the same round.
struct Row {
    state: State,
    mode: LoadMode,
    /// Fraction of the files that was in the page cache before.
    cached: Figures,
    /// From the start of the program until all weights are loaded, without any computation.
    load_seconds: Figures,
    /// Highest resident set of that.
    load_peak: Figures,
    /// Part of it before any matrix: reading headers and vectors. And the time for reading matrices.
    open_seconds: Figures,
    read_seconds: Figures,
    /// The disk's speed, the mean of measurements just before and just after; only if cold.
    disk: Figures,
    /// From the start of the program to the first token.
    first_token_seconds: Figures,
    /// The same prompt again, with everything in memory.
    prompt_seconds: Figures,
    prompt_speed: Figures,
    generation_speed: Figures,
    /// Highest resident set, anonymous and mapped.
    peak: Figures,
    /// Wall time from start to end, as the parent process sees it.
    process_seconds: Figures,
    chosen: Vec<String>,
    reasons: Vec<String>,
    notes: Vec<String>,
}

impl Row {
    fn new(state: State, mode: LoadMode) -> Row {
        let none = Figures::default;
        Row {
            state,
            mode,
            cached: none(),
            load_seconds: none(),
            load_peak: none(),
            open_seconds: none(),
            read_seconds: none(),
            disk: none(),
            first_token_seconds: none(),
            prompt_seconds: none(),
            prompt_speed: none(),
            generation_speed: none(),
            peak: none(),
            process_seconds: none(),
            chosen: vec![],
            reasons: vec![],
            notes: vec![],
        }
    }

    fn measure(&mut self, args: &LoadArgs, files: &[PathBuf], bytes: u64) -> Result<()> {
        let disk = || -> Result<f64> {
            let mut options = args.engine.options()?.load;
            args.set(&mut options);
            let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
            let (read, time, notes) = measure_disk(&paths, bytes.min(DISK_SAMPLE.max(bytes / 2)), &options)?;
            ensure!(notes.is_empty(), "{}", notes.join("; "));
            Ok(read as f64 / time.as_secs_f64())
        };
        // 1. Loading alone, between two measurements of the disk if it is read
        let before = (self.state == State::Cold).then(disk).transpose()?;
        let cached = self.state.prepare(files)?;
        let (found, _) = case::run(&format!("{}:load", self.mode.name()))?;
        let after = (self.state == State::Cold).then(disk).transpose()?;
        if let (Some(before), Some(after)) = (before, after) {
            self.disk.push((before + after) / 2.0);
        }
        self.cached.push(cached);
        self.load_seconds.push(figure(&found, "load_seconds"));
        self.open_seconds.push(figure(&found, "open_seconds"));
        self.read_seconds.push(figure(&found, "read_seconds"));
        self.load_peak.push(figure(&found, "peak_memory"));
        self.keep_words(&found);
        // 2. A start that answers a prompt
        if args.tokens > 0 {
            self.state.prepare(files)?;
            let (found, time) = case::run(&format!("{}:answer", self.mode.name()))?;
            self.first_token_seconds.push(figure(&found, "first_token_seconds"));
            self.prompt_seconds.push(figure(&found, "prompt_seconds"));
            self.prompt_speed.push(args.prompt as f64 / figure(&found, "prompt_seconds"));
            self.generation_speed.push(figure(&found, "generation_tokens_per_second"));
            self.peak.push(figure(&found, "peak_memory"));
            self.process_seconds.push(time.as_secs_f64());
            self.keep_words(&found);
        }
        Ok(())
    }

    fn keep_words(&mut self, found: &serde_json::Value) {
        let add = |list: &mut Vec<String>, name: &str| {
            for word in found[name].as_array().into_iter().flatten().filter_map(|w| w.as_str()) {
                if !list.iter().any(|w| w == word) {
                    list.push(word.to_owned());
                }
            }
        };
        add(&mut self.chosen, "modes");
        add(&mut self.reasons, "reasons");
        add(&mut self.notes, "fallbacks");
    }

    /// The highest resident set of all measurements.
    fn peak(&self) -> &Figures {
        if self.peak.is_empty() { &self.load_peak } else { &self.peak }
    }

    /// The load's bytes per second over the disk's.
    fn of_disk(&self, bytes: u64) -> Figures {
        self.load_seconds.map(|t| bytes as f64 / t).over(&self.disk)
    }

    fn to_json(&self, name: &str, bytes: u64) -> serde_json::Value {
        json!({
            "bench": "load",
            "model": name,
            "bytes": bytes,
            "state": self.state.name(),
            "mode": self.mode.name(),
            "chosen": self.chosen,
            "reasons": self.reasons,
            "fallbacks": self.notes,
            "cached_before": self.cached.to_json(),
            "load_seconds": self.load_seconds.to_json(),
            "open_seconds": self.open_seconds.to_json(),
            "read_seconds": self.read_seconds.to_json(),
            "load_peak_memory": self.load_peak.to_json(),
            "disk_bytes_per_second": self.disk.to_json(),
            "fraction_of_disk": if self.disk.is_empty() { json!(null) } else { self.of_disk(bytes).to_json() },
            "first_token_seconds": self.first_token_seconds.to_json(),
            "prompt_seconds": self.prompt_seconds.to_json(),
            "prompt_tokens_per_second": self.prompt_speed.to_json(),
            "generation_tokens_per_second": self.generation_speed.to_json(),
            "peak_memory": self.peak.to_json(),
            "process_seconds": self.process_seconds.to_json(),
        })
    }
}

/// How often the prompt is computed again; the median counts.
const AGAIN: usize = 3;
/// Most bytes of a disk measurement. For a large model it is half of the model, since a disk may be faster for a few seconds than it stays.
const DISK_SAMPLE: u64 = 2 << 30;

impl LoadArgs {
    fn set(&self, options: &mut sluice_engine::LoadOptions) {
        options.request = self.request;
        options.depth = self.depth.unwrap_or(options.depth);
        options.large_pages &= !self.small_pages;
        options.rings = self.rings.unwrap_or(options.rings);
        options.threads = self.readers.unwrap_or(options.threads);
    }
}

/// One case, `MODE:load` or `MODE:answer`; prints its measurements as JSON.
fn run_case(args: &LoadArgs, case: &str, start: Instant) -> Result<()> {
    let (mode, kind) = case.split_once(':').unwrap_or((case, "load"));
    let folder = model_or_demo(args.model.as_deref())?;
    let mut options = args.engine.options()?;
    options.load.mode = mode_arg(mode).map_err(anyhow::Error::msg)?;
    options.max_context.get_or_insert(args.prompt + args.tokens + 1);
    args.set(&mut options.load);
    // As in a normal start, the tokenizer loads at the same time, if there is one.
    let text_folder = folder.clone();
    let text = thread::spawn(move || {
        let there = source::open(&text_folder).is_ok_and(|source| source.has("tokenizer.json"));
        if there { load::tokenizer(&text_folder).map(Some) } else { Ok(None) }
    });
    let mut engine = load::engine(&folder, &args.engine, options)?;
    let _tokenizer = text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    let mut found = json!({"open_seconds": start.elapsed().as_secs_f64()});
    if kind == "answer" {
        answer(args, &mut engine, start, &mut found)?;
    }
    if let Some(loading) = engine.loading() {
        loading.finish()?;
    }
    let files = engine.loading().map_or(&[][..], Loading::files);
    found["read_seconds"] = engine.loading().and_then(Loading::time).map(|t| t.as_secs_f64()).into();
    found["load_seconds"] = start.elapsed().as_secs_f64().into();
    found["modes"] = files.iter().map(|f| f.mode.name()).collect();
    found["reasons"] = files.iter().map(|f| f.reason.clone()).collect();
    found["fallbacks"] = engine.loading().map_or(vec![], Loading::notes).into();
    found["peak_memory"] = machine::own_memory("VmHWM").into();
    println!("{found}");
    Ok(())
}

fn answer(args: &LoadArgs, engine: &mut Engine, start: Instant, found: &mut serde_json::Value) -> Result<()> {
    let vocabulary = engine.model().vocabulary;
    let prompt = tokens(0, args.prompt, vocabulary);
    let id = engine.add_sequence();
    engine.feed(id, &prompt, false, |_, _| Ok(()))?;
    found["first_token_seconds"] = start.elapsed().as_secs_f64().into();
    let begun = Instant::now();
    for i in args.prompt..args.prompt + args.tokens {
        engine.feed(id, &[token(i, vocabulary)], false, |_, _| Ok(()))?;
    }
    found["generation_tokens_per_second"] = (args.tokens as f64 / begun.elapsed().as_secs_f64()).into();
    engine.remove_sequence(id);
    let mut again = Figures::default();
    for _ in 0..AGAIN {
        let id = engine.add_sequence();
        let begun = Instant::now();
        engine.feed(id, &prompt, false, |_, _| Ok(()))?;
        again.push(begun.elapsed().as_secs_f64());
        engine.remove_sequence(id);
    }
    found["prompt_seconds"] = again.median().into();
    Ok(())
}

fn print(rows: &[Row], name: &str, bytes: u64) {
    println!("{name}: {:.2} GB", bytes as f64 / 1e9);
    println!(
        "{:<6}{:<8}{:>22}{:>22}{:>12}{:>22}{:>14}{:>22}{:>10}{:>10}  way",
        "state",
        "load",
        "load s",
        "disk GB/s",
        "of it",
        "first token s",
        "its compute",
        "gen tok/s",
        "peak GB",
        "of weights"
    );
    for row in rows {
        let gb = |f: &Figures| f.map(|x| x / 1e9);
        let none = Figures::default();
        let of_disk = if row.disk.is_empty() { none } else { row.of_disk(bytes) };
        println!(
            "{:<6}{:<8}{:>22}{:>22}{:>12}{:>22}{:>14}{:>22}{:>10.3}{:>10.3}  {}{}",
            row.state.name(),
            row.mode.name(),
            row.load_seconds.to_text(3),
            gb(&row.disk).to_text(2),
            if of_disk.is_empty() { "-".to_owned() } else { format!("{:.0}%", 100.0 * of_disk.median()) },
            row.first_token_seconds.to_text(3),
            if row.prompt_seconds.is_empty() { "-".to_owned() } else { format!("{:.3}", row.prompt_seconds.median()) },
            row.generation_speed.to_text(1),
            gb(row.peak()).median(),
            row.peak().median() / bytes as f64,
            row.chosen.join("+"),
            row.notes.iter().map(|n| format!("; {n}")).collect::<String>(),
        );
        let (cached, cold) = (row.cached.high(), row.state == State::Cold);
        if cold && cached > 0.0 {
            println!("      not quite cold: up to {:.1}% was in the page cache", 100.0 * cached);
        }
    }
    for &state in [State::Cold, State::Warm].iter().filter(|s| rows.iter().any(|r| r.state == **s)) {
        let find = |mode| rows.iter().find(|r| r.state == state && r.mode == mode);
        let (Some(std), Some(mmap)) = (find(LoadMode::Pread), find(LoadMode::Mmap)) else { continue };
        let both = |of: &dyn Fn(&Row) -> String| format!("{} / {}", of(std), of(mmap));
        let speed = |r: &Row| {
            if r.generation_speed.is_empty() { "-".into() } else { format!("{:.1}", r.generation_speed.median()) }
        };
        println!(
            "{}, pread / mmap: load {} s, {:.2} times as fast mapped; generation {} tokens/s; peak {} GB",
            state.name(),
            both(&|r| format!("{:.3}", r.load_seconds.median())),
            std.load_seconds.median() / mmap.load_seconds.median(),
            both(&speed),
            both(&|r| format!("{:.2}", r.peak().median() / 1e9)),
        );
    }
}
