//! The end of a step with drafts: what came true is kept, the rest is cut.

use sluice_cache::KvCache;

use super::planner::Drafting;
use crate::draft::SequenceDrafts;
use crate::schedule::plan::ScheduledSequence;
use crate::schedule::sequence::Sequence;

impl Drafting {
    /// Learns which proposed tokens of a sequence came true. `new`: its tokens of the step.
    fn learn_acceptance(&mut self, drafts: &mut SequenceDrafts, new: &[u32]) {
        let agreed = drafts.agreed(new);
        let by = drafts.by as usize;
        for (at, class) in drafts.draft.classes.iter().enumerate().take(new.len().min(agreed + 1)) {
            drafts.acceptance[by].learn(*class, at < agreed);
            self.acceptance[by].learn(*class, at < agreed);
        }
    }
}

/// Ends the step for a sequence: keeps what was computed of drafted tokens that came true, and cuts the rest. `accepted`: drafted tokens whose logits were looked at.
pub(crate) fn settle(
    s: &mut Sequence,
    scheduled: ScheduledSequence,
    accepted: usize,
    drafting: &mut Option<Drafting>,
    cache: &mut KvCache,
) {
    let (Some(drafting), Some(drafts)) = (drafting, &mut s.drafts) else { return };
    let new = &s.tokens[s.computed..];
    drafting.learn_acceptance(drafts, new);
    if scheduled.drafts == 0 {
        return drafts.draft.clear();
    }
    // Tokens that a constraint has forced may have been drafted, too. The last token of a sequence that goes on is computed in the next step.
    let forced = drafts.agreed(new).min(scheduled.computed_drafts).min(new.len().saturating_sub(1));
    let kept = if s.running.is_some() { accepted.max(forced) } else { accepted };
    drafts.counts.add(scheduled.drafts, kept);
    let of_drafter = drafting.records.iter_mut().find(|record| record.drafter.kind() == drafts.by);
    of_drafter.into_iter().for_each(|record| record.stats.counts.add(scheduled.drafts, kept));
    drafts.draft.clear();
    s.computed += kept;
    cache.shrink(&mut s.held, s.computed);
    if let Some(first) = scheduled.kept_states.filter(|_| kept < scheduled.drafts) {
        cache.set_state(&s.held, first + kept as u32);
    }
    if s.shares {
        cache.publish(&mut s.held, s.root, &s.tokens, s.computed);
    }
    if kept > 0 && s.snapshot_points.binary_search(&s.computed).is_ok() {
        cache.snapshot(&mut s.held, s.root, &s.tokens, s.computed);
    }
    cache.drop_before_window(&mut s.held, s.computed);
}
