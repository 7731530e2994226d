//! Telling kinds of models apart, by their paths: the one place that does.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use sluice_store::load::OpenCheckpoint;
use sluice_store::open_regular;

use super::folder::SafetensorsFolder;
use super::gguf::{self, GgufModel};
use super::model_source::ModelSource;
use super::tensors::ModelTensors;

/// What kind of model a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SourceKind {
    /// A folder with `config.json` and safetensors: Hugging Face's, MLX's, or a bundle.
    SafetensorsFolder,
    /// A GGUF file, or one of a set.
    Gguf(PathBuf),
}

/// Models that an error lists.
const LISTED: usize = 8;

/// # Errors
/// What is at `path` instead of a model.
fn detect(path: &Path) -> Result<SourceKind> {
    let shown = path.display();
    ensure!(path.exists(), "{shown}: no such folder or file");
    if path.is_dir() {
        if has_safetensors(path) {
            return Ok(SourceKind::SafetensorsFolder);
        }
        // A folder that is neither is told as one of safetensors without them.
        let mut all = gguf::models_in(path).unwrap_or_default();
        ensure!(
            all.len() < 2,
            "{shown}: several GGUF models in one folder; name the file of one of them: {}{}",
            all.iter().take(LISTED).map(|file| file.display().to_string()).collect::<Vec<_>>().join(", "),
            if all.len() > LISTED { format!(" and {} more", all.len() - LISTED) } else { String::new() }
        );
        return Ok(all.pop().map_or(SourceKind::SafetensorsFolder, SourceKind::Gguf));
    }
    ensure!(begins_as_gguf(path)?, "{shown}: not a folder, and not a GGUF file (a model is either)");
    Ok(SourceKind::Gguf(path.to_owned()))
}

/// Whether the file begins as GGUF files do, whatever its name.
fn begins_as_gguf(path: &Path) -> Result<bool> {
    let mut magic = Vec::new();
    let file: File = open_regular(path)?;
    file.take(4).read_to_end(&mut magic).with_context(|| format!("{}: cannot read", path.display()))?;
    Ok(magic == gguf::MAGIC)
}

/// Whether the path is that of a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.is_file() && begins_as_gguf(path).unwrap_or(false)
}

/// Whether the path looks like that of a model: a folder with `config.json` or GGUF files, or a GGUF file. Opening it may still fail.
pub fn is_model(path: &Path) -> bool {
    let has_files = || path.is_dir() && gguf::models_in(path).is_ok_and(|models| !models.is_empty());
    path.join("config.json").is_file() || is_gguf(path) || has_files()
}

/// What people call the model in that file: its name without `.gguf` and the number of its part. `None` for anything but a GGUF file.
pub fn gguf_name(path: &Path) -> Option<String> {
    if path.is_dir() {
        return None;
    }
    gguf::name_of(&path.file_name()?.to_string_lossy()).map(str::to_owned)
}

/// The models in a folder of models: GGUF files, of a split model the first.
///
/// # Errors
/// A folder that cannot be listed.
pub fn gguf_files(folder: &Path) -> Result<Vec<PathBuf>> {
    gguf::models_in(folder)
}

fn has_safetensors(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    entries.flatten().any(|e| e.path().extension().is_some_and(|x| x == "safetensors"))
}

/// Opens the model at `path`: the one place that tells kinds of models apart. Reads its config and no weight.
///
/// # Errors
/// A path that names no model, and a config that cannot be read. The message names the path.
///
/// # Examples
/// ```
/// use sluice_model::{Options, describe_stored, source};
///
/// # fn main() -> anyhow::Result<()> {
/// # let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/qwen3_moe"));
/// let source = source::open(folder)?;
/// let tensors = source.tensors()?;
/// let model = describe_stored(&tensors, &Options::default())?;
/// println!("{}, {} layers, {} layout", model.architecture, model.layers.len(), tensors.layout().name());
/// for weight in model.weights() {
///     println!("{}: {} x {}", weight.name(), weight.rows, weight.cols);
/// }
/// # assert_eq!((model.architecture, tensors.layout().name()), ("qwen3_moe", "safetensors"));
/// # Ok(())
/// # }
/// ```
pub fn open(path: &Path) -> Result<Arc<dyn ModelSource>> {
    Ok(match detect(path)? {
        SourceKind::SafetensorsFolder => Arc::new(SafetensorsFolder::open(path)?),
        SourceKind::Gguf(file) => Arc::new(GgufModel::open(&file)?),
    })
}

/// Opens the model at `path` with its tensors, for programs that cannot do without weights: where neither config nor weights can be read, the error is about the
/// weights.
///
/// # Errors
/// As for [`open`] and [`ModelSource::tensors`].
pub fn open_with_tensors(path: &Path) -> Result<(Arc<dyn ModelSource>, ModelTensors)> {
    let opened = open(path);
    if opened.is_err() && !is_gguf(path) && gguf::models_in(path).is_ok_and(|models| models.is_empty()) {
        OpenCheckpoint::safetensors(path)?;
    }
    let source = opened?;
    let tensors = source.tensors()?;
    Ok((source, tensors))
}
