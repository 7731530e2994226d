//! `sluice pull NAME`: fetches a model, or what is missing of it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use sluice_hub::{Client, Extent, ModelName, Settings};

use super::screen::{self, Screen, Voice, time};
use crate::terminal::note;
use crate::units;

const EXAMPLES: &str = "\
Examples:
  sluice pull Qwen/Qwen3-0.6B                   safetensors, with config and tokenizer
  sluice pull unsloth/Qwen3-8B-GGUF             one quantisation: Q4_K_M, or else the first
  sluice pull unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL  another one
  sluice pull org/name@v1.0                     a tag, branch or commit; or --revision v1.0
  sluice pull https://huggingface.co/org/name/resolve/main/name-Q8_0.gguf

HF_ENDPOINT names another hub, HF_TOKEN a token, HF_HUB_CACHE another cache; HF_HUB_OFFLINE=1 asks nobody.";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct PullArgs {
    /// The model's name: ORG/NAME, ORG/NAME:QUANT, or an URL
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// A branch, a tag or a commit [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Connections at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    connections: u8,
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Print a line of JSON for each event: planned, progress, note, done
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
}

/// Fetches models. Ctrl-C exits with 130; what has arrived stays.
pub fn run(args: PullArgs) -> Result<()> {
    let settings = Settings { connections: args.connections.into(), ..Settings::from_env()? };
    let host = settings.host().to_owned();
    let voice = match (args.quiet, args.json) {
        (true, _) => Voice::Quiet,
        (_, true) => Voice::Json,
        _ => Voice::People,
    };
    let names = args.names.iter().map(|text| {
        let mut name = ModelName::parse(text, &host)?;
        if let Some(revision) = &args.revision {
            ensure!(name.revision.is_none(), "{text} names a revision itself, and --revision another");
            name =
                ModelName { revision: ModelName::parse(&format!("{}@{revision}", name.repo), &host)?.revision, ..name };
        }
        Ok(name)
    });
    let names: Vec<ModelName> = names.collect::<Result<_>>()?;
    let client = Arc::new(Client::new(settings));
    for name in &names {
        let begun = Instant::now();
        let screen = Screen::new(name, &host, voice, "fetching");
        let pulled = sluice_hub::pull(&client, name, Extent::Whole, &screen);
        let model = screen.ended(pulled)?;
        let seconds = begun.elapsed().as_secs_f64();
        match voice {
            Voice::Quiet => {}
            Voice::Json => screen::say(&screen::done(&model, seconds)),
            Voice::People if model.fetched == 0 => {
                note(&format!(
                    "{}: all {} are there: {}",
                    model.name,
                    units::bytes(model.bytes()),
                    model.path.display()
                ));
            }
            Voice::People => {
                let rate = units::bytes((model.fetched as f64 / seconds.max(0.001)) as u64);
                note(&format!(
                    "{}: fetched {} in {} ({rate}/s), checked: {}",
                    model.name,
                    units::bytes(model.fetched),
                    time(seconds),
                    model.path.display()
                ));
            }
        }
    }
    Ok(())
}
