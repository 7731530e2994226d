//! Memory that is to be freed once the device no longer uses it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::device::device::Device;
use crate::device::sys::{Address, sys};
use crate::device::wait::WaitPermit;

/// An allocation that is to be freed.
pub enum Allocation {
    Device(Address),
    /// Page-locked memory of the host.
    Host(usize),
}

/// Allocations that only work under way on the device may still use.
pub struct Retired {
    device: Arc<Device>,
    all: Mutex<Vec<Allocation>>,
}

impl Retired {
    pub fn new(device: &Arc<Device>) -> Arc<Retired> {
        Arc::new(Retired { device: Arc::clone(device), all: Mutex::default() })
    }

    pub fn add(&self, allocation: Allocation) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push(allocation);
    }

    pub fn is_empty(&self) -> bool {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Frees all of it.
    pub fn free(&self, _: WaitPermit) {
        self.free_all();
    }

    fn free_all(&self) {
        let all = std::mem::take(&mut *self.all.lock().unwrap_or_else(PoisonError::into_inner));
        if !all.is_empty() {
            self.device.bind();
        }
        for allocation in all {
            // SAFETY: the owner of the allocation is gone; the driver waits for work that still uses it.
            let _ = unsafe {
                match allocation {
                    Allocation::Device(at) => sys::cuMemFree_v2(at),
                    Allocation::Host(at) => sys::cuMemFreeHost(at as *mut _),
                }
            };
        }
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        self.free_all();
    }
}
