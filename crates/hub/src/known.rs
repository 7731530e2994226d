//! Names that other programs have for well-known models, and the hub's names for the same: only ever a hint in a message.

/// A family: its name at Ollama, the size that `latest` means there, and its sizes with the hub's repositories.
struct Family {
    name: &'static str,
    usual: &'static str,
    sizes: &'static [(&'static str, &'static str)],
}

const fn family(name: &'static str, usual: &'static str, sizes: &'static [(&'static str, &'static str)]) -> Family {
    Family { name, usual, sizes }
}

const FAMILIES: &[Family] = &[
    family(
        "qwen2.5-coder",
        "7b",
        &[
            ("0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"),
            ("1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"),
            ("3b", "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF"),
            ("7b", "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF"),
            ("14b", "Qwen/Qwen2.5-Coder-14B-Instruct-GGUF"),
            ("32b", "Qwen/Qwen2.5-Coder-32B-Instruct-GGUF"),
        ],
    ),
    family(
        "qwen2.5",
        "7b",
        &[
            ("0.5b", "Qwen/Qwen2.5-0.5B-Instruct-GGUF"),
            ("1.5b", "Qwen/Qwen2.5-1.5B-Instruct-GGUF"),
            ("3b", "Qwen/Qwen2.5-3B-Instruct-GGUF"),
            ("7b", "Qwen/Qwen2.5-7B-Instruct-GGUF"),
            ("14b", "Qwen/Qwen2.5-14B-Instruct-GGUF"),
            ("32b", "Qwen/Qwen2.5-32B-Instruct-GGUF"),
            ("72b", "Qwen/Qwen2.5-72B-Instruct-GGUF"),
        ],
    ),
    family("qwen3-coder", "30b", &[("30b", "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF")]),
    family(
        "qwen3",
        "8b",
        &[
            ("0.6b", "unsloth/Qwen3-0.6B-GGUF"),
            ("1.7b", "unsloth/Qwen3-1.7B-GGUF"),
            ("4b", "unsloth/Qwen3-4B-GGUF"),
            ("8b", "unsloth/Qwen3-8B-GGUF"),
            ("14b", "unsloth/Qwen3-14B-GGUF"),
            ("30b", "unsloth/Qwen3-30B-A3B-GGUF"),
            ("32b", "unsloth/Qwen3-32B-GGUF"),
            ("235b", "unsloth/Qwen3-235B-A22B-GGUF"),
        ],
    ),
    family("qwen3.6", "35b", &[("35b", "unsloth/Qwen3.6-35B-A3B-GGUF")]),
    family("qwen3.8", "27b", &[("27b", "unsloth/Qwen3.8-27B-GGUF")]),
    family("llama3.1", "8b", &[("8b", "unsloth/Llama-3.1-8B-Instruct-GGUF")]),
    family(
        "llama3.2",
        "3b",
        &[("1b", "unsloth/Llama-3.2-1B-Instruct-GGUF"), ("3b", "unsloth/Llama-3.2-3B-Instruct-GGUF")],
    ),
    family("llama3.3", "70b", &[("70b", "unsloth/Llama-3.3-70B-Instruct-GGUF")]),
    family(
        "gemma3",
        "4b",
        &[
            ("270m", "unsloth/gemma-3-270m-it-GGUF"),
            ("1b", "unsloth/gemma-3-1b-it-GGUF"),
            ("4b", "unsloth/gemma-3-4b-it-GGUF"),
            ("12b", "unsloth/gemma-3-12b-it-GGUF"),
            ("27b", "unsloth/gemma-3-27b-it-GGUF"),
        ],
    ),
    family(
        "smollm2",
        "1.7b",
        &[
            ("135m", "unsloth/SmolLM2-135M-Instruct-GGUF"),
            ("360m", "unsloth/SmolLM2-360M-Instruct-GGUF"),
            ("1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF"),
        ],
    ),
];

/// The hub's name for what Ollama calls `qwen3:8b` or `qwen3:8b-q4_K_M`, and LM Studio `qwen/qwen3-8b`. `None` for what is not among the well-known.
pub fn likely(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let text = text.split_once('@').map_or(&*text, |(name, _)| name);
    let name = text.rsplit('/').next()?.replace(':', "-");
    // `gemma-3-4b` is Ollama's `gemma3`, and `llama-3.2-1b` its `llama3.2`.
    let joined = ["gemma-", "llama-", "qwen-"]
        .iter()
        .find_map(|p| Some(format!("{}{}", p.trim_end_matches('-'), name.strip_prefix(p)?)));
    let name = joined.unwrap_or(name);
    let family = FAMILIES
        .iter()
        .find(|family| name.strip_prefix(family.name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-')))?;
    let rest = name[family.name.len()..].trim_start_matches('-');
    let (size, rest) = rest.split_once('-').unwrap_or((rest, ""));
    let size = if size.is_empty() || size == "latest" { family.usual } else { size };
    let (_, repo) = family.sizes.iter().find(|(known, _)| *known == size)?;
    let quant = rest.rsplit('-').next().filter(|last| crate::quant::is_label(last));
    Some(quant.map_or_else(|| (*repo).to_owned(), |quant| format!("{repo}:{}", quant.to_uppercase())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Repo;

    #[test]
    fn names_of_other_programs_are_understood() {
        for (text, name) in [
            ("qwen3:8b", Some("unsloth/Qwen3-8B-GGUF")),
            ("qwen3", Some("unsloth/Qwen3-8B-GGUF")),
            ("qwen3:latest", Some("unsloth/Qwen3-8B-GGUF")),
            ("qwen3:8b-q4_K_M", Some("unsloth/Qwen3-8B-GGUF:Q4_K_M")),
            ("qwen/qwen3-8b", Some("unsloth/Qwen3-8B-GGUF")),
            ("qwen/qwen3-4b-2507", Some("unsloth/Qwen3-4B-GGUF")),
            ("google/gemma-3-4b", Some("unsloth/gemma-3-4b-it-GGUF")),
            ("llama3.2:1b", Some("unsloth/Llama-3.2-1B-Instruct-GGUF")),
            ("qwen2.5-coder:7b", Some("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF")),
            ("qwen3:9b", None),
            ("qwen33", None),
            ("hello", None),
        ] {
            assert_eq!(likely(text).as_deref(), name, "{text}");
        }
    }

    #[test]
    fn every_hint_is_a_name() {
        for (_, repo) in FAMILIES.iter().flat_map(|family| family.sizes) {
            let (org, name) = repo.split_once('/').unwrap();
            assert_eq!(Repo::new(org, name).unwrap().as_str(), *repo);
        }
        assert!(FAMILIES.iter().all(|family| family.sizes.iter().any(|(size, _)| *size == family.usual)));
    }
}
