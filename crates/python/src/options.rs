//! How an engine is set up: the command line's options under the names of its flags, read from a dictionary.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sluice_cpu::default_threads;
use sluice_engine::{
    Activations, AttentionMode, DrafterChoice, KvType, LoadMode, LoadOptions, Lookahead, Numa, Options, Placement,
    PromptCacheOptions, Unified,
};
use sluice_front::{DeviceArg, machine};

use crate::errors::{self, RequestError};

/// Requests that may wait. The caller's own memory limits them.
const QUEUE: usize = 1 << 16;
/// Sequences that are computed at once, if nobody says.
const PARALLEL: usize = 8;
/// Recurrent states that are kept for later prompts.
const SNAPSHOTS: usize = 128;
/// Prompts of fewer tokens are not kept on disk.
const MIN_TOKENS: usize = 256;

/// How an engine is opened.
#[derive(Clone)]
pub struct Setup {
    pub device: DeviceArg,
    pub engine: Options,
    /// The name in requests and answers; `None`: that of its folder.
    pub name: Option<String>,
    /// Requests that may wait.
    pub queue: usize,
}

/// Fields of a dictionary. What is `None` is not there.
pub struct Fields<'a, 'py>(pub &'a Bound<'py, PyDict>);

impl<'py> Fields<'_, 'py> {
    /// A field, if it is there.
    ///
    /// # Errors
    /// A value of another type; the message names the field.
    pub fn get<T: for<'a> FromPyObject<'a, 'py>>(&self, name: &str) -> PyResult<Option<T>> {
        let Some(value) = self.0.get_item(name)?.filter(|value| !value.is_none()) else { return Ok(None) };
        let read = value.extract::<T>();
        let wrong = |_| RequestError::new_err(format!("{name}: {} is no value for it", shown(&value)));
        read.map(Some).map_err(|e| wrong(e.into()))
    }

    fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> PyResult<Option<T>> {
        let Some(text) = self.get::<String>(name)? else { return Ok(None) };
        let found = choices.iter().find(|(choice, _)| *choice == text).map(|(_, value)| *value);
        let all = || choices.iter().map(|(choice, _)| *choice).collect::<Vec<_>>().join(", ");
        found.map(Some).ok_or_else(|| errors::argument(name, &format!("one of {}", all()), format!("{text:?}")))
    }

    /// Checks that there are no others.
    ///
    /// # Errors
    /// The first field that is not one of these.
    pub fn known(&self, names: &[&str]) -> PyResult<()> {
        for name in self.0.keys() {
            let name: String = name.extract()?;
            if !names.contains(&name.as_str()) {
                return Err(RequestError::new_err(format!("{name} is no option; there are {}", names.join(", "))));
            }
        }
        Ok(())
    }
}

fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    text.chars().take(80).collect()
}

const NAMES: [&str; 33] = [
    "device",
    "threads",
    "numa",
    "activations",
    "kv_type",
    "attention",
    "max_context",
    "chunk",
    "experts_per_token",
    "load",
    "kv_reserve",
    "memory_budget",
    "gpu_memory",
    "unified",
    "kv_spill",
    "experts",
    "expert_budget",
    "lookahead",
    "draft",
    "draft_tokens",
    "parallel",
    "snapshots",
    "prefix_cache",
    "prompt_cache",
    "prompt_cache_bytes",
    "prompt_cache_daily_bytes",
    "prompt_cache_min_tokens",
    "prompt_cache_key_file",
    "prompt_cache_store",
    "model_name",
    "queue",
    "disk_speeds_file",
    "sums_file",
];

impl Setup {
    /// Reads a dictionary.
    ///
    /// # Errors
    /// A field that is not known, or a value that is none; the message names it.
    pub fn read(dict: &Bound<'_, PyDict>) -> PyResult<Setup> {
        let fields = Fields(dict);
        fields.known(&NAMES)?;
        let defaults = Options::for_this_machine().map_err(|e| errors::request(&e))?;
        let device = fields.get::<String>("device")?;
        let read = |text: String| {
            text.parse()
                .map_err(|e: String| errors::argument("device", e.trim_start_matches("expected "), format!("{text:?}")))
        };
        let device = device.map(read).transpose()?.unwrap_or_else(DeviceArg::host);
        let numa = fields.choice(
            "numa",
            &[("off", Numa::Off), ("spread", Numa::Spread), ("isolate", Numa::Isolate), ("replicate", Numa::Replicate)],
        )?;
        let numa = numa.unwrap_or(Numa::Off);
        let threads = fields.get::<usize>("threads")?;
        if let Some(wrong) = threads.filter(|n| !(1..=1024).contains(n)) {
            return Err(errors::argument("threads", "between 1 and 1024", wrong));
        }
        let mut drafts = defaults.drafts;
        let drafters = [("off", DrafterChoice::Off), ("auto", DrafterChoice::Auto), ("ngram", DrafterChoice::Ngram)];
        let drafter = fields.choice("draft", &drafters)?;
        (drafts.drafter, drafts.only_spare_memory) = (drafter.unwrap_or(DrafterChoice::Ngram), drafter.is_none());
        drafts.tokens = fields.get("draft_tokens")?.unwrap_or(drafts.tokens);
        let memory_budget = fields.get("memory_budget")?;
        let load = LoadOptions {
            mode: fields.choice("load", &LOADS)?.unwrap_or_default(),
            copy_budget: machine::room().into_iter().chain(memory_budget).min(),
            disk_speeds_file: fields.get("disk_speeds_file")?,
            ..LoadOptions::default()
        };
        let engine = Options {
            threads: threads.unwrap_or_else(|| default_threads(numa)),
            numa,
            activations: fields.choice("activations", &ACTIVATIONS)?.unwrap_or(defaults.activations),
            kv_type: fields.choice("kv_type", &KV_TYPES)?.flatten(),
            attention: fields.choice("attention", &ATTENTION)?.unwrap_or(defaults.attention),
            max_context: fields.get("max_context")?.filter(|n| *n > 0),
            max_sequences: fields.get("parallel")?.unwrap_or(PARALLEL),
            chunk: fields.get("chunk")?,
            prefix_cache: fields.get("prefix_cache")?.unwrap_or(true),
            snapshots: fields.get("snapshots")?.unwrap_or(SNAPSHOTS),
            prompt_cache: prompt_cache(&fields)?,
            kv_spill: fields.get("kv_spill")?.unwrap_or(0),
            experts_per_token: fields.get("experts_per_token")?,
            drafts,
            load,
            kv_reserve: fields.get("kv_reserve")?,
            memory_budget,
            device_memory: fields.get("gpu_memory")?,
            unified: fields.choice("unified", &UNIFIED)?.unwrap_or(defaults.unified),
            admitted: Some(machine::held),
            experts: fields.choice("experts", &EXPERTS)?.unwrap_or_default(),
            expert_budget: fields.get("expert_budget")?,
            lookahead: fields.choice("lookahead", &LOOKAHEAD)?.unwrap_or(defaults.lookahead),
            ..defaults
        };
        if !(1..=1024).contains(&engine.max_sequences) {
            return Err(errors::argument("parallel", "between 1 and 1024", engine.max_sequences));
        }
        if device.is_host() && engine.device_memory.is_some() {
            return Err(RequestError::new_err(
                "gpu_memory is of a GPU's memory, and none was asked for: device cuda, or auto",
            ));
        }
        Ok(Setup { device, engine, name: fields.get("model_name")?, queue: fields.get("queue")?.unwrap_or(QUEUE) })
    }
}

/// The prompt cache on disk, if a folder is named for it.
fn prompt_cache(fields: &Fields) -> PyResult<Option<PromptCacheOptions>> {
    let Some(folder) = fields.get::<PathBuf>("prompt_cache")? else { return Ok(None) };
    let store: Option<String> = fields.get("prompt_cache_store")?;
    let store = store.map(|url| sluice_objects::open(&url)).transpose();
    let store = store.map_err(|e| RequestError::new_err(format!("prompt_cache_store: {e:#}")))?;
    Ok(Some(PromptCacheOptions {
        folder,
        quota: fields.get("prompt_cache_bytes")?,
        daily_limit: fields.get("prompt_cache_daily_bytes")?,
        min_tokens: fields.get("prompt_cache_min_tokens")?.unwrap_or(MIN_TOKENS),
        key_file: fields.get("prompt_cache_key_file")?,
        sums_file: fields.get("sums_file")?,
        sum_at_start: PromptCacheOptions::SUM_AT_START,
        store,
    }))
}

/// Readers by name.
pub const LOADS: [(&str, LoadMode); 4] =
    [("auto", LoadMode::Auto), ("mmap", LoadMode::Mmap), ("pread", LoadMode::Pread), ("direct", LoadMode::Direct)];
const ACTIVATIONS: [(&str, Activations); 4] = [
    ("f32", Activations::F32),
    ("bf16", Activations::Bf16),
    ("int8", Activations::Int8),
    ("int11", Activations::Int11),
];
const KV_TYPES: [(&str, Option<KvType>); 6] = [
    ("auto", None),
    ("f32", Some(KvType::F32)),
    ("bf16", Some(KvType::Bf16)),
    ("f16", Some(KvType::F16)),
    ("int8", Some(KvType::Int8)),
    ("int16", Some(KvType::Int16)),
];
const ATTENTION: [(&str, AttentionMode); 3] =
    [("f32", AttentionMode::F32), ("int8", AttentionMode::Int8), ("int16", AttentionMode::Int16)];
const EXPERTS: [(&str, Placement); 4] = [
    ("auto", Placement::Auto),
    ("mapped", Placement::Mapped),
    ("pagecache", Placement::PageCache),
    ("slots", Placement::Slots),
];
const UNIFIED: [(&str, Unified); 3] = [("on", Unified::On), ("off", Unified::Off), ("auto", Unified::Auto)];
const LOOKAHEAD: [(&str, Lookahead); 3] = [("on", Lookahead::On), ("off", Lookahead::Off), ("auto", Lookahead::Auto)];
