//! The driver's own interface: its answers as results, and which devices it has.

use anyhow::{Context, Result, ensure};
pub use cudarc::driver::{DriverError, sys};

/// CUDA 12.4, which driver 550 brings. Older drivers refuse the embedded PTX.
const MIN_DRIVER: i32 = 12_040;

/// An address in a device's memory. The host cannot read through it.
pub type Address = sys::CUdeviceptr;

/// The driver's answer as a result.
pub fn checked(answer: sys::CUresult) -> Result<(), DriverError> {
    answer.result()
}

/// The number of devices.
///
/// # Errors
/// One line if there is no driver or it is too old.
pub fn count() -> Result<u32> {
    // SAFETY: looks for a library and loads it.
    ensure!(unsafe { sys::is_culib_present() }, "no CUDA driver is installed (libcuda.so is missing)");
    // SAFETY: the library is there; both only fill what they are given.
    let (answer, version) = unsafe {
        let mut version = 0;
        let answer = checked(sys::cuInit(0)).and_then(|()| checked(sys::cuDriverGetVersion(&mut version)));
        (answer, version)
    };
    answer.context("the CUDA driver does not start")?;
    let (major, minor) = (version / 1000, version % 1000 / 10);
    ensure!(
        version >= MIN_DRIVER,
        "the CUDA driver is too old: it supports CUDA {major}.{minor}, and 12.4 (driver 550) is needed"
    );
    let mut devices = 0;
    // SAFETY: fills one number.
    checked(unsafe { sys::cuDeviceGetCount(&mut devices) }).context("the CUDA driver does not count its devices")?;
    Ok(devices as u32)
}
