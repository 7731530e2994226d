//! Which version of the program this is, and of the numerics.

use sluice_backend::{Isa, NUMERICS_VERSION};

/// `0.1.0 (numerics 3, avx512)`. Results are equal only if all of it is.
pub fn version() -> String {
    let isa = Isa::from_env().map_or_else(|e| e.to_string(), |isa| isa.to_string());
    format!("{} (numerics {NUMERICS_VERSION}, {isa})", env!("CARGO_PKG_VERSION"))
}
