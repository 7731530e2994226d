//! The limits of a device: bandwidth of its memory and its link, int8 products, launches. The kernels are a module of their own, which the driver compiles only for this.

use std::ffi::{CString, c_void};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::device::event::TimingEvent;
use crate::device::memory::DeviceBuffer;
use crate::device::pinned::PinnedBuffer;
use crate::device::stream::Gpu;
use crate::device::sys::{Address, checked, sys};

/// The unit of the kernels that measure.
const UNIT: &str = "probes/probes";
/// Bytes that are read; far more than the second-level cache has.
const READ: usize = 4 << 30;
/// Bytes of a copy between host and device.
const COPIED: usize = 256 << 20;
/// Consecutive rounds of each warp, of eight products each, and multiply-adds of a product.
const ROUNDS: u32 = 20_000;
const MACS: u64 = 16 * 8 * 32;
const LAUNCHES: u32 = 1000;

/// Measurements of one device. Each can be repeated.
pub struct Probes {
    gpu: Gpu,
    memory: DeviceBuffer,
    host: PinnedBuffer,
    out: DeviceBuffer,
    read: sys::CUfunction,
    int8: sys::CUfunction,
    nothing: sys::CUfunction,
    begin: TimingEvent,
    end: TimingEvent,
}

impl Probes {
    /// # Errors
    /// If there is no such device, it is older than compute capability 8.0, or it or the host lacks memory.
    pub fn new(ordinal: u32) -> Result<Probes> {
        let gpu = Gpu::open(ordinal)?;
        let why = "the driver does not take the probes (compute capability 8.0 is needed)";
        let module = gpu.device.load_unit(UNIT).context(why)?;
        let function = |name: &str| -> Result<sys::CUfunction> {
            let (name, mut function) = (CString::new(name)?, std::ptr::null_mut());
            // SAFETY: the module was just loaded; the name ends with a zero.
            checked(unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) })?;
            Ok(function)
        };
        let (memory, out) = (DeviceBuffer::zeroed(&gpu, READ, "reading")?, DeviceBuffer::zeroed(&gpu, 4, "reading")?);
        let mut host = PinnedBuffer::default();
        host.reserve(&gpu, COPIED)?;
        let [read, int8, nothing] = [function("probe_read")?, function("probe_int8")?, function("probe_nothing")?];
        let (begin, end) = (TimingEvent::new(&gpu.device)?, TimingEvent::new(&gpu.device)?);
        Ok(Probes { gpu, memory, host, out, read, int8, nothing, begin, end })
    }

    pub fn name(&self) -> &str {
        &self.gpu.device.name
    }

    /// Bytes per second that a kernel reads of the device's memory.
    pub fn read(&self) -> Result<f64> {
        let (from, n, out): (Address, u64, Address) = (self.memory.at, READ as u64 / 16, self.out.at);
        let blocks = 4 * self.gpu.device.multiprocessors as u32;
        let arguments = [(&raw const from).cast(), (&raw const n).cast(), (&raw const out).cast()];
        Ok(READ as f64 / self.timed(|| self.launch(self.read, blocks, 512, &arguments))?)
    }

    /// Bytes per second from pinned memory of the host to the device.
    pub fn up(&mut self) -> Result<f64> {
        let from = self.host.bytes_mut().as_ptr();
        let seconds = self.timed(|| {
            // SAFETY: both have as many bytes, and `timed` waits.
            unsafe { self.gpu.write_async(self.memory.at, std::slice::from_raw_parts(from, COPIED))? };
            Ok(())
        })?;
        Ok(COPIED as f64 / seconds)
    }

    /// Bytes per second from the device to pinned memory of the host.
    pub fn down(&mut self) -> Result<f64> {
        let to = self.host.bytes_mut().as_mut_ptr();
        let seconds = self.timed(|| {
            // SAFETY: as above.
            unsafe { self.gpu.read_async(self.memory.at, std::slice::from_raw_parts_mut(to, COPIED))? };
            Ok(())
        })?;
        Ok(COPIED as f64 / seconds)
    }

    /// Operations per second of int8 products on tensor cores (`mma.m16n8k32`). A multiply-add is two operations.
    pub fn int8(&self) -> Result<f64> {
        let blocks = 8 * self.gpu.device.multiprocessors as u32;
        let (rounds, out): (u32, Address) = (ROUNDS, self.out.at);
        let arguments = [(&raw const rounds).cast(), (&raw const out).cast()];
        let macs = u64::from(blocks) * (256 / 32) * u64::from(ROUNDS) * 8 * MACS;
        Ok(2.0 * macs as f64 / self.timed(|| self.launch(self.int8, blocks, 256, &arguments))?)
    }

    /// Seconds of a launch of an empty kernel among many.
    pub fn launches(&self) -> Result<f64> {
        let many = || (0..LAUNCHES).try_for_each(|_| self.launch(self.nothing, 1, 32, &[]));
        Ok(self.timed(many)? / f64::from(LAUNCHES))
    }

    /// Mean seconds from the launch of an empty kernel until the host knows that it has ended.
    pub fn launch_and_wait(&self) -> Result<f64> {
        self.gpu.wait(self.gpu.wait_permit()?)?;
        let begun = Instant::now();
        for _ in 0..LAUNCHES {
            self.launch(self.nothing, 1, 32, &[])?;
            self.gpu.wait(self.gpu.wait_permit()?)?;
        }
        Ok(begun.elapsed().as_secs_f64() / f64::from(LAUNCHES))
    }

    /// Seconds of the device for what `work` enqueues.
    fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.gpu.record(&self.begin)?;
        work()?;
        self.gpu.record(&self.end)?;
        self.gpu.wait(self.gpu.wait_permit()?)?;
        Ok(self.end.since(&self.begin)?.as_secs_f64())
    }

    fn launch(&self, function: sys::CUfunction, blocks: u32, threads: u32, arguments: &[*const c_void]) -> Result<()> {
        self.gpu.device.bind();
        let mut arguments: Vec<*mut c_void> = arguments.iter().map(|a| a.cast_mut()).collect();
        // SAFETY: the arguments are those of the kernel, which the driver copies before this returns; what they point to is as large as the kernel expects.
        checked(unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.gpu.stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })?;
        Ok(())
    }
}
