//! The time of a step, by phase.

use std::time::Duration;

/// A phase of a model step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Rows of the embedding.
    Embed,
    /// Projections of token mixers.
    Project,
    /// Attention, without projections.
    Attention,
    /// Delta rule, without projections.
    DeltaNet,
    /// Mamba-2, without projections.
    StateSpace,
    /// Dense feed-forward layers.
    Mlp,
    /// Routers.
    Route,
    /// Experts of mixtures.
    Experts,
    /// Final norm and logits.
    Head,
}

impl Phase {
    /// All phases, in the order of a step.
    pub const ALL: [Phase; 9] = [
        Phase::Embed,
        Phase::Project,
        Phase::Attention,
        Phase::DeltaNet,
        Phase::StateSpace,
        Phase::Mlp,
        Phase::Route,
        Phase::Experts,
        Phase::Head,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Embed => "embed",
            Phase::Project => "project",
            Phase::Attention => "attention",
            Phase::DeltaNet => "delta_net",
            Phase::StateSpace => "state_space",
            Phase::Mlp => "mlp",
            Phase::Route => "route",
            Phase::Experts => "experts",
            Phase::Head => "head",
        }
    }
}

/// What one phase took.
#[derive(Clone, Copy, Debug, Default)]
pub struct PhaseRow {
    /// Total time.
    pub time: Duration,
    /// Operations.
    pub calls: u64,
    /// Weight bytes used, counted once per call and matrix row.
    pub weight_bytes: u64,
    /// Multiply-adds with weights.
    pub macs: u64,
}

/// Time and work by phase.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    rows: [PhaseRow; Phase::ALL.len()],
}

impl Profile {
    /// What a phase took.
    pub fn row(&self, phase: Phase) -> PhaseRow {
        self.rows[phase as usize]
    }

    /// Adds what another profile counted.
    pub fn add_row(&mut self, phase: Phase, more: PhaseRow) {
        let row = &mut self.rows[phase as usize];
        row.time += more.time;
        row.calls += more.calls;
        row.weight_bytes += more.weight_bytes;
        row.macs += more.macs;
    }

    /// Counts one call of a phase.
    pub fn add(&mut self, phase: Phase, time: Duration, weight_bytes: u64, macs: u64) {
        let row = &mut self.rows[phase as usize];
        row.time += time;
        row.calls += 1;
        row.weight_bytes += weight_bytes;
        row.macs += macs;
    }
}
