//! Angles of rotary embeddings.

use anyhow::{Context, Result};
use sluice_backend::{MemoryClass, RotaryFrequencies};

use super::{Buffer, Place};
use crate::threads::Pool;

/// Cosines and then sines of each position's angles, `[positions, 2 * frequencies]`. Addresses are reserved for all positions; positions are filled when a step reaches them.
pub struct RotaryTable {
    pub frequencies: RotaryFrequencies,
    buffer: Buffer,
    positions: usize,
    /// For each [`FILLED`] positions.
    filled: Vec<bool>,
    /// Runs of [`FILLED`] positions that the present step fills.
    new: Vec<usize>,
}

/// Positions that are filled at once. Few, since a step may start at a late position when the keys and values before it came from a cache.
const FILLED: usize = 64;

impl RotaryTable {
    pub fn new(frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryTable> {
        let bytes = positions.checked_mul(frequencies.inv_freq.len() * 2 * size_of::<f32>());
        let bytes = bytes.with_context(|| format!("{positions} positions are too many"))?;
        let buffer = Buffer::zeroed(MemoryClass::Scratch, bytes)?;
        let parts = positions.div_ceil(FILLED);
        let (filled, new) = (vec![false; parts], Vec::with_capacity(parts));
        Ok(RotaryTable { frequencies: frequencies.clone(), buffer, positions, filled, new })
    }

    /// Bytes that are filled.
    pub fn bytes(&self) -> usize {
        let filled = self.filled.iter().filter(|filled| **filled).count() * FILLED;
        filled * 2 * self.frequencies.inv_freq.len() * size_of::<f32>()
    }

    pub fn place(&self) -> Place {
        let cols = 2 * self.frequencies.inv_freq.len();
        Place { start: self.buffer.start.cast(), rows: self.positions, cols, stride: cols }
    }

    /// Computes the missing angles of these positions.
    pub fn fill(&mut self, positions: &[u32], pool: &mut Pool) {
        self.new.clear();
        for position in positions.iter().map(|p| *p as usize) {
            assert!(position < self.positions, "position {position} of {}", self.positions);
            if !std::mem::replace(&mut self.filled[position / FILLED], true) {
                self.new.push(position / FILLED);
            }
        }
        let (place, half, frequencies, new) =
            (self.place(), self.frequencies.inv_freq.len(), &self.frequencies, &self.new);
        const TASK: usize = 16;
        pool.run(new.len() * FILLED / TASK, &|task, _| {
            let from = new[task * TASK / FILLED] * FILLED + task * TASK % FILLED;
            for row in (from..place.rows).take(TASK) {
                // SAFETY: this task alone writes this row.
                let (cos, sin) = unsafe { place.get_mut(row, 0..2 * half) }.split_at_mut(half);
                frequencies.angles(row as u32, cos, sin);
            }
        });
    }
}
