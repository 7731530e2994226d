//! The GPU: driver, devices, and whether this program has kernels for them.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::units;

#[derive(Serialize)]
pub struct Graphics {
    /// The version of NVIDIA's kernel module.
    pub driver: Option<String>,
    /// Whether the system has a node for a device, driver or not.
    pub has_node: bool,
    /// Name and memory of each device.
    pub devices: Vec<String>,
    /// Bytes of kernels in this program; 0: it was built without.
    pub kernel_bytes: u64,
    /// Whether `--device cuda` works.
    pub is_usable: bool,
    /// If not, why.
    pub why_not: Option<String>,
}

impl Graphics {
    pub fn find() -> Graphics {
        let version = fs::read_to_string("/proc/driver/nvidia/version").ok();
        let opened = sluice_cuda::open(0);
        let devices = sluice_cuda::count().unwrap_or(0);
        Graphics {
            driver: version.as_deref().and_then(driver_version),
            has_node: Path::new("/dev/nvidia0").exists() || Path::new("/dev/dxg").exists(),
            devices: (0..devices).map(|n| sluice_cuda::describe(n).unwrap_or_else(|e| format!("{e:#}"))).collect(),
            kernel_bytes: sluice_cuda::embedded_bytes(),
            is_usable: opened.is_ok(),
            why_not: opened.err().map(|e| format!("{e:#}")),
        }
    }

    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let kernels = match self.kernel_bytes {
            0 => "this program has no kernels".to_owned(),
            bytes => format!("this program has kernels ({})", units::bytes(bytes)),
        };
        let mut lines = Vec::new();
        let of = |n: usize, name: &str| format!("cuda:{n}: {name}");
        lines.extend(self.devices.iter().enumerate().map(|(n, name)| ("", of(n, name))));
        let driver = self.driver.as_ref().map(|driver| format!("driver {driver}; ")).unwrap_or_default();
        let state = self.why_not.clone().unwrap_or_else(|| "usable".to_owned());
        lines.push(("", format!("{driver}{kernels}; {state}")));
        lines[0].0 = "gpu";
        lines
    }
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ..`
fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    let is_version = |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    line.split_ascii_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_version_is_found() {
        for (text, version) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12.2.0",
                Some("550.54.15"),
            ),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", Some("580.65.06")),
            ("GCC version: 12.2.0", None),
        ] {
            assert_eq!(driver_version(text).as_deref(), version);
        }
    }

    #[test]
    fn without_a_gpu_a_reason_is_given() {
        let found = Graphics::find();
        assert_eq!(found.is_usable, found.why_not.is_none());
        assert_eq!(found.lines()[0].0, "gpu");
    }
}
