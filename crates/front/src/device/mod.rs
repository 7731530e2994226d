//! Devices: the CPU, a GPU, or several. A registry of kinds, and the argument that chooses one.
//!
//! To add a kind of device: a file here with its [`Kind`], and a line in [`KINDS`].

mod cpu;
mod cuda;
mod kind;

use std::fmt;
use std::str::FromStr;

pub use kind::{Device, Kind, Probes};

/// The kinds of devices. `auto` takes the first that is there; the last is always there.
static KINDS: [&Kind; 2] = [&cuda::KIND, &cpu::KIND];

/// The machine itself.
pub fn host() -> Device {
    Device::first(KINDS[KINDS.len() - 1])
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
        DeviceArg::Given(host())
    }

    /// Whether the machine itself was asked for.
    pub fn is_host(&self) -> bool {
        matches!(self, DeviceArg::Given(device) if device.is_host())
    }

    /// The device. For `auto` chooses one, and says in a line which and why.
    pub fn chosen(&self, say: &dyn Fn(&str)) -> Device {
        let DeviceArg::Given(device) = self else {
            return DeviceArg::detect(say);
        };
        device.clone()
    }

    fn detect(say: &dyn Fn(&str)) -> Device {
        let mut missing = None;
        for kind in KINDS.into_iter().filter(|kind| kind.numbered) {
            match (kind.detect)() {
                Ok(name) => {
                    let device = Device::first(kind);
                    say(&format!("device: {device}, {name}"));
                    return device;
                }
                Err(why) => missing = Some(why),
            }
        }
        let device = host();
        match missing {
            Some(why) => say(&format!("device: {device}: {why:#}")),
            None => say(&format!("device: {device}")),
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
            None => Some(Device::first(kind)),
            Some(numbers) if kind.numbered && numbers.bytes().all(|b| b.is_ascii_digit() || b == b',') => {
                let numbers = numbers.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<u32>>>()?;
                Some(Device::numbered(kind, numbers))
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
        let cuda = |numbers: &[u32]| DeviceArg::Given(Device::numbered(&cuda::KIND, numbers.to_vec()));
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
