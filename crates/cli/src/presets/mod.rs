//! Published configs of large models (the text model's part), so that `plan` and `synth` need no checkpoint.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use sluice_model::{Config, ModelSource, source};
use sluice_store::{MAX_SETTINGS, read_small};

use crate::hub;

/// Names and texts of configs.
pub const PRESETS: [(&str, &str); 28] = [
    ("qwen3-30b-a3b", include_str!("qwen3-30b-a3b.json")),
    ("qwen3-235b-a22b", include_str!("qwen3-235b-a22b.json")),
    ("qwen3.5-35b-a3b", include_str!("qwen3.5-35b-a3b.json")),
    ("qwen3.5-397b-a17b", include_str!("qwen3.5-397b-a17b.json")),
    ("qwen3.8-flash-next", include_str!("qwen3.8-flash-next.json")),
    ("gpt-oss-20b", include_str!("gpt-oss-20b.json")),
    ("gpt-oss-120b", include_str!("gpt-oss-120b.json")),
    ("gemma-4-31b", include_str!("gemma-4-31b.json")),
    ("gemma-4-26b-a4b", include_str!("gemma-4-26b-a4b.json")),
    ("gemma-4-e4b", include_str!("gemma-4-e4b.json")),
    ("gemma-4-e2b", include_str!("gemma-4-e2b.json")),
    ("mistral-7b", include_str!("mistral-7b.json")),
    ("mixtral-8x7b", include_str!("mixtral-8x7b.json")),
    ("phi-4", include_str!("phi-4.json")),
    ("glm-4.5-air", include_str!("glm-4.5-air.json")),
    ("minimax-m2", include_str!("minimax-m2.json")),
    ("deepseek-v3", include_str!("deepseek-v3.json")),
    ("deepseek-v3.2", include_str!("deepseek-v3.2.json")),
    ("deepseek-v4-flash", include_str!("deepseek-v4-flash.json")),
    ("kimi-k2", include_str!("kimi-k2.json")),
    ("kimi-k3", include_str!("kimi-k3.json")),
    ("glm-4.7-flash", include_str!("glm-4.7-flash.json")),
    ("glm-5", include_str!("glm-5.json")),
    ("nemotron-3-nano-30b-a3b", include_str!("nemotron-3-nano-30b-a3b.json")),
    ("nemotron-3-super-120b-a12b", include_str!("nemotron-3-super-120b-a12b.json")),
    ("granite-4.0-h-small", include_str!("granite-4.0-h-small.json")),
    ("granite-4.0-h-tiny", include_str!("granite-4.0-h-tiny.json")),
    ("mistral-small-4", include_str!("mistral-small-4.json")),
];

/// All names, for messages.
pub fn names() -> String {
    PRESETS.map(|(name, _)| name).join(", ")
}

/// The text of a known model's config; upper and lower case are alike.
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, text)| *text)
}

/// The model that an argument names.
pub enum Named {
    /// A folder, which may hold a config and nothing else.
    Stored(Arc<dyn ModelSource>),
    /// Only its config is known.
    Described(Box<Config>),
}

impl Named {
    /// The model's config.
    pub fn config(&self) -> &Config {
        match self {
            Named::Stored(source) => source.config(),
            Named::Described(config) => config,
        }
    }

    /// The model itself, where it is on disk.
    pub fn source(&self) -> Option<&dyn ModelSource> {
        match self {
            Named::Stored(source) => Some(&**source),
            Named::Described(_) => None,
        }
    }
}

/// The model that `named` means: a folder with a `config.json`, a GGUF file, a config alone, a known model, or the hub's model of that name.
///
/// # Errors
/// A name that means none of these; the message lists the known models.
pub fn find(named: &Path) -> Result<Named> {
    let described = |config| Ok(Named::Described(Box::new(config)));
    if named.is_dir() || source::is_gguf(named) {
        return Ok(Named::Stored(source::open(&hub::resolved(named)?)?));
    }
    if named.is_file() {
        let text = read_small(named, MAX_SETTINGS)?;
        return described(Config::parse(named.to_owned(), &text)?);
    }
    let name = named.display().to_string();
    let Some(text) = text(&name) else {
        if hub::may_be_name(named) {
            return Ok(Named::Stored(source::open(&hub::described(named)?)?));
        }
        bail!("{name}: no such folder or file, and no model that is known (known are {})", names())
    };
    described(Config::parse(PathBuf::from(format!("{name}/config.json")), text.as_bytes())?)
}
