//! Numbers that the kernels' sources and the host both have. Needs no GPU and no compiled kernels.

use std::fs;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
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
