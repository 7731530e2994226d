//! Decides how many drafted tokens are worth computing.
//!
//! It learns what a step takes by its number of rows, and takes the number that promises most tokens in a second, none included. Times are measured, so all that rows cost
//! is in them: products, attention, the distinct experts of a mixture, and their reads. An account limits what wrong guesses may cost: a draft that is lost altogether
//! must be covered by it, and it fills slowly, or with what drafts have saved.
//!
//! Time decides only how many tokens are computed together, which changes no bit.

use std::time::Duration;

/// Rows whose time is kept. Steps with more are without drafts.
const MAX_ROWS: usize = 96;
/// Steps without drafts that are measured before the first draft.
const FIRST_STEPS: u32 = 3;
/// What a row adds to a step before any step with drafts was measured, in steps without drafts.
const GUESSED_ROW: f64 = 0.15;
/// Weight of a new measurement: for its own number of rows, and for all, since machines as a whole become slower and faster.
const NEWEST: f64 = 0.15;
const COMMON: f64 = 0.1;
/// A step that took longer than so many times what it usually takes was held up by others.
const HELD_UP: f64 = 1.5;
/// Drafts are worth it only if they promise so many times the tokens in a second.
const WORTH: f64 = 1.03;
/// The account, in tokens' times: at first, at most, and what each token adds. In 200 tokens no more than four can be lost: 2 %.
const ACCOUNT: f64 = 1.5;
const FULL_ACCOUNT: f64 = 2.5;
const REFILL: f64 = 0.0075;

/// A measured time in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    seconds: f64,
    times: u32,
}

impl Measured {
    /// Mixes a measurement in, by its logarithm, so that what was held up counts little.
    fn learn(&mut self, seconds: f64) {
        self.times = self.times.saturating_add(1);
        let newest = NEWEST.max(1.0 / f64::from(self.times));
        self.seconds = match self.times {
            1 => seconds,
            _ => self.seconds * ratio(seconds, self.seconds).powf(newest),
        };
    }

    fn get(&self) -> Option<f64> {
        (self.times > 0).then_some(self.seconds)
    }
}

fn ratio(new: f64, known: f64) -> f64 {
    (new / known.max(1e-9)).clamp(0.5, 2.0)
}

/// A drafted token that may be computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// The chance that it and all before it come true.
    pub chance: f64,
    /// The sequence's place in the plan.
    pub scheduled: usize,
    /// How many drafted tokens of the sequence come before it.
    pub depth: usize,
}

/// See the module.
pub(crate) struct Governor {
    /// Of steps with this many rows that only generate.
    steps: [Measured; MAX_ROWS + 1],
    /// Of sampling a token, in steps without drafts and with drafts.
    sampling: [Measured; 2],
    /// What drafts may cost, in tokens' times.
    account: f64,
}

impl Default for Governor {
    fn default() -> Governor {
        Governor { steps: [Measured::default(); MAX_ROWS + 1], sampling: Default::default(), account: ACCOUNT }
    }
}

impl Governor {
    /// How many of the candidates are worth a step with `generating` sequences, at most `most`. Sorts them: those that are worth it come first, for each sequence
    /// from its first on.
    pub fn choose(&self, generating: usize, most: usize, candidates: &mut [Candidate]) -> usize {
        candidates.sort_unstable_by(|a, b| b.chance.total_cmp(&a.chance).then(a.depth.cmp(&b.depth)));
        let Some(usual) = self.usual(generating) else { return 0 };
        let token = usual / generating as f64;
        let [plain, drafting] = self.sampling.map(|s| s.get());
        let plain = plain.unwrap_or(0.0);
        let drafting = drafting.unwrap_or(plain);
        let mut expected = generating as f64;
        let (mut best, mut chosen) = (WORTH * expected / (usual + plain * expected), 0);
        for (i, candidate) in candidates.iter().take(most.min(MAX_ROWS.saturating_sub(generating))).enumerate() {
            let rows = generating + i + 1;
            let seconds = self.seconds(generating, usual, rows);
            if self.worst_seconds(generating, usual, rows) - usual > self.account * token {
                break;
            }
            expected += candidate.chance;
            let speed = expected / (seconds + drafting * expected);
            if speed > best {
                (best, chosen) = (speed, i + 1);
            }
        }
        chosen
    }

    /// Seconds of a step without drafts, once there are enough measurements.
    fn usual(&self, generating: usize) -> Option<f64> {
        let measured = self.steps.get(generating)?;
        measured.get().filter(|_| generating > 0 && measured.times >= FIRST_STEPS)
    }

    /// Seconds of a step of `rows` rows: measured, or between measured ones, or beyond them by the mean of what a row adds.
    fn seconds(&self, generating: usize, usual: f64, rows: usize) -> f64 {
        let (low, below) = self.measured_up_to(generating, usual, rows);
        if low == rows {
            return below;
        }
        let known = |rows: usize| self.steps[rows].get().map(|seconds| (rows, seconds.max(usual)));
        let row = match (rows + 1..=MAX_ROWS).find_map(known) {
            Some((high, above)) => ((above - below) / (high - low) as f64).max(0.0),
            None if low == generating => GUESSED_ROW * usual / generating as f64,
            None => (below - usual) / (low - generating) as f64,
        };
        below + row * (rows - low) as f64
    }

    /// Seconds that a step of `rows` rows takes at most: where it was not measured, rows may cost twice what others did, or if none was measured a whole step each.
    fn worst_seconds(&self, generating: usize, usual: f64, rows: usize) -> f64 {
        let seconds = self.seconds(generating, usual, rows);
        let (low, below) = self.measured_up_to(generating, usual, rows);
        if low == rows || self.steps[rows..].iter().any(|measured| measured.times > 0) {
            return seconds;
        }
        let most = usual / generating as f64;
        let row = if low == generating { most } else { 2.0 * (below - usual) / (low - generating) as f64 };
        below + row.min(most) * (rows - low) as f64
    }

    /// The most rows up to `rows` whose step was measured, and its seconds.
    fn measured_up_to(&self, generating: usize, usual: f64, rows: usize) -> (usize, f64) {
        let known = |rows: usize| self.steps[rows].get().map(|seconds| (rows, seconds.max(usual)));
        (generating..=rows).rev().find_map(known).unwrap_or((generating, usual))
    }

    /// Notes a step that only generated. `rows`: with drafts. `tokens`: what it gave. `step`, `sampling`: what the model took, and choosing the tokens.
    pub fn learn(&mut self, generating: usize, rows: usize, tokens: usize, step: Duration, sampling: Duration) {
        if generating == 0 || rows > MAX_ROWS || tokens == 0 {
            return;
        }
        let (seconds, sampling) = (step.as_secs_f64().max(1e-9), sampling.as_secs_f64());
        let drafts = rows > generating;
        // 1. The account
        if !drafts {
            self.account = (self.account + REFILL * tokens as f64).min(FULL_ACCOUNT);
        } else if let Some(usual) = self.usual(generating) {
            let plain = self.sampling[0].get().unwrap_or(0.0);
            let token = usual / generating as f64 + plain;
            let expected = self.steps[rows].get().unwrap_or(seconds);
            let took = seconds.min(HELD_UP * expected) + sampling;
            self.account = (self.account + tokens as f64 * (1.0 + REFILL) - took / token).min(FULL_ACCOUNT);
        }
        // 2. Times
        let known = self.steps[rows];
        if known.times > FIRST_STEPS {
            let common = ratio(seconds, known.seconds).powf(COMMON);
            self.steps.iter_mut().for_each(|measured| measured.seconds *= common);
        }
        self.steps[rows].learn(seconds);
        self.sampling[usize::from(drafts)].learn((sampling / tokens as f64).max(1e-9));
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    /// A machine where a step takes a second, and each further row `row` seconds, give or take `noise`.
    struct Machine {
        row: f64,
        noise: f64,
        random: Rng,
    }

    impl Machine {
        fn step(&mut self, rows: usize) -> Duration {
            let seconds = 1.0 + self.row * (rows - 1) as f64;
            // One in thirty steps is held up.
            let held_up = if self.random.u8(..30) == 0 { 1.0 } else { 0.0 };
            Duration::from_secs_f64(seconds * (1.0 + self.noise * (self.random.f64() - 0.5 + held_up)))
        }
    }

    /// Generates `tokens` with a drafter of eight tokens that believes each comes true with the chance `believed`, and is right with the chance `real`.
    /// Returns how many times as long it takes without drafts.
    fn speed_up(governor: &mut Governor, machine: &mut Machine, tokens: usize, believed: f64, real: f64) -> f64 {
        let (mut made, mut seconds) = (0, 0.0);
        while made < tokens {
            let mut candidates: Vec<Candidate> = (0..8)
                .map(|depth| Candidate { chance: believed.powi(depth as i32 + 1), scheduled: 0, depth })
                .collect();
            let drafts = governor.choose(1, 8, &mut candidates);
            let took = machine.step(1 + drafts);
            let accepted = (0..drafts).take_while(|_| machine.random.f64() < real).count();
            governor.learn(1, 1 + drafts, 1 + accepted, took, Duration::ZERO);
            made += 1 + accepted;
            seconds += took.as_secs_f64();
        }
        // What the steps would have taken on the average, with those that are held up.
        made as f64 * (1.0 + machine.noise / 30.0) / seconds
    }

    #[test]
    fn drafts_that_come_true_are_computed() {
        let mut machine = Machine { row: 0.1, noise: 0.2, random: Rng::with_seed(1) };
        let speed = speed_up(&mut Governor::default(), &mut machine, 2000, 0.9, 0.9);
        // Eight rows more take 1.8 seconds and give 6.1 tokens.
        assert!(speed > 3.0, "{speed}");
    }

    #[test]
    fn drafts_that_cost_more_than_they_give_are_not() {
        let mut machine = Machine { row: 0.8, noise: 0.2, random: Rng::with_seed(2) };
        let speed = speed_up(&mut Governor::default(), &mut machine, 2000, 0.6, 0.6);
        assert!(speed > 0.98, "{speed}");
    }

    #[test]
    fn wrong_beliefs_cost_two_in_a_hundred_at_most() {
        for row in [0.05, 0.2, 0.5, 1.0] {
            for seed in 0..20 {
                let mut machine = Machine { row, noise: 0.0, random: Rng::with_seed(seed) };
                let speed = speed_up(&mut Governor::default(), &mut machine, 200, 0.95, 0.0);
                assert!(speed > 0.98, "row {row}, seed {seed}: {speed}");
            }
        }
    }

    #[test]
    fn the_widest_draft_is_as_wide_as_it_pays() {
        let mut governor = Governor::default();
        let chances = |p: f64| -> Vec<Candidate> {
            (0..8).map(|depth| Candidate { chance: p.powi(depth as i32 + 1), scheduled: 0, depth }).collect()
        };
        assert_eq!(governor.choose(1, 8, &mut chances(0.99)), 0, "nothing is measured");
        let ms = Duration::from_millis;
        for _ in 0..100 {
            governor.learn(1, 1, 1, ms(100), ms(0));
            // Up to four rows are cheap.
            governor.learn(1, 4, 4, ms(120), ms(0));
            governor.learn(1, 5, 5, ms(300), ms(0));
            governor.learn(1, 9, 9, ms(500), ms(0));
        }
        assert_eq!(governor.choose(1, 8, &mut chances(0.9)), 3);
        assert_eq!(governor.choose(1, 2, &mut chances(0.9)), 2, "no more than there may be");
        assert_eq!(governor.choose(1, 8, &mut chances(0.01)), 0);
        // Two sequences, of which one is surer.
        (0..10).for_each(|_| governor.learn(2, 2, 2, ms(105), ms(0)));
        let mut both = [0.9, 0.8].iter().enumerate().flat_map(|(scheduled, p)| {
            (0..4).map(move |depth| Candidate { chance: f64::powi(*p, depth as i32 + 1), scheduled, depth })
        });
        let mut both: Vec<Candidate> = both.by_ref().collect();
        assert_eq!(governor.choose(2, 8, &mut both), 2);
        assert!(both[..2].iter().all(|c| (c.scheduled, c.depth) == (0, 0) || c.depth < 2));
    }
}
