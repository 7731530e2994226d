//! One program for all fuzz targets: `SLUICE_FUZZ_TARGET` says which. What they are is in `crates/fuzz_targets`.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use sluice_fuzz_targets::TARGETS;

fuzz_target!(|bytes: &[u8]| {
    static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let name = std::env::var("SLUICE_FUZZ_TARGET").unwrap_or_default();
        let found = TARGETS.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("SLUICE_FUZZ_TARGET={name}: one of {:?}", TARGETS.map(|e| e.0))).1
    });
    target(bytes);
});
