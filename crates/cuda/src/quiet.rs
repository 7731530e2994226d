//! When the host may wait for a device.
//!
//! A device that asks (`questions.rs`) waits for the host in the middle of a step. Were the host to wait for it then, or for a device that waits for that one, neither would
//! go on. So whatever waits for a device takes a [`Quiet`], and so does giving memory back, since the driver waits for that: there is none while a question is open on any device
//! of the backend. What a step no longer needs before that is only set aside ([`Retired`]).

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use cudarc::driver::sys;

use crate::driver::{Address, Device};

/// How many questions are open on the devices of a backend: asked, or to be asked once what is gathered is carried out, and not answered.
#[derive(Clone, Default)]
pub struct Asked(Arc<AtomicUsize>);

/// Proof that no device of a backend waits for the host. Good for one wait, and taken right before it.
pub struct Quiet<'a>(PhantomData<&'a Asked>);

impl Asked {
    /// # Errors
    /// Where a question is open: whoever wants to wait has to see it answered first.
    pub fn quiet(&self) -> Result<Quiet<'_>> {
        let quiet = (!self.any()).then_some(Quiet(PhantomData));
        quiet.context("the device waits for an answer of the host, which must not wait for it")
    }

    pub fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    pub fn ask(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn answer(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What is to be given back.
pub enum Gone {
    OnDevice(Address),
    /// Memory that the driver has locked.
    OnHost(usize),
}

/// Memory that nobody needs any more but what is under way on the device.
pub struct Retired {
    device: Arc<Device>,
    all: Mutex<Vec<Gone>>,
}

impl Retired {
    pub fn new(device: &Arc<Device>) -> Arc<Retired> {
        Arc::new(Retired { device: Arc::clone(device), all: Mutex::default() })
    }

    pub fn add(&self, gone: Gone) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push(gone);
    }

    pub fn is_empty(&self) -> bool {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Gives all of it back.
    pub fn free(&self, _: Quiet) {
        self.free_all();
    }

    fn free_all(&self) {
        let all = std::mem::take(&mut *self.all.lock().unwrap_or_else(PoisonError::into_inner));
        if !all.is_empty() {
            self.device.bind();
        }
        for gone in all {
            // SAFETY: allocated so, and whoever had it is gone; the driver waits for what still uses it.
            let _ = unsafe {
                match gone {
                    Gone::OnDevice(at) => sys::cuMemFree_v2(at),
                    Gone::OnHost(at) => sys::cuMemFreeHost(at as *mut _),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_while_a_question_is_open_on_any_device() {
        let one = Asked::default();
        let other = one.clone();
        assert!(one.quiet().is_ok());
        other.ask();
        other.ask();
        assert!(one.quiet().is_err());
        other.answer();
        assert!(one.quiet().is_err() && other.any());
        other.answer();
        assert!(one.quiet().is_ok());
    }
}
