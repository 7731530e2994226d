//! Copies beside the stream in which everything is computed: streams of their own, and the points at which one waits for another; memory of the host that the
//! device's copies read at full speed.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{DriverError, sys};
use sluice_store::{Memory, host_memory};

use crate::driver::{Address, Device, Gpu, checked};

/// A stream that copies and does nothing else. It waits for no other, so it may be waited for at any time, also while a device asks.
pub struct Copies {
    device: Arc<Device>,
    stream: sys::CUstream,
}

// SAFETY: a stream may be used by any thread, one at a time, on which its context is current.
unsafe impl Send for Copies {}

impl Copies {
    pub fn new(device: &Arc<Device>) -> Result<Copies, DriverError> {
        device.bind();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) })?;
        Ok(Copies { device: Arc::clone(device), stream })
    }

    /// Copies to the device.
    ///
    /// # Safety
    /// `to` has room, and nothing else uses it; `from` stays as it is until the stream has come so far.
    pub unsafe fn write(&self, to: Address, from: &[u8]) -> Result<(), DriverError> {
        if from.is_empty() {
            return Ok(());
        }
        self.device.bind();
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream) })
    }

    /// Copies to the host.
    ///
    /// # Safety
    /// `from` has so many bytes; nobody looks at `to` until the stream has come so far.
    pub unsafe fn read(&self, from: Address, to: &mut [u8]) -> Result<(), DriverError> {
        if to.is_empty() {
            return Ok(());
        }
        self.device.bind();
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream) })
    }

    /// Waits on the host until all of it is done.
    pub fn wait(&self) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: the stream is alive.
        checked(unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let _ = self.wait();
        // SAFETY: nothing is under way in it any more.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}

/// A point in a stream, marked again and again.
pub struct Point {
    device: Arc<Device>,
    pub(crate) event: sys::CUevent,
}

// SAFETY: an event may be used by any thread on which its context is current.
unsafe impl Send for Point {}

impl Point {
    pub fn new(gpu: &Gpu) -> Result<Point, DriverError> {
        let device = Arc::clone(&gpu.device);
        device.bind();
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32) })?;
        Ok(Point { device, event })
    }

    /// Where the copies are now.
    pub fn mark(&self, copies: &Copies) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: both are alive.
        checked(unsafe { sys::cuEventRecord(self.event, copies.stream) })
    }

    /// Whether the stream has come to it.
    pub fn is_past(&self) -> bool {
        self.device.bind();
        // SAFETY: it is alive.
        checked(unsafe { sys::cuEventQuery(self.event) }).is_ok()
    }

    /// Waits on the host until it has.
    pub fn wait(&self) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: it is alive.
        checked(unsafe { sys::cuEventSynchronize(self.event) })
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        self.device.bind();
        // SAFETY: it was created so; the driver keeps what is still to be recorded.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}

/// Ordinary memory that the driver has locked in place, where it does.
pub struct Locked {
    device: Arc<Device>,
    memory: Box<dyn Memory>,
    pub is_locked: bool,
}

impl Locked {
    pub fn new(device: &Arc<Device>, bytes: usize) -> std::io::Result<Locked> {
        let memory = host_memory(bytes)?;
        device.bind();
        // In one piece: no copy may reach from one to the next.
        // SAFETY: memory of its own, which is unlocked before it goes.
        let locked = checked(unsafe {
            sys::cuMemHostRegister_v2(memory.start().cast(), memory.len(), sys::CU_MEMHOSTREGISTER_PORTABLE)
        });
        Ok(Locked { device: Arc::clone(device), is_locked: !memory.is_empty() && locked.is_ok(), memory })
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.is_locked {
            self.device.bind();
            // SAFETY: it was locked so; whoever copies has waited before it lets go of memory.
            let _ = unsafe { sys::cuMemHostUnregister(self.memory.start().cast()) };
        }
    }
}

// SAFETY: memory that is lent on as it was given, and stays until this is dropped.
unsafe impl Memory for Locked {
    fn start(&self) -> *mut u8 {
        self.memory.start()
    }

    fn len(&self) -> usize {
        self.memory.len()
    }
}
