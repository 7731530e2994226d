//! Experts that the host computes for a device whose layer it is: what it would do in a mixture of its own, up to the sum.

use std::time::Duration;

use anyhow::{Context, Result};
use sluice_kernels::Isa;
use sluice_kernels::format::{Activations, MAX_PLANES};

use super::experts::{self, GatedFfn, Operand};
use super::matmul::{self, Encoded, ExecContext, Needs, Worker};
use super::memory::{PerThread, Place, Weight};
use crate::pool::Pool;
use crate::{Experts, MatrixSource};

/// How long helpers spin between one layer of a token and the next, which the device computes meanwhile: waking them all takes as long as their work.
const SPIN: Duration = Duration::from_micros(500);

/// An expert that the host computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadedExpert {
    pub expert: usize,
    /// Its tokens: so many, from here in the list of rows.
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
    counting: Vec<u32>,
    units: Vec<GatedFfn>,
}

impl HostExperts {
    /// `threads` threads, with the arithmetic of `isa` and activations encoded as `mode` says; matrices have the numbers of their places among `matrices`.
    ///
    /// # Errors
    /// When the system refuses a thread, or a matrix is not what its form says.
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
            counting: Vec::new(),
            units: Vec::new(),
        })
    }

    /// `out[pair] = expert(x[rows[pair]])` for the pairs of each of `wanted`; `x` is normed, `[tokens, hidden]`, `out` `[rows.len(), hidden]`. `array(i, n)` is array
    /// `n` of `wanted[i]`, where it lies in memory: those of each of its projections, as their forms list them.
    pub fn compute<'a>(
        &mut self,
        of: &Experts,
        wanted: &[OffloadedExpert],
        rows: &[u32],
        x: &mut [f32],
        array: impl Fn(usize, usize) -> &'a [u8],
        out: &mut [f32],
    ) {
        let from = self.counting.len() as u32;
        self.counting.extend(from..rows.len() as u32);
        self.units.clear();
        for (i, &OffloadedExpert { expert, from, tokens }) in wanted.iter().enumerate() {
            let [gate, up, down] = experts::operands(of, expert);
            let unit = GatedFfn { gate, up, down, intermediate: of.intermediate(), from, tokens, first_task: 0 };
            // SAFETY: the units are not used beyond this call, and arrays stay for as long.
            self.units.push(unsafe { unit.read_to(|n| array(i, n)) });
        }
        let mut context = ExecContext {
            isa: self.isa,
            mode: self.mode,
            weights: &self.weights,
            buffers: &[],
            pool: &mut self.pool,
            workers: &mut self.workers,
        };
        let encoding = |o: &Operand| self.weights[o.weight].form().activation_format(self.mode);
        let needs = Needs::of(self.units.iter().flat_map(|u| [encoding(&u.gate), encoding(&u.up)]));
        let hidden = x.len() / of.hidden().max(1);
        assert!(rows.iter().all(|row| (*row as usize) < hidden), "rows of x");
        matmul::encode(context.again(), Place::of_slice(x, of.hidden()), None, needs, &mut self.x);
        let needs = experts::hidden_needs(&context, &self.units);
        self.hidden.reset(rows.len(), of.intermediate(), needs);
        experts::gate_up(context.again(), &mut self.units, rows, &self.x, needs, &mut self.hidden);
        let downs: Vec<_> = self.units.iter().map(|u| (u.down, u.from..u.from + u.tokens, u.from)).collect();
        let out = Place::of_slice(out, of.hidden());
        experts::down(context, &downs, &self.counting[..rows.len()], &self.hidden, out);
    }

    /// Arrays of a projection in the list that [`HostExperts::compute`] asks for.
    pub const ARRAYS: usize = MAX_PLANES;
}
