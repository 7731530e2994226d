//! Where an engine computes.

use anyhow::{Context, Result, bail};
use sluice_cuda::{Cuda, HostOffload, Pipeline};
use sluice_engine::{Backend, Options};

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    /// NVIDIA GPUs by number, in the order in which they take layers.
    Cuda(Vec<u32>),
}

impl Device {
    /// As `--device` has it: `cpu`, `cuda`, `cuda:0,1`, or `auto`, which takes the first usable GPU or else the CPU.
    ///
    /// # Errors
    /// What is none of these.
    pub fn parse(text: &str) -> Result<Device> {
        let numbers = |list: &str| list.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<u32>>>();
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "cuda" => Ok(Device::Cuda(vec![0])),
            None if text == "auto" => {
                Ok(if sluice_cuda::open(0).is_ok() { Device::Cuda(vec![0]) } else { Device::Cpu })
            }
            Some(("cuda", list)) if numbers(list).is_some() => Ok(Device::Cuda(numbers(list).unwrap_or_default())),
            _ => bail!("device must be auto, cpu, cuda, cuda:N or cuda:N,N (N from 0), found {text:?}"),
        }
    }

    /// The backend of an engine with these options.
    ///
    /// # Errors
    /// Where there is no such device, or it cannot be used.
    pub fn backend(&self, options: &Options) -> Result<Box<dyn Backend>> {
        let Device::Cuda(numbers) = self else { return sluice_engine::cpu(options) };
        let host = HostOffload { isa: options.isa, threads: options.threads, always: false };
        let several = || -> Result<Box<dyn Backend>> {
            Ok(match numbers[..] {
                [one] => Box::new(Cuda::new(one, options.activations)?.with_host_experts(host)),
                _ => Box::new(Pipeline::new(numbers, options.activations, options.threads)?.with_host_experts(host)),
            })
        };
        several().with_context(|| format!("device {numbers:?} of cuda"))
    }
}
