//! Events: points in a stream that are timed, or that another stream or the host waits for.

use std::sync::Arc;
use std::time::Duration;

use crate::device::device::Device;
use crate::device::sys::{DriverError, checked, sys};

/// A point in a stream whose time is read later.
pub struct TimingEvent(pub(super) sys::CUevent);

// SAFETY: an event may be used by any thread on which its context is current.
unsafe impl Send for TimingEvent {}

impl TimingEvent {
    pub fn new(device: &Device) -> Result<TimingEvent, DriverError> {
        device.bind();
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DEFAULT as u32) })?;
        Ok(TimingEvent(event))
    }

    /// The time since an earlier event. The stream has passed both.
    pub fn since(&self, before: &TimingEvent) -> Result<Duration, DriverError> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive; fills one number.
        checked(unsafe { sys::cuEventElapsedTime(&mut milliseconds, before.0, self.0) })?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for TimingEvent {
    fn drop(&mut self) {
        // SAFETY: created by `new`; the driver keeps it until it has been recorded.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A point in a stream that others wait for, recorded again and again.
pub struct SyncEvent {
    device: Arc<Device>,
    pub(super) event: sys::CUevent,
}

// SAFETY: an event may be used by any thread on which its context is current.
unsafe impl Send for SyncEvent {}

impl SyncEvent {
    pub fn new(device: &Arc<Device>) -> Result<SyncEvent, DriverError> {
        device.bind();
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        checked(unsafe { sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32) })?;
        Ok(SyncEvent { device: Arc::clone(device), event })
    }

    /// Whether the stream has passed it.
    pub fn is_past(&self) -> bool {
        self.device.bind();
        // SAFETY: it is alive.
        checked(unsafe { sys::cuEventQuery(self.event) }).is_ok()
    }

    /// Blocks the host until the stream has passed it.
    pub fn wait(&self) -> Result<(), DriverError> {
        self.device.bind();
        // SAFETY: it is alive.
        checked(unsafe { sys::cuEventSynchronize(self.event) })
    }
}

impl Drop for SyncEvent {
    fn drop(&mut self) {
        self.device.bind();
        // SAFETY: created by `new`; the driver keeps it until it has been recorded.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}
