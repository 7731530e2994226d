//! Loading weights to devices: pieces are copied from the locked memory that readers have read them into, while they read on.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use sluice_store::load::{LoadProgress, Piece};
use sluice_store::{Bytes, Loading, Memory as HostMemory};

use crate::device::copies::CopyStream;
use crate::device::device::Device;
use crate::device::memory::DeviceBuffer;
use crate::device::pinned::RegisteredMemory;
use crate::device::sys::{Address, DriverError};

/// Arrays of weights and their addresses on a device.
pub struct Arrivals {
    pub device: Arc<Device>,
    /// The memory that they are in. It stays until the last has arrived.
    pub memory: Arc<DeviceBuffer>,
    pub arrays: Vec<(Bytes, Address)>,
}

/// A device that arrays are copied to.
struct Target {
    device: Arc<Device>,
    _memory: Arc<DeviceBuffer>,
    /// Streams without copies under way.
    idle: Mutex<Vec<CopyStream>>,
}

impl Target {
    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<CopyStream>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies bytes to addresses and waits for it.
    ///
    /// # Safety
    /// The addresses have that many bytes, which nothing else uses.
    unsafe fn copy<'a>(&self, all: impl Iterator<Item = (Address, &'a [u8])>) -> Result<(), DriverError> {
        let idle = self.idle().pop();
        let copies = idle.map_or_else(|| CopyStream::new(&self.device), Ok)?;
        for (at, bytes) in all {
            // SAFETY: as the caller vouches; waited for below, and when it is dropped.
            unsafe { copies.write(at, bytes)? };
        }
        copies.wait()?;
        self.idle().push(copies);
        Ok(())
    }
}

/// Starts reading arrays to their devices, and those that `stays` names to their places in the host's memory, and returns. Arrays that are not in this load's files
/// are copied at once.
///
/// # Errors
/// If there is no memory for the buffers, or a device fails.
pub fn begin(loading: &Loading, all: Vec<Arrivals>, stays: &[&Bytes]) -> Result<LoadProgress> {
    let mut targets = Vec::new();
    let (mut views, mut places) = (Vec::new(), Vec::new());
    for Arrivals { device, memory, arrays } in &all {
        let number = targets.len();
        targets.push(Target { device: Arc::clone(device), _memory: Arc::clone(memory), idle: Mutex::default() });
        views.extend(arrays.iter().map(|(bytes, _)| bytes));
        places.extend(arrays.iter().map(|(_, at)| (number, *at)));
    }
    let targets = Arc::new(targets);
    let (to, place) = (Arc::clone(&targets), places.clone());
    let take = move |pieces: &[Piece]| {
        for (number, target) in to.iter().enumerate() {
            let own = pieces.iter().filter(|piece| place[piece.view].0 == number);
            let mut own = own.map(|piece| (place[piece.view].1 + piece.offset as u64, piece.bytes)).peekable();
            if own.peek().is_some() {
                // SAFETY: each array has room for all its pieces, and nothing reads it before it has arrived.
                unsafe { target.copy(own) }
                    .map_err(|e| io::Error::other(format!("cuda:{}: {e}", target.device.ordinal)))?;
            }
        }
        Ok(())
    };
    // All devices can copy from memory that one has locked.
    let mut lend = |bytes: usize| -> io::Result<Box<dyn HostMemory>> {
        match targets.first() {
            Some(target) => Ok(Box::new(RegisteredMemory::new(&target.device, bytes)?)),
            None => sluice_store::host_memory(bytes),
        }
    };
    let others = loading.deliver(&views, stays, &mut lend, take)?;
    for view in others {
        let ((number, at), bytes) = (places[view], views[view]);
        bytes.wait();
        // SAFETY: as above.
        unsafe { targets[number].copy(std::iter::once((at, &**bytes)))? };
    }
    Ok(loading.progress())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use sluice_backend::{Activations, Float, MatrixSource, Resources, WeightFormat};
    use sluice_store::load::{self, LoadOptions};
    use sluice_store::{Dtype, LoadMode, TensorPlan, Writer};

    use crate::Pipeline;
    use crate::cuda::Cuda;
    use crate::device::memory::bytes_of;

    /// A device, unless there is none and none is asked for by `SLUICE_GPU`.
    fn device() -> Option<u32> {
        let asked: Option<u32> = std::env::var("SLUICE_GPU").ok().map(|n| n.parse().expect("SLUICE_GPU: a number"));
        match (crate::describe(asked.unwrap_or(0)), asked) {
            (Ok(_), _) => Some(asked.unwrap_or(0)),
            (Err(why), None) => {
                eprintln!("left out: {why:#}");
                None
            }
            (Err(why), Some(_)) => panic!("SLUICE_GPU: {why:#}"),
        }
    }

    /// Matrices of f32, so many rows of 64, and what is in them.
    fn checkpoint(rows: &[usize]) -> (tempfile::TempDir, Vec<Vec<f32>>) {
        let folder = tempfile::tempdir().unwrap();
        let plan =
            |(i, rows): (usize, &usize)| TensorPlan { name: i.to_string(), dtype: Dtype::F32, shape: vec![*rows, 64] };
        let plans: Vec<TensorPlan> = rows.iter().enumerate().map(plan).collect();
        let mut writer = Writer::create(&folder.path().join("model.safetensors"), &plans, &BTreeMap::new()).unwrap();
        let mut random = fastrand::Rng::with_seed(rows.len() as u64);
        let mut all = Vec::new();
        for (plan, rows) in plans.iter().zip(rows) {
            let values: Vec<f32> = (0..64 * rows).map(|_| random.f32()).collect();
            writer.append(&plan.name, bytes_of(&values)).unwrap();
            all.push(values);
        }
        writer.finish().unwrap();
        (folder, all)
    }

    /// What a device holds of a matrix.
    fn held(device: &Cuda, matrix: usize) -> Vec<u8> {
        let weight = &device.context.weights.all[matrix];
        let mut bytes = vec![0; weight.bytes()];
        let at = weight.at_row(0, device.context.mode).data;
        // SAFETY: as many bytes as it has there.
        unsafe { device.context.gpu.read(at, &mut bytes, device.context.gpu.wait_permit().unwrap()).unwrap() };
        bytes
    }

    #[test]
    fn weights_come_to_their_devices_as_they_are_read() {
        let Some(number) = device() else { return };
        let (folder, values) = checkpoint(&[3, 40_000, 1, 300_000, 17]);
        for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
            let options = LoadOptions { mode, ..LoadOptions::default() };
            let (checkpoint, loading) = load::open(folder.path(), &options).unwrap();
            let mut several = Pipeline::new(&[number, number], Activations::Int8, 1).unwrap();
            for tensor in checkpoint.tensors() {
                let (rows, parts) = (tensor.shape[0], vec![tensor.bytes.clone()]);
                several
                    .matrix(MatrixSource { format: WeightFormat::Float(Float::F32), rows, cols: 64, planes: parts })
                    .unwrap();
            }
            several.read_weights(&loading, &[]).unwrap();
            for device in &mut several.devices {
                device.context.weights.bring(&device.context.gpu).unwrap();
                for (matrix, values) in values.iter().enumerate() {
                    assert!(held(device, matrix) == bytes_of(values), "{mode:?}: matrix {matrix}");
                }
            }
            loading.check().unwrap();
        }
    }
}
