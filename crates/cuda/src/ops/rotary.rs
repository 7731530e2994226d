//! Tables of rotary angles.

use anyhow::{Context as _, Result};
use sluice_backend::{MOST_POOLED, RotaryFrequencies};

use crate::device::memory::{VirtualRange, bytes_of};
use crate::device::stream::Gpu;

/// `[positions, 2 * frequencies]` f32: the cosines and then the sines of each position's angles. Addresses are reserved for all positions; those that steps used are
/// filled.
pub struct RotaryTable {
    frequencies: RotaryFrequencies,
    pub memory: VirtualRange,
    positions: usize,
    /// For each run of [`FILL_POSITIONS`] positions.
    filled: Vec<bool>,
    angles: Vec<f32>,
}

/// Positions that are filled together. Few, because a step may begin far behind position 0 if the keys and values of a prompt are cached.
const FILL_POSITIONS: usize = 64;

impl RotaryTable {
    pub fn new(gpu: &Gpu, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryTable> {
        let bytes = positions.checked_mul(frequencies.inv_freq.len() * 8);
        let bytes = bytes.with_context(|| format!("{positions} positions are too many"))?;
        let memory = VirtualRange::new(gpu, bytes, "rotary angles")?;
        let filled = vec![false; positions.div_ceil(FILL_POSITIONS)];
        Ok(RotaryTable { frequencies: frequencies.clone(), memory, positions, filled, angles: Vec::new() })
    }

    /// The number of frequencies.
    pub fn half(&self) -> usize {
        self.frequencies.inv_freq.len()
    }

    /// Fills the angles of these positions. The host computes them, because a device's sine has other bits.
    pub fn fill(&mut self, gpu: &Gpu, positions: &[u32]) -> Result<()> {
        let (half, row) = (self.half(), 8 * self.half());
        // Entries of windows have the angles of their first positions, which may come from a cache.
        let before = (0..=MOST_POOLED).step_by(FILL_POSITIONS);
        let all = positions.iter().flat_map(|p| before.clone().map(|n| (*p as usize).saturating_sub(n)));
        for position in all {
            assert!(position < self.positions, "position {position} of {}", self.positions);
            if self.filled[position / FILL_POSITIONS] {
                continue;
            }
            let from = position / FILL_POSITIONS * FILL_POSITIONS;
            let to = (from + FILL_POSITIONS).min(self.positions);
            self.memory.commit(gpu, to * row, "rotary angles")?;
            self.angles.clear();
            self.angles.resize((to - from) * 2 * half, 0.0);
            for (row, position) in self.angles.chunks_exact_mut((2 * half).max(1)).zip(from..) {
                let (cos, sin) = row.split_at_mut(half);
                self.frequencies.angles(position as u32, cos, sin);
            }
            // SAFETY: this much was just committed.
            unsafe { gpu.write(self.memory.at + (from * row) as u64, bytes_of(&self.angles), gpu.wait_permit()?)? };
            self.filled[position / FILL_POSITIONS] = true;
        }
        Ok(())
    }
}
