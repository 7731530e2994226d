//! A kind of device, and devices of it.

use std::fmt;

use anyhow::{Context, Result};
use sluice_backend::Backend;
use sluice_engine::Options;

/// Opens the measurements of a device by its number.
pub type OpenProbes = fn(u32) -> Result<Box<dyn Probes>>;

/// A kind of device.
pub struct Kind {
    /// The name in `--device`.
    pub name: &'static str,
    /// Devices of this kind are told apart by numbers, as in `name:0`, and compute in memory of their own. Without: it is the machine itself.
    pub numbered: bool,
    /// Whether device 0 can be used: its name to a user, or why not.
    pub detect: fn() -> Result<String>,
    /// Devices of this kind in this machine.
    pub count: fn() -> Result<u32>,
    /// Makes the backend of an engine. It reports its memory itself ([`sluice_backend::Resources::device_memory`]).
    pub open: fn(&Device, &Options) -> Result<Box<dyn Backend>>,
    /// What `bench roofline` measures on such a device, by number.
    pub probes: Option<OpenProbes>,
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
    /// The first device of a kind.
    pub fn first(kind: &'static Kind) -> Device {
        Device { kind: KindRef(kind), numbers: if kind.numbered { vec![0] } else { Vec::new() } }
    }

    /// These devices of a kind with numbers.
    pub fn numbered(kind: &'static Kind, numbers: Vec<u32>) -> Device {
        Device { kind: KindRef(kind), numbers }
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
