//! Learns how long a drafter takes to compute its proposals.

use std::time::Duration;

/// Each number of sequences up to this one has a time of its own.
const MAX_SEQUENCES: usize = 32;
/// Weight of a new measurement once there are many.
const NEWEST: f64 = 0.1;
/// A measurement counts as at most so many times the mean, since other programs may have held it up.
const HELD_UP: f64 = 3.0;

/// A measured mean of seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    seconds: f64,
    times: u32,
}

impl Mean {
    fn learn(&mut self, seconds: f64) {
        self.times = self.times.saturating_add(1);
        // The first steps may have waited for weights, so the shortest time counts.
        self.seconds = match self.times {
            1 => seconds,
            2..=4 => self.seconds.min(seconds),
            _ => self.seconds + NEWEST * (seconds.min(HELD_UP * self.seconds) - self.seconds),
        };
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct DraftCosts {
    /// A round, which gives one token for each sequence, by the number of sequences.
    round: [Mean; MAX_SEQUENCES + 1],
    /// One token of catching up.
    token: Mean,
}

impl Default for DraftCosts {
    fn default() -> DraftCosts {
        DraftCosts { round: [Mean::default(); MAX_SEQUENCES + 1], token: Mean::default() }
    }
}

impl DraftCosts {
    /// Seconds of a round for so many sequences, or for the nearest number that was measured. `guess`: before any was. The first measurement counts as no more,
    /// since it may have waited for weights: a drafter that is judged by it alone might never be asked again.
    pub fn round(&self, sequences: usize, guess: f64) -> f64 {
        let at = sequences.min(MAX_SEQUENCES);
        let measured = |i: usize| {
            let mean = self.round.get(i).filter(|mean| mean.times > 0)?;
            Some(if mean.times == 1 { mean.seconds.min(guess) } else { mean.seconds })
        };
        let nearest = |d: usize| at.checked_sub(d).and_then(measured).or_else(|| measured(at + d));
        (0..=MAX_SEQUENCES).find_map(nearest).unwrap_or(guess)
    }

    /// Seconds to catch up with so many tokens; `None` before it was measured.
    pub fn catching_up(&self, tokens: usize) -> Option<f64> {
        if tokens == 0 { Some(0.0) } else { (self.token.times > 0).then_some(self.token.seconds * tokens as f64) }
    }

    /// Notes the time of `rounds` rounds for so many sequences.
    pub fn learn_rounds(&mut self, sequences: usize, rounds: usize, time: Duration) {
        if rounds > 0 {
            self.round[sequences.min(MAX_SEQUENCES)].learn(time.as_secs_f64() / rounds as f64);
        }
    }

    /// Notes the time of catching up with so many tokens.
    pub fn learn_catching_up(&mut self, tokens: usize, time: Duration) {
        if tokens > 0 {
            self.token.learn(time.as_secs_f64() / tokens as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_was_not_measured_costs_what_the_nearest_does() {
        let (mut costs, ms) = (DraftCosts::default(), Duration::from_millis);
        assert_eq!((costs.round(1, 0.2), costs.catching_up(9), costs.catching_up(0)), (0.2, None, Some(0.0)));
        // The first waited for weights.
        costs.learn_rounds(1, 2, ms(900));
        assert_eq!(costs.round(1, 0.2), 0.2);
        costs.learn_rounds(1, 3, ms(30));
        costs.learn_rounds(8, 1, ms(20));
        costs.learn_catching_up(100, ms(50));
        assert_eq!(costs.round(2, 0.2), 0.01);
        assert_eq!(
            (costs.round(7, 0.01), costs.round(400, 0.2)),
            (0.01, 0.02),
            "one measurement is no more than the guess"
        );
        assert_eq!(costs.catching_up(10), Some(0.005));
    }
}
