//! What computes: the CPU, a GPU, or several.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use sluice_backend::Backend;
use sluice_cuda::{Cuda, HostOffload, Pipeline};
use sluice_engine::Options;

use crate::terminal;

/// `--device`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    Auto,
    Cpu,
    /// By number, in the order in which layers lie on them.
    Cuda(Vec<u32>),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceArg, String> {
        let device = match text.split_once(':') {
            None if text == "auto" => Some(DeviceArg::Auto),
            None if text == "cpu" => Some(DeviceArg::Cpu),
            None if text == "cuda" => Some(DeviceArg::Cuda(vec![0])),
            Some(("cuda", numbers)) if numbers.bytes().all(|b| b.is_ascii_digit() || b == b',') => {
                numbers.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<u32>>>().map(DeviceArg::Cuda)
            }
            _ => None,
        };
        device.ok_or_else(|| "expected auto, cpu, cuda, cuda:N or cuda:N,N (N from 0)".into())
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            DeviceArg::Auto => f.write_str("auto"),
            DeviceArg::Cpu => f.write_str("cpu"),
            DeviceArg::Cuda(numbers) => {
                write!(f, "cuda:{}", numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
            }
        }
    }
}

impl DeviceArg {
    /// `auto` as what it stands for here, and says why.
    pub fn chosen(&self) -> DeviceArg {
        if *self != DeviceArg::Auto {
            return self.clone();
        }
        match sluice_cuda::open(0) {
            Ok(name) => {
                terminal::note(&format!("device: cuda:0, {name}"));
                DeviceArg::Cuda(vec![0])
            }
            Err(why) => {
                terminal::note(&format!("device: cpu: {why:#}"));
                DeviceArg::Cpu
            }
        }
    }

    /// One GPU more than these, for a model that they do not hold; `None` where there are no more.
    pub fn and_another(&self) -> Option<DeviceArg> {
        let DeviceArg::Cuda(numbers) = self else { return None };
        let next = (0..sluice_cuda::count().ok()?).find(|n| !numbers.contains(n))?;
        Some(DeviceArg::Cuda(numbers.iter().copied().chain([next]).collect()))
    }

    /// The backend of an engine with these options.
    ///
    /// # Errors
    /// Where there is no such device, or it cannot be used.
    pub fn backend(&self, options: &Options) -> Result<Box<dyn Backend>> {
        let host = HostOffload { isa: options.isa, threads: options.threads, always: false };
        match self {
            DeviceArg::Auto | DeviceArg::Cpu => sluice_engine::cpu(options),
            DeviceArg::Cuda(numbers) if numbers.len() > 1 => {
                let several = Pipeline::new(numbers, options.activations, options.threads)
                    .with_context(|| format!("--device {self}"))?;
                Ok(Box::new(several.with_host_experts(host)))
            }
            DeviceArg::Cuda(numbers) => {
                let number = numbers.first().copied().unwrap_or(0);
                let cuda = Cuda::new(number, options.activations).with_context(|| format!("--device {self}"))?;
                Ok(Box::new(cuda.with_host_experts(host)))
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
            ("cuda", DeviceArg::Cuda(vec![0])),
            ("cuda:0", DeviceArg::Cuda(vec![0])),
            ("cuda:12", DeviceArg::Cuda(vec![12])),
            ("cuda:2,0,1", DeviceArg::Cuda(vec![2, 0, 1])),
            ("cuda:0,0", DeviceArg::Cuda(vec![0, 0])),
        ] {
            assert_eq!(text.parse(), Ok(device), "{text}");
        }
        for text in
            ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:99999999999", "cuda:0,", "cuda:,1", "cuda:0;1", "cpu:0"]
        {
            assert!(text.parse::<DeviceArg>().is_err(), "{text}");
        }
    }
}
