//! What a model's name means: a path that is there, or a model on the hub.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use sluice_hub::{Extent, ModelName, Settings};

use crate::quantisations;

/// The path to open for an argument: a folder or a file that is there, or else the hub's model of that name. `fetch` gets what the cache lacks of it.
///
/// # Errors
/// A path that is not there, a name that is none, and whatever keeps a model from being fetched.
pub fn resolve(
    named: &Path,
    extent: Extent,
    fetch: impl FnOnce(Settings, &ModelName) -> Result<PathBuf>,
) -> Result<PathBuf> {
    if named.exists() {
        return quantisations::meant(sluice_hub::followed(named.to_owned())?);
    }
    ensure!(!named.as_os_str().is_empty(), "the model's name is empty");
    let settings = Settings::from_env()?;
    let name = named_at(named, &settings)?;
    if let Some(model) = sluice_hub::find(&settings, &name, extent) {
        return Ok(model.path);
    }
    fetch(settings, &name)
}

/// An argument as a name of a model on the hub.
///
/// # Errors
/// Text that cannot be a name, or that is likelier a path to something that is not there.
pub fn named_at(named: &Path, settings: &Settings) -> Result<ModelName> {
    let shown = named.display();
    let Some(text) = named.to_str() else { bail!("{shown}: no such folder or file") };
    if is_path(text) {
        bail!("{shown}: no such folder or file");
    }
    match ModelName::parse(text, settings.host()) {
        Ok(name) if is_below_a_folder(named) && sluice_hub::find(settings, &name, Extent::Config).is_none() => {
            bail!("{shown}: no such folder or file (hf:{text} is the hub's model of that name)")
        }
        Ok(name) => Ok(name),
        Err(e) => {
            let why = e.to_string();
            // The message need not name it twice.
            let why = why.strip_prefix(&format!("{text:?}: ")).or_else(|| why.strip_prefix(&format!("{text}: ")));
            bail!("{shown}: no such folder or file; {}", why.unwrap_or(&e.to_string()))
        }
    }
}

/// Whether a text can only be a path.
pub fn is_path(text: &str) -> bool {
    let is_remote = text.contains("://") || text.starts_with("hf:") || text.starts_with("hf.co/");
    let is_file = [".gguf", ".safetensors", ".json"].iter().any(|end| text.ends_with(end)) && !text.contains(':');
    !is_remote && (is_file || ["/", "./", "../", "~"].iter().any(|begin| text.starts_with(begin)))
}

/// Whether its parent is a folder here: then a typo is likelier than a name.
pub fn is_below_a_folder(path: &Path) -> bool {
    path.parent().is_some_and(|p| !p.as_os_str().is_empty() && p.is_dir())
}
