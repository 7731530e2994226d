//! Mixtures whose experts stay on disk.

use sluice_engine::{Engine, MemoryClass, Options, Placement};

use crate::support::folder;

/// A mixture of each kind: stacked and single tensors, Hugging Face's and MLX's, with recurrent layers and without.
pub const FOLDERS: [&str; 21] = [
    "gemma4_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v3",
    "minimax_m2",
    "nemotron_h_moe",
    "kimi_linear",
    "nemotron_h_latent",
    "kimi_k3",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp",
    "granitemoehybrid_mamba",
    "qwen3_moe",
    "qwen3_moe_stacked",
    "qwen3_next",
    "qwen3_5_moe",
    "gpt_oss_mxfp4",
    "mlx_qwen3_moe",
    "mlx_qwen3_next",
    "mlx_qwen3_5_moe",
];

pub fn mapped() -> Options {
    Options { threads: 2, max_context: Some(400), experts: Placement::Mapped, ..Options::for_this_machine().unwrap() }
}

pub fn streamed(placement: Placement) -> Options {
    Options { experts: placement, ..mapped() }
}

/// Bytes of a slot.
pub fn slot_bytes(name: &str) -> u64 {
    let mut engine = Engine::open(&folder(name), streamed(Placement::Slots)).unwrap();
    let slots = engine.take_streamed().unwrap().slots;
    assert_eq!(slots.0, slots.1, "all experts fit");
    engine.memory(MemoryClass::Experts) as u64 / slots.0 as u64
}

/// Bytes that a token's experts take at least, as the refusal of less says.
pub fn least_bytes(name: &str) -> u64 {
    let options = Options { expert_budget: Some(1), ..streamed(Placement::Slots) };
    let error = format!("{:#}", Engine::open(&folder(name), options).err().unwrap());
    error.rsplit("which takes ").next().unwrap().parse().unwrap()
}
