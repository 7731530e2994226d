//! How long steps take, learned as they go by: so that a prompt takes no more of a step than those who generate beside it can spare.

use std::time::Duration;

/// A step with a prompt in it takes so many times as long as one without, at most: then a gap between two tokens stays below three of the usual ones, and a
/// prompt takes half as long again or so as by itself.
const STRETCH: f64 = 2.5;
/// How much the newest step says.
const NEWEST: f64 = 0.25;
/// Tokens of the first prompt beside others, before anything is known.
const FIRST: usize = 64;

/// Seconds, as far as they are known.
#[derive(Debug)]
pub struct Pace {
    /// Of a step in which sequences only generate.
    generating: Option<f64>,
    /// That each token of a prompt adds.
    per_token: Option<f64>,
    /// A prompt has so many tokens in a step at least.
    fewest: usize,
}

impl Pace {
    pub fn new(fewest: usize) -> Pace {
        Pace { generating: None, per_token: None, fewest }
    }

    /// Tokens that prompts may have in a step with so many sequences that generate, of at most `most`.
    pub fn room(&self, generating: usize, most: usize) -> usize {
        if generating == 0 {
            return most;
        }
        let room = match (self.generating, self.per_token) {
            (Some(step), Some(token)) if token > 0.0 => ((STRETCH - 1.0) * step / token) as usize,
            _ => FIRST,
        };
        room.clamp(self.fewest.min(most), most)
    }

    /// A step of so many sequences that generate and tokens of prompts has taken so long.
    pub fn learn(&mut self, generating: usize, prompt_tokens: usize, time: Duration) {
        let time = time.as_secs_f64();
        let mix =
            |known: &mut Option<f64>, new: f64| *known = Some(known.map_or(new, |old| old + NEWEST * (new - old)));
        match (generating, prompt_tokens) {
            (0, 0) => {}
            (_, 0) => mix(&mut self.generating, time),
            (0, tokens) => mix(&mut self.per_token, time / tokens as f64),
            (_, tokens) => {
                let beside = self.generating.unwrap_or(0.0).min(time);
                mix(&mut self.per_token, (time - beside) / tokens as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_what_two_and_a_half_steps_leave() {
        let mut pace = Pace::new(8);
        assert_eq!((pace.room(0, 512), pace.room(3, 512)), (512, FIRST));
        let ms = Duration::from_millis;
        for _ in 0..50 {
            pace.learn(0, 500, ms(1000));
            pace.learn(3, 0, ms(40));
            // 15 ms of it are the prompt's: three a token.
            pace.learn(3, 5, ms(55));
        }
        let room = pace.room(3, 512);
        assert!((20..30).contains(&room), "{room}");
        // However slow a prompt's tokens are, some go on.
        (0..50).for_each(|_| pace.learn(3, 1, ms(5000)));
        assert_eq!((pace.room(3, 512), pace.room(3, 4), pace.room(0, 512)), (8, 4, 512));
    }
}
