//! How a checkpoint makes embeddings of hidden states, according to sentence-transformers' `modules.json` and `1_Pooling/config.json`.

use std::path::{Component, Path};

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use sluice_model::source::TextFiles;

use super::files::read_json;
use crate::step::pooling::Pooling;

/// How embeddings are made of a prompt's hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Which states.
    pub pooling: Pooling,
    /// Whether vectors are normalised to length 1.
    pub normalised: bool,
}

impl Embedding {
    /// Reads a checkpoint's files. Without them it is the last token's state, normalised.
    ///
    /// # Errors
    /// A file that is broken, or asks for something unsupported. The message names it.
    pub fn load(files: impl TextFiles) -> Result<Embedding> {
        let files: &dyn TextFiles = &files;
        let mut pooling_folder = "1_Pooling".to_owned();
        let mut normalised = true;
        if let Some(modules) = read_json(files, "modules.json")? {
            let modules = modules.as_array().map_or(&[][..], Vec::as_slice);
            normalised = false;
            for module in modules {
                let kind = module["type"].as_str().and_then(|kind| kind.rsplit('.').next()).unwrap_or_default();
                match kind {
                    "Transformer" => {}
                    "Normalize" => normalised = true,
                    "Pooling" => {
                        let path = module["path"].as_str().unwrap_or("1_Pooling");
                        let is_within = Path::new(path).components().all(|c| matches!(c, Component::Normal(_)));
                        let name = files.locate("modules.json");
                        ensure!(is_within, "{}: {path:?} is no folder beside the model", name.display());
                        pooling_folder = path.to_owned();
                    }
                    _ => {
                        bail!("{}: modules of type {kind:?} are not supported", files.locate("modules.json").display())
                    }
                }
            }
        }
        let name = format!("{pooling_folder}/config.json");
        let config = read_json(files, &name)?;
        let pooling = config.map_or(Ok(Pooling::Last), |config| {
            let path = files.locate(&name);
            pooling_of(&config).map_err(|what| anyhow::anyhow!("{}: {what}", path.display()))
        })?;
        Ok(Embedding { pooling, normalised })
    }
}

/// Reads either of sentence-transformers' formats: a name, or a flag for each kind of pooling.
fn pooling_of(config: &Value) -> Result<Pooling, String> {
    let flags = config.as_object().into_iter().flatten();
    let flags = flags.filter(|(_, on)| **on == true).filter_map(|(name, _)| name.strip_prefix("pooling_mode_"));
    let named: Vec<&str> = match &config["pooling_mode"] {
        Value::String(name) => vec![name],
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
        _ => flags.collect(),
    };
    match named[..] {
        ["lasttoken"] => Ok(Pooling::Last),
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        _ => Err(format!("pooling by {named:?} is not supported (lasttoken and mean are)")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What a folder with these files says.
    fn read(modules: Option<&str>, pooling: Option<&str>) -> Result<Embedding, String> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        for (name, text) in [("modules.json", modules), ("1_Pooling/config.json", pooling)] {
            if let Some(text) = text {
                fs::write(folder.path().join(name), text).unwrap();
            }
        }
        Embedding::load(folder.path()).map_err(|e| format!("{e:#}"))
    }

    #[test]
    fn pooling_is_what_the_files_say() {
        let made = |pooling, normalised| Ok(Embedding { pooling, normalised });
        let modules = |kinds: &[&str]| {
            let one =
                |kind: &&str| format!(r#"{{"path": "1_Pooling", "type": "sentence_transformers.models.{kind}"}}"#);
            format!("[{}]", kinds.iter().map(one).collect::<Vec<_>>().join(","))
        };
        let mean = r#"{"word_embedding_dimension": 8, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true, "include_prompt": true}"#;
        let last = r#"{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}"#;
        assert_eq!(read(None, None), made(Pooling::Last, true));
        assert_eq!(read(None, Some(mean)), made(Pooling::Mean, true));
        assert_eq!(read(None, Some(r#"{"pooling_mode": "mean"}"#)), made(Pooling::Mean, true));
        assert_eq!(read(Some(&modules(&["Transformer", "Pooling"])), Some(last)), made(Pooling::Last, false));
        let all = modules(&["Transformer", "Pooling", "Normalize"]);
        assert_eq!(read(Some(&all), Some(mean)), made(Pooling::Mean, true));
    }

    #[test]
    fn what_is_not_done_here_is_named() {
        for (modules, pooling, parts) in [
            (None, Some(r#"{"pooling_mode_cls_token": true}"#), ["1_Pooling/config.json", "cls_token"]),
            (None, Some(r#"{"pooling_mode": ["mean", "max"]}"#), ["1_Pooling/config.json", "max"]),
            (Some(r#"[{"type": "a.Dense"}]"#), None, ["modules.json", "Dense"]),
            (Some(r#"[{"type": "a.Pooling", "path": "../x"}]"#), None, ["modules.json", "../x"]),
            (Some("[,"), None, ["modules.json", "line 1"]),
        ] {
            let error = read(modules, pooling).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
