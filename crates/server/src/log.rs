//! Lines on standard error.

use std::io::Write;

/// Writes one line to standard error.
pub fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "sluice: {line}");
}
