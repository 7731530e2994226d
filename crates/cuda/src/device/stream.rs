//! A device's stream, in which a backend enqueues everything that it computes, in order.

use std::cell::{RefCell, RefMut};
use std::sync::Arc;

use anyhow::Result;

use crate::device::device::Device;
use crate::device::event::{SyncEvent, TimingEvent};
use crate::device::graph::{Graphs, HoldGuard, Launch, MAX_HELD_LAUNCHES};
use crate::device::retired::Retired;
use crate::device::sys::{Address, DriverError, checked, sys};
use crate::device::wait::{OpenRequests, WaitPermit};
use crate::kernels::Kernel;
use crate::parameters::Parameters;

/// A device and a stream on it.
pub struct Gpu {
    pub device: Arc<Device>,
    pub(crate) stream: sys::CUstream,
    /// Only the thread that has the backend uses them, so launches take no lock.
    graphs: RefCell<Graphs>,
    /// Requests that are open on this device and the others of its backend.
    pub requests: OpenRequests,
    pub(super) retired: Arc<Retired>,
    /// The most launches of a step that may be enqueued while a request is open.
    pub max_held_launches: usize,
}

// SAFETY: a stream may be used by any thread, one at a time, on which its context is current.
unsafe impl Send for Gpu {}

impl Gpu {
    pub fn open(ordinal: u32) -> Result<Gpu> {
        let device = Device::open(ordinal)?;
        device.bind();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) })?;
        let retired = Retired::new(&device);
        Ok(Gpu {
            device,
            stream,
            graphs: RefCell::default(),
            requests: OpenRequests::default(),
            retired,
            max_held_launches: MAX_HELD_LAUNCHES,
        })
    }

    fn graphs(&self) -> RefMut<'_, Graphs> {
        self.graphs.borrow_mut()
    }

    /// [`OpenRequests::wait_permit`]
    pub fn wait_permit(&self) -> Result<WaitPermit<'_>> {
        self.requests.wait_permit()
    }

    /// Blocks until all enqueued work is done, then frees retired memory.
    ///
    /// # Errors
    /// If any of the work failed. The device is unusable then until the process ends.
    pub fn wait(&self, permit: WaitPermit) -> Result<(), DriverError> {
        self.flush()?;
        self.synchronise()?;
        self.graphs().drop_evicted();
        self.retired.free(permit);
        Ok(())
    }

    fn synchronise(&self) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: the stream is alive.
        checked(unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Frees retired memory, if there is any and the host may wait now. Returns whether it did.
    pub(super) fn reclaim(&self) -> bool {
        !self.retired.is_empty() && self.wait_permit().is_ok_and(|permit| self.wait(permit).is_ok())
    }

    /// Whether all enqueued work is done.
    ///
    /// # Errors
    /// As [`Gpu::wait`]
    pub fn is_idle(&self) -> Result<bool, DriverError> {
        self.device.bind();
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => checked(answer).map(|()| true),
        }
    }

    /// Whether the launches of this step can be held.
    pub fn can_hold(&self) -> bool {
        let mut graphs = self.graphs();
        graphs.can_hold() && graphs.launches() < self.max_held_launches
    }

    /// Holds the recorded launches, because one of them waits for the host: none runs before [`Gpu::flush`], [`Gpu::end_step`] or a command that is no launch.
    pub fn hold(&self) -> HoldGuard {
        self.graphs().hold()
    }

    pub fn is_held(&self) -> bool {
        self.graphs().is_held()
    }

    /// Whether open requests have to be answered before anything else is launched: the driver queues only so many launches and then blocks.
    pub fn is_full(&self) -> bool {
        self.requests.any() && self.graphs().launches() >= self.max_held_launches
    }

    /// Drops the recorded launches: the step has failed.
    pub fn discard(&self) {
        self.graphs().discard();
    }

    /// Records launches from here on, until [`Gpu::end_step`] or a command that is no launch. The step before has ended.
    pub fn begin_step(&self) {
        self.graphs().begin();
    }

    /// Starts recording again in the middle of a step, behind a command that was no launch.
    pub fn restart_recording(&self) {
        self.graphs().restart_recording();
    }

    /// Runs the recorded launches: as one graph if the same were recorded before.
    pub fn end_step(&self) -> Result<(), DriverError> {
        self.device.bind();
        self.graphs().end(&self.device.kernels, self.stream)
    }

    /// Makes the work that follows wait for an event of another stream.
    pub fn wait_for(&self, event: &SyncEvent) -> Result<(), DriverError> {
        self.flush()?;
        // SAFETY: both are alive.
        checked(unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) })
    }

    /// Makes the work that follows wait for all that is enqueued on `other`. `event` belongs to `other`.
    pub fn wait_for_stream(&self, other: &Gpu, event: &SyncEvent) -> Result<(), DriverError> {
        other.flush()?;
        // SAFETY: both are alive, and `flush` has made the event's context current.
        checked(unsafe { sys::cuEventRecord(event.event, other.stream) })?;
        self.wait_for(event)
    }

    /// Copies from another device's memory.
    ///
    /// # Safety
    /// Both have `len` bytes, and this stream waits for the other's writes.
    pub unsafe fn receive(&self, to: Address, (other, from): (&Gpu, Address), len: usize) -> Result<(), DriverError> {
        if len == 0 {
            return Ok(());
        }
        self.flush()?;
        let [own, its] = [self, other].map(|gpu| gpu.device.context);
        // SAFETY: as the caller vouches. The driver copies through the host if the devices do not reach each other.
        checked(unsafe { sys::cuMemcpyPeerAsync(to, own, from, its, len, self.stream) })
    }

    /// Lets copies from another device's memory go directly, if the hardware can.
    pub fn reach(&self, other: &Gpu) {
        self.device.bind();
        // SAFETY: both contexts are alive, and this one's is current. A failure means that it was done before or cannot be done; copies work all the same.
        let _ = unsafe { sys::cuCtxEnablePeerAccess(other.device.context, 0) };
    }

    /// Enqueues the recorded launches one by one and stops recording. Everything that is no launch begins with this.
    pub fn flush(&self) -> Result<(), DriverError> {
        self.device.bind();
        self.graphs().interrupt(&self.device.kernels, self.stream)
    }

    /// Launches a kernel over `grid` blocks of `block` threads, with `shared` bytes of shared memory for each block.
    ///
    /// # Safety
    /// What the parameters point to stays alive until the kernel has run, and is as large as the kernel expects.
    pub unsafe fn launch<P: Parameters>(
        &self,
        kernel: Kernel,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        p: &P,
    ) -> Result<(), DriverError> {
        assert_eq!(kernel.parameters(), size_of::<P>(), "{kernel:?} takes other parameters");
        if grid.contains(&0) {
            return Ok(());
        }
        self.device.bind();
        let launch = Launch { kernel: kernel.index() as u32, grid, block, shared };
        // SAFETY: the kernel takes one parameter of this size; for the rest the caller vouches.
        unsafe { self.graphs().launch(&self.device.kernels, self.stream, launch, p.as_bytes()) }
    }

    /// Copies host bytes to the device and waits for it.
    ///
    /// # Safety
    /// `to` has `from.len()` bytes.
    pub unsafe fn write(&self, to: Address, from: &[u8], permit: WaitPermit) -> Result<(), DriverError> {
        // SAFETY: as the caller vouches; waited for below.
        unsafe { self.write_async(to, from)? };
        self.wait(permit)
    }

    /// Copies host bytes to the device without waiting.
    ///
    /// # Safety
    /// `to` has `from.len()` bytes; `from` stays unchanged until the copy is done.
    pub unsafe fn write_async(&self, to: Address, from: &[u8]) -> Result<(), DriverError> {
        if from.is_empty() {
            return Ok(());
        }
        self.flush()?;
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream) })
    }

    /// Copies bytes of the device to the host behind all enqueued work, and waits for it.
    ///
    /// # Safety
    /// `from` has `to.len()` bytes.
    pub unsafe fn read(&self, from: Address, to: &mut [u8], permit: WaitPermit) -> Result<(), DriverError> {
        // SAFETY: as the caller vouches; waited for below.
        unsafe { self.read_async(from, to)? };
        self.wait(permit)
    }

    /// Copies bytes of the device to the host without waiting.
    ///
    /// # Safety
    /// `from` has `to.len()` bytes; nobody reads `to` until the copy is done.
    pub unsafe fn read_async(&self, from: Address, to: &mut [u8]) -> Result<(), DriverError> {
        if to.is_empty() {
            return Ok(());
        }
        self.flush()?;
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream) })
    }

    /// Copies within the device, between ranges that are equal or do not overlap.
    ///
    /// # Safety
    /// Both have `len` bytes.
    pub unsafe fn copy(&self, from: Address, to: Address, len: usize) -> Result<(), DriverError> {
        if len == 0 || from == to {
            return Ok(());
        }
        self.flush()?;
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, self.stream) })
    }

    /// Fills with zeros before the recorded launches run.
    ///
    /// # Safety
    /// There are `len` bytes, which no recorded launch uses.
    pub unsafe fn zero_first(&self, at: Address, len: usize) -> Result<(), DriverError> {
        if len == 0 {
            return Ok(());
        }
        self.device.bind();
        // SAFETY: as the caller vouches.
        checked(unsafe { sys::cuMemsetD8Async(at, 0, len, self.stream) })
    }

    /// Fills with zeros.
    ///
    /// # Safety
    /// There are `len` bytes.
    pub unsafe fn zero(&self, at: Address, len: usize) -> Result<(), DriverError> {
        if len == 0 {
            return Ok(());
        }
        self.flush()?;
        // SAFETY: as the caller vouches.
        unsafe { self.zero_first(at, len) }
    }

    /// Records an event behind all work so far.
    pub fn record(&self, event: &TimingEvent) -> Result<(), DriverError> {
        self.flush()?;
        // SAFETY: both are alive.
        checked(unsafe { sys::cuEventRecord(event.0, self.stream) })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = self.synchronise();
        // SAFETY: it is idle.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}
