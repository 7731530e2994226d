//! Experts that the host computes for another device. It does all of a mixture but the sum.

use std::time::Duration;

use anyhow::{Context, Result};
use sluice_kernels::Isa;
use sluice_kernels::format::{Activations, MAX_PLANES};

use super::experts::{self, GatedFfn, Operand};
use crate::encoded::{Encoded, Needs};
use crate::exec::{Worker, context};
use crate::matmul;
use crate::memory::{PerThread, Place, Weight};
use crate::threads::Pool;
use sluice_backend::{Experts, MatrixSource};

/// How long helpers spin between two layers of a token, while the device computes. Waking them takes as long as their work.
const SPIN: Duration = Duration::from_micros(500);

/// An expert that the host computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadedExpert {
    pub expert: usize,
    /// The first of its tokens in the list of rows.
    pub from: usize,
    pub tokens: usize,
}

/// Threads, and what they need to compute experts.
pub struct HostExperts {
    isa: Isa,
    mode: Activations,
    pool: Pool,
    workers: PerThread<Worker>,
    weights: Vec<Weight>,
    x: Encoded,
    hidden: Encoded,
    identity_rows: Vec<u32>,
    units: Vec<GatedFfn>,
}

impl HostExperts {
    /// `threads` threads, with the arithmetic of `isa` and activations encoded as `mode` says; a matrix's number is its index in `matrices`.
    ///
    /// # Errors
    /// When the system refuses a thread, or a matrix does not match its format.
    pub fn new(
        isa: Isa,
        threads: usize,
        mode: Activations,
        matrices: impl Iterator<Item = MatrixSource>,
    ) -> Result<HostExperts> {
        let pool = Pool::new(threads).with_context(|| format!("cannot start {threads} threads"))?;
        pool.set_spin(SPIN);
        Ok(HostExperts {
            isa,
            mode,
            workers: PerThread::new(pool.threads()),
            pool,
            weights: matrices.map(Weight::new).collect::<Result<_>>()?,
            x: Encoded::default(),
            hidden: Encoded::default(),
            identity_rows: Vec::new(),
            units: Vec::new(),
        })
    }

    /// `out[pair] = expert(x[rows[pair]])` for the pairs of each of `wanted`; `x` is normed, `[tokens, hidden]`, `out` `[rows.len(), hidden]`. `array(i, n)` is plane
    /// `n` of `wanted[i]` in memory: gate, up and down, [`HostExperts::ARRAYS`] planes each.
    pub fn compute<'a>(
        &mut self,
        of: &Experts,
        wanted: &[OffloadedExpert],
        rows: &[u32],
        x: &mut [f32],
        array: impl Fn(usize, usize) -> &'a [u8],
        out: &mut [f32],
    ) {
        assert!(of.biases.is_none() && of.order.is_none(), "no device that asks for experts takes biases or orders");
        let from = self.identity_rows.len() as u32;
        self.identity_rows.extend(from..rows.len() as u32);
        self.units.clear();
        for (i, &OffloadedExpert { expert, from, tokens }) in wanted.iter().enumerate() {
            let [gate, up, down] = experts::operands(of, expert);
            let (intermediate, kind) = (of.intermediate(), of.kind);
            let unit = GatedFfn { gate, up, down, intermediate, kind, biases: None, from, tokens, first_task: 0 };
            // SAFETY: the units are not used beyond this call, and arrays stay for as long.
            self.units.push(unsafe { unit.read_to(|n| array(i, n)) });
        }
        let mut context = context!(self, &[]);
        let encoding = |o: &Operand| self.weights[o.weight].format().activation_format(self.mode);
        let needs = Needs::of(self.units.iter().flat_map(|u| [encoding(&u.gate), encoding(&u.up)]));
        let hidden = x.len() / of.hidden().max(1);
        assert!(rows.iter().all(|row| (*row as usize) < hidden), "rows of x");
        matmul::encode(context.reborrow(), Place::of_slice(x, of.hidden()), None, needs, &mut self.x);
        let needs = experts::hidden_needs(&context, &self.units);
        self.hidden.reset(rows.len(), of.intermediate(), needs);
        experts::gate_up(context.reborrow(), &mut self.units, rows, &self.x, needs, &mut self.hidden);
        let downs: Vec<_> = self.units.iter().map(GatedFfn::down_projection).collect();
        let out = Place::of_slice(out, of.hidden());
        experts::down(context, &downs, &self.identity_rows[..rows.len()], &self.hidden, out);
    }

    /// Planes per projection in the numbering of [`HostExperts::compute`].
    pub const ARRAYS: usize = MAX_PLANES;
}
