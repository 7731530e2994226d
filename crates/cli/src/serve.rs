//! `sluice serve [MODEL]`: the model behind HTTP, for many at once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use sluice_engine::Options;
use sluice_server::{Bound, Limits, Server, Settings};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::access_args::AccessArgs;
use crate::engine_args::{EngineArgs, model_or_demo};
use crate::prompt_cache_args::PromptCacheArgs;
use crate::{interrupt, load, terminal};

#[derive(Args)]
pub struct ServeArgs {
    /// The model's folder (default: the demo model)
    #[arg(value_name = "MODEL")]
    folder: Option<PathBuf>,
    /// The model's folder
    #[arg(short, long, value_name = "MODEL", conflicts_with = "folder")]
    model: Option<PathBuf>,
    /// Where to listen; 0.0.0.0 for all of this machine's addresses
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 takes one that is free
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Listen on this Unix socket instead
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"])]
    unix_socket: Option<PathBuf>,
    /// What the model is called in answers (default: its folder's name)
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Requests that are computed at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Requests that may wait for their turn; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// Recurrent states that are kept for prompts to come, where the model has some: two or three for each prompt, in a sixteenth of the memory at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    snapshots: usize,
    /// Seconds after which a request that is not over is given up (default: none)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    request_timeout: Option<u64>,
    /// Write no line for each request that is over; what it says is in none of them
    #[arg(long)]
    no_request_log: bool,
    /// Share nothing between requests
    #[arg(long)]
    no_prefix_cache: bool,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    prompt_cache: PromptCacheArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

fn why_no_model(folder: &Path) -> &'static str {
    if folder.is_dir() { "there is no config.json in this folder" } else { "no such folder" }
}

/// Serves until it is told to stop: by SIGINT or SIGTERM, after which running requests come to their end; a second one ends it at once.
pub fn run(args: ServeArgs) -> Result<()> {
    let folder = model_or_demo(args.folder.or(args.model).as_deref())?;
    // What is not there at all is no news for those who ask a server.
    ensure!(folder.join("config.json").is_file(), "{}: {}", folder.display(), why_no_model(&folder));
    let options = Options {
        max_sequences: args.parallel.into(),
        snapshots: args.snapshots,
        prefix_cache: !args.no_prefix_cache,
        prompt_cache: args.prompt_cache.options()?,
        beside: sluice_server::memory(args.parallel.into(), args.queue),
        ..args.engine.options()?
    };
    let name = args.model_name.unwrap_or_else(|| {
        let real = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        real.file_name().map_or_else(|| "sluice".to_owned(), |n| n.to_string_lossy().into_owned())
    });
    let settings = Settings {
        name: name.clone(),
        limits: Limits { queue: args.queue },
        access: args.access.access()?,
        request_timeout: args.request_timeout.map(Duration::from_secs),
        log_requests: !args.no_request_log,
    };
    // Requests wait for the engine most of the time: two threads are plenty beside those that compute.
    let _held = interrupt::hold();
    let runtime = runtime::Builder::new_multi_thread().worker_threads(2).thread_name("http").enable_all().build()?;
    runtime.block_on(async {
        let bound = match &args.unix_socket {
            Some(path) => Bound::unix(path).await?,
            None => Bound::tcp(&args.host, args.port).await?,
        };
        args.access.check(&settings.access, &bound, &args.host)?;
        let address = bound.address()?;
        terminal::say(&format!("{name}: listening on {address}"));
        let engine_args = args.engine;
        let load = move || {
            let loaded = load::model(&folder, &engine_args, options)?;
            load::say_notes(&loaded.engine);
            Ok((loaded.engine, loaded.text))
        };
        let ready = move |ready: &sluice_server::Ready| {
            terminal::say(&format!("{}: ready, {} tokens of context", ready.name, ready.context));
        };
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let stop = async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            terminal::say("stopping: requests that run come to their end; once more to stop at once");
            tokio::spawn(async move {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                std::process::exit(130);
            });
        };
        Server::new(bound, settings).run(load, ready, stop).await.context("serving")
    })
}
