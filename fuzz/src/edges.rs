//! One program for all edges: `SLUICE_FUZZ_EDGE` says which. What they are is in `crates/edges`.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use sluice_edges::EDGES;

fuzz_target!(|bytes: &[u8]| {
    static EDGE: OnceLock<fn(&[u8])> = OnceLock::new();
    let edge = EDGE.get_or_init(|| {
        let name = std::env::var("SLUICE_FUZZ_EDGE").unwrap_or_default();
        let found = EDGES.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("SLUICE_FUZZ_EDGE={name}: one of {:?}", EDGES.map(|e| e.0))).1
    });
    edge(bytes);
});
