//! The program `sluice`: turns flags into engine calls, and events into terminal output. Each subcommand has a file or a folder; what two of them share has a file
//! of its own. Every failure is one line on standard error and exit code 2. Nothing a user or a file says may cause a panic.
#![forbid(unsafe_code)]

mod access_args;
mod bench;
mod cache;
mod cache_store;
mod chat;
mod completions;
mod config;
mod connection_args;
mod default_model;
mod disk;
mod doctor;
mod engine_args;
mod eval;
mod facts;
mod folders;
mod generate;
mod help;
mod hub;
mod inspect;
mod interrupt;
mod launch;
mod load;
mod pack;
mod plan;
mod presets;
mod progress;
mod prompt;
mod prompt_cache_args;
mod run;
mod sampling_args;
mod self_test;
mod serve;
mod stats;
mod streamed;
mod terminal;
mod units;
mod version;

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use version::version;

/// Runs language models that are bigger than memory, from the files you have.
#[derive(Parser)]
#[command(name = "sluice", version = version(), max_term_width = 100)]
struct Cli {
    /// A file with settings, which flags override [default: ~/.config/sluice/config.toml]
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer one prompt, with the answer streamed.
    Run(run::RunArgs),
    /// Talk with a model, turn by turn.
    Chat(chat::ChatArgs),
    /// Serve models over HTTP: the APIs of OpenAI, Anthropic and Ollama.
    Serve(serve::ServeArgs),
    /// Start a coding agent with a model of this machine.
    Launch(launch::LaunchArgs),
    /// Show what a checkpoint is, how large, and whether it fits here.
    Inspect(inspect::InspectArgs),
    /// Quantise a checkpoint to MLX's format. LOSSY: see `eval ppl`.
    Pack(pack::PackArgs),
    /// Estimate where a model would fit, and how fast it would run.
    Plan(plan::PlanArgs),
    /// Fetch a model from the Hugging Face hub, or what is missing of it.
    Pull(hub::PullArgs),
    /// List the models in the cache that Hugging Face's programs share.
    #[command(alias = "ls")]
    List(hub::ListArgs),
    /// Remove models from that cache.
    Rm(hub::RemoveArgs),
    /// Compare a model's files with the hub's checksums.
    Verify(hub::VerifyArgs),
    /// Measure how fast this machine computes, next to its own limits.
    Bench(bench::BenchArgs),
    /// Look at this machine: what it has, and what would be quicker.
    Doctor(doctor::DoctorArgs),
    /// Check that this machine computes the right bits.
    SelfTest(self_test::SelfTestArgs),
    /// List, check or clear the prompt cache on disk.
    Cache(cache::CacheArgs),
    /// Measure a model: perplexity, logits, use of experts.
    Eval(eval::EvalArgs),
    /// Print completions for a shell.
    Completions(completions::CompletionsArgs),
    /// Write a manual page for each command.
    #[command(hide = true)]
    Manuals(completions::ManualsArgs),
}

fn main() -> ExitCode {
    let start = Instant::now();
    if let Some(done) = sluice_engine::text::serve_templates() {
        return done;
    }
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or("an unknown place".to_owned(), |l| l.to_string());
        let payload = panic.payload();
        let what = payload.downcast_ref::<&str>().copied().map(str::to_owned);
        let what = what.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        // The reader of our output has closed the pipe, and `println!` can only panic.
        if what.starts_with("failed printing to stdout") && what.contains("Broken pipe") {
            std::process::exit(0);
        }
        terminal::note(&format!(
            "this is a bug in sluice, please report it: {what:?} at {place}, version {}",
            version()
        ));
    }));
    let command = help::grouped(Cli::command());
    let result =
        interrupt::install().and_then(|()| config::matches(&command)).map(|found| parsed(&found)).and_then(|cli| {
            match cli.command {
                Command::Run(args) => run::run(args, start),
                Command::Chat(args) => chat::run(args),
                Command::Serve(args) => serve::run(args),
                Command::Launch(args) => launch::run(&args, cli.config.as_deref()),
                Command::Inspect(args) => inspect::run(args),
                Command::Pack(args) => pack::run(args),
                Command::Bench(args) => bench::run(args, start),
                Command::Plan(args) => plan::run(args),
                Command::Cache(args) => cache::run(args),
                Command::Pull(args) => hub::run_pull(args),
                Command::List(args) => hub::list(&args),
                Command::Rm(args) => hub::remove(&args),
                Command::Verify(args) => hub::verify(&args),
                Command::Eval(args) => eval::run(args),
                Command::Doctor(args) => doctor::run(&args),
                Command::SelfTest(args) => self_test::run(&args),
                Command::Completions(args) => completions::run(&args, Cli::command()),
                Command::Manuals(args) => completions::write_manuals(&args, Cli::command()),
            }
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has closed the pipe (`| head`).
        Err(e) if e.chain().any(is_closed_pipe) => ExitCode::SUCCESS,
        // The error has already been reported.
        Err(e) if e.is::<interrupt::Interrupted>() => ExitCode::from(interrupt::STATUS),
        Err(e) => {
            terminal::note(&format!("{e:#}"));
            ExitCode::from(2)
        }
    }
}

fn parsed(found: &ArgMatches) -> Cli {
    Cli::from_arg_matches(found).unwrap_or_else(|e| e.exit())
}

fn is_closed_pipe(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
