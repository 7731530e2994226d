//! This machine's processor in the place of a device, for tests where there is no GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use sluice_backend::Isa;

/// This test program once more, with a driver whose devices are emulated; `None`, and a line that says so, where that cannot be built.
pub fn this_program() -> Option<Command> {
    let out = build()?;
    let mut program = Command::new(std::env::current_exe().expect("this program"));
    program.env("LD_LIBRARY_PATH", &out).env("SLUICE_CUDA_KERNELS", out.join("kernels"));
    Some(program)
}

/// The folder of the driver.
fn build() -> Option<PathBuf> {
    let (out, build) = (
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated"),
        concat!(env!("CARGO_MANIFEST_DIR"), "/emulated/build.py"),
    );
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !(there("python3") && there("c++") && cfg!(target_arch = "x86_64") && Isa::supported().len() > 1) {
        eprintln!("left out: it takes python3, c++ and AVX2");
        return None;
    }
    let built = Command::new("python3").args(["-B", build]).arg(&out).status().expect("python3 was there");
    assert!(built.success(), "{build} failed");
    Some(out)
}
