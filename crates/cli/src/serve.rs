//! `sluice serve [MODEL]`: serves a model over HTTP.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use sluice_engine::text::ChatTemplate;
use sluice_engine::{ModelSource, Options, source};
use sluice_server::{Bound, Offer, Server, Settings};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::access_args::AccessArgs;
use crate::connection_args::ConnectionArgs;
use crate::engine_args::{EngineArgs, model_or_demo};
use crate::prompt_cache_args::PromptCacheArgs;
use crate::{facts, hub, interrupt, load, terminal};

#[derive(Args)]
pub struct ServeArgs {
    /// The model's folder (default: the demo model). With several, one is in memory at a time: the first at the start, another when a request names it
    #[arg(value_name = "MODEL")]
    folders: Vec<PathBuf>,
    /// The model's folder
    #[arg(short, long, value_name = "MODEL", conflicts_with = "folders")]
    model: Option<PathBuf>,
    /// Serve every model in this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["folders", "model"])]
    models: Option<PathBuf>,
    /// Unload a model after this many seconds without a request, and reload it for the next one (default: never)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    idle_unload: Option<u64>,
    /// The address to listen on; 0.0.0.0 for all addresses of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Listen on this Unix socket instead of a port
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port"])]
    unix_socket: Option<PathBuf>,
    /// The model's name in requests and answers (default: its folder's name)
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Requests computed at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    parallel: u16,
    /// Recurrent states kept for later prompts, if the model has any: each prompt needs two or three; at most a sixteenth of the memory
    #[arg(long, value_name = "N", default_value_t = 128)]
    snapshots: usize,
    /// Seconds after which an unfinished request is ended with an error (default: no limit)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    request_timeout: Option<u64>,
    /// Do not log a line for each finished request; the line never has any text of the prompt or the answer
    #[arg(long)]
    no_request_log: bool,
    /// Stop when standard input ends: for whoever starts a server and must not leave one behind
    #[arg(long, hide = true)]
    until_input_ends: bool,
    /// Do not share cached prefixes between requests
    #[arg(long)]
    no_prefix_cache: bool,
    #[command(flatten)]
    connections: ConnectionArgs,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    prompt_cache: PromptCacheArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    download: hub::DownloadArgs,
}

fn has_model(folder: &Path) -> bool {
    source::is_model(folder)
}

fn why_no_model(folder: &Path) -> &'static str {
    match folder {
        f if f.is_dir() => "there is no config.json in this folder, and no GGUF file",
        f if f.is_file() => "not a folder, and not a GGUF file",
        _ => "no such folder or file",
    }
}

/// The folders in `folder` that have a model, sorted by name.
fn within(folder: &Path) -> Result<Vec<PathBuf>> {
    let name = || folder.display().to_string();
    let (mut found, mut several) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder).with_context(name)? {
        // Incomplete downloads in Hugging Face's cache are not models.
        let Ok(path) = sluice_hub::followed(entry.with_context(name)?.path()) else { continue };
        // A folder may have several quantisations, in folders of their own too; the hub's names name each.
        let quantisations = hub::quantisations(&path);
        let is_one =
            matches!(&quantisations[..], [one] if one.parent() == Some(&path) && hub::name_of(&path).is_none());
        if quantisations.is_empty() || is_one {
            found.extend(Some(path).filter(|path| has_model(path)));
        } else {
            several.extend(quantisations);
        }
    }
    // The file of a model by itself; a file that is (a part of) another is not listed.
    found.retain(|path| path.is_dir());
    found.extend(source::gguf_files(folder)?);
    found.extend(several);
    ensure!(!found.is_empty(), "{}: no GGUF file in it, and none of the folders in it has a config.json", name());
    found.sort();
    Ok(found)
}

/// A model's name: its folder's, or the model's own in Hugging Face's cache. `.` and the like are resolved.
fn name_of(folder: &Path) -> String {
    if let Some(name) = hub::name_of(folder) {
        return name;
    }
    if let Some(name) = source::gguf_name(folder) {
        return name;
    }
    let real = || folder.canonicalize().ok();
    let name = folder.file_name().map(ToOwned::to_owned).or_else(|| real()?.file_name().map(ToOwned::to_owned));
    name.map_or_else(|| "sluice".to_owned(), |n| n.to_string_lossy().into_owned())
}

impl ServeArgs {
    /// The models' folders, the default first.
    fn folders(&self) -> Result<Vec<PathBuf>> {
        let started = |one: Option<&Path>| hub::started(one, &self.download, &self.engine, &self.prompt_cache);
        let folders = match (&self.models, &self.folders[..]) {
            (Some(folder), _) => within(folder)?,
            (None, []) => vec![started(self.model.as_deref())?],
            (None, [one]) => vec![started(Some(one))?],
            (None, named) => named.iter().map(|f| model_or_demo(Some(f))).collect::<Result<_>>()?,
        };
        // Without this, clients would be the first to learn that a folder is missing.
        let missing = folders.iter().find(|folder| !has_model(folder));
        if let Some(folder) = missing {
            bail!("{}: {}", folder.display(), why_no_model(folder));
        }
        Ok(folders)
    }

    /// The longest context in tokens, if memory allows it.
    fn context(&self, source: &dyn ModelSource, wanted: Option<usize>) -> Result<usize> {
        let config = source.config();
        // An invalid config is reported when the model is loaded.
        let described = sluice_model::describe(config, &sluice_model::Options::default());
        let made_for = || described.map_or_else(|_| config.max_positions(), |model| Ok(model.max_context));
        wanted.map_or_else(made_for, Ok)
    }

    fn offer(&self, source: &dyn ModelSource, options: &Options) -> Result<Offer> {
        let folder = source.path();
        let (own, args, options) = (folder.to_owned(), self.engine.clone(), options.clone());
        Ok(Offer {
            name: self.model_name.clone().unwrap_or_else(|| name_of(folder)),
            context: self.context(source, options.max_context)?,
            style: ChatTemplate::style_of(source)?,
            facts: facts::of(source),
            load: Box::new(move || {
                let loaded = load::model(&own, &args, options.clone())?;
                load::say_notes(&loaded.engine);
                Ok((loaded.engine, loaded.text))
            }),
        })
    }
}

/// Ends when standard input does, or never.
async fn input_ended(is_awaited: bool) {
    if !is_awaited {
        std::future::pending::<()>().await;
    }
    let read = || std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
    let _ = tokio::task::spawn_blocking(read).await;
}

/// Serves until SIGINT or SIGTERM; running requests may then finish. A second signal ends the program at once.
pub fn run(args: ServeArgs) -> Result<()> {
    let folders = args.folders()?;
    ensure!(
        args.model_name.is_none() || folders.len() == 1,
        "--model-name is for one model; here are {}",
        folders.len()
    );
    let limits = args.connections.limits(args.parallel.into());
    let engine = args.engine.answering_options()?;
    let sources = folders.iter().map(|folder| source::open(folder)).collect::<Result<Vec<_>>>()?;
    let contexts = sources.iter().map(|source| args.context(&**source, engine.max_context));
    let context = contexts.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0);
    let options = Options {
        max_sequences: args.parallel.into(),
        snapshots: args.snapshots,
        prefix_cache: !args.no_prefix_cache,
        prompt_cache: args.prompt_cache.options()?,
        caller_memory: sluice_server::memory(args.parallel.into(), &limits, context),
        ..engine
    };
    let offers = sources.iter().map(|source| args.offer(&**source, &options)).collect::<Result<Vec<_>>>()?;
    let names: Vec<String> = offers.iter().map(|offer| offer.name.clone()).collect();
    let twice = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name));
    if let Some((at, name)) = twice {
        bail!("{}: another model is called {name} too", folders[at].display());
    }
    let settings = Settings {
        limits,
        access: args.access.access()?,
        request_timeout: args.request_timeout.map(Duration::from_secs),
        idle_unload: args.idle_unload.map(Duration::from_secs),
        log_requests: !args.no_request_log,
    };
    // Handling an event takes some microseconds. A second thread would be woken for every event, mostly to find it handled. Slow work (templates, tokenizers,
    // grammars) runs on blocking threads.
    let _held = interrupt::hold();
    let runtime = runtime::Builder::new_multi_thread().worker_threads(1).thread_name("http").enable_all().build()?;
    let served = runtime.block_on(async {
        let bound = match &args.unix_socket {
            Some(path) => Bound::unix(path).await?,
            None => Bound::tcp(&args.host, args.port).await?,
        };
        args.access.check(&settings.access, &bound, &args.host)?;
        let address = bound.address()?;
        terminal::say(&format!("{}: listening on {address}", names.join(", ")));
        let on_loaded = |ready: &sluice_server::LoadedModel| {
            terminal::say(&format!("{}: ready, {} tokens of context", ready.name, ready.context));
        };
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let stop = async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                () = input_ended(args.until_input_ends) => {}
            }
            terminal::say("stopping: running requests may finish; press again to stop at once");
            tokio::spawn(async move {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                std::process::exit(130);
            });
        };
        Server::new(bound, settings, offers, on_loaded).run(stop).await.context("serving")
    });
    // Blocking threads may still be busy, but nobody needs their results.
    runtime.shutdown_background();
    hub::leave();
    served
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_models_has_quantisations_in_folders_too() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            "alone.gguf",
            "one/one-Q8_0.gguf",
            "two/m-Q4_K_M.gguf",
            "two/m-Q8_0.gguf",
            "two/config.json",
            "parts/UD-Q2_K_XL/m-00001-of-00002.gguf",
            "parts/UD-Q2_K_XL/m-00002-of-00002.gguf",
            "parts/mmproj-F16.gguf",
            "plain/config.json",
            "plain/model.safetensors",
            "notes/readme.txt",
        ];
        for file in files {
            fs::create_dir_all(dir.path().join(file).parent().unwrap()).unwrap();
            fs::write(dir.path().join(file), "GGUF").unwrap();
        }
        let found = within(dir.path()).unwrap();
        let names: Vec<&str> =
            found.iter().map(|path| path.strip_prefix(dir.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "alone.gguf",
                "one",
                "parts/UD-Q2_K_XL/m-00001-of-00002.gguf",
                "plain",
                "two/m-Q4_K_M.gguf",
                "two/m-Q8_0.gguf",
            ]
        );
    }
}
