//! Draws tokens from logits that a device has. It is asked for the few numbers that draws need, and for all rows of a step at once. Among these are the rows of drafted
//! tokens, although nobody knows yet which of them are reached: an exchange with a device takes longer than what it computes for one.

use sluice_backend::{Best, DRAWN_TOGETHER, DeviceSampling, Isa, Logits, MAX_RANKS, Ranked, Scaled};

use super::candidates::Needs;
use super::params::{History, SamplingParams};
use super::sampler::{Hit, Logprobs, Mask, SampleError, Sampler, block_hit, token_hit};

/// A row of logits that a token may be drawn from.
#[derive(Clone, Copy)]
pub(crate) struct RowDraw<'a> {
    pub row: usize,
    pub params: &'a SamplingParams,
    /// The position of the token.
    pub position: u64,
    /// How many of the likeliest tokens' log-probabilities are wanted, if any.
    pub logprobs: Option<usize>,
    /// Whether a mask rules tokens out.
    pub is_masked: bool,
}

/// The result of a draw.
#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub token: Result<u32, SampleError>,
    /// If they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// What a device was asked about the rows of a step, and its answers.
#[derive(Default)]
pub(crate) struct DeviceDraws {
    /// By row of the logits; `None`: not asked for, or all logits are needed.
    rows: Vec<Option<AskedRow>>,
    /// Likeliest tokens, of rows that need them.
    best: Vec<Best>,
    questions: Questions,
}

/// Questions of one exchange.
#[derive(Default)]
struct Questions {
    /// The rows that they are about.
    rows: Vec<usize>,
    scaled: Vec<Scaled>,
    ranked: Vec<Ranked>,
    /// (row, block) of blocks that were drawn.
    blocks: Vec<(usize, usize)>,
}

/// What is known of a row. Indices are into the lists of [`Questions`].
struct AskedRow {
    needs: Needs,
    highest: f32,
    seed: u64,
    position: u64,
    /// The sum of its weights at its temperature.
    weights: Option<usize>,
    /// The sum of its weights at temperature 1, for log-probabilities.
    plain: Option<usize>,
    /// Index into [`DeviceDraws::best`].
    best: Option<usize>,
    /// The block that was drawn.
    hit: Option<(usize, Hit)>,
    /// Sums of all weights: at its temperature, and at 1.
    totals: [Option<u64>; 2],
    /// The drawn token and its logit, unless it takes the likeliest ones.
    token: Result<u32, SampleError>,
    logit: f32,
}

impl DeviceDraws {
    /// Forgets the step before.
    pub fn begin_step(&mut self) {
        self.rows.clear();
        self.best.clear();
    }

    /// Whether a row was asked for.
    pub fn has(&self, row: usize) -> bool {
        self.rows.get(row).is_some_and(Option::is_some)
    }

    /// Asks for what these rows need, in three exchanges at most.
    pub fn ask<'a>(
        &mut self,
        isa: Isa,
        device: &mut dyn DeviceSampling,
        logits: Logits,
        rows: impl Iterator<Item = RowDraw<'a>>,
    ) {
        let DeviceDraws { rows: asked, best, questions } = self;
        let Some(tops) = device.tops(logits) else { return };
        asked.resize_with(logits.rows, || None);
        questions.clear();
        // 1. Collect what each row needs. Rows without a finite logit are left to the other way, which reports them
        for draw in rows.filter(|draw| tops[draw.row].logit.is_finite()) {
            let top = tops[draw.row];
            asked[draw.row] = questions.add(draw, (top.token, top.logit), best.len(), logits.vocabulary);
        }
        // 2. Ask for sums of weights, and draw blocks by them
        if !questions.scaled.is_empty() {
            let sums = device.sums(logits, &questions.scaled);
            let sums_of = |place: usize| {
                let blocks = logits.vocabulary.div_ceil(DRAWN_TOGETHER);
                &sums[place * blocks..(place + 1) * blocks]
            };
            for &row in &questions.rows {
                let Some(of) = &mut asked[row] else { continue };
                of.totals = [of.weights, of.plain].map(|place| place.map(|place| sums_of(place).iter().sum()));
                if let (Needs::Sums, Some(place)) = (of.needs, of.weights) {
                    // Without a hit, only the likeliest token has a weight.
                    let hit = block_hit(of.seed, of.position, sums_of(place)).ok();
                    of.hit = hit.map(|hit| (questions.blocks.len(), hit));
                    questions.blocks.extend(hit.map(|hit| (row, hit.block)));
                }
            }
        }
        if !questions.blocks.is_empty() {
            let found = device.blocks(logits, &questions.blocks);
            for &row in &questions.rows {
                let Some(of) = &mut asked[row] else { continue };
                let Some((place, hit)) = of.hit else { continue };
                let from = hit.block * DRAWN_TOGETHER;
                let block = &found[place * DRAWN_TOGETHER..][..(logits.vocabulary - from).min(DRAWN_TOGETHER)];
                let scale = of.weights.map_or(1.0, |place| questions.scaled[place].scale);
                of.token = token_hit(isa, block, of.highest, scale, hit);
                of.logit = of.token.as_ref().map_or(of.highest, |token| block[*token as usize - from]);
            }
        }
        // 3. Ask for the likeliest tokens
        if !questions.ranked.is_empty() {
            best.extend_from_slice(device.best(logits, &questions.ranked));
        }
    }

    /// Draws the token of a row as it was asked for, now that history and mask are known. `None`: it takes all logits.
    pub fn draw(
        &self,
        draw: RowDraw,
        history: Option<&History>,
        mask: Option<&Mask>,
        sampler: &mut Sampler,
    ) -> Option<Drawn> {
        let of = self.rows.get(draw.row)?.as_ref()?;
        debug_assert_eq!(of.position, draw.position, "row {}", draw.row);
        let best = of.best.map(|place| &self.best[place]);
        // More tokens are needed than the device returns.
        if best.is_some_and(|best| best.found.is_empty()) {
            return None;
        }
        let (mut token, mut logit) = (of.token, of.logit);
        if let (Needs::Best { .. }, Some(best)) = (of.needs, best) {
            let drawn = sampler.sample_best(draw.params, best, of.totals[0], history, mask, draw.position);
            let found = best.found.iter().find(|top| Some(top.token) == drawn)?;
            (token, logit) = (Ok(found.token), found.logit);
        }
        let wanted = draw.logprobs.zip(of.totals[1]);
        let logprobs = wanted.map(|(top, total)| Logprobs::from_best(logit, of.highest, total, best, top));
        Some(Drawn { token, logprobs })
    }
}

impl Questions {
    fn clear(&mut self) {
        self.rows.clear();
        self.scaled.clear();
        self.ranked.clear();
        self.blocks.clear();
    }

    /// Adds what a row needs, whose likeliest token and its logit are these. `answers`: how many likeliest tokens are known already. `None`: it needs all logits.
    fn add(&mut self, draw: RowDraw, top: (u32, f32), answers: usize, vocabulary: usize) -> Option<AskedRow> {
        let RowDraw { row, params, position, logprobs, is_masked } = draw;
        let (needs, listed, (token, highest)) = (Needs::new(params, vocabulary, is_masked), logprobs.unwrap_or(0), top);
        if needs == Needs::All || listed > MAX_RANKS {
            return None;
        }
        let (ranks, sums) = match needs {
            Needs::Best { ranks, total } => (ranks, total),
            _ => (0, needs == Needs::Sums),
        };
        let mut summed = |scale| {
            self.scaled.push(Scaled { row, highest, scale });
            self.scaled.len() - 1
        };
        let weights = sums.then(|| summed(params.scale()));
        let plain = logprobs.map(|_| summed(1.0));
        let rank = ranks.max(listed);
        let best = (rank > 0).then(|| {
            self.ranked.push(Ranked { row, rank });
            answers + self.ranked.len() - 1
        });
        self.rows.push(row);
        let (hit, totals, token, logit, seed) = (None, [None; 2], Ok(token), highest, params.seed);
        Some(AskedRow { needs, highest, seed, position, weights, plain, best, hit, totals, token, logit })
    }
}

#[cfg(test)]
mod tests {
    use sluice_backend::{Top, sample};

    use super::*;
    use crate::sampling::random::uniform;

    const VOCABULARY: usize = 2500;
    const ISA: Isa = Isa::GENERIC;

    /// A device whose logits are known, which counts exchanges.
    struct Known {
        rows: Vec<Vec<f32>>,
        exchanges: usize,
        tops: Vec<Top>,
        best: Vec<Best>,
        sums: Vec<u64>,
        blocks: Vec<f32>,
    }

    impl Known {
        fn new(rows: usize) -> Known {
            let logit = |row: usize, i: usize| (uniform(row as u64, i as u64) >> 40) as f32 / (1u64 << 21) as f32;
            let rows = (0..rows).map(|row| (0..VOCABULARY).map(|i| logit(row, i)).collect()).collect();
            let (tops, best, sums, blocks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            Known { rows, exchanges: 0, tops, best, sums, blocks }
        }

        fn shape(&self) -> Logits {
            Logits { rows: self.rows.len(), vocabulary: VOCABULARY }
        }
    }

    impl DeviceSampling for Known {
        fn tops(&mut self, _: Logits) -> Option<&[Top]> {
            let top = |row: &Vec<f32>| {
                let logit = sample::highest(ISA, row).0;
                Top { logit, token: row.iter().position(|other| *other == logit).unwrap() as u32 }
            };
            self.tops = self.rows.iter().map(top).collect();
            Some(&self.tops)
        }

        fn best(&mut self, _: Logits, of: &[Ranked]) -> &[Best] {
            self.exchanges += 1;
            let best = |ranked: &Ranked| {
                let row = &self.rows[ranked.row];
                let mut sorted = row.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                let bar = sorted[ranked.rank - 1];
                let found = (0..).zip(row).filter(|(_, logit)| **logit >= bar);
                Best { bar, found: found.map(|(token, logit)| Top { logit: *logit, token }).collect() }
            };
            self.best = of.iter().map(best).collect();
            &self.best
        }

        fn sums(&mut self, _: Logits, of: &[Scaled]) -> &[u64] {
            self.exchanges += 1;
            let sums = of.iter().flat_map(|of| {
                let blocks = self.rows[of.row].chunks(DRAWN_TOGETHER);
                blocks.map(|block| sample::total(ISA, block, of.highest, of.scale))
            });
            self.sums = sums.collect();
            &self.sums
        }

        fn blocks(&mut self, _: Logits, of: &[(usize, usize)]) -> &[f32] {
            self.exchanges += 1;
            let block = |(row, block): &(usize, usize)| {
                let mut all = self.rows[*row][block * DRAWN_TOGETHER..].to_vec();
                all.resize(DRAWN_TOGETHER, 0.0);
                all
            };
            self.blocks = of.iter().flat_map(block).collect();
            &self.blocks
        }
    }

    #[test]
    fn rows_of_drafted_tokens_take_no_more_exchanges_than_one() {
        let with = SamplingParams { temperature: 1.0, seed: 5, ..SamplingParams::default() };
        let greedy = SamplingParams { temperature: 0.0, ..with.clone() };
        let few = SamplingParams { top_k: 20, top_p: 0.9, ..with.clone() };
        let penalised = SamplingParams { presence_penalty: 0.5, ..few.clone() };
        for (params, logprobs, most) in
            [(&greedy, None, 0), (&with, None, 2), (&few, None, 1), (&penalised, Some(3), 2), (&with, Some(2), 3)]
        {
            let (mut device, mut draws) = (Known::new(6), DeviceDraws::default());
            let mut sampler = Sampler::new(ISA, VOCABULARY);
            let row = |row: usize| RowDraw { row, params, position: 100 + row as u64, logprobs, is_masked: false };
            let shape = device.shape();
            draws.ask(ISA, &mut device, shape, (0..6).map(row));
            assert_eq!(device.exchanges, most, "{params:?}");
            let mut history = History::default();
            for i in 0..6 {
                let drawn = draws.draw(row(i), Some(&history), None, &mut sampler).unwrap();
                let wanted = sampler.sample(params, &device.rows[i], Some(&history), None, 100 + i as u64);
                assert_eq!(drawn.token, wanted, "row {i}, {params:?}");
                let token = wanted.unwrap();
                let of_token = logprobs.map(|top| Logprobs::new(ISA, &device.rows[i], token, top));
                assert_eq!(drawn.logprobs, of_token);
                // What is accepted before a row decides it.
                history.add_generated(token);
            }
        }
    }
}
