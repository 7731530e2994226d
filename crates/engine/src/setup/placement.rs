//! Decides where the experts of a mixture are stored: mapped like all other weights, or on disk until tokens use them. Decided before weights are read.

use anyhow::{Result, ensure};
use sluice_model::{Description, ModelSource};
use sluice_store::load::{Speeds, disk_speeds};

use crate::options::{Options, Placement};

/// Where experts are stored, and why.
#[derive(Clone, Debug)]
pub struct PlacementChoice {
    /// Never [`Placement::Auto`].
    pub placement: Placement,
    /// The reason, as a clause.
    pub reason: String,
}

/// The part of the memory that `Auto` leaves for everything but weights: keys and values, scratch, other programs.
const SPARE: f64 = 0.1;

/// Slots need direct reads of at least this part of the speed of reads through the page cache. They may be slower, because slots save more reads than the page
/// cache does.
const SLOW: f64 = 0.5;

/// Decides where the experts of the model are stored. `device`: weights go to a device's own memory.
///
/// # Errors
/// When streaming was asked for and the model has no experts.
pub(crate) fn decide(
    source: &dyn ModelSource,
    model: &Description,
    options: &Options,
    device: bool,
) -> Result<PlacementChoice> {
    let has_experts = model.experts().is_some();
    let placed = |placement, reason: String| Ok(PlacementChoice { placement, reason });
    match options.experts {
        Placement::Auto => {}
        Placement::Mapped => return placed(Placement::Mapped, "asked for".into()),
        streamed => {
            ensure!(has_experts, "--experts {}: this model has no experts", streamed.name());
            return placed(streamed, "asked for".into());
        }
    }
    if !has_experts {
        return placed(Placement::Mapped, "no experts".into());
    }
    if options.expert_budget.is_some() {
        return placed(Placement::Slots, "a budget for experts is given".into());
    }
    if device {
        return placed(Placement::Mapped, "the device's memory holds all weights".into());
    }
    let Some(room) = options.memory_budget.into_iter().chain(options.load.copy_budget).min() else {
        return placed(Placement::Mapped, "how much memory there is, is not known".into());
    };
    let weights: u64 = source.weight_files().iter().map(|(_, size)| size).sum();
    let gb = |n: u64| n as f64 / 1e9;
    if weights as f64 > room as f64 * (1.0 - SPARE) {
        let (placement, why) = streamed(source, options);
        let reason = format!(
            "{:.2} GB of weights do not fit {:.2} GB of memory with room to spare; {why}",
            gb(weights),
            gb(room)
        );
        return placed(placement, reason);
    }
    placed(Placement::Mapped, format!("{:.2} GB of weights fit {:.2} GB of memory", gb(weights), gb(room)))
}

/// The placement for a model that was to be mapped and did not fit.
pub(crate) fn instead_of_mapped(source: &dyn ModelSource, options: &Options, device: bool) -> PlacementChoice {
    if device {
        // However slow the disk is: as long as memory has room, each expert is read once.
        let reason = "the device's memory is too little for all experts".to_owned();
        return PlacementChoice { placement: Placement::Slots, reason };
    }
    let (placement, why) = streamed(source, options);
    PlacementChoice { placement, reason: format!("with all experts mapped the memory is too little; {why}") }
}

/// Slots or the page cache, by the measured speeds of the disk, and why.
fn streamed(source: &dyn ModelSource, options: &Options) -> (Placement, String) {
    let largest = source.weight_files().into_iter().max_by_key(|(_, size)| *size);
    let speeds = largest.and_then(|(file, _)| disk_speeds(&file, &options.load));
    let per_second = |speed: f64| format!("{:.2} GB/s", speed / 1e9);
    match speeds {
        // Slots that are filled through the page cache would hold everything twice.
        Some(Speeds { direct: None, .. }) => {
            (Placement::PageCache, "the disk refuses reads past the page cache, which is the only cache then".into())
        }
        Some(Speeds { direct: Some(direct), mapped }) if direct < mapped * SLOW => {
            let (direct, mapped) = (per_second(direct), per_second(mapped));
            (Placement::PageCache, format!("reads past the page cache give {direct}, through it {mapped}"))
        }
        Some(Speeds { direct: Some(direct), .. }) => {
            (Placement::Slots, format!("reads past the page cache give {}", per_second(direct)))
        }
        None => (Placement::Slots, "the disk is not measured".into()),
    }
}
