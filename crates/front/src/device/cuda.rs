//! NVIDIA GPUs. Several share a model layer by layer.

use anyhow::{Context, Result, ensure};
use sluice_backend::Backend;
use sluice_cuda::{Cuda, HostOffload, Pipeline};
use sluice_engine::{Options, Unified};

use super::kind::{Device, Kind, Probes};

pub(super) static KIND: Kind = Kind {
    name: "cuda",
    numbered: true,
    detect: || sluice_cuda::open(0),
    count: || sluice_cuda::count(),
    open,
    probes: Some(|number| {
        let probes = sluice_cuda::Probes::new(number).with_context(|| format!("--device cuda:{number}"))?;
        Ok(Box::new(probes))
    }),
};

fn open(device: &Device, options: &Options) -> Result<Box<dyn Backend>> {
    let host = HostOffload { isa: options.isa, threads: options.threads, always: false };
    match device.numbers() {
        numbers if numbers.len() > 1 => {
            ensure!(options.unified != Unified::On, "--unified on is for one GPU alone");
            Ok(Box::new(Pipeline::new(numbers, options.activations, options.threads)?.with_host_experts(host)))
        }
        numbers => {
            let number = numbers.first().copied().unwrap_or(0);
            let cuda = Cuda::new(number, options.activations)?.with_unified(options.unified);
            Ok(Box::new(cuda.with_host_experts(host)))
        }
    }
}

impl Probes for sluice_cuda::Probes {
    fn name(&self) -> &str {
        sluice_cuda::Probes::name(self)
    }
    fn read(&mut self) -> Result<f64> {
        sluice_cuda::Probes::read(self)
    }
    fn up(&mut self) -> Result<f64> {
        sluice_cuda::Probes::up(self)
    }
    fn down(&mut self) -> Result<f64> {
        sluice_cuda::Probes::down(self)
    }
    fn int8(&mut self) -> Result<f64> {
        sluice_cuda::Probes::int8(self)
    }
    fn launches(&mut self) -> Result<f64> {
        sluice_cuda::Probes::launches(self)
    }
    fn launch_and_wait(&mut self) -> Result<f64> {
        sluice_cuda::Probes::launch_and_wait(self)
    }
}
