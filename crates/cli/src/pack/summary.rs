//! What the user is told: remarks before, arithmetic of the space, and the figures at the end.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use sluice_model::Description;

use crate::units::bytes;

use super::plan::{Plan, Treatment};
use super::quantize::Error;

/// Lines about what the user might not expect.
pub fn remarks(plan: &Plan, description: &Description) -> Vec<String> {
    let mut lines = Vec::new();
    if !plan.left_out.is_empty() {
        let parts: Vec<&str> = plan.left_out.iter().map(String::as_str).take(8).collect();
        lines.push(format!("left out, as only the text model is packed: {}", parts.join(", ")));
    }
    if plan.copied > 0 {
        lines.push(format!("{} modules are quantised already and are copied as they are", plan.copied));
    }
    if plan.requantised > 0 {
        lines.push(format!(
            "{} modules are quantised already and are quantised anew, which adds to their error",
            plan.requantised
        ));
    }
    if plan.too_few > 0 {
        lines.push(format!("{} modules stay at the fewer bits that they have", plan.too_few));
    }
    if let Some(first) = plan.undivided.first() {
        let others = match plan.undivided.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        lines.push(format!("not quantised, as their inputs do not divide into the groups: {first}{others}"));
    }
    if !plan.quantizes {
        lines.push("nothing to quantise: tensors are copied".to_owned());
    }
    if description.mlx.refuses_order {
        lines.push("mlx_lm cannot run this order of attention and linear layers; sluice can".to_owned());
    }
    lines
}

/// Bytes that the output takes.
pub struct Sizes {
    pub weights: u64,
    /// Headers, and what else the files themselves need.
    pub headers: u64,
    pub others: u64,
    /// Of the weights, what an unfinished packing has left behind for this one.
    pub done: u64,
}

impl Sizes {
    pub fn needed(&self) -> u64 {
        self.weights.saturating_sub(self.done) + self.others + self.headers
    }

    pub fn line(&self, free: u64) -> String {
        let done = if self.done > 0 { format!(" (of which {} are there)", bytes(self.done)) } else { String::new() };
        format!(
            "needs {} of weights{done} + {} of other files + {} for headers = {}; {} are free",
            bytes(self.weights),
            bytes(self.others),
            bytes(self.headers),
            bytes(self.needed()),
            bytes(free)
        )
    }
}

/// What was done.
#[derive(Debug, Default)]
pub struct Done {
    /// By class of module: weights and their error.
    pub errors: BTreeMap<String, Error>,
    /// Of the files of weights.
    pub bytes: u64,
}

/// The figures of a finished packing.
pub fn report(plan: &Plan, done: &Done, input: u64, time: Duration) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{} -> {}: {:.2} M weights at {:.3} bits, {:.2} s ({}/s)",
        bytes(input),
        bytes(done.bytes),
        plan.parameters as f64 / 1e6,
        done.bytes as f64 * 8.0 / plan.parameters.max(1) as f64,
        time.as_secs_f64(),
        bytes((input as f64 / time.as_secs_f64()) as u64),
    );
    if done.errors.is_empty() {
        return text;
    }
    let _ = writeln!(text, "{:18} {:>10} {:>6} {:>10} {:>9}", "quantised", "M weights", "bits", "RMSE", "of RMS");
    for (class, error) in &done.errors {
        let units = plan.units.iter().filter(|u| u.weight.class.name() == class.as_str());
        let packed: u64 = units.filter(|u| matches!(u.treatment, Treatment::Quantize { .. })).map(|u| u.size()).sum();
        let _ = writeln!(
            text,
            "{class:18} {:>10.3} {:>6.2} {:>10.3e} {:>8.2}%",
            error.count as f64 / 1e6,
            packed as f64 * 8.0 / error.count.max(1) as f64,
            error.rmse(),
            error.relative() * 100.0,
        );
    }
    text
}
