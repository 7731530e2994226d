//! Plans steps: which sequences take part, and with how many tokens.
//!
//! Sequences that generate go first, with one token each, so that a long prompt does not stall them. The rest of the step goes to prompts, in the order in which they
//! were started. All sequences take blocks from one pool. When it is empty, idle conversations are evicted, the least recently used first. Then the generation
//! that was started last is preempted. What it had computed stays in the prefix cache while there is room, and is computed again otherwise, to the
//! same bits. The generation that was started first is never preempted, so all of them finish.

use sluice_cache::KvCache;

use super::chunk_budget::ChunkBudget;
use super::plan::{Plan, ScheduledSequence};
use super::sequence::Sequence;
use crate::tiers::Tiers;

/// Plans steps.
pub(crate) struct Scheduler {
    /// Tokens of a step at most.
    pub max_tokens: usize,
    /// Sequences of a step at most.
    pub max_sequences: usize,
    /// How many tokens of prompts fit beside sequences that generate.
    pub chunk_budget: ChunkBudget,
    /// Running sequences in the order in which they were started. Kept between steps, so that planning allocates nothing.
    queue: Vec<usize>,
}

impl Scheduler {
    /// A prompt gets at least `min_chunk` tokens in a step, however slow they are.
    pub fn new(max_tokens: usize, max_sequences: usize, min_chunk: usize) -> Scheduler {
        let chunk_budget = ChunkBudget::new(min_chunk);
        Scheduler { max_tokens, max_sequences, chunk_budget, queue: Vec::with_capacity(max_sequences) }
    }

    /// Fills `plan` with the next step, and reserves blocks for it.
    pub fn plan(&mut self, sequences: &mut [Sequence], cache: &mut KvCache, tiers: &mut Tiers, plan: &mut Plan) {
        plan.clear();
        let mut queue = std::mem::take(&mut self.queue);
        queue.clear();
        let is_ready = |s: &Sequence| s.running.is_some() && s.uncomputed() > 0 && !s.restore.is_pending();
        queue.extend((0..sequences.len()).filter(|i| is_ready(&sequences[*i])));
        queue.sort_unstable_by_key(|i| sequences[*i].running.as_ref().map(|r| r.turn));
        let mut room = self.max_tokens;
        // 1. Sequences that generate
        for at in 0..queue.len() {
            let i = queue[at];
            if sequences[i].generates() && room > 0 && !self.is_full(plan) {
                room -= usize::from(schedule(sequences, cache, plan, &queue[at + 1..], i, 1));
            }
        }
        plan.generating = plan.scheduled.len();
        let waiting = queue.len() - queue.iter().filter(|i| sequences[**i].generates()).count();
        room = room.min(self.chunk_budget.tokens(plan.generating, waiting, self.max_tokens));
        // 2. Prompts, and sequences that were preempted. One that has not started waits until there is room for all its tokens, and so do those behind it
        for &i in &queue {
            let s = &sequences[i];
            let has_started = !s.held.is_empty();
            if s.generates() || room == 0 || self.is_full(plan) {
                continue;
            }
            if !has_started {
                let (total, max) = (s.tokens.len(), s.tokens.len() - 1);
                let fits = |sequences: &[Sequence], cache: &KvCache| {
                    cache.would_fit(sequences[i].root, &sequences[i].tokens, max, total)
                };
                while !fits(sequences, cache) && evict_idle(sequences, cache, i) {}
                if !fits(sequences, cache) && !plan.scheduled.is_empty() {
                    break;
                }
                if tiers.begin_restore(&mut sequences[i], cache) {
                    continue;
                }
                reuse_prefix(&mut sequences[i], cache);
            }
            let max = self.chunk_budget.chunk_at(room, plan.generating, sequences[i].computed);
            let tokens = next_tokens(&sequences[i], max);
            // A prompt preempts nothing.
            if !schedule(sequences, cache, plan, &[], i, tokens) {
                break;
            }
            room -= tokens;
        }
        // 3. If nothing was scheduled, the first sequence may preempt all others
        if plan.scheduled.is_empty()
            && let Some(at) = queue.iter().position(|i| !sequences[*i].restore.is_pending())
        {
            let (first, others) = (queue[at], &queue[at + 1..]);
            let tokens = next_tokens(&sequences[first], self.max_tokens);
            // A sequence that is being restored will free its memory one day.
            if !schedule(sequences, cache, plan, others, first, tokens) && !any_pending(sequences) {
                plan.stuck.push(first);
            }
        }
        plan.waiting = queue.len() - plan.scheduled.len();
        self.queue = queue;
    }

    /// Fills `plan` with the next tokens of one sequence, which may preempt all others. Returns whether there is room.
    pub fn plan_one(
        &mut self,
        i: usize,
        tokens: usize,
        sequences: &mut [Sequence],
        cache: &mut KvCache,
        plan: &mut Plan,
    ) -> bool {
        plan.clear();
        let mut queue = std::mem::take(&mut self.queue);
        queue.clear();
        queue.extend((0..sequences.len()).filter(|j| *j != i && sequences[*j].running.is_some()));
        queue.sort_unstable_by_key(|j| sequences[*j].running.as_ref().map(|r| r.turn));
        let planned = schedule(sequences, cache, plan, &queue, i, tokens);
        self.queue = queue;
        planned
    }

    fn is_full(&self, plan: &Plan) -> bool {
        plan.scheduled.len() >= self.max_sequences
    }
}

fn any_pending(sequences: &[Sequence]) -> bool {
    sequences.iter().any(|s| s.running.is_some() && s.restore.is_pending())
}

/// Adds a sequence to the plan, if there is room. Idle conversations are evicted for it. Then sequences of `after` that are not scheduled are preempted, the last
/// one first.
pub(crate) fn schedule(
    sequences: &mut [Sequence],
    cache: &mut KvCache,
    plan: &mut Plan,
    after: &[usize],
    i: usize,
    tokens: usize,
) -> bool {
    let total = sequences[i].computed + tokens;
    while !cache.can_grow(&sequences[i].held, total) && evict_idle(sequences, cache, i) {}
    let mut victims = after.iter().rev();
    while !cache.can_grow(&sequences[i].held, total) {
        let holds = |v: &&usize| !sequences[**v].held.is_empty() && !plan.scheduled.iter().any(|t| t.sequence == **v);
        let Some(&victim) = victims.find(holds) else { return false };
        sequences[victim].retire(cache);
    }
    let s = &mut sequences[i];
    cache.grow(&mut s.held, total).expect("room was found");
    plan.scheduled.push(ScheduledSequence { sequence: i, tokens, drafts: 0, kept_states: None, computed_drafts: 0 });
    true
}

/// Reuses what the caches have of a prompt. The last token is computed in any case, for its logits.
pub(crate) fn reuse_prefix(s: &mut Sequence, cache: &mut KvCache) {
    if !s.shares {
        return;
    }
    let found = cache.reuse_prefix(&mut s.held, s.root, &s.tokens, s.tokens.len() - 1);
    s.computed = found.tokens;
    (s.reused, s.restored) = (found.tokens, 0);
    // Keys and values reach further than states. Leave a snapshot where they end, for the next prompt that continues there.
    if found.known > found.tokens
        && let Err(at) = s.snapshot_points.binary_search(&found.known)
    {
        s.snapshot_points.insert(at, found.known);
    }
}

/// How many of its next tokens a sequence computes: at most `max`, and not beyond its next snapshot point.
fn next_tokens(s: &Sequence, max: usize) -> usize {
    let tokens = s.uncomputed().min(max);
    s.next_snapshot_point().map_or(tokens, |point| tokens.min(point - s.computed))
}

/// Evicts the idle conversation that was used least recently, other than `i`. Returns whether there was one.
fn evict_idle(sequences: &mut [Sequence], cache: &mut KvCache, i: usize) -> bool {
    let idle = |(j, s): &(usize, &Sequence)| *j != i && s.running.is_none() && !s.held.is_empty();
    let oldest = sequences.iter().enumerate().filter(idle).min_by_key(|(_, s)| s.last_used);
    let Some((victim, _)) = oldest else { return false };
    sequences[victim].retire(cache);
    true
}

#[cfg(test)]
mod tests {
    use sluice_cache::Group;

    use super::*;
    use crate::sampling::SamplingParams;
    use crate::schedule::sequence::{Generation, Running, SequenceId};

    fn sequence(cache: &KvCache, turn: u64, tokens: usize) -> Sequence {
        let generation = Generation { sampling: SamplingParams::default(), max_tokens: 1000, ..Generation::default() };
        let running =
            Some(Running { generation, generated: 0, prompt_from: 0, history: None, guide: None, pooled: None, turn });
        let (id, held) = (SequenceId(turn), cache.new_sequence());
        let root = cache.root(b"");
        Sequence { tokens: vec![0; tokens], shares: true, running, ..Sequence::new(id, root, held) }
    }

    fn cache(blocks: usize) -> KvCache {
        KvCache::new(&[Group { block_tokens: 4, window: None, blocks }], 0, None)
    }

    /// Marks the step as computed, and adds a token to each sequence that reached its end.
    fn finish_step(sequences: &mut [Sequence], plan: &Plan) {
        for t in &plan.scheduled {
            let s = &mut sequences[t.sequence];
            s.computed += t.tokens;
            if s.uncomputed() == 0 {
                s.tokens.push(0);
                s.running.as_mut().unwrap().generated += 1;
            }
        }
    }

    fn scheduled(plan: &Plan) -> Vec<(usize, usize)> {
        plan.scheduled.iter().map(|t| (t.sequence, t.tokens)).collect()
    }

    #[test]
    fn prompts_get_what_generating_sequences_leave() {
        let mut cache = cache(100);
        let mut all = vec![sequence(&cache, 0, 5), sequence(&cache, 1, 20)];
        let (mut scheduler, mut plan) = (Scheduler::new(8, 4, 8), Plan::default());
        for wanted in [
            vec![(0, 5), (1, 3)],
            vec![(0, 1), (1, 7)],
            vec![(0, 1), (1, 7)],
            vec![(0, 1), (1, 3)],
            vec![(0, 1), (1, 1)],
        ] {
            scheduler.plan(&mut all, &mut cache, &mut Tiers::default(), &mut plan);
            assert_eq!(scheduled(&plan), wanted);
            finish_step(&mut all, &plan);
        }
    }

    #[test]
    fn the_last_started_is_preempted_and_continues_later() {
        let mut cache = cache(4);
        let mut all = vec![sequence(&cache, 0, 7), sequence(&cache, 1, 7)];
        let (mut scheduler, mut plan) = (Scheduler::new(64, 4, 64), Plan::default());
        let mut alone = 0;
        for _ in 0..6 {
            scheduler.plan(&mut all, &mut cache, &mut Tiers::default(), &mut plan);
            assert!(plan.scheduled.iter().any(|t| t.sequence == 0), "the first one continues");
            alone += usize::from(plan.scheduled.len() == 1);
            finish_step(&mut all, &plan);
        }
        assert!(alone > 0 && all[1].computed == 0 && all[1].held.is_empty());
        // The first one finishes.
        all[0].running = None;
        scheduler.plan(&mut all, &mut cache, &mut Tiers::default(), &mut plan);
        assert_eq!(scheduled(&plan), [(1, all[1].tokens.len())]);
        assert_eq!(all[0].computed, 0, "it is not running");
    }

    #[test]
    fn a_one_token_prompt_waits_behind_an_earlier_prompt() {
        let mut cache = cache(100);
        let mut all = vec![sequence(&cache, 0, 5), sequence(&cache, 1, 20)];
        let (mut scheduler, mut plan) = (Scheduler::new(8, 4, 8), Plan::default());
        scheduler.plan(&mut all, &mut cache, &mut Tiers::default(), &mut plan);
        finish_step(&mut all, &plan);
        // The first one was cancelled after a token, and is started again after the other.
        (all[0].running, all[0].last_used) = (sequence(&cache, 2, 0).running, 1);
        for wanted in [vec![(1, 8)], vec![(1, 8)], vec![(1, 1), (0, 1)]] {
            scheduler.plan(&mut all, &mut cache, &mut Tiers::default(), &mut plan);
            assert_eq!(scheduled(&plan), wanted);
            finish_step(&mut all, &plan);
        }
    }

    #[test]
    fn a_sequence_without_room_is_stuck() {
        let mut cache = cache(2);
        let mut all = vec![sequence(&cache, 0, 7)];
        let (mut scheduler, mut plan) = (Scheduler::new(64, 4, 64), Plan::default());
        for _ in 0..2 {
            scheduler.plan(&mut all, &mut cache, &mut Tiers::default(), &mut plan);
            assert_eq!(plan.scheduled.len(), 1);
            finish_step(&mut all, &plan);
        }
        scheduler.plan(&mut all, &mut cache, &mut Tiers::default(), &mut plan);
        assert_eq!((scheduled(&plan), &plan.stuck[..]), (vec![], &[0][..]));
    }
}
