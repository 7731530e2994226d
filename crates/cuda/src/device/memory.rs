//! DeviceBuffer of the device: buffers, scratch that grows, and address ranges that get memory step by step.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::device::device::Device;
use crate::device::retired::{Allocation, Retired};
use crate::device::stream::Gpu;
use crate::device::sys::{Address, checked, sys};

/// Alignment in bytes of the driver's allocations and of arrays inside one.
pub const ALIGNMENT: usize = 256;

/// A run of device memory. After a drop it is freed once no work under way can use it.
pub struct DeviceBuffer {
    retired: Arc<Retired>,
    pub at: Address,
    pub bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes`; `what` names its use in the error.
    ///
    /// # Errors
    /// If the device has no more memory.
    pub fn new(gpu: &Gpu, bytes: usize, what: &str) -> Result<DeviceBuffer> {
        let allocate = || {
            gpu.device.bind();
            let mut at = 0;
            // SAFETY: the context is current; freed after it was dropped.
            checked(unsafe { sys::cuMemAlloc_v2(&mut at, bytes.max(1)) }).map(|()| at)
        };
        // Retired memory may be enough, if the host may wait for the device now.
        let at = allocate().or_else(|refused| if gpu.reclaim() { allocate() } else { Err(refused) });
        let at = at.with_context(|| refused(&gpu.device, bytes, what))?;
        Ok(DeviceBuffer { retired: Arc::clone(&gpu.retired), at, bytes })
    }

    /// Allocates `bytes` and fills them with zeros.
    pub fn zeroed(gpu: &Gpu, bytes: usize, what: &str) -> Result<DeviceBuffer> {
        let memory = DeviceBuffer::new(gpu, bytes, what)?;
        // SAFETY: it was just allocated with this length, and nothing uses it yet.
        unsafe { gpu.zero_first(memory.at, bytes)? };
        Ok(memory)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.retired.add(Allocation::Device(self.at));
    }
}

fn refused(device: &Device, bytes: usize, what: &str) -> String {
    let free = device.memory().map_or(String::new(), |(free, total)| format!(", {free} of {total} are free"));
    format!("cuda:{} has no {bytes} bytes for {what}{free}", device.ordinal)
}

/// Scratch that grows to the largest use and then stays. It begins as zeros: kernels read across gaps and beyond the slots in use.
#[derive(Default)]
pub struct Scratch(Option<DeviceBuffer>);

impl Scratch {
    /// Grows to at least `bytes` and returns the address. Growing loses the contents.
    ///
    /// # Errors
    /// If the device has no more memory.
    pub fn reserve(&mut self, gpu: &Gpu, bytes: usize) -> Result<Address> {
        if let Some(memory) = self.0.as_ref().filter(|m| m.bytes >= bytes) {
            return Ok(memory.at);
        }
        self.0 = None;
        let memory = DeviceBuffer::zeroed(gpu, bytes, "scratch")?;
        Ok(self.0.insert(memory).at)
    }

    pub fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |m| m.bytes)
    }

    /// Its address; 0 if it was never used.
    pub fn at(&self) -> Address {
        self.0.as_ref().map_or(0, |m| m.at)
    }
}

/// A fixed range of addresses whose first part has memory. If the device cannot reserve addresses, all of the range has memory from the start.
pub struct VirtualRange {
    device: Arc<Device>,
    pub at: Address,
    bytes: usize,
    /// Bytes that have memory, from the start of the range.
    pub committed: usize,
    /// Bytes of the unit that memory is added in.
    granularity: usize,
    /// Each piece of memory, by its bytes of the range.
    mapped: Vec<Range<usize>>,
    whole: Option<DeviceBuffer>,
}

impl VirtualRange {
    pub fn new(gpu: &Gpu, bytes: usize, what: &str) -> Result<VirtualRange> {
        let device = Arc::clone(&gpu.device);
        if !device.reserves {
            let whole = DeviceBuffer::zeroed(gpu, bytes, what)?;
            let at = whole.at;
            let mapped = Vec::new();
            return Ok(VirtualRange {
                device,
                at,
                bytes,
                committed: bytes,
                granularity: 1,
                mapped,
                whole: Some(whole),
            });
        }
        device.bind();
        let (mut granularity, mut at) = (0, 0);
        let flags = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: fills one number.
        checked(unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &device.allocation(), flags) })?;
        let bytes = bytes.max(1).next_multiple_of(granularity);
        // SAFETY: reserves addresses only; released when dropped.
        checked(unsafe { sys::cuMemAddressReserve(&mut at, bytes, 0, 0, 0) })
            .with_context(|| format!("cuda:{} has no {bytes} bytes of addresses for {what}", device.ordinal))?;
        Ok(VirtualRange { device, at, bytes, committed: 0, granularity, mapped: Vec::new(), whole: None })
    }

    /// Gives the first `bytes` zeroed memory. Bytes that have memory already keep their contents.
    ///
    /// # Errors
    /// If the device has no more memory.
    ///
    /// # Panics
    /// If the range is shorter.
    pub fn commit(&mut self, gpu: &Gpu, bytes: usize, what: &str) -> Result<()> {
        if bytes <= self.committed {
            return Ok(());
        }
        let (from, to) = (self.committed, bytes.next_multiple_of(self.granularity));
        assert!(to <= self.bytes, "{bytes} bytes of {} addresses", self.bytes);
        self.device.bind();
        let (property, at, len) = (self.device.allocation(), self.at + from as u64, to - from);
        let mut handle = 0;
        // SAFETY: the memory lives as long as it is mapped; the piece is inside the reserved range, and nothing is mapped there.
        unsafe {
            checked(sys::cuMemCreate(&mut handle, len, &property, 0))
                .with_context(|| refused(&self.device, len, what))?;
            let mapped = checked(sys::cuMemMap(at, len, 0, handle, 0));
            checked(sys::cuMemRelease(handle))?;
            mapped?;
            self.mapped.push(from..to);
            let access = sys::CUmemAccessDesc {
                location: property.location,
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            checked(sys::cuMemSetAccess(at, len, &access, 1))?;
            gpu.zero(at, len)?;
        }
        self.committed = to;
        Ok(())
    }
}

impl Drop for VirtualRange {
    fn drop(&mut self) {
        if self.whole.is_some() {
            return;
        }
        self.device.bind();
        // SAFETY: mapped and reserved by this; the backend waits for its stream before it drops memory.
        unsafe {
            for range in &self.mapped {
                let _ = sys::cuMemUnmap(self.at + range.start as u64, range.len());
            }
            let _ = sys::cuMemAddressFree(self.at, self.bytes);
        }
    }
}

/// Numbers as bytes.
pub fn bytes_of<T: Number>(values: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Numbers as bytes, to be written.
pub fn bytes_of_mut<T: Number>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, and any bits are a number.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Types without padding for which any bits are a value.
pub trait Number: Copy {}
impl Number for f32 {}
impl Number for u32 {}
impl Number for u64 {}
