//! What computes: the CPU, or a GPU.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use sluice_backend::Backend;
use sluice_cuda::{Cuda, Host};
use sluice_engine::Options;

use crate::terminal;

/// `--device`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    Auto,
    Cpu,
    Cuda(u32),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceArg, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceArg::Auto),
            None if text == "cpu" => Ok(DeviceArg::Cpu),
            None if text == "cuda" => Ok(DeviceArg::Cuda(0)),
            Some(("cuda", number)) if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) => {
                number.parse().map(DeviceArg::Cuda).map_err(|_| "N must be the number of a device, from 0".into())
            }
            _ => Err("expected auto, cpu, cuda or cuda:N".into()),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            DeviceArg::Auto => f.write_str("auto"),
            DeviceArg::Cpu => f.write_str("cpu"),
            DeviceArg::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl DeviceArg {
    /// `auto` as what it stands for here, and says why.
    pub fn chosen(self) -> DeviceArg {
        if self != DeviceArg::Auto {
            return self;
        }
        match sluice_cuda::open(0) {
            Ok(name) => {
                terminal::note(&format!("device: cuda:0, {name}"));
                DeviceArg::Cuda(0)
            }
            Err(why) => {
                terminal::note(&format!("device: cpu: {why:#}"));
                DeviceArg::Cpu
            }
        }
    }

    /// The backend of an engine with these options.
    ///
    /// # Errors
    /// Where there is no such device, or it cannot be used.
    pub fn backend(self, options: &Options) -> Result<Box<dyn Backend>> {
        match self {
            DeviceArg::Auto | DeviceArg::Cpu => sluice_engine::cpu(options),
            DeviceArg::Cuda(number) => {
                let cuda = Cuda::new(number, options.activations).with_context(|| format!("--device {self}"))?;
                Ok(Box::new(cuda.beside(Host { isa: options.isa, threads: options.threads, always: false })))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_by_kind_and_number() {
        for (text, device) in [
            ("auto", DeviceArg::Auto),
            ("cpu", DeviceArg::Cpu),
            ("cuda", DeviceArg::Cuda(0)),
            ("cuda:0", DeviceArg::Cuda(0)),
            ("cuda:12", DeviceArg::Cuda(12)),
        ] {
            assert_eq!(text.parse(), Ok(device), "{text}");
        }
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999999999", "cpu:0"] {
            assert!(text.parse::<DeviceArg>().is_err(), "{text}");
        }
    }
}
