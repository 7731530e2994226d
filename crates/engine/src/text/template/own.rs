//! Templates of our own, for model types whose checkpoints have none: their makers publish a program that writes prompts.

use anyhow::Result;
use serde_json::Value as Json;
use sluice_model::source::TextFiles;

use crate::text::files::read_json;

/// (model type, template).
const TEMPLATES: [(&str, &str); 3] = [
    ("deepseek_v32", include_str!("own/deepseek_v32.jinja")),
    ("deepseek_v4", include_str!("own/deepseek_v4.jinja")),
    ("kimi_k3", include_str!("own/kimi_k3.jinja")),
];

/// The name and the text of the template for a checkpoint's model type, if there is one.
///
/// # Errors
/// A `config.json` that cannot be read.
pub(super) fn template(files: &dyn TextFiles) -> Result<Option<(&'static str, &'static str)>> {
    let config = read_json(files, "config.json")?.unwrap_or(Json::Null);
    Ok(TEMPLATES.into_iter().find(|(model_type, _)| config["model_type"] == *model_type))
}
