//! Models by name: what an argument means, and the commands `pull`, `list`, `rm` and `verify`. Names, the cache and transfers are `sluice_hub`.

mod arriving;
mod pull;
mod screen;
mod shelf;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use sluice_front::is_path;
use sluice_hub::{Client, Extent, ModelName, Settings};

pub use arriving::{DownloadArgs, figures, finish, first_token, leave, started};
pub use pull::PullArgs;
pub use pull::run as run_pull;
pub use shelf::{ListArgs, RemoveArgs, VerifyArgs, list, remove, verify};
pub use sluice_front::{is_below_a_folder, name_of, quantisations};
pub use sluice_hub::is_cached;

use screen::Screen;

/// What to open for an argument: a folder or a file that is there, or else the model of the hub with that name. What of the model is not in the cache is fetched, after a
/// line that says how much that is.
///
/// # Errors
/// A path that is not there, a name that is none, and whatever keeps a model from being fetched.
pub fn resolved(named: &Path) -> Result<PathBuf> {
    resolve(named, Extent::Whole)
}

/// The same for those who need no weights: of safetensors that are not in the cache only the config is fetched.
pub fn described(named: &Path) -> Result<PathBuf> {
    resolve(named, Extent::Config)
}

fn resolve(named: &Path, extent: Extent) -> Result<PathBuf> {
    sluice_front::resolve(named, extent, |settings, name| {
        let screen = Screen::for_use(name, settings.host());
        let pulled = sluice_hub::pull(&Arc::new(Client::new(settings)), name, extent, &screen);
        Ok(screen.ended(pulled)?.path)
    })
}

/// Whether a word that is no path was meant as the name of a model: where a model may stand, or the name of one at Ollama.
pub fn may_be_name(word: &Path) -> bool {
    let Some(text) = word.to_str().filter(|text| !text.contains(char::is_whitespace) && !is_path(text)) else {
        return false;
    };
    ModelName::parse(text, "").is_ok() || text.contains([':', '@']) && sluice_hub::likely(text).is_some()
}

/// Whether a word can hardly be anything but the name of a model, where it may also be a prompt: `Qwen/Qwen3-0.6B`, but not `and/or`.
pub fn is_surely_name(word: &Path) -> bool {
    let Some(text) = word.to_str().filter(|_| !word.exists() && may_be_name(word)) else { return false };
    let is_spelled_out =
        text.starts_with("hf:") || text.starts_with("hf.co/") || text.contains("://") || text.contains([':', '@']);
    let has_a_size = || {
        let name = text.rsplit('/').next().unwrap_or_default();
        name.len() >= 4
            && name.contains(|c: char| c.is_ascii_digit())
            && name.contains(|c: char| c.is_ascii_alphabetic())
    };
    let is_here = || {
        Settings::from_env()
            .ok()
            .zip(ModelName::parse(text, "").ok())
            .is_some_and(|(s, n)| sluice_hub::find(&s, &n, Extent::Config).is_some())
    };
    is_spelled_out || has_a_size() || is_here()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_told_apart_from_names() {
        for (word, may_be, surely) in [
            ("Qwen/Qwen3-0.6B", true, true),
            ("unsloth/Qwen3-8B-GGUF:q4_k_m", true, true),
            ("hf:org/name", true, true),
            ("https://huggingface.co/org/name", true, true),
            ("qwen3:8b", true, true),
            ("and/or", true, false),
            ("1/2", true, false),
            ("Hello", false, false),
            ("Once upon a time", false, false),
            ("./org/name1", false, false),
            ("org/name1.gguf", false, false),
            ("qwen3", false, false),
        ] {
            let word = Path::new(word);
            assert_eq!((may_be_name(word), is_surely_name(word)), (may_be, surely), "{}", word.display());
        }
    }
}
