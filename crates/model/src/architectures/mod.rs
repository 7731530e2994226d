//! The architectures: one file each, from `config.json` to a [`Description`], and a line in [`BUILT_IN`].

mod deepseek;
mod deepseek_v32;
mod deepseek_v4;
mod gemma3;
mod gemma4;
mod glm4;
mod glm4_moe;
mod glm4_moe_lite;
mod glm5_next;
mod gpt_oss;
mod granite;
mod kimi_linear;
mod llama;
mod minimax_m2;
mod mistral;
mod mistral4;
mod mixtral;
mod nemotron_h;
mod olmo;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen4_exp;
mod smollm3;
mod unknown;

use std::sync::{PoisonError, RwLock};

use anyhow::{Result, anyhow};

use crate::config::Config;
use crate::description::{Description, MtpDescription};
use crate::options::Options;

/// Turns a config into a description. Errors name the key of `config.json`.
pub type Describe = fn(&Config, &Options) -> Result<Description>;

/// An architecture.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// The `model_type` of its configs.
    pub model_type: &'static str,
    /// Reads such a config.
    pub describe: Describe,
}

/// The list: a line for each `model_type`.
const BUILT_IN: &[Architecture] = &[
    Architecture { model_type: "llama", describe: llama::describe },
    Architecture { model_type: "qwen2", describe: qwen2::describe },
    Architecture { model_type: "qwen3", describe: qwen3::describe },
    Architecture { model_type: "qwen3_moe", describe: qwen3_moe::describe },
    Architecture { model_type: "qwen3_next", describe: qwen3_next::describe },
    Architecture { model_type: "qwen3_5", describe: qwen3_5::describe },
    Architecture { model_type: "qwen3_5_text", describe: qwen3_5::describe },
    Architecture { model_type: "qwen3_5_moe", describe: qwen3_5_moe::describe },
    Architecture { model_type: "qwen3_5_moe_text", describe: qwen3_5_moe::describe },
    Architecture { model_type: "qwen4_exp", describe: qwen4_exp::describe },
    Architecture { model_type: "qwen4_exp_text", describe: qwen4_exp::describe },
    Architecture { model_type: "gemma2", describe: gemma3::describe_2 },
    Architecture { model_type: "gemma3", describe: gemma3::describe },
    Architecture { model_type: "gemma3_text", describe: gemma3::describe },
    Architecture { model_type: "gemma4", describe: gemma4::describe },
    Architecture { model_type: "gemma4_text", describe: gemma4::describe },
    Architecture { model_type: "gemma4_unified", describe: gemma4::describe_unified },
    Architecture { model_type: "gemma4_unified_text", describe: gemma4::describe_unified },
    Architecture { model_type: "gpt_oss", describe: gpt_oss::describe },
    Architecture { model_type: "mistral", describe: mistral::describe },
    Architecture { model_type: "ministral", describe: mistral::describe },
    Architecture { model_type: "ministral3", describe: mistral::describe },
    Architecture { model_type: "mistral3", describe: mistral4::describe_wrapped },
    Architecture { model_type: "mixtral", describe: mixtral::describe },
    Architecture { model_type: "phi3", describe: phi3::describe },
    Architecture { model_type: "granite", describe: granite::describe },
    Architecture { model_type: "granitemoehybrid", describe: granite::describe_hybrid },
    Architecture { model_type: "granitemoe", describe: granite::describe_mixture },
    Architecture { model_type: "nemotron_h", describe: nemotron_h::describe },
    Architecture { model_type: "smollm3", describe: smollm3::describe },
    Architecture { model_type: "olmo2", describe: olmo::describe },
    Architecture { model_type: "olmo3", describe: olmo::describe_3 },
    Architecture { model_type: "minimax_m2", describe: minimax_m2::describe },
    Architecture { model_type: "glm4", describe: glm4::describe },
    Architecture { model_type: "glm4_moe", describe: glm4_moe::describe },
    Architecture { model_type: "glm4_moe_lite", describe: glm4_moe_lite::describe },
    Architecture { model_type: "deepseek_v2", describe: deepseek::describe_v2 },
    Architecture { model_type: "deepseek_v3", describe: deepseek::describe },
    Architecture { model_type: "deepseek_v32", describe: deepseek_v32::describe },
    Architecture { model_type: "deepseek_v4", describe: deepseek_v4::describe },
    Architecture { model_type: "glm_moe_dsa", describe: deepseek_v32::describe_glm },
    Architecture { model_type: "glm5_next", describe: glm5_next::describe },
    Architecture { model_type: "glm5_next_text", describe: glm5_next::describe },
    Architecture { model_type: "kimi_k2", describe: deepseek::describe },
    Architecture { model_type: "kimi_k25", describe: deepseek::describe },
    Architecture { model_type: "kimi_k3", describe: kimi_linear::describe },
    Architecture { model_type: "kimi_linear", describe: kimi_linear::describe },
    Architecture { model_type: "mistral4", describe: mistral4::describe },
];

/// Architectures that a program has added.
static REGISTERED: RwLock<Vec<Architecture>> = RwLock::new(Vec::new());

/// Adds architectures, for models that are opened from now on. Built-in ones take precedence.
pub fn register(architectures: &[Architecture]) {
    REGISTERED.write().unwrap_or_else(PoisonError::into_inner).extend_from_slice(architectures);
}

fn all() -> Vec<Architecture> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    BUILT_IN.iter().chain(&*registered).copied().collect()
}

/// The `model_type`s that can be loaded.
pub fn supported() -> Vec<&'static str> {
    all().iter().map(|architecture| architecture.model_type).collect()
}

fn describer(config: &Config) -> Result<Describe> {
    let kind = config.model_type()?;
    let found = all().into_iter().find(|architecture| architecture.model_type == kind);
    found.map(|architecture| architecture.describe).ok_or_else(|| {
        let (path, all) = (config.path().display(), supported());
        let (near, all) = (unknown::nearest(kind, &all), all.join(", "));
        anyhow!("{path}: architecture {kind:?} is not supported{near} (supported are {all})")
    })
}

/// Refuses an architecture that is not supported, naming those that are.
///
/// # Errors
/// A `model_type` that is missing or not among them.
pub fn check_supported(config: &Config) -> Result<()> {
    describer(config).map(|_| ())
}

/// What the config says the model is.
///
/// # Errors
/// An architecture that is not supported, and a key that is missing or wrong: the message names it.
pub fn describe(config: &Config, options: &Options) -> Result<Description> {
    let mut description = describer(config)?(config, options)?;
    if options.mtp {
        description.mtp = MtpDescription::of(&description);
    }
    Ok(description)
}
