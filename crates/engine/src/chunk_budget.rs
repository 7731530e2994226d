//! How long steps take, learned as they go by: so that a prompt takes no more of a step than those who generate beside it can spare.

use std::time::Duration;

/// A step with a prompt in it may take so many times as long as one without: then a gap between two tokens stays below three of the usual ones, and a prompt
/// takes 1.6 times as long as by itself.
const STRETCH: f64 = 2.7;
/// Where several wait, small pieces make poor use of a machine that many wait for: a piece has as many tokens as it takes to be as cheap a token as any, but a
/// step takes no longer than this for it, in seconds.
const LONGEST: f64 = 0.25;
/// Tokens of a piece from which on more at once are no cheaper each.
const CHEAP: usize = 128;
/// How much the newest step says.
const NEWEST: f64 = 0.25;
/// How much it says of those that only generate where it took longer than usual: a few that something else held up must not stretch all steps of the prompt that
/// comes next, during which none is seen by itself.
const HELD_UP: f64 = 0.05;
/// Tokens of the first prompt beside others, before anything is known.
const FIRST: usize = 64;
/// A token takes the longer the more stand before it, but up to so many that is little beside its weights.
const NEAR: usize = 1024;
/// Steps are told apart by how many sequences generate, up to so many.
const MOST: usize = 64;

/// Seconds, as far as they are known.
#[derive(Debug)]
pub struct ChunkBudget {
    /// Of a step in which so many sequences only generate.
    generating: [Option<f64>; MOST + 1],
    /// That each token of a prompt adds, at the position where prompts were last.
    per_token: Option<f64>,
    position: usize,
    /// A prompt has so many tokens in a step at least.
    fewest: usize,
}

impl ChunkBudget {
    pub fn new(fewest: usize) -> ChunkBudget {
        ChunkBudget { generating: [None; MOST + 1], per_token: None, position: 0, fewest }
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
                let cheap = if waiting > 1 { (LONGEST - step).min(CHEAP as f64 * token) } else { 0.0 };
                (((STRETCH - 1.0) * step).max(cheap) / token) as usize
            }
            _ => FIRST,
        };
        room.clamp(self.fewest.min(most), most)
    }

    /// Of that room, what a prompt may take that goes on at `position`. Further behind than any was lately, as after a long prefix that was there, its tokens
    /// may be dearer than they were, but by no more than they see more.
    pub fn within(&self, room: usize, generating: usize, position: usize) -> usize {
        let fewer = room as f64 / self.dearer(position);
        if generating == 0 { room } else { (fewer as usize).max(self.fewest.min(room)) }
    }

    /// How many times as long a token at `position` may take as one where prompts were last.
    fn dearer(&self, position: usize) -> f64 {
        (position.max(NEAR) as f64 / self.position.max(NEAR) as f64).max(1.0)
    }

    /// A step of so many sequences that generate and tokens of prompts, the last of them at `position`, has taken so long.
    pub fn learn(&mut self, generating: usize, prompt_tokens: usize, position: usize, time: Duration) {
        if prompt_tokens > 0 {
            let dearer = self.dearer(position.saturating_sub(prompt_tokens));
            self.per_token = self.per_token.map(|known| known * dearer);
            self.position = position;
        }
        let time = time.as_secs_f64();
        let mix =
            |known: &mut Option<f64>, new: f64| *known = Some(known.map_or(new, |old| old + NEWEST * (new - old)));
        let at = generating.min(MOST);
        match (generating, prompt_tokens) {
            (0, 0) => {}
            (_, 0) => {
                let usual = self.generating[at].get_or_insert(time);
                let newest = if time > *usual { HELD_UP } else { NEWEST };
                *usual += newest * (time - *usual);
            }
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
        let mut pace = ChunkBudget::new(8);
        assert_eq!((pace.room(0, 1, 512), pace.room(3, 1, 512)), (512, FIRST));
        for _ in 0..50 {
            pace.learn(0, 500, 500, MS(1000));
            pace.learn(3, 0, 0, MS(40));
            // 10 ms of it are the prompt's: two a token.
            pace.learn(3, 5, 500, MS(50));
        }
        // 68 ms at two a token.
        let room = pace.room(3, 1, 512);
        assert!((32..36).contains(&room), "{room}");
        // However slow a prompt's tokens are, some go on.
        (0..50).for_each(|_| pace.learn(3, 1, 500, MS(5000)));
        assert_eq!((pace.room(3, 1, 512), pace.room(3, 1, 4), pace.room(0, 1, 512)), (8, 4, 512));
    }

    #[test]
    fn where_several_wait_pieces_are_large_enough_to_be_cheap() {
        let mut pace = ChunkBudget::new(8);
        for _ in 0..50 {
            pace.learn(0, 500, 500, MS(1500));
            pace.learn(1, 0, 0, MS(30));
            pace.learn(4, 0, 0, MS(40));
        }
        // Three milliseconds a token: up to a quarter of a second, however many wait.
        assert_eq!((pace.room(1, 5, 512), pace.room(4, 2, 512), pace.room(4, 70, 512)), (73, 70, 70));
        // One that waits has what a step may be stretched to.
        assert_eq!((pace.room(1, 1, 512), pace.room(4, 1, 512)), (17, 22));
        // On a faster machine they are no larger than that.
        (0..50).for_each(|_| pace.learn(0, 500, 500, MS(250)));
        assert_eq!((pace.room(1, 5, 512), pace.room(4, 1, 512)), (128, 135));
    }

    #[test]
    fn a_number_of_sequences_that_was_not_seen_yet_is_like_the_nearest() {
        let mut pace = ChunkBudget::new(1);
        (0..50).for_each(|_| pace.learn(0, 500, 500, MS(500)));
        (0..50).for_each(|_| pace.learn(2, 0, 0, MS(20)));
        (0..50).for_each(|_| pace.learn(8, 0, 0, MS(80)));
        assert_eq!((pace.room(3, 1, 512), pace.room(7, 1, 512), pace.room(200, 1, 512)), (34, 136, 136));
        // A step that is shorter than the guess has not been theirs alone.
        (0..50).for_each(|_| pace.learn(7, 10, 500, MS(45)));
        assert!(pace.room(7, 1, 512) < 80, "{}", pace.room(7, 1, 512));
    }

    #[test]
    fn steps_that_were_held_up_hardly_stretch_those_of_the_next_prompt() {
        let mut pace = ChunkBudget::new(8);
        (0..50).for_each(|_| pace.learn(0, 500, 500, MS(500)));
        (0..50).for_each(|_| pace.learn(7, 0, 0, MS(40)));
        let before = pace.room(7, 1, 512);
        (0..3).for_each(|_| pace.learn(7, 0, 0, MS(80)));
        assert!(pace.room(7, 1, 512) < before * 6 / 5, "{} after {before}", pace.room(7, 1, 512));
    }

    /// Seconds of a step on a machine where a token of a prompt takes twice as long behind 1,700 others: one with seven that generate, on two cores.
    fn seconds(generating: usize, tokens: usize, position: usize) -> f64 {
        let before = position as f64 + tokens as f64 / 2.0;
        (if generating > 0 { 0.0345 } else { 0.0 }) + tokens as f64 * (0.0024 + 1.4e-6 * before)
    }

    /// Takes a prompt from one position to another: its seconds, and those of its longest step.
    fn prompt(pace: &mut ChunkBudget, generating: usize, from: usize, to: usize) -> (f64, f64) {
        let (mut at, mut all, mut longest) = (from, 0.0, 0.0_f64);
        while at < to {
            let room = pace.room(generating, 1, 512);
            let tokens = pace.within(room, generating, at).min(to - at);
            let took = seconds(generating, tokens, at);
            at += tokens;
            pace.learn(generating, tokens, at, Duration::from_secs_f64(took));
            (all, longest) = (all + took, longest.max(took));
        }
        (all, longest)
    }

    #[test]
    fn a_long_prompt_among_streams_keeps_their_gaps_near_three_usual_ones_to_its_end() {
        let mut pace = ChunkBudget::new(8);
        let (alone, _) = prompt(&mut pace, 0, 0, 4000);
        let usual = seconds(7, 0, 0);
        (0..32).for_each(|_| pace.learn(7, 0, 0, Duration::from_secs_f64(usual)));
        let (among, longest) = prompt(&mut pace, 7, 0, 4000);
        assert!(longest < 3.0 * usual, "{} times the usual", longest / usual);
        assert!(among < 1.7 * alone, "{} times as long", among / alone);
    }

    #[test]
    fn a_prompt_that_goes_on_behind_a_long_prefix_begins_with_fewer_tokens() {
        let mut pace = ChunkBudget::new(8);
        let usual = seconds(7, 0, 0);
        (0..32).for_each(|_| pace.learn(7, 0, 0, Duration::from_secs_f64(usual)));
        prompt(&mut pace, 7, 0, 600);
        let (_, longest) = prompt(&mut pace, 7, 3_400, 3_800);
        assert!(longest < 3.0 * usual, "{} times the usual", longest / usual);
        // By itself it has what there is.
        assert_eq!(pace.within(512, 0, 30_000), 512);
    }
}
