//! Flags for the model and the engine, which several subcommands share.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum, value_parser};
use sluice_cpu::default_threads;
use sluice_engine::{
    Activations, AttentionMode, DraftOptions, DrafterChoice, ExpertOptions, HotExperts, KvType, LoadMode, LoadOptions,
    Lookahead, Numa, Options, Placement, Policy, TablePlacement, Unified,
};
use sluice_store::{MAX_SETTINGS, read_small};

use crate::{default_model, folders, hub};
use sluice_front::DeviceArg;
use sluice_front::machine;

/// What the command line names, or a setting, or else the demo model's folder. A name of the hub's is fetched if it is not in the cache.
pub fn model_or_demo(named: Option<&Path>) -> Result<PathBuf> {
    let Some(named) = named.or(default_model::configured()) else { return default_model::demo_folder() };
    hub::resolved(named)
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Where to compute: the CPU, an NVIDIA GPU by its number (cuda: the first), or several that share the layers in this order (cuda:0,1). auto takes the first usable
    /// GPU, and more if they are needed to hold everything but the experts, or else the CPU; it reports its choice. Changes speed and memory, never the result
    #[arg(long, default_value_t = DeviceArg::host(), value_name = "auto|cpu|cuda[:N[,N]]")]
    device: DeviceArg,
    /// Number of threads that compute [default: one for each core that this process may use]
    #[arg(short, long, value_name = "N", value_parser = value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// For machines with several memory nodes. spread: distribute memory over all nodes and bind threads to cores. replicate: the same, with a copy of the weights on each
    /// node if memory allows it. isolate: keep threads and memory on one node. What the page cache already holds stays where it is. Changes speed, never the
    /// result
    #[arg(long, value_enum, default_value = "off", value_name = "HOW")]
    numa: NumaArg,
    /// Precision of activations in matrix products: f32 is exact, bf16 and int8 are faster; int11 is near f32, and on a GPU the fastest for prompts with dense 4-bit weights [default: int8]
    #[arg(long, value_enum, value_name = "TYPE")]
    activations: Option<ActivationsArg>,
    /// Element type of cached keys and values. auto: f32 with f32 activations, otherwise the checkpoint's own. int8 takes half the memory (one scale per token and
    /// head); int16 is for --attention int16, and implies it. LOSSY: this changes the model's output
    #[arg(long, value_enum, default_value = "auto", value_name = "TYPE")]
    kv_type: KvTypeArg,
    /// Arithmetic of attention: f32 is exact; int8 multiplies integers, with keys and values of eight bits, which is much faster for long prompts; int16 does so with
    /// sixteen bits, nearer to f32 than bf16 keys and values are. LOSSY: this changes the model's output
    #[arg(long, value_enum, default_value = "f32", value_name = "MODE")]
    attention: AttentionArg,
    /// Longest context in tokens; 0: the model's own limit, which is the default
    #[arg(short = 'c', long, visible_alias = "ctx-size", value_name = "TOKENS", value_parser = value_parser!(u32).range(0..=1 << 24))]
    max_context: Option<u32>,
    /// Prompt tokens computed in one step; changes speed and memory, never the result
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=1 << 16))]
    chunk: Option<u32>,
    /// How to load weights: mapped, or read through the page cache or past it. auto chooses for each file; --stats shows why
    #[arg(long, value_enum, default_value = "auto", value_name = "WAY")]
    load: LoadArg,
    /// Memory for keys and values. dynamic: committed as needed. reserve: resident from the start for TOKENS tokens (by default the whole context), and committed as
    /// needed beyond that
    #[arg(long, default_value = "dynamic", value_name = "dynamic|reserve[=TOKENS]", value_parser = kv_arg)]
    kv: KvArg,
    /// Upper limit in bytes, such as 8G or 900M, for the program, weights, keys and values, states, experts and scratch together. If the model needs more, it is refused before anything is read
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg)]
    memory_budget: Option<u64>,
    /// GPU memory in bytes (per GPU) for weights, keys and values, states, scratch and experts. Experts that do not fit stay in host memory or on disk [default: what is
    /// free, less 512 MiB]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg)]
    gpu_memory: Option<u64>,
    /// Whether the GPU reads weights and experts where the host has them, instead of copies in memory of its own. Then --memory-budget is for both. auto: if it has no
    /// memory of its own. Changes speed and memory, never the result
    #[arg(long, value_enum, default_value = "auto", value_name = "WHEN", hide_short_help = true)]
    unified: UnifiedArg,
    /// Host memory in bytes for keys, values and states of prompts that no longer fit on the GPU. They are copied back when a later prompt begins the same way. Taken as
    /// needed; never changes the result [default: none]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg, hide_short_help = true)]
    kv_spill: Option<u64>,
    /// Where the experts of a mixture are kept: mapped like other weights, or on disk and read when needed, into memory slots (slots) or through the page cache
    /// (pagecache). auto streams what does not fit in memory. Changes speed and memory, never the result
    #[arg(long, value_enum, default_value = "auto", value_name = "WHERE")]
    experts: ExpertsArg,
    /// Memory for experts that are on disk, within --memory-budget and the memory control group [default: what is left]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg)]
    expert_budget: Option<u64>,
    /// Where tables of which a token uses one row are, such as Gemma 4's embeddings for each layer: in memory, or on disk, where rows are read while the first layer is
    /// computed. auto leaves large ones on disk, and on a GPU those that would take more than a quarter of its memory. Changes speed and memory, never the result
    #[arg(long, value_enum, default_value = "auto", value_name = "WHERE")]
    tables: TablesArg,
    /// Memory for rows of tables that are on disk [default: 128 MB, or less if memory is limited]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg, hide_short_help = true)]
    table_budget: Option<u64>,
    /// Predict the next layer's experts and read them while the disk is idle; auto does so while it helps. Never changes the result
    #[arg(long, value_enum, default_value = "auto", value_name = "WHEN")]
    lookahead: LookaheadArg,
    /// Experts to keep in memory: a file of `sluice eval routing --pin-out`, hottest first; at most half of the memory for experts
    #[arg(long, value_name = "FILE")]
    pin: Option<PathBuf>,
    /// Which expert to evict when another needs its slot
    #[arg(long, value_name = "POLICY", value_parser = policy_arg, hide_short_help = true)]
    expert_policy: Option<Policy>,
    /// Most bytes that one read of an expert may request
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg, hide_short_help = true)]
    expert_request: Option<u64>,
    /// Experts that look-ahead predicts for a layer
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1024), hide_short_help = true)]
    lookahead_experts: Option<u32>,
    /// Reads of experts in flight at once
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1024), hide_short_help = true)]
    expert_depth: Option<u32>,
    /// Guess the next tokens and compute several in one step, where measured times say that it pays. ngram: by looking up in the prompt and the answer what came before; mtp: by
    /// the checkpoint's own head that predicts one token more; auto: the best that there is; MODEL: auto, with a smaller model of the same vocabulary. Never changes the result [default: ngram, where there is memory to spare; to measure: off]
    #[arg(long, value_name = "off|auto|ngram|mtp|MODEL", value_parser = draft_arg)]
    draft: Option<DraftArg>,
    /// A smaller model of the same vocabulary that guesses: a name or a path. It gets a quarter of the memory at most
    #[arg(long, value_name = "NAME|PATH")]
    draft_model: Option<PathBuf>,
    /// Tokens to guess at a time, at most
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = value_parser!(u32).range(1..=32), hide_short_help = true)]
    draft_tokens: u32,
    /// Report how each weight file is read, and why
    #[arg(short, long)]
    verbose: bool,
    /// Experts per token, instead of the model's own number. LOSSY: this changes the model's output
    #[arg(long, value_name = "K", value_parser = value_parser!(u32).range(1..=1 << 16))]
    experts_per_token: Option<u32>,
}

/// The aliases are llama.cpp's names, and other common ones.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum NumaArg {
    Off,
    #[value(alias = "distribute")]
    Spread,
    #[value(alias = "bind")]
    Isolate,
    #[value(alias = "mirror")]
    Replicate,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum ActivationsArg {
    F32,
    Bf16,
    Int8,
    Int11,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum LoadArg {
    Auto,
    Mmap,
    Pread,
    Direct,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum ExpertsArg {
    Auto,
    Mapped,
    Pagecache,
    Slots,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum TablesArg {
    Auto,
    Memory,
    Disk,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum LookaheadArg {
    On,
    Off,
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum UnifiedArg {
    On,
    Off,
    Auto,
}

#[derive(Clone, Debug, PartialEq)]
enum DraftArg {
    Off,
    Auto,
    Ngram,
    Mtp,
    Model(PathBuf),
}

fn draft_arg(text: &str) -> Result<DraftArg, String> {
    Ok(match text {
        "off" => DraftArg::Off,
        "auto" => DraftArg::Auto,
        "ngram" => DraftArg::Ngram,
        "mtp" => DraftArg::Mtp,
        "" => return Err("expected off, auto, ngram, mtp or a model".into()),
        model => DraftArg::Model(model.into()),
    })
}

fn policy_arg(name: &str) -> Result<Policy, String> {
    let names = || Policy::ALL.map(Policy::name).join(", ");
    Policy::ALL.into_iter().find(|p| p.name() == name).ok_or_else(|| format!("expected one of: {}", names()))
}

/// The experts in a file of `eval routing --pin-out`, hottest first.
fn read_pins(path: &Path) -> Result<Vec<(usize, usize)>> {
    let name = || path.display().to_string();
    let pins = HotExperts::parse(&read_small(path, MAX_SETTINGS)?).with_context(name)?;
    Ok(pins.hottest.into_iter().map(|(layer, expert, _)| (layer, expert)).collect())
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum KvTypeArg {
    Auto,
    F32,
    Bf16,
    F16,
    Int8,
    Int16,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum AttentionArg {
    F32,
    Int8,
    Int16,
}

/// Tokens to reserve memory for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct KvArg(Option<usize>);

fn kv_arg(text: &str) -> Result<KvArg, String> {
    match text.split_once('=') {
        None if text == "dynamic" => Ok(KvArg(None)),
        None if text == "reserve" => Ok(KvArg(Some(usize::MAX))),
        Some(("reserve", tokens)) => match tokens.parse::<u32>() {
            Ok(n) if (1..=1 << 24).contains(&n) => Ok(KvArg(Some(n as usize))),
            _ => Err("TOKENS must be a number from 1 to 16777216".into()),
        },
        _ => Err("expected dynamic, reserve or reserve=TOKENS".into()),
    }
}

/// Parses a number of bytes: `123456`, or with a decimal (k, M, G, T) or binary (Ki, Mi, Gi, Ti) unit, and an optional B.
pub fn bytes_arg(text: &str) -> Result<u64, String> {
    let wrong = || "expected a number of bytes, such as 8G, 7.5GB or 900Mi".to_owned();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim().to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let scale = match unit {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "g" => 1e9,
        "t" => 1e12,
        "ki" => 1024.0,
        "mi" => 1024f64.powi(2),
        "gi" => 1024f64.powi(3),
        "ti" => 1024f64.powi(4),
        _ => return Err(wrong()),
    };
    let bytes = number * scale;
    if bytes >= 1.0 && bytes < 2f64.powi(63) { Ok(bytes as u64) } else { Err(wrong()) }
}

impl EngineArgs {
    /// Whether to report how weights are read.
    pub fn verbose(&self) -> bool {
        self.verbose
    }

    /// Where to compute.
    pub fn device(&self) -> &DeviceArg {
        &self.device
    }

    /// The engine's options: this machine's defaults, overridden by flags.
    ///
    /// # Errors
    /// When `SLUICE_ISA` names an instruction set that this machine lacks.
    pub fn options(&self) -> Result<Options> {
        let size = |n: u32| n as usize;
        let defaults = Options::for_this_machine()?;
        let numa = match self.numa {
            NumaArg::Off => Numa::Off,
            NumaArg::Spread => Numa::Spread,
            NumaArg::Isolate => Numa::Isolate,
            NumaArg::Replicate => Numa::Replicate,
        };
        Ok(Options {
            threads: self.threads.map_or_else(|| default_threads(numa), size),
            numa,
            activations: match self.activations {
                None => defaults.activations,
                Some(ActivationsArg::F32) => Activations::F32,
                Some(ActivationsArg::Bf16) => Activations::Bf16,
                Some(ActivationsArg::Int8) => Activations::Int8,
                Some(ActivationsArg::Int11) => Activations::Int11,
            },
            kv_type: match self.kv_type {
                KvTypeArg::Auto => None,
                KvTypeArg::F32 => Some(KvType::F32),
                KvTypeArg::Bf16 => Some(KvType::Bf16),
                KvTypeArg::F16 => Some(KvType::F16),
                KvTypeArg::Int8 => Some(KvType::Int8),
                KvTypeArg::Int16 => Some(KvType::Int16),
            },
            attention: match self.attention {
                AttentionArg::F32 => AttentionMode::F32,
                AttentionArg::Int8 => AttentionMode::Int8,
                AttentionArg::Int16 => AttentionMode::Int16,
            },
            max_context: self.max_context.filter(|n| *n > 0).map(size),
            chunk: self.chunk.map(size),
            experts_per_token: self.experts_per_token.map(size),
            load: self.load(),
            kv_reserve: self.kv.0,
            memory_budget: self.memory_budget,
            device_memory: self.gpu_memory,
            unified: match self.unified {
                UnifiedArg::On => Unified::On,
                UnifiedArg::Off => Unified::Off,
                UnifiedArg::Auto => Unified::Auto,
            },
            kv_spill: self.kv_spill.unwrap_or(0),
            admitted: Some(machine::held),
            experts: match self.experts {
                ExpertsArg::Auto => Placement::Auto,
                ExpertsArg::Mapped => Placement::Mapped,
                ExpertsArg::Pagecache => Placement::PageCache,
                ExpertsArg::Slots => Placement::Slots,
            },
            tables: match self.tables {
                TablesArg::Auto => TablePlacement::Auto,
                TablesArg::Memory => TablePlacement::Memory,
                TablesArg::Disk => TablePlacement::Disk,
            },
            table_budget: self.table_budget,
            expert_budget: self.expert_budget,
            expert_options: self.expert_options()?,
            lookahead: match self.lookahead {
                LookaheadArg::On => Lookahead::On,
                LookaheadArg::Off => Lookahead::Off,
                LookaheadArg::Auto => Lookahead::Auto,
            },
            draft_model: self.draft_model()?,
            drafts: DraftOptions {
                drafter: match &self.draft {
                    None if self.draft_model.is_some() => DrafterChoice::Auto,
                    None | Some(DraftArg::Off) => DrafterChoice::Off,
                    Some(DraftArg::Auto | DraftArg::Model(_)) => DrafterChoice::Auto,
                    Some(DraftArg::Ngram) => DrafterChoice::Ngram,
                    Some(DraftArg::Mtp) => DrafterChoice::Mtp,
                },
                tokens: size(self.draft_tokens),
                ..defaults.drafts
            },
            ..defaults
        })
    }

    /// [`EngineArgs::options`] of a command that answers: it drafts by look-up where there is memory to spare, unless it is told otherwise. Measurements do not.
    pub fn answering_options(&self) -> Result<Options> {
        let mut options = self.options()?;
        if self.draft.is_none() && self.draft_model.is_none() {
            options.drafts.drafter = DrafterChoice::Ngram;
            options.drafts.only_spare_memory = true;
        }
        Ok(options)
    }

    /// The model that drafts, if one is to.
    fn draft_model(&self) -> Result<Option<PathBuf>> {
        let named = match (&self.draft, &self.draft_model) {
            (Some(DraftArg::Off | DraftArg::Ngram | DraftArg::Mtp), _) => None,
            (Some(DraftArg::Model(model)), None) => Some(model),
            (Some(DraftArg::Model(_)), Some(_)) => bail!("--draft names a model, and so does --draft-model"),
            (_, model) => model.as_ref(),
        };
        named.map(|model| hub::resolved(model)).transpose()
    }

    fn expert_options(&self) -> Result<ExpertOptions> {
        let defaults = ExpertOptions::default();
        Ok(ExpertOptions {
            policy: self.expert_policy.unwrap_or(defaults.policy),
            pinned: self.pin.as_deref().map(read_pins).transpose()?.unwrap_or_default(),
            request: self.expert_request.map_or(defaults.request, |n| n as usize),
            ahead: self.lookahead_experts.map_or(defaults.ahead, |n| n as usize),
            depth: self.expert_depth.map(|n| n as usize).or(defaults.depth),
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
            copy_budget: machine::room().into_iter().chain(self.memory_budget).min(),
            disk_speeds_file: folders::disk_speeds(),
            ..LoadOptions::default()
        }
    }
}

/// The flag's name for it.
pub fn activations_name(activations: Activations) -> &'static str {
    match activations {
        Activations::F32 => "f32",
        Activations::Bf16 => "bf16",
        Activations::Int8 => "int8",
        Activations::Int11 => "int11",
    }
}

/// The flag's name for it; `auto` if the engine chose.
pub fn kv_type_name(kv_type: Option<KvType>) -> &'static str {
    match kv_type {
        None => "auto",
        Some(KvType::F32) => "f32",
        Some(KvType::Bf16) => "bf16",
        Some(KvType::F16) => "f16",
        Some(KvType::Int8) => "int8",
        Some(KvType::Int16) => "int16",
    }
}

/// The flag's name for it.
pub fn attention_name(attention: AttentionMode) -> &'static str {
    match attention {
        AttentionMode::F32 => "f32",
        AttentionMode::Int8 => "int8",
        AttentionMode::Int16 => "int16",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        for (text, bytes) in
            [("123", 123), ("8G", 8_000_000_000), ("7.5gb", 7_500_000_000), ("2Ki", 2048), ("1MiB", 1 << 20)]
        {
            assert_eq!(bytes_arg(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "-1", "0", "8X", "1e9", "nan", "99999999999T"] {
            assert!(bytes_arg(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_reservation_may_have_a_size() {
        assert_eq!(kv_arg("dynamic"), Ok(KvArg(None)));
        assert_eq!(kv_arg("reserve"), Ok(KvArg(Some(usize::MAX))));
        assert_eq!(kv_arg("reserve=2048"), Ok(KvArg(Some(2048))));
        for text in ["", "reserve=", "reserve=0", "dynamic=3", "static"] {
            assert!(kv_arg(text).is_err(), "{text}");
        }
    }
}
