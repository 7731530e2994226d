//! Where the experts of layers are on the device: for each layer a [`p::Matrix`] of each expert, projection after projection, here and as the device has it; and which of them are there
//! to stay.

use anyhow::Result;
use cudarc::driver::DriverError;

use crate::driver::{Address, Gpu};
use crate::memory::{Memory, Pinned};
use crate::mixture_one::MOST_EXPERTS;
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
    host: Pinned,
    device: Memory,
    layers: Vec<Layer>,
    /// A bit for each expert that stays, [`MOST_EXPERTS`] for each layer.
    stays: Pinned,
    stays_on_device: Memory,
    stays_changed: bool,
}

const SIZE: usize = size_of::<p::Matrix>();

/// Bytes on the device of the table of a layer with so many experts.
pub fn bytes_of_layer(experts: usize) -> usize {
    PROJECTIONS * experts * SIZE + MOST_EXPERTS / 8
}

impl Tables {
    /// Of layers with so many experts.
    pub fn new(gpu: &Gpu, experts: impl Iterator<Item = usize>) -> Result<Tables> {
        let (mut layers, mut count) = (Vec::new(), 0);
        for experts in experts {
            layers.push(Layer { first: count, experts, changed: true });
            count += PROJECTIONS * experts;
        }
        let (mut host, mut stays) = (Pinned::default(), Pinned::default());
        host.room(gpu, count * SIZE)?;
        let bytes = layers.len() * MOST_EXPERTS / 8;
        stays.room(gpu, bytes)?.fill(0);
        let device = Memory::new(gpu, count * SIZE, "tables of experts")?;
        let stays_on_device = Memory::zeroed(gpu, bytes, "tables of experts")?;
        Ok(Tables { host, device, layers, stays, stays_on_device, stays_changed: false })
    }

    /// Where a layer's table is on the device.
    pub fn at(&self, layer: usize) -> Address {
        self.device.at + (self.layers[layer].first * SIZE) as u64
    }

    /// Where the bits are of those of a layer's experts that stay on the device, `[MOST_EXPERTS / 32]` words.
    pub fn here(&self, layer: usize) -> Address {
        self.stays_on_device.at + (layer * MOST_EXPERTS / 8) as u64
    }

    /// Writes down whether an expert is on the device to stay, where its matrices say that it is. More than [`MOST_EXPERTS`] of a layer are not told of.
    pub fn stay(&mut self, layer: usize, expert: usize, stays: bool) {
        if expert < MOST_EXPERTS {
            let byte = &mut self.stays.bytes_mut()[(layer * MOST_EXPERTS + expert) / 8];
            *byte = *byte & !(1 << (expert % 8)) | u8::from(stays) << (expert % 8);
            self.stays_changed = true;
        }
    }

    /// Writes down a matrix. The device has come to the end of what was told before.
    pub fn write(&mut self, layer: usize, projection: usize, expert: usize, matrix: p::Matrix) {
        let Layer { first, experts, changed } = &mut self.layers[layer];
        let at = (*first + projection * *experts + expert) * SIZE;
        *changed = true;
        self.host.bytes_mut()[at..at + SIZE].copy_from_slice(p::Matrix::bytes(&[matrix]));
    }

    /// Tells the device what has changed, behind all copies; whether anything has.
    pub fn tell(&mut self, copies: &Copies) -> Result<bool, DriverError> {
        let mut told = false;
        for layer in 0..self.layers.len() {
            let to = self.at(layer);
            let Layer { first, experts, changed } = &mut self.layers[layer];
            if std::mem::take(changed) {
                let bytes = &self.host.bytes_mut()[*first * SIZE..][..PROJECTIONS * *experts * SIZE];
                // SAFETY: the layer's part of the table, which is written again only after the host has waited.
                unsafe { copies.write(to, bytes)? };
                told = true;
            }
        }
        if std::mem::take(&mut self.stays_changed) {
            // SAFETY: as large as that, and written again only after the host has waited.
            unsafe { copies.write(self.stays_on_device.at, self.stays.bytes_mut())? };
            told = true;
        }
        Ok(told)
    }

    /// Whether the device knows all of a layer.
    pub fn is_told(&self, layer: usize) -> bool {
        !self.layers[layer].changed
    }

    /// Bytes on the device, which are as many on the host.
    pub fn bytes(&self) -> usize {
        self.device.bytes + self.stays_on_device.bytes
    }
}
