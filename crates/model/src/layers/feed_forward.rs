//! Feed-forward layers: a dense gated one, or a router with its experts.

use anyhow::{Result, ensure};
use sluice_backend::{Backend, Experts, Foresight, Linear, Mlp, NextMixture, Norm, Routing, Scoring, SharedExpert};

use crate::config::Config;
use crate::decoder::Scratch;
use crate::qwen3_moe::expert_count;
use crate::weights::Weights;

/// A mixture of experts.
pub struct Moe {
    pub router: Linear,
    pub scoring: Scoring,
    pub experts: Experts,
    pub shared: Option<SharedExpert>,
}

impl Moe {
    /// The mixture under `layers.N.mlp`. `renormalise`: the chosen weights are divided by their sum.
    /// `shared`: the width of the shared expert, where there is one.
    pub fn load(
        w: &mut Weights,
        config: &Config,
        module: &str,
        k: usize,
        renormalise: bool,
        shared: Option<usize>,
    ) -> Result<Moe> {
        let (count, hidden) = (expert_count(config)?, config.size("hidden_size")?);
        let intermediate = config.size("moe_intermediate_size")?;
        ensure!(k <= count, "{} experts per token, but only {count} experts", k);
        Ok(Moe {
            router: w.linear(&format!("{module}.gate"), count, hidden)?,
            scoring: Scoring::SoftmaxTopK { k, renormalise },
            experts: w.experts(module, count, hidden, intermediate)?,
            shared: shared.map(|width| w.shared_expert(module, hidden, width)).transpose()?,
        })
    }
}

/// The second half of a layer.
pub enum FeedForward {
    Dense { norm: Norm, mlp: Box<Mlp> },
    Moe { norm: Norm, moe: Box<Moe> },
}

impl FeedForward {
    /// `x += feed_forward(norm(x))`; `next`: the feed-forward part of the layer after this one.
    pub fn forward(
        &self,
        backend: &mut dyn Backend,
        s: &Scratch,
        routing: &mut Routing,
        tokens: usize,
        next: Option<&FeedForward>,
    ) {
        let x = s.x.first_rows(tokens);
        match self {
            FeedForward::Dense { norm, mlp } => backend.mlp(x, *norm, mlp, x),
            FeedForward::Moe { norm, moe } => {
                let h = s.normed.first_rows(tokens);
                backend.norm(x, *norm, h);
                backend.route(h, &moe.router, &moe.scoring, routing);
                backend.fetch(routing, &moe.experts);
                let foresee = |backend: &mut dyn Backend, sight| {
                    if let Some(FeedForward::Moe { norm, moe }) = next {
                        let Moe { router, scoring, experts, .. } = &**moe;
                        backend.foresee(x, NextMixture { norm: *norm, router, scoring, experts }, sight);
                    }
                };
                foresee(backend, Foresight::Early);
                backend.experts(h, routing, &moe.experts, moe.shared.as_ref(), x);
                foresee(backend, Foresight::Late);
            }
        }
    }

    /// As [`FeedForward::forward`], without what the routed experts add; `routing` says which they would be.
    pub fn forward_but_experts(&self, backend: &mut dyn Backend, s: &Scratch, routing: &mut Routing, tokens: usize) {
        let FeedForward::Moe { norm, moe } = self else {
            return self.forward(backend, s, routing, tokens, None);
        };
        let (x, h) = (s.x.first_rows(tokens), s.normed.first_rows(tokens));
        backend.norm(x, *norm, h);
        backend.route(h, &moe.router, &moe.scoring, routing);
        let none = Routing { k: routing.k, ..Routing::default() };
        backend.fetch(&none, &moe.experts);
        backend.experts(h, &none, &moe.experts, moe.shared.as_ref(), x);
    }
}
