//! Memory of the device: buffers, scratch that grows, addresses that memory is put behind step by step; and pinned memory of the host.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use anyhow::{Context, Result};
use cudarc::driver::sys;

use crate::driver::{Address, Device, Gpu, checked};
use crate::quiet::{Gone, Retired};

/// What allocations of the driver are aligned to, and arrays inside one.
pub const ALIGNMENT: usize = 256;

/// A run of device memory.
/// Dropped, it is given back once nothing that is under way may use it.
pub struct Memory {
    retired: Arc<Retired>,
    pub at: Address,
    pub bytes: usize,
}

impl Memory {
    /// `what` it is for, for the error.
    ///
    /// # Errors
    /// Where the device has no more.
    pub fn new(gpu: &Gpu, bytes: usize, what: &str) -> Result<Memory> {
        let allocate = || {
            gpu.device.bind();
            let mut at = 0;
            // SAFETY: the context is current; freed once it was dropped.
            checked(unsafe { sys::cuMemAlloc_v2(&mut at, bytes.max(1)) }).map(|()| at)
        };
        // What was set aside may be what is missing, where it can be waited for.
        let at = allocate().or_else(|refused| if gpu.reclaim() { allocate() } else { Err(refused) });
        let at = at.with_context(|| refused(&gpu.device, bytes, what))?;
        Ok(Memory { retired: Arc::clone(&gpu.retired), at, bytes })
    }

    /// The same, filled with zeros.
    pub fn zeroed(gpu: &Gpu, bytes: usize, what: &str) -> Result<Memory> {
        let memory = Memory::new(gpu, bytes, what)?;
        // SAFETY: as long as was just allocated, and nobody knows of it yet.
        unsafe { gpu.zero_first(memory.at, bytes)? };
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.retired.add(Gone::OnDevice(self.at));
    }
}

fn refused(device: &Device, bytes: usize, what: &str) -> String {
    let free = device.memory().map_or(String::new(), |(free, total)| format!(", {free} of {total} are free"));
    format!("cuda:{} has no {bytes} bytes for {what}{free}", device.ordinal)
}

/// Scratch that grows to the largest use and then stays. Zeros at first: kernels read gaps along, and slots of which they do not know yet how many are used.
#[derive(Default)]
pub struct Scratch(Option<Memory>);

impl Scratch {
    /// `bytes` of it at least; what was in it is lost where it grows.
    pub fn room(&mut self, gpu: &Gpu, bytes: usize) -> Result<Address> {
        if let Some(memory) = self.0.as_ref().filter(|m| m.bytes >= bytes) {
            return Ok(memory.at);
        }
        self.0 = None;
        let memory = Memory::zeroed(gpu, bytes, "scratch")?;
        Ok(self.0.insert(memory).at)
    }

    pub fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |m| m.bytes)
    }

    /// Where it is; 0 where it was never used.
    pub fn at(&self) -> Address {
        self.0.as_ref().map_or(0, |m| m.at)
    }
}

/// Addresses of which the first have memory behind them: at their place for good. Where the device cannot do that, all of them have.
pub struct Reserved {
    device: Arc<Device>,
    pub at: Address,
    bytes: usize,
    /// Bytes that have memory.
    pub committed: usize,
    /// What memory comes in.
    granularity: usize,
    /// Each piece of memory that was put behind them.
    mapped: Vec<Range<usize>>,
    whole: Option<Memory>,
}

impl Reserved {
    pub fn new(gpu: &Gpu, bytes: usize, what: &str) -> Result<Reserved> {
        let device = Arc::clone(&gpu.device);
        if !device.reserves {
            let whole = Memory::zeroed(gpu, bytes, what)?;
            let at = whole.at;
            let mapped = Vec::new();
            return Ok(Reserved { device, at, bytes, committed: bytes, granularity: 1, mapped, whole: Some(whole) });
        }
        device.bind();
        let (mut granularity, mut at) = (0, 0);
        let flags = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: fills one number.
        checked(unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &device.allocation(), flags) })?;
        let bytes = bytes.max(1).next_multiple_of(granularity);
        // SAFETY: addresses alone, given back when dropped.
        checked(unsafe { sys::cuMemAddressReserve(&mut at, bytes, 0, 0, 0) })
            .with_context(|| format!("cuda:{} has no {bytes} bytes of addresses for {what}", device.ordinal))?;
        Ok(Reserved { device, at, bytes, committed: 0, granularity, mapped: Vec::new(), whole: None })
    }

    /// Puts zeroed memory behind the first `bytes`; what is there stays as it is.
    ///
    /// # Errors
    /// Where the device has no more.
    ///
    /// # Panics
    /// Where there are no so many addresses.
    pub fn commit(&mut self, gpu: &Gpu, bytes: usize, what: &str) -> Result<()> {
        if bytes <= self.committed {
            return Ok(());
        }
        let (from, to) = (self.committed, bytes.next_multiple_of(self.granularity));
        assert!(to <= self.bytes, "{bytes} bytes of {} addresses", self.bytes);
        self.device.bind();
        let (property, at, len) = (self.device.allocation(), self.at + from as u64, to - from);
        let mut handle = 0;
        // SAFETY: the memory lives as long as it is mapped; the range lies inside what was reserved, and nothing is mapped there.
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

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.whole.is_some() {
            return;
        }
        self.device.bind();
        // SAFETY: mapped and reserved so; the backend waits for its stream before it lets go of memory.
        unsafe {
            for range in &self.mapped {
                let _ = sys::cuMemUnmap(self.at + range.start as u64, range.len());
            }
            let _ = sys::cuMemAddressFree(self.at, self.bytes);
        }
    }
}

/// Memory of the host that the device copies from and to at full speed. Not write-combined: the host reads it, too.
#[derive(Default)]
pub struct Pinned {
    retired: Option<Arc<Retired>>,
    at: usize,
    bytes: usize,
}

impl Pinned {
    /// `bytes` of it at least; what was in it is lost where it grows.
    pub fn room(&mut self, gpu: &Gpu, bytes: usize) -> Result<&mut [u8]> {
        if self.bytes < bytes {
            *self = Pinned::default();
            gpu.device.bind();
            let mut at = std::ptr::null_mut();
            // SAFETY: the context is current; freed once it was dropped.
            checked(unsafe { sys::cuMemHostAlloc(&mut at, bytes, 0) })
                .with_context(|| format!("the system has no {bytes} bytes of pinned memory"))?;
            // SAFETY: it was just allocated with so many bytes.
            unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
            *self = Pinned { retired: Some(Arc::clone(&gpu.retired)), at: at as usize, bytes };
        }
        Ok(&mut self.bytes_mut()[..bytes])
    }

    /// All that is there.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: as many bytes as are there, which nobody else knows.
        unsafe { std::slice::from_raw_parts_mut(self.at as *mut u8, self.bytes) }
    }

    /// All that is there as words that the device may write meanwhile.
    pub fn words(&self) -> &[AtomicU32] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: so many whole words, aligned to a page; the device writes whole words of it, and the host in no other way while this is borrowed.
        unsafe { std::slice::from_raw_parts(self.at as *const AtomicU32, self.bytes / size_of::<AtomicU32>()) }
    }

    /// The first `n` of what is there, as f32.
    pub fn floats(&self, n: usize) -> &[f32] {
        assert!(4 * n <= self.bytes);
        if n == 0 {
            return &[];
        }
        // SAFETY: as just checked; pinned memory is aligned to pages, and any bits are f32.
        unsafe { std::slice::from_raw_parts(self.at as *const f32, n) }
    }

    /// The same, to be written.
    pub fn floats_mut(&mut self, n: usize) -> &mut [f32] {
        assert!(4 * n <= self.bytes);
        if n == 0 {
            return &mut [];
        }
        // SAFETY: as above; nobody else knows it.
        unsafe { std::slice::from_raw_parts_mut(self.at as *mut f32, n) }
    }

    /// Where the device finds it.
    pub fn at(&self) -> Address {
        self.at as Address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(retired) = &self.retired {
            retired.add(Gone::OnHost(self.at));
        }
    }
}

/// Numbers as bytes.
pub fn bytes_of<T: Number>(values: &[T]) -> &[u8] {
    // SAFETY: numbers have no gaps, and any alignment will do for bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The same, to be written.
pub fn bytes_of_mut<T: Number>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bits are a number.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Types of which any bits are a value, without gaps.
pub trait Number: Copy {}
impl Number for f32 {}
impl Number for u32 {}
impl Number for u64 {}
