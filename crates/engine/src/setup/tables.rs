//! Whether tables of which a token uses few rows stay on disk, and how large the cache of their rows is.

use sluice_backend::RowOptions;
use sluice_model::Description;

use crate::options::{Options, TablePlacement};
use crate::setup::limits::hard_limits;

/// Elements from which on `Auto` leaves a table on disk. Smaller ones are read with the rest, in less time than anybody notices.
const LARGE: u64 = 1 << 26;
/// The part of a device's memory that tables may take under `Auto`.
const DEVICE_PART: u64 = 4;
/// Bytes of the cache of rows, unless the options say otherwise, and the part of a memory limit that it takes at most.
const CACHE: u64 = 128 << 20;
const PART: u64 = 32;

/// Whether the model's tables stay on disk. `device`: bytes that are free on the device that would have them, if it is one with memory of its own.
pub(crate) fn stay_on_disk(model: &Description, options: &Options, device: Option<u64>) -> bool {
    let tables = || model.weights().filter(|w| w.class.is_table()).map(|w| w.elements());
    match (options.tables, device) {
        // A device has no rows of n-grams.
        (_, Some(_)) if model.ngrams.is_some() => true,
        (TablePlacement::Memory, _) => false,
        (TablePlacement::Disk, _) => tables().next().is_some(),
        (TablePlacement::Auto, None) => tables().any(|elements| elements >= LARGE),
        // Counted as bf16, whatever the file has.
        (TablePlacement::Auto, Some(free)) => 2 * tables().sum::<u64>() > free / DEVICE_PART,
    }
}

/// How the rows of each of so many tables are read and kept.
pub(crate) fn row_options(options: &Options, tables: usize) -> RowOptions {
    let limit = hard_limits(options).iter().map(|limit| limit.bytes).min().unwrap_or(u64::MAX);
    let budget = options.table_budget.unwrap_or(CACHE.min(limit / PART));
    let how = &options.expert_options;
    let budget = budget / tables.max(1) as u64;
    RowOptions { budget, io_uring: how.io_uring, faults: how.faults.clone(), ..RowOptions::default() }
}
