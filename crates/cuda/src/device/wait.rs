//! When the host may wait for a device.
//!
//! In the middle of a step a device may wait for the host: it has requested experts through the mailbox ([`crate::moe::mailbox`]). If the host waited for that device
//! then, or for a device that waits for it, both would wait for ever. So everything that waits for a device takes a [`WaitPermit`], and there is none while a request is
//! open on any device of the backend. Freeing memory takes one too, because the driver waits for the device in it; until then memory is set aside
//! ([`crate::device::retired`]).

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};

/// How many requests are open on the devices of a backend: posted, or to be posted once the recorded launches run, and not answered.
#[derive(Clone, Default)]
pub struct OpenRequests(Arc<AtomicUsize>);

/// Proof that no device of a backend waits for the host. It is good for one wait and is taken right before it.
pub struct WaitPermit<'a>(PhantomData<&'a OpenRequests>);

impl OpenRequests {
    /// # Errors
    /// If a request is open: it has to be answered before anyone waits.
    pub fn wait_permit(&self) -> Result<WaitPermit<'_>> {
        let permit = (!self.any()).then_some(WaitPermit(PhantomData));
        permit.context("the device waits for an answer of the host, which must not wait for it")
    }

    pub fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    pub fn open(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn close(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_while_a_request_is_open_on_any_device() {
        let one = OpenRequests::default();
        let other = one.clone();
        assert!(one.wait_permit().is_ok());
        other.open();
        other.open();
        assert!(one.wait_permit().is_err());
        other.close();
        assert!(one.wait_permit().is_err() && other.any());
        other.close();
        assert!(one.wait_permit().is_ok());
    }
}
