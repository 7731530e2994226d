//! Experts that a layer of few tokens wants and the device does not have: some are copied there, and the host computes the others where they lie, at the same time.
//! Which of the two does it changes no bit.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;
use sluice_backend::{Activations, Experts, Isa};
use sluice_cpu::{HostExperts, OffloadedExpert};

use crate::driver::Gpu;
use crate::memory::{Memory, Pinned};
use crate::streams::{Copies, Locked};
use crate::weights::Weights;

/// With so many pairs of token and expert at most the host computes some.
pub const MOST_PAIRS: usize = 64;
/// What the host is taken to do at first, in bytes per second, and beside the bytes in seconds each time.
const GUESS: f64 = 30e9;
const OVERHEAD: f64 = 25e-6;
/// How much of a new measurement counts.
const NEW: f64 = 0.1;
/// Bytes and copies by which the link is measured.
const TRIED: usize = 4 << 20;
const TIMES: usize = 4;

/// Who shares a layer with the device, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    pub isa: Isa,
    pub threads: usize,
    /// Half of what is missing is the host's, whatever it takes: for tests.
    pub always: bool,
}

/// What the host computes of a layer: experts with their tokens.
#[derive(Default)]
pub struct Aside {
    /// Their positions in what is wanted.
    pub held: Vec<usize>,
    pub wanted: Vec<OffloadedExpert>,
    /// Rows of x, and the pairs of token and expert that they are of.
    pub rows: Vec<u32>,
    pub pairs: Vec<usize>,
}

impl Aside {
    /// The experts at these positions of what is wanted, with the tokens that have chosen them.
    pub fn new(mut held: Vec<usize>, wanted: &[u32], (k, chosen): (usize, &[u32])) -> Aside {
        held.sort_unstable();
        let mut aside = Aside::default();
        for &i in &held {
            let from = aside.rows.len();
            let pairs = (0..chosen.len()).filter(|pair| chosen[*pair] == wanted[i]);
            aside.pairs.extend(pairs);
            aside.rows.extend(aside.pairs[from..].iter().map(|pair| (pair / k) as u32));
            let tokens = aside.rows.len() - from;
            aside.wanted.push(OffloadedExpert { expert: wanted[i] as usize, from, tokens });
        }
        Aside { held, ..aside }
    }
}

/// The threads that compute, which several devices have in common: they take turns.
pub type Computes = Arc<Mutex<HostExperts>>;

pub struct Sharing {
    host: Computes,
    always: bool,
    /// Seconds for a byte: copied, and computed with.
    copy: f64,
    compute: f64,
    /// The normed input on the host, of so many bytes, and what experts give.
    x: Pinned,
    x_bytes: usize,
    outputs: Pinned,
}

impl Sharing {
    /// `computes`: what another device has made, or will be there for another.
    pub fn new(
        gpu: &Gpu,
        host: Host,
        mode: Activations,
        weights: &Weights,
        computes: &mut Option<Computes>,
    ) -> Result<Sharing> {
        let computes = match computes {
            Some(computes) => Arc::clone(computes),
            None => {
                let matrices = weights.all.iter().map(|weight| weight.source().clone());
                let new = HostExperts::new(host.isa, host.threads, mode, matrices)?;
                Arc::clone(computes.insert(Arc::new(Mutex::new(new))))
            }
        };
        // What the link takes for a byte.
        let (memory, room) = (Locked::new(&gpu.device, TRIED)?, Memory::new(gpu, TRIED, "scratch")?);
        let copies = Copies::new(&gpu.device)?;
        // SAFETY: memory of its own, of which nothing is written meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts(sluice_store::Memory::start(&memory), TRIED) };
        let mut copy = f64::INFINITY;
        for _ in 0..TIMES {
            let began = Instant::now();
            // SAFETY: there is room; waited for right here.
            unsafe { copies.write(room.at, bytes)? };
            copies.wait()?;
            copy = copy.min(began.elapsed().as_secs_f64() / TRIED as f64);
        }
        let (x, outputs) = (Pinned::default(), Pinned::default());
        Ok(Sharing { host: computes, always: host.always, copy, compute: 1.0 / GUESS, x, x_bytes: 0, outputs })
    }

    /// Room for the normed input of a layer.
    pub fn input(&mut self, gpu: &Gpu, bytes: usize) -> Result<&mut [u8]> {
        self.x_bytes = bytes;
        self.x.room(gpu, bytes)
    }

    /// How many of so many experts of so many bytes each the host should compute, for all to be done first.
    pub fn share(&self, missing: usize, bytes: usize) -> usize {
        if self.always {
            return missing.div_ceil(2);
        }
        share(missing, bytes as f64 * self.copy, bytes as f64 * self.compute)
    }

    /// As [`HostExperts::compute`] of the input that was made room for, with experts of `bytes` bytes together; what they give, until the next call.
    pub fn compute_rows<'a>(
        &mut self,
        gpu: &Gpu,
        of: &Experts,
        (wanted, rows): (&[OffloadedExpert], &[u32]),
        bytes: usize,
        array: impl Fn(usize, usize) -> &'a [u8],
    ) -> Result<&[u8]> {
        let numbers = rows.len() * of.hidden();
        self.outputs.room(gpu, size_of::<f32>() * numbers)?;
        let (mut x, mut outputs) = (std::mem::take(&mut self.x), std::mem::take(&mut self.outputs));
        let (from, to) = (x.floats_mut(self.x_bytes / size_of::<f32>()), outputs.floats_mut(numbers));
        self.compute(of, (wanted, rows), bytes, array, (from, to));
        (self.x, self.outputs) = (x, outputs);
        Ok(&self.outputs.bytes_mut()[..size_of::<f32>() * numbers])
    }

    /// As [`HostExperts::compute`] with experts of `bytes` bytes together.
    pub fn compute<'a>(
        &mut self,
        of: &Experts,
        (wanted, rows): (&[OffloadedExpert], &[u32]),
        bytes: usize,
        array: impl Fn(usize, usize) -> &'a [u8],
        (x, out): (&mut [f32], &mut [f32]),
    ) {
        let began = Instant::now();
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        host.compute(of, wanted, rows, x, array, out);
        drop(host);
        let taken = (began.elapsed().as_secs_f64() - OVERHEAD).max(0.0) / bytes.max(1) as f64;
        self.compute += (taken - self.compute) * NEW;
    }
}

/// The same from the seconds that an expert takes to copy and to compute with.
fn share(missing: usize, copy: f64, compute: f64) -> usize {
    let time = |n: usize| {
        let host = if n == 0 { 0.0 } else { OVERHEAD + n as f64 * compute };
        host.max((missing - n) as f64 * copy)
    };
    // The fewest where several are alike: what is copied may stay.
    (0..=missing).min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_queue_gets_the_next_expert() {
        // As quick on either side, but for what the host takes to begin.
        assert_eq!(share(8, 50e-6, 50e-6), 4);
        assert_eq!(share(1, 50e-6, 50e-6), 0);
        assert_eq!(share(1, 100e-6, 20e-6), 1);
        // A link that is slow, a host that is.
        assert_eq!(share(8, 500e-6, 25e-6), 8);
        assert_eq!(share(8, 50e-6, 5e-3), 0);
        assert_eq!(share(0, 50e-6, 50e-6), 0);
        for missing in 0..20 {
            for compute in [10e-6, 40e-6, 90e-6] {
                let n = share(missing, 50e-6, compute);
                let both = |n: usize| (OVERHEAD + n as f64 * compute).max((missing - n) as f64 * 50e-6);
                assert!(n == 0 || both(n) <= missing as f64 * 50e-6, "{missing}, {compute}: {n}");
            }
        }
    }
}
