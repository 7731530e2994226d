//! `sluice eval`: figures to compare with other implementations.

mod logits;
mod ppl;
mod routing;
mod text;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Perplexity of a text, in windows that do not overlap.
    Ppl(ppl::PplArgs),
    /// Logits after given token ids; needs no tokenizer.
    Logits(logits::LogitsArgs),
    /// Which experts the tokens of a text want: how they repeat, and what each policy of caching them makes of it.
    Routing(routing::RoutingArgs),
}

pub fn run(args: EvalArgs) -> Result<()> {
    match args.what {
        What::Ppl(args) => ppl::run(args),
        What::Logits(args) => logits::run(args),
        What::Routing(args) => routing::run(args),
    }
}
