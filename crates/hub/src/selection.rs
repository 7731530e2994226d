//! Which of a repository's files make the model: one format, one quantisation, and the small files beside it. Never pickles (`.bin`, `.pt`), ONNX and the like.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::name::{Choice, is_relative};
use crate::quant::{self, GgufName};

/// The index of a model in shards.
pub const INDEX: &str = "model.safetensors.index.json";
/// The manifest of a bundle of `sluice pack`.
const BUNDLE: &str = "bundle.json";
/// The quantisation that is taken if none is asked for.
const USUAL: [&str; 2] = ["Q4_K_M", "UD-Q4_K_M"];
/// Labels of models that are not quantised.
const FLOATS: [&str; 5] = ["BF16", "F16", "F32", "FP16", "FP32"];
/// Labels that a message lists.
const LISTED: usize = 40;

/// Files that make a model, named as in the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Config, tokenizer, templates: fetched first.
    pub small: Vec<String>,
    /// Weights.
    pub weights: Vec<String>,
    /// The file to open, for GGUF; `None` for a folder of safetensors.
    pub entry: Option<String>,
    /// The quantisation, for GGUF.
    pub label: Option<String>,
}

/// The model among `files`. `text` gives what is in a small file: the index of shards, or a bundle's manifest.
///
/// # Errors
/// No model that can be run, or not the quantisation that was asked for; the message lists what there is.
pub fn select(files: &[&str], choice: &Choice, text: &mut dyn FnMut(&str) -> Result<Vec<u8>>) -> Result<Selection> {
    let has_safetensors = files.iter().any(|file| !file.contains('/') && file.ends_with(".safetensors"));
    match choice {
        Choice::Usual if has_safetensors => safetensors(files, text),
        _ => gguf(files, choice),
    }
}

fn safetensors(files: &[&str], text: &mut dyn FnMut(&str) -> Result<Vec<u8>>) -> Result<Selection> {
    let has = |name: &str| files.contains(&name);
    let small: Vec<String> = files.iter().filter(|file| is_small(file)).map(|file| (*file).to_owned()).collect();
    if !has("config.json") {
        return Err(Error::NoChoice(
            "there is no config.json beside the safetensors: not a language model, or an adapter".into(),
        ));
    }
    let weights = if has(BUNDLE) {
        named_in(BUNDLE, &text(BUNDLE)?, |root| {
            root.get("files")?.as_object().map(|files| files.keys().cloned().collect())
        })?
    } else if has("model.safetensors") {
        // As transformers does: an index of other files does not count beside it.
        vec!["model.safetensors".to_owned()]
    } else if has(INDEX) {
        let of_map = |root: &Value| {
            let map = root.get("weight_map")?.as_object()?;
            map.values().map(|file| file.as_str().map(str::to_owned)).collect()
        };
        named_in(INDEX, &text(INDEX)?, of_map)?
    } else {
        let all = files.iter().filter(|file| !file.contains('/') && file.ends_with(".safetensors"));
        all.filter(|file| file.starts_with("model")).map(|file| (*file).to_owned()).collect()
    };
    let missing = weights.iter().find(|file| !has(file));
    if let Some(missing) = missing {
        return Err(Error::NoChoice(format!("{missing}: named by the index, but not in the repository")));
    }
    if weights.is_empty() {
        return Err(Error::NoChoice("there are safetensors, but none is called model*.safetensors".into()));
    }
    Ok(Selection { small, weights, entry: None, label: None })
}

/// The files that a small file names, sorted, each once.
fn named_in(name: &str, text: &[u8], find: impl Fn(&Value) -> Option<Vec<String>>) -> Result<Vec<String>> {
    let wrong = |what: &str| Error::NoChoice(format!("{name}: {what}"));
    let root: Value = serde_json::from_slice(text).map_err(|e| wrong(&e.to_string()))?;
    let mut found = find(&root).ok_or_else(|| wrong("no list of files in it"))?;
    if let Some(bad) = found.iter().find(|file| !is_relative(file) || !file.ends_with(".safetensors")) {
        return Err(wrong(&format!("{bad:?} is not the name of a file beside it")));
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// Whether a file is config, tokenizer or template.
pub fn is_small(file: &str) -> bool {
    let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
    let of_pooling =
        || folder.split_once('_').is_some_and(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    match folder {
        "" => {
            let foreign =
                ["bin.index.json", "h5.index.json", "msgpack.index.json"].iter().any(|end| name.ends_with(end));
            let of_training = ["trainer_state.json", "all_results.json", "train_results.json", "eval_results.json"];
            (name.ends_with(".json") && !foreign && !of_training.contains(&name)) || name.ends_with(".jinja")
        }
        "additional_chat_templates" => name.ends_with(".jinja"),
        _ => !folder.contains('/') && of_pooling() && name == "config.json",
    }
}

/// A GGUF model: the parts that there are, in order.
#[derive(Debug)]
struct Gguf<'a> {
    label: String,
    /// By number; 0 for a model in one file.
    parts: BTreeMap<u32, &'a str>,
    count: u32,
}

impl Gguf<'_> {
    fn is_whole(&self) -> bool {
        self.parts.len() == self.count.max(1) as usize
    }
}

fn models<'a>(files: &[&'a str]) -> BTreeMap<String, Gguf<'a>> {
    let mut models = BTreeMap::new();
    for file in files {
        let Some(GgufName { model, label, part }) = quant::read(file) else { continue };
        let (number, count) = part.unwrap_or((0, 0));
        // One file and a set of parts may have the same name; so may sets of several lengths.
        let key = format!("{model} {count}");
        models.entry(key).or_insert(Gguf { label, parts: BTreeMap::new(), count }).parts.insert(number, file);
    }
    models
}

fn gguf(files: &[&str], choice: &Choice) -> Result<Selection> {
    let models = models(files);
    let whole = || models.values().filter(|model| model.is_whole());
    let labelled = |label: &str| whole().find(|model| model.label == label);
    let found = match choice {
        Choice::File(file) => whole().find(|model| model.parts.values().any(|part| part == file)),
        Choice::Quant(label) => labelled(label).or_else(|| match label.strip_prefix("UD-") {
            Some(plain) => labelled(plain),
            None => labelled(&format!("UD-{label}")),
        }),
        Choice::Usual => {
            let usual = USUAL.iter().find_map(|label| labelled(label));
            // Names in order begin with BF16 more often than not, which nobody means.
            usual.or_else(|| whole().find(|model| !FLOATS.contains(&&*model.label))).or_else(|| whole().next())
        }
    };
    let Some(found) = found else { return Err(Error::NoChoice(miss(files, &models, choice))) };
    let weights: Vec<String> = found.parts.values().map(|file| (*file).to_owned()).collect();
    Ok(Selection { small: Vec::new(), entry: Some(weights[0].clone()), weights, label: Some(found.label.clone()) })
}

fn miss(files: &[&str], models: &BTreeMap<String, Gguf>, choice: &Choice) -> String {
    if models.is_empty() {
        let ends = |all: &[&str]| files.iter().any(|file| all.iter().any(|end| file.ends_with(end)));
        return match choice {
            Choice::Usual if ends(&[".bin", ".pt", ".pth"]) => "there are only PyTorch's pickles, which are not loaded",
            Choice::Usual => "there are neither safetensors nor GGUF files",
            _ if ends(&[".safetensors"]) => {
                "there are only safetensors, and quantisations are chosen among GGUF files: leave it out"
            }
            _ => "there are no GGUF files, among which a quantisation is chosen",
        }
        .to_owned();
    }
    let mut labels: Vec<&str> = models.values().filter(|m| m.is_whole()).map(|model| &*model.label).collect();
    labels.sort_unstable();
    labels.dedup();
    let more = labels.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let listed = labels.iter().take(LISTED).copied().collect::<Vec<_>>().join(", ");
    match choice {
        _ if labels.is_empty() => "of each GGUF model in parts some part is missing".to_owned(),
        Choice::File(file) => format!("there is no {file}; quantisations: {listed}{more}"),
        Choice::Quant(label) => format!("there is no {label}; quantisations: {listed}{more}"),
        Choice::Usual => format!("quantisations: {listed}{more}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_text(name: &str) -> Result<Vec<u8>> {
        panic!("{name} was not needed")
    }

    fn weights(files: &[&str], choice: &Choice) -> Vec<String> {
        select(files, choice, &mut no_text).unwrap().weights
    }

    #[test]
    fn of_safetensors_the_shards_of_the_index_are_taken() {
        let files = [
            ".gitattributes",
            "LICENSE",
            "README.md",
            "config.json",
            "generation_config.json",
            "merges.txt",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "stale-00001.safetensors",
            INDEX,
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "onnx/model.onnx",
            "original/consolidated.safetensors",
            "1_Pooling/config.json",
            "trainer_state.json",
            "additional_chat_templates/tool.jinja",
        ];
        let index = br#"{"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}}"#;
        let found = select(&files, &Choice::Usual, &mut |name| {
            assert_eq!(name, INDEX);
            Ok(index.to_vec())
        });
        let found = found.unwrap();
        assert_eq!(found.weights, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
        let small = [
            "config.json",
            "generation_config.json",
            INDEX,
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "1_Pooling/config.json",
            "additional_chat_templates/tool.jinja",
        ];
        assert_eq!(found.small, small);
        assert_eq!((found.entry, found.label), (None, None));
    }

    #[test]
    fn one_file_takes_precedence_over_an_index() {
        assert_eq!(weights(&["config.json", INDEX, "model.safetensors"], &Choice::Usual), ["model.safetensors"]);
    }

    #[test]
    fn an_index_that_names_other_places_is_refused() {
        for (index, part) in [
            (r#"{"weight_map": {"a": "../../x.safetensors"}}"#, "not the name of a file"),
            (r#"{"weight_map": {"a": "/etc/passwd"}}"#, "not the name of a file"),
            (r#"{"weight_map": {"a": "other.safetensors"}}"#, "not in the repository"),
            (r#"{"weight_map": []}"#, "no list of files"),
            ("[", INDEX),
        ] {
            let files = ["config.json", INDEX, "model-1.safetensors"];
            let error = select(&files, &Choice::Usual, &mut |_| Ok(index.into())).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn one_quantisation_is_taken_with_all_its_parts() {
        let files = [
            "config.json",
            "m-Q4_K_M.gguf",
            "m-Q8_0.gguf",
            "m-UD-Q4_K_XL.gguf",
            "mmproj-F16.gguf",
            "UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf",
            "UD-Q2_K_XL/m-UD-Q2_K_XL-00002-of-00002.gguf",
            "BF16/m-BF16-00001-of-00002.gguf",
        ];
        let quant = |label: &str| Choice::Quant(label.into());
        assert_eq!(weights(&files, &Choice::Usual), ["m-Q4_K_M.gguf"]);
        assert_eq!(weights(&files, &quant("Q4_K_XL")), ["m-UD-Q4_K_XL.gguf"]);
        assert_eq!(weights(&files, &quant("UD-Q8_0")), ["m-Q8_0.gguf"]);
        assert_eq!(weights(&files, &Choice::File("m-Q8_0.gguf".into())), ["m-Q8_0.gguf"]);
        let parts = ["UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf", "UD-Q2_K_XL/m-UD-Q2_K_XL-00002-of-00002.gguf"];
        assert_eq!(weights(&files, &quant("Q2_K_XL")), parts);
        assert_eq!(weights(&files, &Choice::File(parts[1].into())), parts);
        // A part that is not there makes a model that cannot be chosen.
        let error = select(&files, &quant("BF16"), &mut no_text).unwrap_err().to_string();
        assert_eq!(error, "there is no BF16; quantisations: Q4_K_M, Q8_0, UD-Q2_K_XL, UD-Q4_K_XL");
        assert_eq!(weights(&["b-Q8_0.gguf", "a-Q5_K_M.gguf"], &Choice::Usual), ["a-Q5_K_M.gguf"]);
        assert_eq!(weights(&["a-BF16.gguf", "a-Q8_0.gguf", "a-MXFP4.gguf"], &Choice::Usual), ["a-MXFP4.gguf"]);
        assert_eq!(weights(&["a-F16.gguf"], &Choice::Usual), ["a-F16.gguf"]);
    }

    #[test]
    fn what_cannot_be_run_is_named() {
        for (files, part) in [
            (&["pytorch_model.bin", "config.json"][..], "pickles"),
            (&["README.md"], "neither safetensors nor GGUF"),
            (&["adapter_model.safetensors"], "no config.json"),
            (&["config.json", "consolidated.safetensors"], "none is called model"),
            (&["a-Q8_0-00001-of-00002.gguf"], "some part is missing"),
        ] {
            let error = select(files, &Choice::Usual, &mut no_text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
