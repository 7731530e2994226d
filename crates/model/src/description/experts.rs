//! Mixtures of experts: how tokens are routed, and what an expert computes.

use anyhow::{Result, ensure};
use sluice_backend::Scoring;

use crate::config::Config;

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoring {
    /// A softmax over all experts; the best are chosen (Qwen3-MoE).
    Softmax,
    /// The best are chosen, and a softmax over them weighs them (Mixtral, gpt-oss).
    SoftmaxOfChosen,
    /// A sigmoid of each logit (DeepSeek-V3).
    Sigmoid,
    /// The root of each logit's softplus (DeepSeek-V4).
    RootSoftplus,
    /// The same weighs experts that depend on the token's number alone: a table has those of so many tokens.
    ByToken { tokens: usize },
}

/// Experts are divided into groups of consecutive ones, and only the best groups take part: those with the greatest sum of their two best scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many groups there are.
    pub count: usize,
    /// How many of them take part.
    pub top: usize,
}

/// How a mixture chooses and weighs experts for a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterDescription {
    /// Experts per token.
    pub k: usize,
    /// From logits to scores.
    pub scoring: RouterScoring,
    /// The router's projection has a bias, which is part of its logits.
    pub biased: bool,
    /// Its input goes through a norm of its own, whose weights are a stored vector over the root of the width (Gemma 4).
    pub own_norm: bool,
    /// The weight of each chosen expert is multiplied by a stored number of that expert's (Gemma 4).
    pub expert_scales: bool,
    /// A stored bias is added to the scores where experts are chosen, and not where they are weighed.
    pub correction_bias: bool,
    /// Groups of experts, where there are any.
    pub groups: Option<ExpertGroups>,
    /// The weights of the chosen are divided by their sum.
    pub normalise: bool,
    /// Weights are multiplied by this.
    pub scale: f32,
}

/// What an expert computes between its projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `down(silu(gate(x)) * up(x))`
    SwiGlu,
    /// `down(gelu(gate(x)) * up(x))`
    GeGlu,
    /// SwiGLU with `alpha` within its sigmoid, `added` to `up(x)`, and both clamped to `limit` (gpt-oss, GLM-5.3). A shared expert is alike, and is added behind the routed ones.
    ClampedSwiGlu { alpha: f32, limit: f32, added: f32 },
    /// SiTU, in which gate and up are bounded by tanh (Kimi-K3). A shared expert is alike, and is added behind the routed ones.
    SiTu { beta: f32, linear: f32 },
    /// `down(max(up(x), 0)^2)`: there are no gates (Nemotron-H). A shared expert is alike, and is added behind the routed ones.
    SquaredRelu,
}

impl ExpertActivation {
    /// Whether experts have gates.
    pub fn is_gated(self) -> bool {
        self != ExpertActivation::SquaredRelu
    }
}

/// How checkpoints that have the experts of a layer in two stacks lay them out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackOrder {
    /// For each expert the rows of gate, then those of up.
    Halves,
    /// Rows of gate and up take turns. Stacks of floats are stored by columns (gpt-oss).
    Turns,
}

/// An expert that every token takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpertDescription {
    /// Its width.
    pub intermediate: usize,
    /// Its output is multiplied by the sigmoid of a projection of the token.
    pub gated: bool,
    /// Gate and up are rows of one matrix, `mlp.shared_expert.gate_up_proj`.
    pub joined: bool,
}

/// Routed experts take a small vector, a projection of the input, and a projection of what they put out is added (Nemotron 3 Super).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentExperts {
    /// Its elements.
    pub size: usize,
    /// What experts put out is normed before its projection (Kimi-K3).
    pub normed: bool,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeDescription {
    /// Routed experts.
    pub count: usize,
    /// The width of each.
    pub intermediate: usize,
    /// What they take in place of the input.
    pub latent: Option<LatentExperts>,
    /// How tokens choose among them.
    pub router: RouterDescription,
    /// What each of them computes.
    pub activation: ExpertActivation,
    /// Their projections have biases.
    pub biased: bool,
    /// How stacks of gate and up are laid out, where a checkpoint has such.
    pub stacks: StackOrder,
    /// The expert that every token takes besides.
    pub shared: Option<SharedExpertDescription>,
}

impl RouterDescription {
    /// The softmax of all logits, as Qwen's mixtures have it.
    pub fn softmax(k: usize, normalise: bool) -> RouterDescription {
        RouterDescription {
            k,
            scoring: RouterScoring::Softmax,
            biased: false,
            own_norm: false,
            expert_scales: false,
            correction_bias: false,
            groups: None,
            normalise,
            scale: 1.0,
        }
    }

    /// How a backend is to choose; `stored`: the values of the correction bias, or of the experts' scales, `[experts]`, empty without either.
    ///
    /// # Errors
    /// A combination that no operation has; the message names it.
    pub fn scoring(&self, stored: Vec<f32>) -> Result<Scoring, String> {
        let RouterDescription { k, normalise: renormalise, scale, .. } = *self;
        let plain = match self.scoring {
            _ if self.expert_scales && self.scoring != RouterScoring::Softmax => {
                return Err("a router with scales of experts and without a softmax of all".into());
            }
            RouterScoring::Sigmoid => {
                let ExpertGroups { count: groups, top: top_groups } =
                    self.groups.unwrap_or(ExpertGroups { count: 1, top: 1 });
                return Ok(Scoring::Sigmoid { k, bias: stored, groups, top_groups, renormalise, scale });
            }
            RouterScoring::RootSoftplus if self.groups.is_none() && renormalise => {
                return Ok(Scoring::RootSoftplus { k, bias: stored, scale });
            }
            RouterScoring::RootSoftplus => {
                return Err("roots of softplus with groups of experts, or with weights that keep their sum".into());
            }
            RouterScoring::ByToken { .. } => return Err("experts by the token's number, without their table".into()),
            RouterScoring::Softmax => {
                Scoring::SoftmaxTopK { k, renormalise, scales: if self.expert_scales { stored } else { Vec::new() } }
            }
            RouterScoring::SoftmaxOfChosen => Scoring::TopKSoftmax { k },
        };
        let more = [
            (self.correction_bias, "a correction bias"),
            (self.groups.is_some(), "groups of experts"),
            (scale != 1.0, "a scale"),
        ];
        match more.into_iter().find(|(is_there, _)| *is_there) {
            Some((_, what)) => Err(format!("a softmax router with {what}")),
            None => Ok(plain),
        }
    }
}

impl MoeDescription {
    /// The mixture of Qwen's configs. `experts_per_token`: instead of the config's. `normalise`: the weights of the chosen are divided by their sum.
    ///
    /// # Errors
    /// A key that is missing or wrong, and more experts per token than there are.
    pub fn read(config: &Config, experts_per_token: Option<usize>, normalise: bool) -> Result<MoeDescription> {
        MoeDescription::read_with(config, experts_per_token, normalise, "moe_intermediate_size")
    }

    /// The same; `width`: the key of an expert's width.
    ///
    /// # Errors
    /// A key that is missing or wrong, and more experts per token than there are.
    pub fn read_with(
        config: &Config,
        experts_per_token: Option<usize>,
        normalise: bool,
        width: &str,
    ) -> Result<MoeDescription> {
        // Newer versions of the reference write the second name for some architectures.
        let key = if config.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
        MoeDescription::read_keys(config, (key, width), experts_per_token, normalise)
    }

    /// The same with the keys that say how many experts there are and how wide each is.
    ///
    /// # Errors
    /// A key that is missing or wrong, and more experts per token than there are.
    pub fn read_keys(
        config: &Config,
        (count, intermediate): (&str, &str),
        experts_per_token: Option<usize>,
        normalise: bool,
    ) -> Result<MoeDescription> {
        let (count, intermediate) = (config.size(count)?, config.size(intermediate)?);
        let k = experts_per_token.map_or_else(|| config.size("num_experts_per_tok"), Ok)?;
        ensure!(k <= count, "{k} experts per token, but only {count} experts");
        Ok(MoeDescription {
            count,
            intermediate,
            latent: None,
            router: RouterDescription::softmax(k, normalise),
            activation: ExpertActivation::SwiGlu,
            biased: false,
            stacks: StackOrder::Halves,
            shared: None,
        })
    }
}

impl SharedExpertDescription {
    /// Qwen's shared expert, which is gated.
    ///
    /// # Errors
    /// A width that is missing or wrong.
    pub fn read(config: &Config) -> Result<SharedExpertDescription> {
        let intermediate = config.size("shared_expert_intermediate_size")?;
        Ok(SharedExpertDescription { intermediate, gated: true, joined: false })
    }
}
