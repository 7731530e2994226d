//! Memory of the host that a device reads where it lies.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};
use sluice_store::page_size;

use crate::device::device::Device;
use crate::device::sys::{Address, checked, sys};

/// Ranges of the host's memory with their addresses on a device. Whoever has this keeps the memory.
pub struct SharedMemory {
    device: Arc<Device>,
    /// What the driver has locked and mapped, in ascending order. Empty where the device takes the host's addresses.
    locked: Vec<(Range<usize>, Address)>,
}

impl SharedMemory {
    /// Makes these ranges readable by the device. `read_only`: the host only reads them, too.
    ///
    /// # Errors
    /// If the driver does not lock them.
    pub fn new(
        device: &Arc<Device>,
        ranges: impl IntoIterator<Item = Range<usize>>,
        read_only: bool,
    ) -> Result<SharedMemory> {
        let mut shared = SharedMemory { device: Arc::clone(device), locked: Vec::new() };
        if device.host.has_host_pages {
            return Ok(shared);
        }
        // No page may be locked twice.
        let page = page_size();
        let pages = |range: Range<usize>| range.start / page * page..range.end.next_multiple_of(page);
        let mut all: Vec<Range<usize>> = ranges.into_iter().filter(|range| !range.is_empty()).map(pages).collect();
        all.sort_unstable_by_key(|range| range.start);
        all.dedup_by(|next, range| {
            let joins = next.start <= range.end;
            range.end = if joins { range.end.max(next.end) } else { range.end };
            joins
        });
        device.bind();
        for range in all {
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            let only = if read_only && device.host.locks_read_only { sys::CU_MEMHOSTREGISTER_READ_ONLY } else { 0 };
            let (start, mut at) = (range.start as *mut std::ffi::c_void, 0);
            // SAFETY: memory that stays for longer than this, which unlocks it.
            checked(unsafe { sys::cuMemHostRegister_v2(start, range.len(), flags | only) })
                .with_context(|| format!("cuda:{}: the driver does not lock memory of the host", device.ordinal))?;
            shared.locked.push((range, 0));
            // SAFETY: it was just locked, to be mapped.
            checked(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut at, start, 0) })
                .with_context(|| format!("cuda:{}: the driver does not map memory of the host", device.ordinal))?;
            shared.locked.last_mut().expect("just added").1 = at;
        }
        Ok(shared)
    }

    /// The address on the device of a byte that lies in one of the ranges.
    ///
    /// # Panics
    /// If it does not, and the device does not take the host's addresses.
    pub fn address(&self, host: *const u8) -> Address {
        let host = host as usize;
        if self.device.host.has_host_pages {
            return host as Address;
        }
        let next = self.locked.partition_point(|(range, _)| range.start <= host);
        let (range, at) = next.checked_sub(1).map(|i| &self.locked[i]).expect("memory that was locked");
        assert!(range.contains(&host), "memory that was locked");
        at + (host - range.start) as u64
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if self.locked.is_empty() {
            return;
        }
        self.device.bind();
        for (range, _) in &self.locked {
            // SAFETY: it was locked by this; whoever computes with it waits before it drops this.
            let _ = unsafe { sys::cuMemHostUnregister(range.start as *mut _) };
        }
    }
}
