//! How long steps take, learned as they go by: so that a prompt takes no more of a step than those who generate beside it can spare.

use std::time::Duration;

/// However many wait, a step with a prompt in it may take so many times as long as one without: then a gap between two tokens stays below three of the usual ones,
/// and a prompt takes 1.6 times as long as by itself.
const STRETCH: f64 = 2.7;
/// Where more wait than generate, time is shared by their numbers: a few who generate by themselves make poor use of a machine that many wait for. But a step
/// takes no longer than this for it, in seconds.
const LONGEST: f64 = 0.25;
/// How much the newest step says.
const NEWEST: f64 = 0.25;
/// Tokens of the first prompt beside others, before anything is known.
const FIRST: usize = 64;
/// Steps are told apart by how many sequences generate, up to so many.
const MOST: usize = 64;

/// Seconds, as far as they are known.
#[derive(Debug)]
pub struct Pace {
    /// Of a step in which so many sequences only generate.
    generating: [Option<f64>; MOST + 1],
    /// That each token of a prompt adds.
    per_token: Option<f64>,
    /// A prompt has so many tokens in a step at least.
    fewest: usize,
}

impl Pace {
    pub fn new(fewest: usize) -> Pace {
        Pace { generating: [None; MOST + 1], per_token: None, fewest }
    }

    /// A step of so many sequences that generate, as far as the most similar ones tell.
    fn generating(&self, sequences: usize) -> Option<f64> {
        let at = sequences.min(MOST);
        let near = |distance: usize| {
            let lower = at.checked_sub(distance).and_then(|i| self.generating[i]);
            lower.or_else(|| self.generating.get(at + distance).copied().flatten())
        };
        (0..=MOST).find_map(near)
    }

    /// Tokens that prompts may have in a step with so many sequences that generate while so many wait for theirs, of at most `most`.
    pub fn room(&self, generating: usize, waiting: usize, most: usize) -> usize {
        if generating == 0 {
            return most;
        }
        let room = match (self.generating(generating), self.per_token) {
            (Some(step), Some(token)) if token > 0.0 => {
                let shared = step * (1.0 + waiting as f64 / generating as f64);
                let whole = (STRETCH * step).max(shared.min(LONGEST));
                ((whole - step) / token) as usize
            }
            _ => FIRST,
        };
        room.clamp(self.fewest.min(most), most)
    }

    /// A step of so many sequences that generate and tokens of prompts has taken so long.
    pub fn learn(&mut self, generating: usize, prompt_tokens: usize, time: Duration) {
        let time = time.as_secs_f64();
        let mix =
            |known: &mut Option<f64>, new: f64| *known = Some(known.map_or(new, |old| old + NEWEST * (new - old)));
        let at = generating.min(MOST);
        match (generating, prompt_tokens) {
            (0, 0) => {}
            (_, 0) => mix(&mut self.generating[at], time),
            (0, tokens) => mix(&mut self.per_token, time / tokens as f64),
            (_, tokens) => {
                // Of sequences that were never seen without a prompt it is a guess: no more than half of the step is theirs then.
                let beside = match self.generating[at] {
                    Some(known) => known.min(time),
                    None => self.generating(generating).unwrap_or(0.0).min(time / 2.0),
                };
                mix(&mut self.per_token, (time - beside) / tokens as f64);
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
        let mut pace = Pace::new(8);
        assert_eq!((pace.room(0, 1, 512), pace.room(3, 1, 512)), (512, FIRST));
        for _ in 0..50 {
            pace.learn(0, 500, MS(1000));
            pace.learn(3, 0, MS(40));
            // 10 ms of it are the prompt's: two a token.
            pace.learn(3, 5, MS(50));
        }
        // 68 ms at two a token.
        let room = pace.room(3, 1, 512);
        assert!((32..36).contains(&room), "{room}");
        // However slow a prompt's tokens are, some go on.
        (0..50).for_each(|_| pace.learn(3, 1, MS(5000)));
        assert_eq!((pace.room(3, 1, 512), pace.room(3, 1, 4), pace.room(0, 1, 512)), (8, 4, 512));
    }

    #[test]
    fn where_more_wait_than_generate_they_have_more_of_a_step() {
        let mut pace = Pace::new(8);
        for _ in 0..50 {
            pace.learn(0, 500, MS(500));
            pace.learn(1, 0, MS(30));
            pace.learn(4, 0, MS(40));
        }
        // As many again as there are waiting, but no step of more than a quarter of a second.
        assert_eq!((pace.room(1, 5, 512), pace.room(1, 70, 512)), (150, 220));
        // One waits for four: what a step may be stretched to is more than its share.
        assert_eq!(pace.room(4, 1, 512), 68);
    }

    #[test]
    fn a_number_of_sequences_that_was_not_seen_yet_is_like_the_nearest() {
        let mut pace = Pace::new(1);
        (0..50).for_each(|_| pace.learn(0, 500, MS(500)));
        (0..50).for_each(|_| pace.learn(2, 0, MS(20)));
        (0..50).for_each(|_| pace.learn(8, 0, MS(80)));
        assert_eq!((pace.room(3, 1, 512), pace.room(7, 1, 512), pace.room(200, 1, 512)), (34, 136, 136));
        // A step that is shorter than the guess has not been theirs alone.
        (0..50).for_each(|_| pace.learn(7, 10, MS(45)));
        assert!(pace.room(7, 1, 512) < 80, "{}", pace.room(7, 1, 512));
    }
}
