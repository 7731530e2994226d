//! Streams that only copy, beside the stream that computes.

use std::sync::Arc;

use crate::device::device::Device;
use crate::device::event::SyncEvent;
use crate::device::sys::{Address, DriverError, checked, sys};

/// A stream of copies. It waits for no other stream, so the host may wait for it at any time, even while the device waits for the host.
pub struct CopyStream {
    device: Arc<Device>,
    stream: sys::CUstream,
}

// SAFETY: a stream may be used by any thread, one at a time, on which its context is current.
unsafe impl Send for CopyStream {}

impl CopyStream {
    pub fn new(device: &Arc<Device>) -> Result<CopyStream, DriverError> {
        device.bind();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) })?;
        Ok(CopyStream { device: Arc::clone(device), stream })
    }

    /// Copies to the device.
    ///
    /// # Safety
    /// `to` has `from.len()` bytes that nothing else uses; `from` stays unchanged until the copy is done.
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
    /// `from` has `to.len()` bytes; nobody reads `to` until the copy is done.
    pub unsafe fn read(&self, from: Address, to: &mut [u8]) -> Result<(), DriverError> {
        if to.is_empty() {
            return Ok(());
        }
        self.device.bind();
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream) })
    }

    /// Records an event behind all copies so far.
    pub fn record(&self, event: &SyncEvent) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: both are alive.
        checked(unsafe { sys::cuEventRecord(event.event, self.stream) })
    }

    /// Blocks the host until all copies are done.
    pub fn wait(&self) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: the stream is alive.
        checked(unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        let _ = self.wait();
        // SAFETY: it is idle.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}
