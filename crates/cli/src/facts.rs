//! What a model's config and headers say about it, for lists of models. What cannot be read is left out, since the model may never be requested.

use std::fs;
use std::time::UNIX_EPOCH;

use serde_json::Value;
use sluice_model::ModelSource;
use sluice_server::ModelFacts;

use crate::inspect::breakdown::Anatomy;

/// Reads the facts of a model's folder.
pub fn of(source: &dyn ModelSource) -> ModelFacts {
    let config = source.config();
    let mut facts =
        ModelFacts { architecture: config.model_type().unwrap_or("unknown").to_owned(), ..ModelFacts::default() };
    let text = |key: &str| config.get(key).and_then(Value::as_str).map(str::to_uppercase);
    facts.stored = text("torch_dtype").or_else(|| text("dtype")).unwrap_or_default();
    let changed = fs::metadata(config.path()).and_then(|m| m.modified()).ok();
    facts.modified = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_secs());
    let Ok(tensors) = source.tensors() else { return facts };
    let checkpoint = tensors.checkpoint();
    facts.bytes = checkpoint.file_sizes().iter().map(|(_, bytes)| bytes).sum();
    facts.digest = ModelFacts::digest_of(&format!("{} {:?}", facts.modified, checkpoint.file_sizes()));
    if let Ok(anatomy) = Anatomy::read(&tensors) {
        facts.parameters = anatomy.parameters();
        facts.stored = match (anatomy.quantization, anatomy.dtypes.iter().max_by_key(|(_, bytes)| **bytes)) {
            (Some((bits, _)), _) => format!("{bits}-bit"),
            (None, Some((dtype, _))) => dtype.to_uppercase(),
            _ => facts.stored,
        };
        if let Some(model) = anatomy.model {
            (facts.hidden, facts.layers) = (model.hidden, model.layers.len());
        }
    }
    facts
}
