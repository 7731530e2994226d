//! Where the experts of layers are on the device: for each layer a [`p::Matrix`] of each expert, projection after projection, here and as the device has it.

use anyhow::Result;
use cudarc::driver::DriverError;

use crate::driver::{Address, Gpu};
use crate::memory::{Memory, Pinned};
use crate::parameters as p;
use crate::parameters::PROJECTIONS;
use crate::streams::Copies;

/// A layer's part of all.
struct Layer {
    first: usize,
    experts: usize,
    /// Something of it has changed that the device has not been told.
    changed: bool,
}

pub struct Tables {
    here: Pinned,
    device: Memory,
    layers: Vec<Layer>,
}

const SIZE: usize = size_of::<p::Matrix>();

/// Bytes on the device of the table of a layer with so many experts.
pub fn bytes_of_layer(experts: usize) -> usize {
    PROJECTIONS * experts * SIZE
}

impl Tables {
    /// Of layers with so many experts.
    pub fn new(gpu: &Gpu, experts: impl Iterator<Item = usize>) -> Result<Tables> {
        let (mut layers, mut count) = (Vec::new(), 0);
        for experts in experts {
            layers.push(Layer { first: count, experts, changed: true });
            count += PROJECTIONS * experts;
        }
        let mut here = Pinned::default();
        here.room(gpu, count * SIZE)?;
        Ok(Tables { here, device: Memory::new(gpu, count * SIZE, "tables of experts")?, layers })
    }

    /// Where a layer's table is on the device.
    pub fn at(&self, layer: usize) -> Address {
        self.device.at + (self.layers[layer].first * SIZE) as u64
    }

    /// Writes down a matrix. The device has come to the end of what was told before.
    pub fn write(&mut self, layer: usize, projection: usize, expert: usize, matrix: p::Matrix) {
        let Layer { first, experts, changed } = &mut self.layers[layer];
        let at = (*first + projection * *experts + expert) * SIZE;
        *changed = true;
        self.here.bytes_mut()[at..at + SIZE].copy_from_slice(p::Matrix::bytes(&[matrix]));
    }

    /// Tells the device what has changed of a layer's table, behind all copies; whether anything has.
    pub fn tell(&mut self, copies: &Copies, layer: usize) -> Result<bool, DriverError> {
        let to = self.at(layer);
        let Layer { first, experts, changed } = &mut self.layers[layer];
        if !std::mem::take(changed) {
            return Ok(false);
        }
        let bytes = &self.here.bytes_mut()[*first * SIZE..][..PROJECTIONS * *experts * SIZE];
        // SAFETY: the layer's part of the table, which is written again only after the host has waited.
        unsafe { copies.write(to, bytes)? };
        Ok(true)
    }

    /// Whether the device knows all of a layer.
    pub fn is_told(&self, layer: usize) -> bool {
        !self.layers[layer].changed
    }

    /// Bytes on the device, which are as many on the host.
    pub fn bytes(&self) -> usize {
        self.device.bytes
    }
}
