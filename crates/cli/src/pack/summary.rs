//! Messages of `pack`: remarks before, disk space, and figures at the end.

use std::fmt::Write;
use std::time::Duration;

use sluice_pack::{ClassReport, Conversion, Report, Space};

use crate::units::bytes;

/// Remarks about surprising parts of the plan, a line each.
pub fn remarks(c: &Conversion) -> Vec<String> {
    let mut lines = Vec::new();
    if !c.left_out.is_empty() {
        let parts: Vec<&str> = c.left_out.iter().map(String::as_str).take(8).collect();
        lines.push(format!("left out, as only the text model is packed: {}", parts.join(", ")));
    }
    if c.copied > 0 {
        lines.push(format!("{} modules are quantised already and are copied as they are", c.copied));
    }
    if c.requantised > 0 {
        lines.push(format!(
            "{} modules are quantised already and are quantised anew, which adds to their error",
            c.requantised
        ));
    }
    if c.too_few > 0 {
        lines.push(format!("{} modules stay at the fewer bits that they have", c.too_few));
    }
    if let Some(first) = c.undivided.first() {
        let others = match c.undivided.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        lines.push(format!("not quantised, as their inputs do not divide into the groups: {first}{others}"));
    }
    if !c.quantizes {
        lines.push("nothing to quantise: tensors are copied".to_owned());
    }
    if c.refused_by_mlx {
        lines.push("mlx_lm cannot run this order of attention and linear layers; sluice can".to_owned());
    }
    lines
}

/// The disk space that the output needs.
pub fn space(s: &Space, free: u64) -> String {
    let done = if s.done > 0 { format!(" (of which {} are there)", bytes(s.done)) } else { String::new() };
    format!(
        "needs {} of weights{done} + {} of other files + {} for headers = {}; {} are free",
        bytes(s.weights),
        bytes(s.others),
        bytes(s.headers),
        bytes(s.needed()),
        bytes(free)
    )
}

/// The figures of a finished packing.
pub fn report(r: &Report, time: Duration) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{} -> {}: {:.2} M weights at {:.3} bits, {:.2} s ({}/s)",
        bytes(r.input_bytes),
        bytes(r.output_bytes),
        r.parameters as f64 / 1e6,
        r.output_bytes as f64 * 8.0 / r.parameters.max(1) as f64,
        time.as_secs_f64(),
        bytes((r.input_bytes as f64 / time.as_secs_f64()) as u64),
    );
    if !r.classes.is_empty() {
        let _ = writeln!(text, "{:18} {:>10} {:>6} {:>10} {:>9}", "quantised", "M weights", "bits", "RMSE", "of RMS");
    }
    for (class, ClassReport { error, bytes }) in &r.classes {
        let _ = writeln!(
            text,
            "{class:18} {:>10.3} {:>6.2} {:>10.3e} {:>8.2}%",
            error.count as f64 / 1e6,
            *bytes as f64 * 8.0 / error.count.max(1) as f64,
            error.rmse(),
            error.relative() * 100.0,
        );
    }
    if let Some(files) = r.verified {
        let _ = writeln!(text, "verified: {files} files read back, every byte as it was written");
    }
    text
}
