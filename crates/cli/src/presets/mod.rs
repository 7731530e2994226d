//! Configs of large models that people ask about, so that `plan` and `synth` need no checkpoint: the text model's part of each `config.json`, as published.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use sluice_model::Config;
use sluice_store::{MAX_SETTINGS, read_small};

use crate::hub;

/// Names and configs.
pub const PRESETS: [(&str, &str); 4] = [
    ("qwen3-30b-a3b", include_str!("qwen3-30b-a3b.json")),
    ("qwen3-235b-a22b", include_str!("qwen3-235b-a22b.json")),
    ("qwen3.5-35b-a3b", include_str!("qwen3.5-35b-a3b.json")),
    ("qwen3.5-397b-a17b", include_str!("qwen3.5-397b-a17b.json")),
];

/// All names, for messages.
pub fn names() -> String {
    PRESETS.map(|(name, _)| name).join(", ")
}

/// The text of a known model's config; upper and lower case are alike.
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, text)| *text)
}

/// The config that `named` means: a folder with a `config.json`, such a file, or a known model.
pub fn config(named: &Path) -> Result<Config> {
    if named.is_dir() {
        return Config::open(&hub::followed(named.to_owned())?);
    }
    if named.is_file() {
        let text = read_small(named, MAX_SETTINGS)?;
        return Config::parse(named.to_owned(), &text);
    }
    let name = named.display().to_string();
    let Some(text) = text(&name) else {
        bail!("{name}: no such folder or file, and no model that is known (known are {})", names())
    };
    Config::parse(PathBuf::from(format!("{name}/config.json")), text.as_bytes())
}
