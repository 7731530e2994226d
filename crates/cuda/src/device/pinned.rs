//! Page-locked memory of the host, which the device copies from and to at full speed.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use anyhow::{Context, Result};
use sluice_store::{Memory, host_memory};

use crate::device::device::Device;
use crate::device::retired::{Allocation, Retired};
use crate::device::stream::Gpu;
use crate::device::sys::{Address, checked, sys};

/// A page-locked buffer that grows to the largest use. It is not write-combined, because the host reads it too.
#[derive(Default)]
pub struct PinnedBuffer {
    retired: Option<Arc<Retired>>,
    at: usize,
    bytes: usize,
}

impl PinnedBuffer {
    /// Grows to at least `bytes`. Growing loses the contents.
    ///
    /// # Errors
    /// If the system has no more such memory.
    pub fn reserve(&mut self, gpu: &Gpu, bytes: usize) -> Result<&mut [u8]> {
        if self.bytes < bytes {
            *self = PinnedBuffer::default();
            gpu.device.bind();
            let mut at = std::ptr::null_mut();
            // SAFETY: the context is current; freed after it was dropped.
            checked(unsafe { sys::cuMemHostAlloc(&mut at, bytes, 0) })
                .with_context(|| format!("the system has no {bytes} bytes of pinned memory"))?;
            // SAFETY: it was just allocated with this length.
            unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
            *self = PinnedBuffer { retired: Some(Arc::clone(&gpu.retired)), at: at as usize, bytes };
        }
        Ok(&mut self.bytes_mut()[..bytes])
    }

    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: the whole allocation, which nobody else refers to.
        unsafe { std::slice::from_raw_parts_mut(self.at as *mut u8, self.bytes) }
    }

    /// All of it as words that the device may write at the same time.
    pub fn words(&self) -> &[AtomicU32] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: whole words, aligned to a page; the device writes whole words, and the host writes them in no other way while this is borrowed.
        unsafe { std::slice::from_raw_parts(self.at as *const AtomicU32, self.bytes / size_of::<AtomicU32>()) }
    }

    /// The first `n` numbers.
    pub fn floats(&self, n: usize) -> &[f32] {
        assert!(4 * n <= self.bytes);
        if n == 0 {
            return &[];
        }
        // SAFETY: the length was just checked; pinned memory is aligned to pages, and any bits are an f32.
        unsafe { std::slice::from_raw_parts(self.at as *const f32, n) }
    }

    /// The first `n` numbers, to be written.
    pub fn floats_mut(&mut self, n: usize) -> &mut [f32] {
        assert!(4 * n <= self.bytes);
        if n == 0 {
            return &mut [];
        }
        // SAFETY: as in `floats`; nobody else refers to it.
        unsafe { std::slice::from_raw_parts_mut(self.at as *mut f32, n) }
    }

    /// Its address as the device sees it.
    pub fn at(&self) -> Address {
        self.at as Address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(retired) = &self.retired {
            retired.add(Allocation::Host(self.at));
        }
    }
}

/// Ordinary memory that the driver has page-locked in place, if it could.
pub struct RegisteredMemory {
    device: Arc<Device>,
    memory: Box<dyn Memory>,
    pub is_locked: bool,
}

impl RegisteredMemory {
    pub fn new(device: &Arc<Device>, bytes: usize) -> std::io::Result<RegisteredMemory> {
        let memory = host_memory(bytes)?;
        device.bind();
        // In one piece: no copy may reach from one registered piece into another.
        // SAFETY: memory of its own, which is unregistered before it is freed.
        let locked = checked(unsafe {
            sys::cuMemHostRegister_v2(memory.start().cast(), memory.len(), sys::CU_MEMHOSTREGISTER_PORTABLE)
        });
        let is_locked = !memory.is_empty() && locked.is_ok();
        Ok(RegisteredMemory { device: Arc::clone(device), is_locked, memory })
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if self.is_locked {
            self.device.bind();
            // SAFETY: it was registered by `new`; whoever copies waits before it drops the memory.
            let _ = unsafe { sys::cuMemHostUnregister(self.memory.start().cast()) };
        }
    }
}

// SAFETY: passes on the memory that it owns, which stays until this is dropped.
unsafe impl Memory for RegisteredMemory {
    fn start(&self) -> *mut u8 {
        self.memory.start()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }
}
