//! Telling kinds of models apart, by their paths: the one place that does.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use sluice_store::load::OpenCheckpoint;

use super::folder::SafetensorsFolder;
use super::model_source::ModelSource;
use super::tensors::ModelTensors;

/// What kind of model a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceKind {
    /// A folder with `config.json` and safetensors: Hugging Face's, MLX's, or a bundle.
    SafetensorsFolder,
}

/// # Errors
/// What is at `path` instead of a model.
fn detect(path: &Path) -> Result<SourceKind> {
    let shown = path.display();
    ensure!(path.exists(), "{shown}: no such folder");
    if path.is_dir() {
        return Ok(SourceKind::SafetensorsFolder);
    }
    bail!("{shown}: not a folder (a model is a folder with config.json)")
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
    })
}

/// Opens the model at `path` with its tensors, for programs that cannot do without weights: where neither config nor weights can be read, the error is about the
/// weights.
///
/// # Errors
/// As for [`open`] and [`ModelSource::tensors`].
pub fn open_with_tensors(path: &Path) -> Result<(Arc<dyn ModelSource>, ModelTensors)> {
    let opened = open(path);
    if opened.is_err() {
        OpenCheckpoint::safetensors(path)?;
    }
    let source = opened?;
    let tensors = source.tensors()?;
    Ok((source, tensors))
}
