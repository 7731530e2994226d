//! The machine itself.

use super::kind::Kind;

pub(super) static KIND: Kind = Kind {
    name: "cpu",
    numbered: false,
    detect: || Ok("cpu".into()),
    count: || Ok(1),
    open: |_, options| sluice_engine::cpu(options),
    probes: None,
};
