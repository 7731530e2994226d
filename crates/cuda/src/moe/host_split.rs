//! Dividing the experts that a layer of few tokens needs and the device does not have: some are copied to it, and the host computes the others from its own memory at the same
//! time. Which of the two computes an expert changes no bit.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;
use sluice_backend::{Activations, Experts, Isa};
use sluice_cpu::{HostExperts, OffloadedExpert};

use crate::device::copies::CopyStream;
use crate::device::memory::DeviceBuffer;
use crate::device::pinned::PinnedBuffer;
use crate::device::pinned::RegisteredMemory;
use crate::device::stream::Gpu;
use crate::weights::Weights;

/// The host computes experts only in steps of up to this many pairs of a token and an expert.
pub const MAX_PAIRS: usize = 64;
/// The first estimate of the host's speed in bytes per second, and its fixed cost in seconds for each layer.
const INITIAL_SPEED: f64 = 30e9;
const OVERHEAD: f64 = 25e-6;
/// The weight of a new measurement.
const SMOOTHING: f64 = 0.1;
/// Bytes of each copy that measures the link, and the number of copies.
const PROBE_BYTES: usize = 4 << 20;
const PROBES: usize = 4;

/// How the host computes experts beside the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOffload {
    pub isa: Isa,
    pub threads: usize,
    /// The host computes half of the missing experts, whatever the cost. For tests.
    pub always: bool,
}

/// The part of a layer that the host computes.
#[derive(Default)]
pub struct HostShare {
    /// Positions of its experts in the list of needed ones.
    pub positions: Vec<usize>,
    pub experts: Vec<OffloadedExpert>,
    /// Rows of x in the order of `experts`, and their pairs of a token and an expert.
    pub rows: Vec<u32>,
    pub pairs: Vec<usize>,
}

impl HostShare {
    /// The experts at these positions of `needed`, with the tokens that chose them.
    pub fn new(mut positions: Vec<usize>, needed: &[u32], (k, chosen): (usize, &[u32])) -> HostShare {
        positions.sort_unstable();
        let mut share = HostShare::default();
        for &i in &positions {
            let from = share.rows.len();
            let pairs = (0..chosen.len()).filter(|pair| chosen[*pair] == needed[i]);
            share.pairs.extend(pairs);
            share.rows.extend(share.pairs[from..].iter().map(|pair| (pair / k) as u32));
            let tokens = share.rows.len() - from;
            share.experts.push(OffloadedExpert { expert: needed[i] as usize, from, tokens });
        }
        HostShare { positions, ..share }
    }
}

/// The host's threads that compute experts. Several devices share them and take turns.
pub type SharedHostExperts = Arc<Mutex<HostExperts>>;

/// Divides layers between the device and the host by measured speeds.
pub struct HostSplit {
    host: SharedHostExperts,
    always: bool,
    /// Seconds for a byte that is copied, and for one that the host computes with.
    copy: f64,
    compute: f64,
    /// The normed input of a layer, its bytes, and the outputs of experts.
    x: PinnedBuffer,
    x_bytes: usize,
    outputs: PinnedBuffer,
}

impl HostSplit {
    /// `computes`: the threads that another device has made; otherwise they are made and left there.
    pub fn new(
        gpu: &Gpu,
        host: HostOffload,
        mode: Activations,
        weights: &Weights,
        computes: &mut Option<SharedHostExperts>,
    ) -> Result<HostSplit> {
        let computes = match computes {
            Some(computes) => Arc::clone(computes),
            None => {
                let matrices = weights.all.iter().map(|weight| weight.source().clone());
                let new = HostExperts::new(host.isa, host.threads, mode, matrices)?;
                Arc::clone(computes.insert(Arc::new(Mutex::new(new))))
            }
        };
        // Measures the link.
        let (memory, target) =
            (RegisteredMemory::new(&gpu.device, PROBE_BYTES)?, DeviceBuffer::new(gpu, PROBE_BYTES, "scratch")?);
        let copies = CopyStream::new(&gpu.device)?;
        // SAFETY: memory of its own, which nothing writes now.
        let bytes = unsafe { std::slice::from_raw_parts(sluice_store::Memory::start(&memory), PROBE_BYTES) };
        let mut copy = f64::INFINITY;
        for _ in 0..PROBES {
            let began = Instant::now();
            // SAFETY: the target has this length; waited for right here.
            unsafe { copies.write(target.at, bytes)? };
            copies.wait()?;
            copy = copy.min(began.elapsed().as_secs_f64() / PROBE_BYTES as f64);
        }
        let (x, outputs) = (PinnedBuffer::default(), PinnedBuffer::default());
        Ok(HostSplit {
            host: computes,
            always: host.always,
            copy,
            compute: 1.0 / INITIAL_SPEED,
            x,
            x_bytes: 0,
            outputs,
        })
    }

    /// Makes room for the normed input of a layer and returns it.
    pub fn input(&mut self, gpu: &Gpu, bytes: usize) -> Result<&mut [u8]> {
        self.x_bytes = bytes;
        self.x.reserve(gpu, bytes)
    }

    /// How many of `missing` experts of `bytes` bytes each the host should compute, so that all are done soonest.
    pub fn share(&self, missing: usize, bytes: usize) -> usize {
        if self.always {
            return missing.div_ceil(2);
        }
        share(missing, bytes as f64 * self.copy, bytes as f64 * self.compute)
    }

    /// As [`HostExperts::compute`] of the input from [`HostSplit::input`], with experts of `bytes` bytes in all. Returns the outputs, valid until the next call.
    pub fn compute_rows<'a>(
        &mut self,
        gpu: &Gpu,
        of: &Experts,
        (wanted, rows): (&[OffloadedExpert], &[u32]),
        bytes: usize,
        array: impl Fn(usize, usize) -> &'a [u8],
    ) -> Result<&[u8]> {
        let numbers = rows.len() * of.hidden();
        self.outputs.reserve(gpu, size_of::<f32>() * numbers)?;
        let (mut x, mut outputs) = (std::mem::take(&mut self.x), std::mem::take(&mut self.outputs));
        let (from, to) = (x.floats_mut(self.x_bytes / size_of::<f32>()), outputs.floats_mut(numbers));
        self.compute(of, (wanted, rows), bytes, array, (from, to));
        (self.x, self.outputs) = (x, outputs);
        Ok(&self.outputs.bytes_mut()[..size_of::<f32>() * numbers])
    }

    /// As [`HostExperts::compute`] with experts of `bytes` bytes in all.
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
        let seconds = (began.elapsed().as_secs_f64() - OVERHEAD).max(0.0) / bytes.max(1) as f64;
        self.compute += (seconds - self.compute) * SMOOTHING;
    }
}

/// How many of `missing` experts the host should compute, by the seconds to copy an expert and to compute with it.
fn share(missing: usize, copy: f64, compute: f64) -> usize {
    let time = |n: usize| {
        let host = if n == 0 { 0.0 } else { OVERHEAD + n as f64 * compute };
        host.max((missing - n) as f64 * copy)
    };
    // The fewest of equally good numbers: experts that are copied may stay on the device.
    (0..=missing).min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_queue_gets_the_next_expert() {
        // Equal speeds, but the host has a fixed cost.
        assert_eq!(share(8, 50e-6, 50e-6), 4);
        assert_eq!(share(1, 50e-6, 50e-6), 0);
        assert_eq!(share(1, 100e-6, 20e-6), 1);
        // A slow link, a slow host.
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
