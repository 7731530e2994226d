//! Measures what drafts cost before anybody waits for an answer: steps with drafted tokens, and the rounds of a model that drafts.
//!
//! On a device the first step of each width takes several times as long as later ones, which run as a graph. The first answers would pay for that, and as long as costs are
//! guesses, the governor hardly dares to draft. With some other tokens, which nobody sees, all of it takes some tens of steps' time.

use std::time::{Duration, Instant};

use sluice_backend::Wanted;

use super::drafter::DraftRequest;
use crate::draft::DrafterKind;
use crate::engine::Engine;
use crate::schedule::plan::ScheduledSequence;
use crate::schedule::sequence::{Generation, SequenceId};

/// Drafted tokens of the steps that are measured; what lies between is interpolated.
const WIDTHS: [usize; 5] = [0, 1, 2, 4, 8];
/// Steps of a width. On a device the first is enqueued launch by launch, the second makes a graph.
const STEPS: usize = 4;
/// How often a drafter is asked, each time for as many tokens as are likely to be asked for.
const PROPOSALS: usize = 8;
const PROPOSED: usize = 4;
/// The prompt: two tokens, of any kind.
const PROMPT: [u32; 2] = [0, 0];
/// Positions that all of it takes at most.
const POSITIONS: usize = 64;

impl Engine {
    /// Measures what drafts cost, once: on a device with memory of its own, where steps are short, when all weights are there and no sequence runs. Returns whether it did.
    /// No answer depends on it.
    pub fn measure_drafts(&mut self) -> bool {
        let on_device = self.runner.backend.device_memory().is_some_and(|own| !own.shared);
        let is_loaded = self.loading.as_ref().is_none_or(|loading| loading.progress().is_over());
        let has_room = self.setup.max_context >= POSITIONS && self.scheduler.max_tokens > WIDTHS[WIDTHS.len() - 1];
        let may_try = on_device && is_loaded && has_room && self.is_idle();
        if !may_try || !self.drafting.as_mut().is_some_and(|drafting| drafting.begin_trial()) {
            return false;
        }
        let id = self.add_sequence();
        // What fails here fails in a request, too, and is said there.
        let _ = self.try_out(id);
        self.remove_sequence(id);
        self.plan.clear();
        true
    }

    fn try_out(&mut self, id: SequenceId) -> Option<()> {
        self.start(id, &PROMPT, Generation { max_tokens: POSITIONS / 2, ..Generation::default() }).ok()?;
        let at = self.sequences.position(id)?;
        // 1. The prompt
        self.sequences.list[at].shares = false;
        self.time_step(at, PROMPT.len(), 0)?;
        let s = &mut self.sequences.list[at];
        s.computed = PROMPT.len();
        s.tokens.push(PROMPT[0]);
        // 2. Steps, each of the same tokens. The widest come first once, since graphs stay only while the device's scratch memory stays where it is
        let most = self.drafting.as_ref()?.most();
        let widths = || WIDTHS.into_iter().filter(|width| *width <= most);
        for (number, width) in widths().next_back().into_iter().chain(widths()).enumerate() {
            let Some(drafts) = &mut self.sequences.list[at].drafts else { break };
            drafts.draft.clear();
            (0..width).for_each(|_| drafts.draft.push(PROMPT[0], 0));
            let mut shortest = Duration::MAX;
            for _ in 0..STEPS {
                shortest = shortest.min(self.time_step(at, 1, width)?);
            }
            let Some(drafting) = &mut self.drafting else { break };
            if number > 0 {
                drafting.know_step(width, shortest);
            }
        }
        // 3. Rounds of a model that drafts. It is behind by one token where its last proposal was wrong, and by two where all of it came true
        for number in 0..PROPOSALS {
            let Some((drafting, _, mut parts)) = self.drafting() else { break };
            let Some(drafts) = &mut parts.sequences[at].drafts else { break };
            drafts.draft.clear();
            drafts.by = DrafterKind::Model;
            drafting.try_out(DraftRequest { sequence: at, most: PROPOSED, least_chance: 0.0 }, &mut parts);
            let s = &mut parts.sequences[at];
            if let Some(drafts) = s.drafts.as_ref().filter(|_| number % 2 == 0) {
                s.tokens.extend_from_slice(&drafts.draft.tokens);
            }
            s.tokens.push(PROMPT[0]);
        }
        Some(())
    }

    /// Runs a step of one sequence, whose tokens stay uncomputed, and returns how long it took; `None`: there is no memory for it.
    fn time_step(&mut self, at: usize, tokens: usize, drafts: usize) -> Option<Duration> {
        let kept_states = self.drafting.as_ref().and_then(|drafting| drafting.first_state());
        let s = &mut self.sequences.list[at];
        let total = s.computed + tokens + drafts;
        // Nothing is evicted for it.
        if !self.cache.has_free(&s.held, total) {
            return None;
        }
        self.cache.grow(&mut s.held, total).ok()?;
        self.plan.clear();
        self.plan.scheduled.push(ScheduledSequence { sequence: at, tokens, drafts, kept_states, computed_drafts: 0 });
        self.tiers.prepare_blocks(&mut self.cache, &mut self.runner.blocks()).ok()?;
        let started = Instant::now();
        self.runner.step(&self.plan, &self.sequences.list, Wanted::Last);
        Some(started.elapsed())
    }
}
