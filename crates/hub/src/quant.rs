//! Quantisations of GGUF repositories: they are told by their files' names.

/// What a file's name says about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufName {
    /// The path without `.gguf` and without the number of a part: equal for all parts of a model.
    pub model: String,
    /// `Q4_K_M`, `UD-Q4_K_XL`; the file's own name if it names no quantisation.
    pub label: String,
    /// The number of this part and of all, from 1.
    pub part: Option<(u32, u32)>,
}

/// Reads the path of a GGUF file. `None` for other files, and for those that are not language models: projectors, importance matrices, draft heads.
pub fn read(path: &str) -> Option<GgufName> {
    let stem =
        path.len().checked_sub(5).filter(|at| path.is_char_boundary(*at) && path[*at..].eq_ignore_ascii_case(".gguf"));
    let stem = &path[..stem?];
    let file = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
    if file.is_empty() || ["mmproj", "imatrix"].iter().any(|other| file.contains(other)) || file.starts_with("mtp-") {
        return None;
    }
    let (model, part) = match part_of(stem) {
        Some((model, part)) => (model, Some(part)),
        None => (stem, None),
    };
    let (folder, own) = model.rsplit_once('/').map_or((None, model), |(folder, own)| (Some(folder), own));
    let named = label_in(own).or_else(|| label_in(folder?.rsplit('/').next()?));
    let label = named.unwrap_or_else(|| own.to_uppercase());
    Some(GgufName { model: model.to_owned(), label, part })
}

/// Splits `-00001-of-00003` off.
fn part_of(stem: &str) -> Option<(&str, (u32, u32))> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (model, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| (text.len() == 5).then(|| text.parse::<u32>().ok()).flatten();
    let (number, count) = (digits(number)?, digits(count)?);
    (1..=count).contains(&number).then_some((model, (number, count)))
}

/// Whether a text is a label of its own: `q4_k_m`, `UD-IQ2_M`, `bf16`.
pub fn is_label(text: &str) -> bool {
    let text = text.to_ascii_uppercase();
    is_type(text.strip_prefix("UD-").unwrap_or(&text))
}

/// Whether a text in upper case names a type of weights.
fn is_type(text: &str) -> bool {
    let plain = |rest: &str| rest.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let digits = |prefix: &str| {
        let rest = text.strip_prefix(prefix);
        rest.is_some_and(|rest| {
            let (head, tail) = rest.split_at(rest.len().min(1));
            head.bytes().all(|b| b.is_ascii_digit())
                && !head.is_empty()
                && (tail.is_empty() || tail.starts_with('_') && plain(tail))
        })
    };
    let whole = ["BF16", "F16", "F32", "FP16", "FP32", "FP8", "MXFP4", "NVFP4"].iter();
    let is_whole = whole
        .filter_map(|name| text.strip_prefix(name))
        .any(|rest| rest.is_empty() || rest.starts_with('_') && plain(rest));
    is_whole || ["Q", "IQ", "TQ"].iter().any(|prefix| digits(prefix))
}

/// The last label in a file's name.
fn label_in(name: &str) -> Option<String> {
    let name = name.to_ascii_uppercase();
    let parts: Vec<&str> = name.split(['-', '.', ' ']).collect();
    for (i, part) in parts.iter().enumerate().rev() {
        // `MODEL_Q4_K_M`: the longest end that is a type.
        let ends = std::iter::once(*part).chain(part.match_indices('_').map(|(at, _)| &part[at + 1..]));
        if let Some(found) = ends.into_iter().find(|end| is_type(end)) {
            let is_dynamic = found == *part && i > 0 && parts[i - 1] == "UD";
            return Some(format!("{}{found}", if is_dynamic { "UD-" } else { "" }));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_found_in_files_names() {
        for (path, label, part) in [
            ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M", None),
            ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "Q4_K_M", None),
            ("llama-2-7b.Q4_K_S.gguf", "Q4_K_S", None),
            ("SmolLM2-135M-Instruct.Q4_1.GGUF", "Q4_1", None),
            ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL", None),
            ("UD-IQ1_M/GLM-5-UD-IQ1_M-00002-of-00007.gguf", "UD-IQ1_M", Some((2, 7))),
            ("BF16/model-00001-of-00002.gguf", "BF16", Some((1, 2))),
            ("gpt-oss-20b-mxfp4_moe.gguf", "MXFP4_MOE", None),
            ("gpt-oss-20b-MXFP4.gguf", "MXFP4", None),
            ("model_q8_0.gguf", "Q8_0", None),
            ("gemma-3-27b-it-qat-q4_0.gguf", "Q4_0", None),
            ("Model-Q4_K_M-imat.gguf", "Q4_K_M", None),
            ("model-TQ1_0.gguf", "TQ1_0", None),
            ("ggml-model-f16.gguf", "F16", None),
            ("plain.gguf", "PLAIN", None),
            ("Q-model.gguf", "Q-MODEL", None),
        ] {
            let found = read(path).unwrap();
            assert_eq!((&*found.label, found.part), (label, part), "{path}");
        }
        for other in ["mmproj-F16.gguf", "model.safetensors", "imatrix_unsloth.gguf", ".gguf", "gguf", "é.gguf/x"] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn parts_of_a_model_are_one_model() {
        let [one, two] = [1, 2].map(|n| read(&format!("Q8_0/m-Q8_0-0000{n}-of-00002.gguf")).unwrap().model);
        assert_eq!(one, two);
        for no_part in ["m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-1-of-2.gguf"] {
            assert_eq!(read(no_part).unwrap().part, None, "{no_part}");
        }
    }

    #[test]
    fn a_label_by_itself_is_known() {
        for label in ["q4_k_m", "UD-Q4_K_XL", "iq3_xxs", "bf16", "F16", "mxfp4", "q8_0"] {
            assert!(is_label(label), "{label}");
        }
        for other in ["main", "v1.0", "Qwen", "q", "f1", "quick", "0123456789abcdef0123456789abcdef01234567"] {
            assert!(!is_label(other), "{other}");
        }
    }
}
