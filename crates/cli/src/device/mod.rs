//! Devices: the CPU, a GPU, or several. A registry of kinds, and the argument that chooses one.
//!
//! To add a kind of device: a file here with its [`Kind`], and a line in [`KINDS`].

mod cpu;
mod cuda;

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use sluice_backend::Backend;
use sluice_engine::Options;

use crate::terminal;

/// The kinds of devices. `auto` takes the first that is there; the last is always there.
static KINDS: [&Kind; 2] = [&cuda::KIND, &cpu::KIND];

/// A kind of device.
pub struct Kind {
    /// The name in `--device`.
    name: &'static str,
    /// Devices of this kind are told apart by numbers, as in `name:0`, and compute in memory of their own. Without: it is the machine itself.
    numbered: bool,
    /// Whether device 0 can be used: its name to a user, or why not.
    detect: fn() -> Result<String>,
    /// Devices of this kind in this machine.
    count: fn() -> Result<u32>,
    /// Makes the backend of an engine. It reports its memory itself ([`sluice_backend::Resources::device_memory`]).
    open: fn(&Device, &Options) -> Result<Box<dyn Backend>>,
    /// What `bench roofline` measures on such a device, by number.
    probes: Option<fn(u32) -> Result<Box<dyn Probes>>>,
}

/// Measurements of what a device can do at best. Each call measures once.
pub trait Probes {
    /// The device's name.
    fn name(&self) -> &str;
    /// Bytes per second read from the device's memory.
    fn read(&mut self) -> Result<f64>;
    /// Bytes per second copied from host memory to the device.
    fn up(&mut self) -> Result<f64>;
    /// Bytes per second copied from the device to host memory.
    fn down(&mut self) -> Result<f64>;
    /// Operations per second of integer products.
    fn int8(&mut self) -> Result<f64>;
    /// Seconds per launch, of many at once.
    fn launches(&mut self) -> Result<f64>;
    /// Seconds per launch that is waited for.
    fn launch_and_wait(&mut self) -> Result<f64>;
}

/// A registered kind. Kinds are equal when their names are.
#[derive(Clone, Copy)]
struct KindRef(&'static Kind);

impl PartialEq for KindRef {
    fn eq(&self, other: &KindRef) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for KindRef {}

impl fmt::Debug for KindRef {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

/// One device, or several of a kind that compute together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    kind: KindRef,
    /// In the order in which they take a model's layers. Empty for a kind without numbers.
    numbers: Vec<u32>,
}

impl Device {
    /// The machine itself.
    fn host() -> Device {
        Device { kind: KindRef(KINDS[KINDS.len() - 1]), numbers: Vec::new() }
    }

    fn of(kind: &'static Kind) -> Device {
        Device { kind: KindRef(kind), numbers: if kind.numbered { vec![0] } else { Vec::new() } }
    }

    /// Whether it is the machine itself, which computes in the host's memory.
    pub fn is_host(&self) -> bool {
        !self.kind.0.numbered
    }

    /// The numbers of these devices.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// One more device than these, for a model that they do not hold. `None` where there is no other.
    pub fn and_another(&self) -> Option<Device> {
        if !self.kind.0.numbered {
            return None;
        }
        let next = (0..(self.kind.0.count)().ok()?).find(|n| !self.numbers.contains(n))?;
        Some(Device { kind: self.kind, numbers: self.numbers.iter().copied().chain([next]).collect() })
    }

    /// This device, or the machine itself where there is no other.
    pub fn or_another(&self) -> Device {
        self.and_another().unwrap_or_else(Device::host)
    }

    /// The backend of an engine with these options.
    ///
    /// # Errors
    /// Where there is no such device, or it cannot be used.
    pub fn backend(&self, options: &Options) -> Result<Box<dyn Backend>> {
        let backend = (self.kind.0.open)(self, options);
        if self.is_host() { backend } else { backend.with_context(|| format!("--device {self}")) }
    }

    /// What `bench roofline` measures on device `number`; `None` on the machine itself.
    ///
    /// # Errors
    /// Where there is no such device, or it cannot be used.
    pub fn probes(&self, number: u32) -> Option<Result<Box<dyn Probes>>> {
        self.kind.0.probes.map(|open| open(number))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.kind.0.name)?;
        if self.kind.0.numbered {
            write!(f, ":{}", self.numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?;
        }
        Ok(())
    }
}

/// `--device`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// The first kind that is there.
    Auto,
    /// What was asked for.
    Given(Device),
}

impl DeviceArg {
    /// The machine itself.
    pub fn host() -> DeviceArg {
        DeviceArg::Given(Device::host())
    }

    /// Whether the machine itself was asked for.
    pub fn is_host(&self) -> bool {
        matches!(self, DeviceArg::Given(device) if device.is_host())
    }

    /// The device. Chooses one for `auto`, and says which and why.
    pub fn chosen(&self) -> Device {
        let DeviceArg::Given(device) = self else {
            return DeviceArg::detect();
        };
        device.clone()
    }

    fn detect() -> Device {
        let mut missing = None;
        for kind in KINDS.into_iter().filter(|kind| kind.numbered) {
            match (kind.detect)() {
                Ok(name) => {
                    let device = Device::of(kind);
                    terminal::note(&format!("device: {device}, {name}"));
                    return device;
                }
                Err(why) => missing = Some(why),
            }
        }
        let device = Device::host();
        match missing {
            Some(why) => terminal::note(&format!("device: {device}: {why:#}")),
            None => terminal::note(&format!("device: {device}")),
        }
        device
    }
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceArg, String> {
        if text == "auto" {
            return Ok(DeviceArg::Auto);
        }
        let (name, numbers) = text.split_once(':').map_or((text, None), |(name, numbers)| (name, Some(numbers)));
        let device = KINDS.into_iter().find(|kind| kind.name == name).and_then(|kind| match numbers {
            None => Some(Device::of(kind)),
            Some(numbers) if kind.numbered && numbers.bytes().all(|b| b.is_ascii_digit() || b == b',') => {
                let numbers = numbers.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<u32>>>()?;
                Some(Device { kind: KindRef(kind), numbers })
            }
            Some(_) => None,
        });
        device.map(DeviceArg::Given).ok_or_else(|| "expected auto, cpu, cuda, cuda:N or cuda:N,N (N from 0)".into())
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            DeviceArg::Auto => f.write_str("auto"),
            DeviceArg::Given(device) => device.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_by_kind_and_number() {
        let cuda = |numbers: &[u32]| DeviceArg::Given(Device { kind: KindRef(&cuda::KIND), numbers: numbers.to_vec() });
        for (text, device) in [
            ("auto", DeviceArg::Auto),
            ("cpu", DeviceArg::host()),
            ("cuda", cuda(&[0])),
            ("cuda:0", cuda(&[0])),
            ("cuda:12", cuda(&[12])),
            ("cuda:2,0,1", cuda(&[2, 0, 1])),
            ("cuda:0,0", cuda(&[0, 0])),
        ] {
            assert_eq!(text.parse(), Ok(device), "{text}");
        }
        for text in
            ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999999999", "cuda:0,", "cuda:,1", "cuda:0;1", "cpu:0"]
        {
            assert!(text.parse::<DeviceArg>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_device_is_written_as_it_is_read() {
        for text in ["auto", "cpu", "cuda:0", "cuda:2,0,1"] {
            assert_eq!(text.parse::<DeviceArg>().unwrap().to_string(), text);
        }
        assert!(DeviceArg::host().is_host() && !"cuda".parse::<DeviceArg>().unwrap().is_host());
    }
}
