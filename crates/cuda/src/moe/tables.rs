//! The device's tables of where experts are: for each layer `[PROJECTIONS, experts]` [`p::Matrix`], and a bit for each expert that stays on the device. The host changes
//! its copy and then publishes the changes.

use anyhow::Result;
use cudarc::driver::DriverError;

use crate::device::copies::CopyStream;
use crate::device::memory::DeviceBuffer;
use crate::device::pinned::PinnedBuffer;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::moe::experts::MAX_EXPERTS;
use crate::parameters as p;
use crate::parameters::PROJECTIONS;

/// A layer's part of the tables.
struct LayerTable {
    first: usize,
    experts: usize,
    /// It has changes that were not published.
    changed: bool,
}

pub struct ExpertTables {
    host: PinnedBuffer,
    device: DeviceBuffer,
    layers: Vec<LayerTable>,
    /// A bit for each expert that stays, [`MAX_EXPERTS`] for each layer.
    resident: PinnedBuffer,
    resident_on_device: DeviceBuffer,
    resident_changed: bool,
}

/// Bytes of a matrix in a table.
const SIZE: usize = size_of::<p::Matrix>();

/// Bytes on the device for a layer of `experts` experts.
pub fn bytes_of_layer(experts: usize) -> usize {
    PROJECTIONS * experts * SIZE + MAX_EXPERTS / 8
}

impl ExpertTables {
    /// `experts`: how many each layer has.
    pub fn new(gpu: &Gpu, experts: impl Iterator<Item = usize>) -> Result<ExpertTables> {
        let (mut layers, mut count) = (Vec::new(), 0);
        for experts in experts {
            layers.push(LayerTable { first: count, experts, changed: true });
            count += PROJECTIONS * experts;
        }
        let (mut host, mut resident) = (PinnedBuffer::default(), PinnedBuffer::default());
        host.reserve(gpu, count * SIZE)?;
        let bytes = layers.len() * MAX_EXPERTS / 8;
        resident.reserve(gpu, bytes)?.fill(0);
        let device = DeviceBuffer::new(gpu, count * SIZE, "tables of experts")?;
        let resident_on_device = DeviceBuffer::zeroed(gpu, bytes, "tables of experts")?;
        Ok(ExpertTables { host, device, layers, resident, resident_on_device, resident_changed: false })
    }

    /// The address of a layer's table.
    pub fn at(&self, layer: usize) -> Address {
        self.device.at + (self.layers[layer].first * SIZE) as u64
    }

    /// The address of a layer's bits of experts that stay, `[MAX_EXPERTS / 32]` u32.
    pub fn resident_bits(&self, layer: usize) -> Address {
        self.resident_on_device.at + (layer * MAX_EXPERTS / 8) as u64
    }

    /// Notes whether an expert stays on the device. Experts beyond [`MAX_EXPERTS`] have no bit.
    pub fn set_resident(&mut self, layer: usize, expert: usize, resident: bool) {
        if expert < MAX_EXPERTS {
            let byte = &mut self.resident.bytes_mut()[(layer * MAX_EXPERTS + expert) / 8];
            *byte = *byte & !(1 << (expert % 8)) | u8::from(resident) << (expert % 8);
            self.resident_changed = true;
        }
    }

    /// Changes a matrix. All copies of earlier changes are done.
    pub fn set(&mut self, layer: usize, projection: usize, expert: usize, matrix: p::Matrix) {
        let LayerTable { first, experts, changed } = &mut self.layers[layer];
        let at = (*first + projection * *experts + expert) * SIZE;
        *changed = true;
        self.host.bytes_mut()[at..at + SIZE].copy_from_slice(p::Matrix::bytes(&[matrix]));
    }

    /// Copies changes to the device, behind all copies so far. Returns whether there were any.
    pub fn publish(&mut self, copies: &CopyStream) -> Result<bool, DriverError> {
        let mut published = false;
        for layer in 0..self.layers.len() {
            let to = self.at(layer);
            let LayerTable { first, experts, changed } = &mut self.layers[layer];
            if std::mem::take(changed) {
                let bytes = &self.host.bytes_mut()[*first * SIZE..][..PROJECTIONS * *experts * SIZE];
                // SAFETY: the layer's part of the table, which changes again only after the host has waited.
                unsafe { copies.write(to, bytes)? };
                published = true;
            }
        }
        if std::mem::take(&mut self.resident_changed) {
            // SAFETY: as long as the copy on the device, and it changes again only after the host has waited.
            unsafe { copies.write(self.resident_on_device.at, self.resident.bytes_mut())? };
            published = true;
        }
        Ok(published)
    }

    /// Whether all changes of a layer were published.
    pub fn is_published(&self, layer: usize) -> bool {
        !self.layers[layer].changed
    }

    /// Bytes on the device, which are as many on the host.
    pub fn bytes(&self) -> usize {
        self.device.bytes + self.resident_on_device.bytes
    }
}
