//! Learns how long steps take, so that a prompt takes no more of a step than the sequences that generate beside it can spare.

use std::time::Duration;

/// A step with prompt tokens may take this many times as long as one without. Gaps between tokens then stay below three usual ones, and a prompt takes 1.6
/// times as long as alone.
const MAX_STRETCH: f64 = 2.7;
/// When several prompts wait, small chunks make poor use of a machine that many wait for. Chunks then have `EFFICIENT_TOKENS`, but a step takes no longer than
/// this for it, in seconds.
const MAX_SECONDS: f64 = 0.25;
/// Larger chunks make a token no cheaper.
const EFFICIENT_TOKENS: usize = 128;
/// Weight of the newest step in the moving averages.
const NEWEST: f64 = 0.25;
/// Weight of a step without prompts that took longer than usual. It is small, because the average stays as it is during the next prompt: a few delayed steps
/// must not stretch all steps of that prompt.
const NEWEST_DELAYED: f64 = 0.05;
/// Prompt tokens beside other sequences before anything is measured.
const FIRST_CHUNK: usize = 64;
/// A token takes longer the more tokens precede it. Up to this many, that is little beside the weights.
const NEAR: usize = 1024;
/// Step times are kept for each number of generating sequences up to this.
const MAX_TRACKED: usize = 64;

/// Measured seconds; `None` before the first measurement.
#[derive(Debug)]
pub(crate) struct ChunkBudget {
    /// Seconds of steps without prompts, by the number of sequences that generate.
    generating: [Option<f64>; MAX_TRACKED + 1],
    /// What each prompt token adds, at `position`.
    per_token: Option<f64>,
    /// Where prompts were last.
    position: usize,
    /// Tokens of a prompt in a step, at least.
    min_chunk: usize,
}

impl ChunkBudget {
    /// `min_chunk`: tokens of a prompt in a step, at least.
    pub fn new(min_chunk: usize) -> ChunkBudget {
        ChunkBudget { generating: [None; MAX_TRACKED + 1], per_token: None, position: 0, min_chunk }
    }

    /// Seconds of a step with this many sequences that generate, or with the nearest number that was measured.
    fn generating(&self, sequences: usize) -> Option<f64> {
        let at = sequences.min(MAX_TRACKED);
        let near = |distance: usize| {
            let lower = at.checked_sub(distance).and_then(|i| self.generating[i]);
            lower.or_else(|| self.generating.get(at + distance).copied().flatten())
        };
        (0..=MAX_TRACKED).find_map(near)
    }

    /// Tokens that prompts may have in a step with `generating` other sequences, while `waiting` prompts wait: `max` at most.
    pub fn tokens(&self, generating: usize, waiting: usize, max: usize) -> usize {
        if generating == 0 {
            return max;
        }
        let tokens = match (self.generating(generating), self.per_token) {
            (Some(step), Some(token)) if token > 0.0 => {
                let efficient =
                    if waiting > 1 { (MAX_SECONDS - step).min(EFFICIENT_TOKENS as f64 * token) } else { 0.0 };
                (((MAX_STRETCH - 1.0) * step).max(efficient) / token) as usize
            }
            _ => FIRST_CHUNK,
        };
        tokens.clamp(self.min_chunk.min(max), max)
    }

    /// How many of these tokens a prompt gets that continues at `position`. If that is further than prompts were lately, as after a long reused prefix, its tokens
    /// may cost more than measured: at most in proportion to the tokens before them.
    pub fn chunk_at(&self, tokens: usize, generating: usize, position: usize) -> usize {
        let fewer = tokens as f64 / self.cost_ratio(position);
        if generating == 0 { tokens } else { (fewer as usize).max(self.min_chunk.min(tokens)) }
    }

    /// How many times as long a token at `position` may take as one at the measured position.
    fn cost_ratio(&self, position: usize) -> f64 {
        (position.max(NEAR) as f64 / self.position.max(NEAR) as f64).max(1.0)
    }

    /// Notes the time of a step with `generating` sequences that generate and `prompt_tokens` tokens of prompts, which end at `position` at most.
    pub fn learn(&mut self, generating: usize, prompt_tokens: usize, position: usize, time: Duration) {
        if prompt_tokens > 0 {
            let ratio = self.cost_ratio(position.saturating_sub(prompt_tokens));
            self.per_token = self.per_token.map(|known| known * ratio);
            self.position = position;
        }
        let time = time.as_secs_f64();
        let mix =
            |known: &mut Option<f64>, new: f64| *known = Some(known.map_or(new, |old| old + NEWEST * (new - old)));
        let at = generating.min(MAX_TRACKED);
        match (generating, prompt_tokens) {
            (0, 0) => {}
            (_, 0) => {
                let usual = self.generating[at].get_or_insert(time);
                let newest = if time > *usual { NEWEST_DELAYED } else { NEWEST };
                *usual += newest * (time - *usual);
            }
            (0, tokens) => mix(&mut self.per_token, time / tokens as f64),
            (_, tokens) => {
                // If this number was never measured, the estimate is a guess: it gets no more than half of the step.
                let others = match self.generating[at] {
                    Some(known) => known.min(time),
                    None => self.generating(generating).unwrap_or(0.0).min(time / 2.0),
                };
                mix(&mut self.per_token, (time - others) / tokens as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_prompt_has_what_the_stretch_of_a_step_leaves() {
        let mut budget = ChunkBudget::new(8);
        assert_eq!((budget.tokens(0, 1, 512), budget.tokens(3, 1, 512)), (512, FIRST_CHUNK));
        for _ in 0..50 {
            budget.learn(0, 500, 500, MS(1000));
            budget.learn(3, 0, 0, MS(40));
            // 10 ms of it are the prompt's: two a token.
            budget.learn(3, 5, 500, MS(50));
        }
        // 68 ms at two a token.
        let room = budget.tokens(3, 1, 512);
        assert!((32..36).contains(&room), "{room}");
        // However slow a prompt's tokens are, some go on.
        (0..50).for_each(|_| budget.learn(3, 1, 500, MS(5000)));
        assert_eq!((budget.tokens(3, 1, 512), budget.tokens(3, 1, 4), budget.tokens(0, 1, 512)), (8, 4, 512));
    }

    #[test]
    fn where_several_wait_pieces_are_large_enough_to_be_cheap() {
        let mut budget = ChunkBudget::new(8);
        for _ in 0..50 {
            budget.learn(0, 500, 500, MS(1500));
            budget.learn(1, 0, 0, MS(30));
            budget.learn(4, 0, 0, MS(40));
        }
        // Three milliseconds a token: up to a quarter of a second, however many wait.
        assert_eq!((budget.tokens(1, 5, 512), budget.tokens(4, 2, 512), budget.tokens(4, 70, 512)), (73, 70, 70));
        // A prompt that waits gets the tokens that a step may be stretched to.
        assert_eq!((budget.tokens(1, 1, 512), budget.tokens(4, 1, 512)), (17, 22));
        // On a faster machine they are no larger than that.
        (0..50).for_each(|_| budget.learn(0, 500, 500, MS(250)));
        assert_eq!((budget.tokens(1, 5, 512), budget.tokens(4, 1, 512)), (128, 135));
    }

    #[test]
    fn a_number_of_sequences_that_was_not_seen_yet_is_like_the_nearest() {
        let mut budget = ChunkBudget::new(1);
        (0..50).for_each(|_| budget.learn(0, 500, 500, MS(500)));
        (0..50).for_each(|_| budget.learn(2, 0, 0, MS(20)));
        (0..50).for_each(|_| budget.learn(8, 0, 0, MS(80)));
        assert_eq!((budget.tokens(3, 1, 512), budget.tokens(7, 1, 512), budget.tokens(200, 1, 512)), (34, 136, 136));
        // A step that is shorter than the guess has not been theirs alone.
        (0..50).for_each(|_| budget.learn(7, 10, 500, MS(45)));
        assert!(budget.tokens(7, 1, 512) < 80, "{}", budget.tokens(7, 1, 512));
    }

    #[test]
    fn steps_that_were_held_up_hardly_stretch_those_of_the_next_prompt() {
        let mut budget = ChunkBudget::new(8);
        (0..50).for_each(|_| budget.learn(0, 500, 500, MS(500)));
        (0..50).for_each(|_| budget.learn(7, 0, 0, MS(40)));
        let before = budget.tokens(7, 1, 512);
        (0..3).for_each(|_| budget.learn(7, 0, 0, MS(80)));
        assert!(budget.tokens(7, 1, 512) < before * 6 / 5, "{} after {before}", budget.tokens(7, 1, 512));
    }

    /// Seconds of a step on a machine where a token of a prompt takes twice as long behind 1,700 others: one with seven that generate, on two cores.
    fn seconds(generating: usize, tokens: usize, position: usize) -> f64 {
        let before = position as f64 + tokens as f64 / 2.0;
        (if generating > 0 { 0.0345 } else { 0.0 }) + tokens as f64 * (0.0024 + 1.4e-6 * before)
    }

    /// Takes a prompt from one position to another: its seconds, and those of its longest step.
    fn prompt(budget: &mut ChunkBudget, generating: usize, from: usize, to: usize) -> (f64, f64) {
        let (mut at, mut all, mut longest) = (from, 0.0, 0.0_f64);
        while at < to {
            let room = budget.tokens(generating, 1, 512);
            let tokens = budget.chunk_at(room, generating, at).min(to - at);
            let took = seconds(generating, tokens, at);
            at += tokens;
            budget.learn(generating, tokens, at, Duration::from_secs_f64(took));
            (all, longest) = (all + took, longest.max(took));
        }
        (all, longest)
    }

    #[test]
    fn a_long_prompt_among_streams_keeps_their_gaps_near_three_usual_ones_to_its_end() {
        let mut budget = ChunkBudget::new(8);
        let (alone, _) = prompt(&mut budget, 0, 0, 4000);
        let usual = seconds(7, 0, 0);
        (0..32).for_each(|_| budget.learn(7, 0, 0, Duration::from_secs_f64(usual)));
        let (among, longest) = prompt(&mut budget, 7, 0, 4000);
        assert!(longest < 3.0 * usual, "{} times the usual", longest / usual);
        assert!(among < 1.7 * alone, "{} times as long", among / alone);
    }

    #[test]
    fn a_prompt_that_goes_on_behind_a_long_prefix_begins_with_fewer_tokens() {
        let mut budget = ChunkBudget::new(8);
        let usual = seconds(7, 0, 0);
        (0..32).for_each(|_| budget.learn(7, 0, 0, Duration::from_secs_f64(usual)));
        prompt(&mut budget, 7, 0, 600);
        let (_, longest) = prompt(&mut budget, 7, 3_400, 3_800);
        assert!(longest < 3.0 * usual, "{} times the usual", longest / usual);
        // By itself it has what there is.
        assert_eq!(budget.chunk_at(512, 0, 30_000), 512);
    }
}
