//! Streams that copy, beside the stream that computes.

use std::sync::Arc;

use crate::device::device::Device;
use crate::device::event::SyncEvent;
use crate::device::sys::{Address, DriverError, checked, sys};
use crate::kernels::Kernel;
use crate::parameters::Parameters;

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

    /// Launches a kernel that is a part of a copy over `blocks` blocks of `threads` threads.
    ///
    /// # Safety
    /// As for [`Gpu::launch`](crate::device::stream::Gpu::launch).
    pub unsafe fn launch<P: Parameters>(
        &self,
        kernel: Kernel,
        blocks: u32,
        threads: u32,
        p: &P,
    ) -> Result<(), DriverError> {
        assert_eq!(kernel.parameters(), size_of::<P>(), "{kernel:?} takes other parameters");
        if blocks == 0 {
            return Ok(());
        }
        self.device.bind();
        let mut list = [(&raw const *p).cast_mut().cast::<std::ffi::c_void>()];
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.stream,
            attrs: std::ptr::null_mut(),
            numAttrs: 0,
        };
        let function = self.device.kernels.function(kernel);
        // SAFETY: the kernel takes one parameter of this size, which the driver copies; for the rest the caller vouches.
        checked(unsafe { sys::cuLaunchKernelEx(&config, function, list.as_mut_ptr(), std::ptr::null_mut()) })
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
