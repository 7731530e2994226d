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
/// Weight of a new measurement once there are many, and what one step may differ from what is known: others may have held it up.
const NEWEST: f64 = 0.05;
const HELD_UP: f64 = 3.0;
/// How much of the difference between what was expected of a step with drafts and what it took is the whole machine's, which has become slower or faster.
const COMMON: f64 = 0.03;
/// Measurements of a number of rows that count as much as what all numbers together say of it.
const ENOUGH: f64 = 6.0;
/// What a drafted row adds to a step, as a part of one without drafts, before any was measured.
const GUESSED_ROW: f64 = 0.15;
/// Drafts must promise so many times the speed without them.
const WORTH: f64 = 1.03;
/// The account, in tokens' times: what an answer begins with at most, and what each token adds. In 200 tokens no more than 2.8 can be lost: 1.4 %.
const ACCOUNT: f64 = 2.0;
const REFILL: f64 = 0.004;
/// What it may grow to by what drafts save. It is spent in the same answer or not at all.
const FULL_ACCOUNT: f64 = 8.0;
/// Where costs are known from the start, one draft may lose this part of the account until it has grown to [`SURE`]: one wrong guess is then not the last.
const STAKE: f64 = 0.6;
const SURE: f64 = 4.0;

/// A measured mean.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    mean: f64,
    times: u32,
}

impl Measured {
    fn learn(&mut self, value: f64) {
        self.times = self.times.saturating_add(1);
        let value = if self.times > FIRST_STEPS { value.min(HELD_UP * self.mean) } else { value };
        self.mean += (value - self.mean) * NEWEST.max(1.0 / f64::from(self.times));
    }

    fn get(&self) -> Option<f64> {
        (self.times > 0).then_some(self.mean)
    }
}

/// What drafted rows add to a step, in times of a step without drafts: a line through all that was measured.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// Sums of weights, of rows and shares, and of their products.
    w: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Default for Line {
    /// A guess, so that a first step that was held up does not decide alone.
    fn default() -> Line {
        let (w, y) = (4.0, 0.2);
        Line { w, x: w, y: w * y, xx: w, xy: w * y }
    }
}

impl Line {
    /// What older measurements count for when another comes.
    const KEPT: f64 = 0.98;

    fn add(&mut self, x: f64, y: f64) {
        let Line { w, x: sx, y: sy, xx, xy } = self;
        for (sum, value) in [(w, 1.0), (sx, x), (sy, y), (xx, x * x), (xy, x * y)] {
            *sum = *sum * Line::KEPT + value;
        }
    }

    /// What `x` rows add, once something was measured.
    fn at(&self, x: f64) -> f64 {
        let spread = self.w * self.xx - self.x * self.x;
        // Of one number of rows alone it goes through nothing.
        let slope =
            if spread > 0.01 * self.w { (self.w * self.xy - self.x * self.y) / spread } else { self.y / self.x };
        let slope = slope.clamp(0.0, 1.0);
        ((self.y - slope * self.x) / self.w).max(0.0) + slope * x
    }
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

/// What drafts promise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Offer {
    /// How many tokens: of a step, or for each sequence.
    pub drafts: usize,
    /// Expected tokens per second.
    pub speed: f64,
}

/// See the module.
pub(crate) struct Governor {
    /// Seconds of steps without drafts, by the number of sequences.
    plain: [Measured; MAX_ROWS + 1],
    /// By drafted rows: what they add to a step, in times of it.
    added: [Measured; MAX_ROWS + 1],
    line: Line,
    /// The most drafted rows that were measured.
    widest: usize,
    /// Seconds of sampling a token, in steps without drafts and with drafts.
    sampling: [Measured; 2],
    /// What drafts may cost, in tokens' times.
    account: f64,
    /// Numbers of drafted tokens whose costs were measured before the first answer.
    known: Vec<usize>,
}

impl Default for Governor {
    fn default() -> Governor {
        Governor {
            plain: [Measured::default(); MAX_ROWS + 1],
            added: [Measured::default(); MAX_ROWS + 1],
            line: Line::default(),
            widest: 0,
            sampling: Default::default(),
            account: ACCOUNT,
            known: Vec::new(),
        }
    }
}

impl Governor {
    /// How many of the candidates a step with `generating` sequences should compute, at most `most`, and what they promise. Sorts the candidates by their chance, so those
    /// come first. The time of proposing does not count: it is spent in any case.
    pub fn choose(&self, generating: usize, most: usize, candidates: &mut [Candidate]) -> Offer {
        candidates.sort_unstable_by(|a, b| b.chance.total_cmp(&a.chance).then(a.depth.cmp(&b.depth)));
        let Some(step) = self.usual(generating) else { return Offer::default() };
        let mut expected = generating as f64;
        let mut best = self.without(generating, step);
        let least = best.speed;
        for (i, candidate) in candidates.iter().take(most.min(MAX_ROWS)).enumerate() {
            let drafts = i + 1;
            if self.worst(drafts) * generating as f64 > self.account {
                break;
            }
            expected += candidate.chance;
            let speed = self.speed(expected, step, drafts, 0.0);
            if self.is_known(generating, drafts) && speed > best.speed.max(WORTH * least) {
                best = Offer { drafts, speed };
            }
        }
        best
    }

    /// How many tokens a drafter should compute for each of some sequences, at most `most`. `chances`: for each of them, that a token comes true. They are some of the
    /// `generating` sequences of the step. `seconds`: how long the drafter takes for so many tokens for each.
    pub fn invest(&self, generating: usize, most: usize, chances: &[f64], seconds: impl Fn(usize) -> f64) -> Offer {
        let Some(step) = self.usual(generating) else { return Offer::default() };
        let (mut best, mut expected) = (self.without(generating, step), generating as f64);
        let least = best.speed;
        for width in 1..=self.covered(generating, most, chances.len(), &seconds) {
            expected += chances.iter().map(|chance| chance.powi(width as i32)).sum::<f64>();
            let speed = self.speed(expected, step, width * chances.len(), seconds(width));
            if self.is_known(generating, width * chances.len()) && speed > best.speed.max(WORTH * least) {
                best = Offer { drafts: width, speed };
            }
        }
        best
    }

    /// Whether each of some sequences should have one token proposed that is hardly worth computing, to learn how often the drafter is right: at hopeful `chances` drafts would
    /// pay, and the account still covers the narrowest that would. The rest as in [`Governor::invest`].
    pub fn explores(&self, generating: usize, most: usize, chances: &[f64], seconds: impl Fn(usize) -> f64) -> bool {
        let Some(step) = self.usual(generating).filter(|_| self.has_costs() && !chances.is_empty()) else {
            return false;
        };
        let least = WORTH * self.without(generating, step).speed;
        let mut expected = generating as f64;
        let narrowest = (1..=most.min(MAX_ROWS / chances.len())).find(|width| {
            expected += chances.iter().map(|chance| chance.powi(*width as i32)).sum::<f64>();
            self.speed(expected, step, width * chances.len(), seconds(*width)) > least
        });
        let token = step / generating as f64;
        narrowest.is_some_and(|width| {
            let lost = self.worst(width * chances.len()) * generating as f64 + (seconds(width) + seconds(1)) / token;
            lost <= self.account
        })
    }

    /// How many tokens for each of `sequences` the account, or what one draft may take of it, covers, should all of them be wrong; at most `most`. `seconds`: as in [`Governor::invest`].
    pub fn covered(&self, generating: usize, most: usize, sequences: usize, seconds: impl Fn(usize) -> f64) -> usize {
        let Some(step) = self.usual(generating).filter(|_| sequences > 0) else { return 0 };
        let token = step / generating as f64;
        let stake = if self.has_costs() && self.account < SURE { STAKE * self.account } else { self.account };
        let is_covered = |width: &usize| {
            let drafts = width * sequences;
            drafts <= MAX_ROWS && self.worst(drafts) * generating as f64 + seconds(*width) / token <= stake
        };
        (1..=most).take_while(is_covered).count()
    }

    /// Whether costs were measured before the first answer.
    fn has_costs(&self) -> bool {
        !self.known.is_empty()
    }

    /// An answer begins: what drafts of others have saved is not for it to lose.
    pub fn begin(&mut self) {
        self.account = self.account.min(ACCOUNT);
    }

    /// Seconds that a drafted row adds to a step, on the average of the first few.
    pub fn row(&self, generating: usize) -> f64 {
        self.usual(generating).map_or(0.0, |step| step * self.adds(4) / 4.0)
    }

    /// Whether steps of one sequence with so many drafted tokens were measured beforehand, if any were: on a device other widths have to be made ready first.
    fn is_known(&self, generating: usize, drafts: usize) -> bool {
        !self.has_costs() || generating > 1 || self.known.contains(&drafts)
    }

    /// What a step without drafts gives.
    fn without(&self, generating: usize, step: f64) -> Offer {
        let (expected, plain) = (generating as f64, self.sampling[0].get().unwrap_or(0.0));
        Offer { drafts: 0, speed: expected / (step + plain * expected) }
    }

    /// Tokens per second of a step with drafts that is expected to give `expected` tokens.
    fn speed(&self, expected: f64, step: f64, drafts: usize, drafting: f64) -> f64 {
        let sampling = self.sampling[1].get().or(self.sampling[0].get()).unwrap_or(0.0);
        expected / (step * (1.0 + self.adds(drafts)) + sampling * expected + drafting)
    }

    /// Seconds of a step without drafts, once there are enough measurements.
    pub fn usual(&self, generating: usize) -> Option<f64> {
        let measured = self.plain.get(generating)?;
        measured.get().filter(|_| generating > 0 && measured.times >= FIRST_STEPS)
    }

    /// What so many drafted rows add to a step, as a part of it: measured, or between measurements. Beyond them each row counts half of what others added, so that it is tried.
    fn adds(&self, drafts: usize) -> f64 {
        let known = |drafts: usize| {
            let Measured { mean, times } = self.added[drafts];
            let share = f64::from(times) / (f64::from(times) + ENOUGH);
            (times > 0).then(|| (drafts as f64, share * mean + (1.0 - share) * self.line.at(drafts as f64)))
        };
        let Some((low, below)) = (1..=drafts).rev().find_map(known).or((self.widest > 0).then_some((0.0, 0.0))) else {
            return GUESSED_ROW * drafts as f64;
        };
        let row = match (drafts..=self.widest).find_map(known) {
            Some((high, above)) if high > low => ((above - below) / (high - low)).max(0.0),
            _ => below / low / 2.0,
        };
        below + row * (drafts as f64 - low)
    }

    /// The same at worst. Beyond what was measured, each row counts as much as the measured ones on average; before any was, a whole step.
    fn worst(&self, drafts: usize) -> f64 {
        match self.widest {
            0 => drafts as f64,
            widest if drafts <= widest => self.adds(drafts),
            widest => self.adds(widest) * drafts as f64 / widest as f64,
        }
    }

    /// Notes how long a step of one sequence with so many drafted tokens takes. It counts as much as a few measurements. The first is to be of none.
    pub fn know(&mut self, drafts: usize, step: Duration) {
        let seconds = step.as_secs_f64().max(1e-9);
        let Some(usual) = self.usual(1).filter(|_| drafts > 0) else {
            self.plain[1] = Measured { mean: seconds, times: FIRST_STEPS };
            return;
        };
        self.known.push(drafts);
        let added = (seconds / usual - 1.0).clamp(0.0, drafts as f64 + 0.5);
        self.added[drafts] = Measured { mean: added, times: ENOUGH as u32 };
        self.line.add(drafts as f64, added);
        self.widest = self.widest.max(drafts);
    }

    /// Notes a step without prompts. `rows`: its rows, drafted ones included. `tokens`: how many it gave. The times: proposing before the step, the model, and choosing the
    /// tokens.
    pub fn learn(&mut self, generating: usize, rows: usize, tokens: usize, [drafting, step, sampling]: [Duration; 3]) {
        if generating == 0 || rows > MAX_ROWS || tokens == 0 {
            return;
        }
        let (seconds, sampling) = (step.as_secs_f64().max(1e-9), sampling.as_secs_f64());
        let drafting = drafting.as_secs_f64();
        let drafts = rows - generating;
        self.sampling[usize::from(drafts > 0)].learn(sampling / tokens as f64);
        if drafts == 0 {
            let spent = self.usual(generating).map_or(0.0, |step| drafting * generating as f64 / step);
            self.account = (self.account + REFILL * tokens as f64 - spent).min(FULL_ACCOUNT);
            return self.plain[generating].learn(seconds);
        }
        let Some(usual) = self.usual(generating) else { return };
        // 1. What rows add, where a row is less than a step
        let share = seconds / usual;
        let added = (share - 1.0).clamp(0.0, drafts as f64 + 0.5);
        let surprise = share / (1.0 + self.adds(drafts));
        if self.added[drafts].times > FIRST_STEPS {
            self.plain[generating].mean *= 1.0 + COMMON * (surprise.clamp(0.5, 2.0) - 1.0);
        }
        self.added[drafts].learn(added);
        self.line.add(drafts as f64, added);
        self.widest = self.widest.max(drafts);
        // 2. The account. What others have held up is not the drafts' fault, so it pays what such a step takes as far as is known
        let token = usual / generating as f64 + self.sampling[0].get().unwrap_or(0.0);
        let took = drafting + usual * (1.0 + self.adds(drafts)) + sampling;
        self.account = (self.account + tokens as f64 * (1.0 + REFILL) - took / token).min(FULL_ACCOUNT);
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
            let drafts = governor.choose(1, 8, &mut candidates).drafts;
            let took = machine.step(1 + drafts);
            let accepted = (0..drafts).take_while(|_| machine.random.f64() < real).count();
            governor.learn(1, 1 + drafts, 1 + accepted, [Duration::ZERO, took, Duration::ZERO]);
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
    fn where_costs_are_known_a_drafter_is_tried_as_long_as_there_is_hope() {
        let (ms, mut governor) = (Duration::from_millis, Governor::default());
        let explores =
            |governor: &Governor, chance: f64| governor.explores(1, 8, &[chance], |tokens| 0.02 * tokens as f64);
        governor.learn(1, 1, 1, [ms(0), ms(100), ms(0)]);
        assert!(!explores(&governor, 0.99), "nothing was measured beforehand");
        for (drafts, took) in [(0, 100), (1, 140), (8, 160)] {
            governor.know(drafts, ms(took));
        }
        assert!((governor.adds(4) - 0.49).abs() < 0.05, "{}", governor.adds(4));
        assert!(explores(&governor, 0.8) && !explores(&governor, 0.3));
        let widest = governor.covered(1, 8, 1, |_| 0.0);
        assert!((1..=8).contains(&widest));
        // Wrong guesses, until what is left covers no draft.
        let mut tries = 0;
        while explores(&governor, 0.8) {
            governor.learn(1, 2, 1, [ms(20), ms(140), ms(0)]);
            tries += 1;
        }
        assert!((2..=3).contains(&tries), "{tries}");
    }

    #[test]
    fn what_other_answers_have_saved_is_not_lost() {
        for seed in 0..20 {
            let mut machine = Machine { row: 0.2, noise: 0.0, random: Rng::with_seed(seed) };
            let mut governor = Governor::default();
            speed_up(&mut governor, &mut machine, 400, 0.9, 0.9);
            governor.begin();
            let speed = speed_up(&mut governor, &mut machine, 200, 0.95, 0.0);
            assert!(speed > 0.98, "seed {seed}: {speed}");
        }
    }

    #[test]
    fn the_widest_draft_is_as_wide_as_it_pays() {
        let mut governor = Governor::default();
        let chances = |p: f64| -> Vec<Candidate> {
            (0..8).map(|depth| Candidate { chance: p.powi(depth as i32 + 1), scheduled: 0, depth }).collect()
        };
        assert_eq!(governor.choose(1, 8, &mut chances(0.99)).drafts, 0, "nothing is measured");
        let ms = Duration::from_millis;
        for _ in 0..100 {
            // Up to three drafted rows are cheap.
            governor.learn(1, 1, 1, [ms(0), ms(100), ms(0)]);
            (1..=3).for_each(|drafts| governor.learn(1, 1 + drafts, 1 + drafts, [ms(0), ms(120), ms(0)]));
            (4..=8).for_each(|drafts| {
                governor.learn(1, 1 + drafts, 1 + drafts, [ms(0), ms(100 + 50 * drafts as u64), ms(0)])
            });
        }
        assert_eq!(governor.choose(1, 8, &mut chances(0.9)).drafts, 3);
        assert_eq!(governor.choose(1, 2, &mut chances(0.9)).drafts, 2, "no more than there may be");
        assert_eq!(governor.choose(1, 8, &mut chances(0.01)).drafts, 0);
        // Two sequences, of which one is surer.
        (0..10).for_each(|_| governor.learn(2, 2, 2, [ms(0), ms(105), ms(0)]));
        let mut both = [0.9, 0.8].iter().enumerate().flat_map(|(scheduled, p)| {
            (0..4).map(move |depth| Candidate { chance: f64::powi(*p, depth as i32 + 1), scheduled, depth })
        });
        let mut both: Vec<Candidate> = both.by_ref().collect();
        assert_eq!(governor.choose(2, 8, &mut both).drafts, 3);
        assert_eq!(both[..3].iter().map(|c| (c.scheduled, c.depth)).collect::<Vec<_>>(), [(0, 0), (0, 1), (1, 0)]);
    }
}
