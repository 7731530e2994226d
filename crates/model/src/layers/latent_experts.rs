//! Routed experts behind a projection of their own: they take a small vector, and a projection of their sum is added (Nemotron 3 Super).

use anyhow::Result;
use sluice_backend::{Elementwise, MoeId, Norm, Operations, Projection, Tensor};

use super::ordered::{Inputs, Output};
use crate::description::{LATENT_DOWN, LATENT_NORM, LATENT_UP};
use crate::weights::Weights;

/// The projections around a mixture.
pub struct LatentMixture {
    /// To what experts take.
    down: Inputs,
    moe: MoeId,
    /// What they put out: `[max_tokens, size]`.
    mixed: Tensor,
    /// The norm of that.
    norm: Option<Norm>,
    up: Output,
}

impl LatentMixture {
    /// The projections of layer `at`, whose input goes through `norm`. `inside`: where what experts of `moe` take and put out goes; `normed`: the latter is normed.
    pub fn load(
        w: &mut Weights,
        at: usize,
        moe: MoeId,
        norm: Option<Norm>,
        (inside, normed): ([Tensor; 2], bool),
    ) -> Result<LatentMixture> {
        let [taken, mixed] = inside;
        let down = vec![Projection { linear: w.ordered_linear(at, LATENT_DOWN)?, out: taken }];
        let down = Inputs::new(w, norm, down)?;
        let norm = normed.then(|| w.norm(at, LATENT_NORM)).transpose()?;
        let up = w.ordered_linear(at, LATENT_UP)?;
        Ok(LatentMixture { down, moe, mixed, norm, up: Output::new(w, up, None)? })
    }

    /// The mixture in between.
    pub fn moe(&self) -> MoeId {
        self.moe
    }

    /// `out += up(norm(mixture(down(x))))`, whose router takes `x`.
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        let mixed = self.mixed.first_rows(x.rows);
        self.down.forward(backend, x);
        backend.elementwise(&Elementwise::Zero { out: mixed });
        backend.mixture(x, self.moe, mixed);
        if let Some(norm) = self.norm {
            backend.elementwise(&Elementwise::Norm { x: mixed, norm, out: mixed });
        }
        self.up.add(backend, mixed, out);
    }
}
