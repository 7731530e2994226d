//! Who takes part in a step, with how many tokens.
//!
//! Sequences that decode go first, with a token each, so that a long prompt does not stall them; what is left of the step goes to prefill, first come, first
//! served. All draw blocks from one pool. Where it is spent, idle conversations are evicted, the least recently used first, and then the generation that was started last
//! is preempted: what it had computed stays in the prefix cache as long as there is room, and is computed again otherwise, to the same bits. The one that was started
//! first is never preempted, so that all come to their end.

use sluice_cache::KvCache;

use crate::chunk_budget::ChunkBudget;
use crate::prompt_cache::{self, Restore};
use crate::sequence::Sequence;
use crate::spill::Spill;

/// A sequence that takes part in a step, by its place among all, with its next so many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledSequence {
    pub sequence: usize,
    pub tokens: usize,
}

/// Plans steps.
pub struct Scheduler {
    /// Tokens and sequences of a step at most.
    pub most_tokens: usize,
    pub most_sequences: usize,
    pub pace: ChunkBudget,
    /// Kept between steps, so that nothing is allocated: running sequences, in the order in which they were started.
    queue: Vec<usize>,
}

/// What a step is to do.
#[derive(Default)]
pub struct Plan {
    pub takers: Vec<ScheduledSequence>,
    /// Sequences for which there is no memory although all others were preempted.
    pub stuck: Vec<usize>,
    /// Of the takers, so many generate: they come first.
    pub generating: usize,
    /// After the step, by taker: whether it has come to the end of its tokens and has logits.
    pub ends: Vec<bool>,
}

impl Plan {
    fn clear(&mut self) {
        self.takers.clear();
        self.generating = 0;
        self.stuck.clear();
        self.ends.clear();
    }
}

impl Scheduler {
    /// A prompt has `fewest` tokens in a step at least, however slow they are.
    pub fn new(most_tokens: usize, most_sequences: usize, fewest: usize) -> Scheduler {
        let pace = ChunkBudget::new(fewest);
        Scheduler { most_tokens, most_sequences, pace, queue: Vec::with_capacity(most_sequences) }
    }

    /// Fills `plan` with the next step, and finds room for it.
    pub fn plan(
        &mut self,
        sequences: &mut [Sequence],
        cache: &mut KvCache,
        mut spill: Option<&mut Spill>,
        plan: &mut Plan,
    ) {
        plan.clear();
        let mut queue = std::mem::take(&mut self.queue);
        queue.clear();
        let goes_on = |s: &Sequence| s.running.is_some() && s.due() > 0 && !s.restore.waits();
        queue.extend((0..sequences.len()).filter(|i| goes_on(&sequences[*i])));
        queue.sort_unstable_by_key(|i| sequences[*i].running.as_ref().map(|r| r.turn));
        let mut room = self.most_tokens;
        // 1. Those that generate
        for at in 0..queue.len() {
            let i = queue[at];
            if sequences[i].generates() && room > 0 && !self.is_full(plan) {
                room -= usize::from(take(sequences, cache, plan, &queue[at + 1..], i, 1));
            }
        }
        plan.generating = plan.takers.len();
        let waiting = queue.len() - queue.iter().filter(|i| sequences[**i].generates()).count();
        room = room.min(self.pace.room(plan.generating, waiting, self.most_tokens));
        // 2. Prompts, and sequences that were preempted. One that has not begun waits until all its tokens have room beside those that run, and so do those behind it
        for &i in &queue {
            let s = &sequences[i];
            let begun = !s.held.is_empty();
            if s.generates() || room == 0 || self.is_full(plan) {
                continue;
            }
            if !begun {
                let (total, most) = (s.tokens.len(), s.tokens.len() - 1);
                let fits = |sequences: &[Sequence], cache: &KvCache| {
                    cache.would_fit(sequences[i].root, &sequences[i].tokens, most, total)
                };
                while !fits(sequences, cache) && evict_idle(sequences, cache, i) {}
                if !fits(sequences, cache) && !plan.takers.is_empty() {
                    break;
                }
                let returns = |spill: &mut &mut Spill| spill.begin(&mut sequences[i], cache);
                if spill.as_mut().is_some_and(returns) || prompt_cache::begin(&mut sequences[i], cache) {
                    continue;
                }
                adopt(&mut sequences[i], cache);
            }
            let within = self.pace.within(room, plan.generating, sequences[i].computed);
            let tokens = next_tokens(&sequences[i], within);
            // Nobody is preempted for a prompt.
            if !take(sequences, cache, plan, &[], i, tokens) {
                break;
            }
            room -= tokens;
        }
        // 3. Somebody must go on: the first may preempt all others
        if plan.takers.is_empty()
            && let Some(at) = queue.iter().position(|i| !sequences[*i].restore.waits())
        {
            let (first, others) = (queue[at], &queue[at + 1..]);
            let tokens = next_tokens(&sequences[first], self.most_tokens);
            // Who waits for the disk holds memory that it gives back one day.
            if !take(sequences, cache, plan, others, first, tokens) && !waits(sequences) {
                plan.stuck.push(first);
            }
        }
        self.queue = queue;
    }

    /// Fills `plan` with the next tokens of one sequence, which may preempt all others. Whether there is room.
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
        let planned = take(sequences, cache, plan, &queue, i, tokens);
        self.queue = queue;
        planned
    }

    fn is_full(&self, plan: &Plan) -> bool {
        plan.takers.len() >= self.most_sequences
    }
}

fn waits(sequences: &[Sequence]) -> bool {
    sequences.iter().any(|s| s.running.is_some() && s.restore.waits())
}

/// Has a sequence take part, if there is room. Idle conversations are evicted for it, and then the last of `after` that takes no part yet is preempted.
fn take(
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
        let holds = |v: &&usize| !sequences[**v].held.is_empty() && !plan.takers.iter().any(|t| t.sequence == **v);
        let Some(&victim) = victims.find(holds) else { return false };
        retire(&mut sequences[victim], cache);
    }
    let s = &mut sequences[i];
    cache.grow(&mut s.held, total).expect("room was found");
    plan.takers.push(ScheduledSequence { sequence: i, tokens });
    true
}

/// A sequence that begins takes up what is there of its prompt; the last token is computed in any case, for its logits.
fn adopt(s: &mut Sequence, cache: &mut KvCache) {
    if !s.shares {
        return;
    }
    let found = cache.reuse_prefix(&mut s.held, s.root, &s.tokens, s.tokens.len() - 1);
    s.computed = found.tokens;
    (s.adopted, s.restored) = (found.tokens, 0);
    // Keys and values are known further than a state: the next to come this way finds one.
    if found.known > found.tokens
        && let Err(at) = s.marks.binary_search(&found.known)
    {
        s.marks.insert(at, found.known);
    }
}

/// How many of its next tokens a sequence computes in a step that has room for `room`: no more than up to its next mark.
fn next_tokens(s: &Sequence, room: usize) -> usize {
    let most = s.due().min(room);
    s.next_mark().map_or(most, |mark| most.min(mark - s.computed))
}

/// Evicts the idle conversation that was used least recently, but not `i`. Whether there was one.
fn evict_idle(sequences: &mut [Sequence], cache: &mut KvCache, i: usize) -> bool {
    let idle = |(j, s): &(usize, &Sequence)| *j != i && s.running.is_none() && !s.held.is_empty();
    let oldest = sequences.iter().enumerate().filter(idle).min_by_key(|(_, s)| s.last_used);
    let Some((victim, _)) = oldest else { return false };
    retire(&mut sequences[victim], cache);
    true
}

/// Takes all that a sequence holds and leaves what it computed in the prefix cache: it is adopted again when the sequence's turn comes, or computed again.
pub fn retire(s: &mut Sequence, cache: &mut KvCache) {
    if s.shares {
        cache.retire(&mut s.held, s.root, &s.tokens, s.computed);
    } else {
        cache.release(&mut s.held);
    }
    s.computed = 0;
    s.restore = Restore::No;
}

#[cfg(test)]
mod tests {
    use sluice_cache::Group;

    use super::*;
    use crate::sampler::SamplingParams;
    use crate::sequence::{Generation, Running, SequenceId};

    fn sequence(cache: &KvCache, turn: u64, tokens: usize) -> Sequence {
        let generation = Generation { sampling: SamplingParams::default(), max_tokens: 1000, ..Generation::default() };
        let running =
            Some(Running { generation, generated: 0, prompt_from: 0, history: None, guide: None, pooled: None, turn });
        let (id, held) = (SequenceId(turn), cache.new_sequence());
        let root = cache.root(b"");
        Sequence {
            id,
            tokens: vec![0; tokens],
            computed: 0,
            held,
            root,
            shares: true,
            marks: Vec::new(),
            adopted: 0,
            restored: 0,
            restore: Restore::No,
            logprobs: None,
            embedding: None,
            running,
            last_used: 0,
        }
    }

    fn cache(blocks: usize) -> KvCache {
        KvCache::new(&[Group { block_tokens: 4, window: None, blocks }], 0, None)
    }

    /// The step is taken, and each that has come to its end has one more token.
    fn done(sequences: &mut [Sequence], plan: &Plan) {
        for t in &plan.takers {
            let s = &mut sequences[t.sequence];
            s.computed += t.tokens;
            if s.due() == 0 {
                s.tokens.push(0);
                s.running.as_mut().unwrap().generated += 1;
            }
        }
    }

    fn takers(plan: &Plan) -> Vec<(usize, usize)> {
        plan.takers.iter().map(|t| (t.sequence, t.tokens)).collect()
    }

    #[test]
    fn a_prompt_has_what_those_who_generate_leave() {
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
            scheduler.plan(&mut all, &mut cache, None, &mut plan);
            assert_eq!(takers(&plan), wanted);
            done(&mut all, &plan);
        }
    }

    #[test]
    fn who_came_last_is_preempted_and_goes_on_later() {
        let mut cache = cache(4);
        let mut all = vec![sequence(&cache, 0, 7), sequence(&cache, 1, 7)];
        let (mut scheduler, mut plan) = (Scheduler::new(64, 4, 64), Plan::default());
        let mut alone = 0;
        for _ in 0..6 {
            scheduler.plan(&mut all, &mut cache, None, &mut plan);
            assert!(plan.takers.iter().any(|t| t.sequence == 0), "who came first goes on");
            alone += usize::from(plan.takers.len() == 1);
            done(&mut all, &plan);
        }
        assert!(alone > 0 && all[1].computed == 0 && all[1].held.is_empty());
        // The first has come to its end.
        all[0].running = None;
        scheduler.plan(&mut all, &mut cache, None, &mut plan);
        assert_eq!(takers(&plan), [(1, all[1].tokens.len())]);
        assert_eq!(all[0].computed, 0, "nobody generates for it");
    }

    #[test]
    fn who_goes_on_by_a_single_token_waits_behind_an_earlier_prompt() {
        let mut cache = cache(100);
        let mut all = vec![sequence(&cache, 0, 5), sequence(&cache, 1, 20)];
        let (mut scheduler, mut plan) = (Scheduler::new(8, 4, 8), Plan::default());
        scheduler.plan(&mut all, &mut cache, None, &mut plan);
        done(&mut all, &plan);
        // The first was cancelled after a token, and is started again behind the other.
        (all[0].running, all[0].last_used) = (sequence(&cache, 2, 0).running, 1);
        for wanted in [vec![(1, 8)], vec![(1, 8)], vec![(1, 1), (0, 1)]] {
            scheduler.plan(&mut all, &mut cache, None, &mut plan);
            assert_eq!(takers(&plan), wanted);
            done(&mut all, &plan);
        }
    }

    #[test]
    fn who_needs_more_than_there_is_is_told_so() {
        let mut cache = cache(2);
        let mut all = vec![sequence(&cache, 0, 7)];
        let (mut scheduler, mut plan) = (Scheduler::new(64, 4, 64), Plan::default());
        for _ in 0..2 {
            scheduler.plan(&mut all, &mut cache, None, &mut plan);
            assert_eq!(plan.takers.len(), 1);
            done(&mut all, &plan);
        }
        scheduler.plan(&mut all, &mut cache, None, &mut plan);
        assert_eq!((takers(&plan), &plan.stuck[..]), (vec![], &[0][..]));
    }
}
