//! Flags of `bench decode`, for single and batched decoding.

use clap::Args;

use super::subject::{ModelArgs, Subject};
use crate::engine_args::activations_name;

#[derive(Args, Debug)]
pub struct DecodeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of context before the measurement, one number or several
    #[arg(long, value_delimiter = ',', default_value = "128", value_name = "N,..")]
    pub context: Vec<usize>,
    /// Tokens of each measurement
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub tokens: usize,
    /// Measure steps with this many sequences, one token each; one number or several; sampled at temperature 1
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub sequences: Vec<usize>,
    /// Tokens that the contexts of these sequences share at their start
    #[arg(long, default_value_t = 0, value_name = "N", requires = "sequences")]
    pub shared: usize,
    /// With --sequences: choose among the K most likely tokens; 0: among all
    #[arg(long, default_value_t = 0, value_name = "K", requires = "sequences")]
    pub top_k: u32,
    /// With --sequences: choose among the most likely tokens whose probabilities add up to P
    #[arg(long, default_value_t = 1.0, value_name = "P", requires = "sequences")]
    pub top_p: f32,
    /// Before measuring, read streamed experts into all the memory there is for them
    #[arg(long)]
    pub fill_experts: bool,
    /// With --sequences: also print where the time of the last measurement went
    #[arg(long, requires = "sequences")]
    pub phases: bool,
}

/// Prints the line above a table: the model, and how it is computed.
pub fn print_subject(subject: &Subject) {
    let options = subject.engine.options();
    println!(
        "{}: {} threads, {}, activations {}",
        subject.name,
        options.threads,
        options.isa,
        activations_name(options.activations)
    );
}
