//! Which model, and how its engine is set up: flags that several subcommands share.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum, value_parser};
use sluice_engine::{Activations, KvType, LoadMode, LoadOptions, Options};

use crate::{demo, folders, machine};

/// The folder that was named, or else the demo model's.
pub fn model_or_demo(named: Option<&Path>) -> Result<PathBuf> {
    let Some(named) = named else { return demo::folder() };
    ensure!(!named.as_os_str().is_empty(), "the model's name is empty");
    Ok(named.to_owned())
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Threads that compute [default: all cores]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Precision of activations where they meet weights: f32 is exact, bf16 and int8 are faster [default: int8]
    #[arg(long, value_enum, value_name = "TYPE")]
    activations: Option<ActivationsArg>,
    /// Element type of cached keys and values; auto: f32 with f32 activations, else bf16
    #[arg(long, value_enum, default_value = "auto", value_name = "TYPE")]
    kv_type: KvTypeArg,
    /// Tokens that a conversation may have [default: what the model was made for]
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=1 << 24))]
    max_context: Option<u32>,
    /// Tokens of a prompt that are computed at once; changes speed and memory, never the result
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=1 << 16))]
    chunk: Option<u32>,
    /// How weights come into memory: mapped, read through the page cache or past it; auto chooses for each file and says why with --stats
    #[arg(long, value_enum, default_value = "auto", value_name = "WAY")]
    load: LoadArg,
    /// Experts per token instead of the model's own number. LOSSY: this changes the model's output
    #[arg(long, value_name = "K", value_parser = value_parser!(u32).range(1..=1 << 16))]
    experts_per_token: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum ActivationsArg {
    F32,
    Bf16,
    Int8,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum LoadArg {
    Auto,
    Mmap,
    Pread,
    Direct,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum KvTypeArg {
    Auto,
    F32,
    Bf16,
    F16,
}

impl EngineArgs {
    /// The engine's options: this machine's defaults, and what the flags say.
    ///
    /// # Errors
    /// When `SLUICE_ISA` asks for what this machine lacks.
    pub fn options(&self) -> Result<Options> {
        let size = |n: u32| n as usize;
        let defaults = Options::for_this_machine()?;
        Ok(Options {
            threads: self.threads.map_or(defaults.threads, size),
            activations: match self.activations {
                None => defaults.activations,
                Some(ActivationsArg::F32) => Activations::F32,
                Some(ActivationsArg::Bf16) => Activations::Bf16,
                Some(ActivationsArg::Int8) => Activations::Int8,
            },
            kv_type: match self.kv_type {
                KvTypeArg::Auto => None,
                KvTypeArg::F32 => Some(KvType::F32),
                KvTypeArg::Bf16 => Some(KvType::Bf16),
                KvTypeArg::F16 => Some(KvType::F16),
            },
            max_context: self.max_context.map(size),
            chunk: self.chunk.map_or(defaults.chunk, size),
            experts_per_token: self.experts_per_token.map(size),
            load: self.load(),
            ..defaults
        })
    }

    fn load(&self) -> LoadOptions {
        LoadOptions {
            mode: match self.load {
                LoadArg::Auto => LoadMode::Auto,
                LoadArg::Mmap => LoadMode::Mmap,
                LoadArg::Pread => LoadMode::Pread,
                LoadArg::Direct => LoadMode::Direct,
            },
            room: machine::room(),
            memory_of_disks: folders::disk_speeds(),
            ..LoadOptions::default()
        }
    }
}

/// The name under which a flag takes it.
pub fn activations_name(activations: Activations) -> &'static str {
    match activations {
        Activations::F32 => "f32",
        Activations::Bf16 => "bf16",
        Activations::Int8 => "int8",
    }
}

/// As the flag names it; `auto` where the engine chose.
pub fn kv_type_name(kv_type: Option<KvType>) -> &'static str {
    match kv_type {
        None => "auto",
        Some(KvType::F32) => "f32",
        Some(KvType::Bf16) => "bf16",
        Some(KvType::F16) => "f16",
    }
}
