//! The embedded kernels are those of the sources, and what the host gives them is what they take. Needs no GPU.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use sluice_cuda::{Kernel, ptx};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

#[test]
fn ptx_was_made_from_the_sources_that_lie_here() {
    let listed = fs::read_to_string(folder().join("ptx/made-from.txt")).unwrap();
    let listed: Vec<(&str, &str)> = listed.lines().map(|line| line.split_once("  ").unwrap()).collect();
    for (hash, name) in &listed {
        let path = folder().join(if name.ends_with(".gz") { "ptx" } else { "" }).join(name);
        let found = format!("{:x}", Sha256::digest(fs::read(&path).unwrap()));
        assert_eq!(&found, hash, "{name} is not what the PTX was made with: run crates/cuda/kernels/make.py");
    }
    for folder in [folder(), folder().join("ptx")] {
        for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap()) {
            let name = entry.file_name().into_string().unwrap();
            let known = listed.iter().any(|(_, listed)| *listed == name) || name == "made-from.txt";
            assert!(known || entry.path().is_dir(), "{name} is not listed: run crates/cuda/kernels/make.py");
        }
    }
}

#[test]
fn kernels_take_what_the_host_gives_them() {
    for capability in [75, 80, 86, 90, 120] {
        let text = ptx(capability).unwrap();
        for kernel in Kernel::ALL {
            let name = kernel.name();
            let (_, parameter) = text.split_once(&format!(" {name}_param_0[")).unwrap_or_else(|| panic!("{name}"));
            let size: usize = parameter.split_once(']').unwrap().0.parse().unwrap();
            assert_eq!(size, kernel.parameters(), "bytes of what {name} takes");
        }
    }
    ptx(70).unwrap_err();
}

/// Nothing approximate, and nothing flushed but the products of bf16 pairs.
#[test]
fn arithmetic_is_exact() {
    for capability in [75, 80, 90] {
        for line in ptx(capability).unwrap().lines().map(str::trim) {
            let operation = line.split_whitespace().next().unwrap_or_default();
            assert!(!operation.contains("approx") && !operation.starts_with("div.full"), "{line}");
            assert!(!operation.contains(".ftz") || operation == "fma.rn.ftz.f32", "{line}");
            // Atomics have no order: they count who is through, and what is found, which is put in order afterwards, or set bits.
            let counts = operation.contains(".inc.u32") || operation == "atom.shared.add.u32";
            let sets = operation == "red.shared.or.b32";
            assert!(sets || !operation.starts_with("red.") && (!operation.starts_with("atom") || counts), "{line}");
            if ["add.f32", "sub.f32", "mul.f32", "fma.f32", "mad.f32"].contains(&operation) {
                panic!("{line}: without a rounding it may be fused");
            }
        }
    }
}

/// Names of two words or more that both sides give a number, as `NAME: u32 = 8` here and `NAME = 8` in the kernels.
#[test]
fn numbers_that_stand_on_both_sides_are_the_same() {
    let in_kernels = numbers(&folder(), "cu", " = ");
    let mut compared = 0;
    for (name, here) in numbers(&folder().join("../src"), "rs", ": ") {
        for (_, there) in in_kernels.iter().filter(|(known, _)| *known == name) {
            assert_eq!(here, *there, "{name}, here and in the kernels");
            compared += 1;
        }
    }
    assert!(compared > 20, "only {compared} names were found on both sides");
}

/// What constants are called that files of this kind define as plain numbers, by what stands behind a name.
fn numbers(folder: &Path, kind: &str, behind: &str) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            found.extend(numbers(&entry, kind, behind));
        } else if entry.extension().is_some_and(|e| e.to_string_lossy().starts_with(kind)) {
            let text = fs::read_to_string(&entry).unwrap();
            for definition in text.split(';').filter_map(|s| s.rsplit_once("const ")).flat_map(|(_, s)| s.split(", ")) {
                let Some((name, rest)) = definition.split_once(behind) else { continue };
                let name = name.rsplit(' ').next().unwrap_or(name);
                let value = rest.rsplit("= ").next().unwrap_or(rest).replace('_', "");
                if let (true, Ok(value)) = (name.contains('_'), value.parse()) {
                    found.push((name.to_owned(), value));
                }
            }
        }
    }
    found
}
