//! Whether a model fits this machine's memory, and what happens where it does not.

use crate::inspect::breakdown::{Anatomy, Component};
use crate::units;
use sluice_front::machine::{self, MemoryLimit};

/// How much of the model fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Weights, state, and keys and values of the whole context.
    FullContext,
    /// Weights and state, and part of the context.
    PartOfContext,
    /// All but the routed experts.
    Resident,
    No,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::FullContext => "full_context",
            Verdict::PartOfContext => "part_of_context",
            Verdict::Resident => "resident",
            Verdict::No => "no",
        }
    }
}

/// Need and room, in bytes. Keys and values are counted in bf16; what a step needs besides is small and not counted.
pub struct Fit {
    pub available: Option<u64>,
    pub cgroup: Option<MemoryLimit>,
    /// What may be taken: the lesser of the two.
    pub room: Option<u64>,
    /// Needed for everything, with keys and values of the whole context.
    pub full_context: u64,
    pub verdict: Verdict,
    /// Tokens of context that fit beside all weights.
    pub context: u64,
}

impl Fit {
    /// `None` for an architecture that is not known.
    pub fn of_this_machine(a: &Anatomy) -> Option<Fit> {
        let model = a.model.as_ref()?;
        let (available, cgroup) = (machine::available(), machine::cgroup());
        let room = machine::room();
        let need = Need {
            resident: a.resident_bytes(),
            experts: a.part(Component::Experts).bytes,
            state: a.state_bytes()?,
            per_token: a.kv_per_token(2)?,
            max_context: model.max_context as u64,
        };
        let (verdict, context) = need.within(room.unwrap_or(u64::MAX));
        Some(Fit { available, cgroup, room, full_context: need.all(), verdict, context })
    }

    pub fn to_text(&self) -> String {
        let room = match (self.room, self.cgroup) {
            (None, _) => return "what this machine has is not known".to_owned(),
            (Some(room), Some(limit)) if limit.left == room => {
                format!("{} left of this control group's limit of {}", units::bytes(room), units::bytes(limit.limit))
            }
            (Some(room), _) => format!("{} available", units::bytes(room)),
        };
        let all = units::bytes(self.full_context);
        match self.verdict {
            Verdict::FullContext => format!("{room}; {all} needed with the full context: fits"),
            Verdict::PartOfContext => {
                format!("{room}; {all} needed with the full context: fits with up to {} tokens", self.context)
            }
            Verdict::Resident => {
                format!(
                    "{room}; {all} needed with the full context: fits but for its experts, which are read from disk as they are used"
                )
            }
            Verdict::No => format!(
                "{room}; {all} needed with the full context: does not fit, all weights are read from disk again and again"
            ),
        }
    }
}

struct Need {
    resident: u64,
    experts: u64,
    state: u64,
    per_token: u64,
    max_context: u64,
}

impl Need {
    fn all(&self) -> u64 {
        let weights = self.resident.saturating_add(self.experts).saturating_add(self.state);
        weights.saturating_add(self.per_token.saturating_mul(self.max_context))
    }

    /// How much fits into `room`, and how many tokens of context beside all weights.
    fn within(&self, room: u64) -> (Verdict, u64) {
        let resident = self.resident.saturating_add(self.state);
        let left = room.saturating_sub(resident.saturating_add(self.experts));
        let context = left.checked_div(self.per_token).unwrap_or(if left > 0 { u64::MAX } else { 0 });
        let verdict = if context >= self.max_context {
            Verdict::FullContext
        } else if context > 0 {
            Verdict::PartOfContext
        } else if self.experts > 0 && room > resident {
            Verdict::Resident
        } else {
            Verdict::No
        };
        (verdict, context.min(self.max_context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_follow_the_room() {
        let need = Need { resident: 100, experts: 1000, state: 10, per_token: 2, max_context: 50 };
        assert_eq!(need.all(), 1210);
        assert_eq!(need.within(1210), (Verdict::FullContext, 50));
        assert_eq!(need.within(1209), (Verdict::PartOfContext, 49));
        assert_eq!(need.within(1110), (Verdict::Resident, 0));
        assert_eq!(need.within(110), (Verdict::No, 0));
    }
}
