//! Statistics of recorded routing: how many experts it uses, how soon it repeats, what predicts it.

use sluice_experts::simulate::{self, Trace};
use sluice_experts::{Policy, Recording};

/// Shares of a token's k experts that k guesses contain.
pub struct Guesses {
    /// Guessed from the token's experts in the layer before.
    pub layer_before: f64,
    /// Guessed from the previous token's experts in this layer.
    pub token_before: f64,
    /// Always the hottest experts.
    pub hottest: f64,
}

/// Share of a layer's experts that are used within `window` tokens: the mean over windows that do not overlap. `None` if there is none.
pub fn diversity(recording: &Recording, layer: usize, window: usize) -> Option<f64> {
    let mut last_used = vec![0; recording.experts];
    let (mut used, mut windows) = (0u64, 0);
    for chosen in recording.layers[layer].chunks_exact(recording.k * window) {
        windows += 1;
        for expert in chosen {
            used += u64::from(std::mem::replace(&mut last_used[*expert as usize], windows) != windows);
        }
    }
    (windows > 0).then(|| used as f64 / (windows as f64 * recording.experts as f64))
}

/// Share of a token's experts that the previous token used too.
pub fn overlap(recording: &Recording, layer: usize) -> f64 {
    let pairs = recording.by_token(layer).zip(recording.by_token(layer).skip(1));
    let common: usize = pairs.map(|(a, b)| b.iter().filter(|e| a.contains(e)).count()).sum();
    common as f64 / ((recording.tokens().max(2) - 1) * recording.k) as f64
}

/// Hit rate of a least-recently-used cache of `entries` experts of this layer alone.
pub fn lru_hits(recording: &Recording, layer: usize, entries: usize) -> f64 {
    let mut trace = Trace::new(&[recording.experts]);
    let each = vec![1; recording.k];
    recording.by_token(layer).for_each(|chosen| trace.push(0, chosen, &each));
    1.0 - simulate::misses(&trace, entries, Policy::Lru, &[]) as f64 / trace.uses() as f64
}

/// What predicts a layer's experts, learned from the first half of the tokens and counted on the second.
///
/// From the layer before (of which the first has none) by naive Bayes: P(expert) times, for each expert of the layer before that the token
/// wants, P(expert | that one) / P(expert).
pub fn guesses(recording: &Recording, layer: usize) -> Guesses {
    let half = recording.tokens() / 2;
    let mut uses = vec![0u32; recording.experts];
    recording.layers[layer][..half * recording.k].iter().for_each(|e| uses[*e as usize] += 1);
    // Half a use is added to each count, so that nothing is impossible.
    let share = |n: u32, of: u32| (f64::from(n) + 0.5) / (f64::from(of) + 1.0);
    let prior: Vec<f64> = uses.iter().map(|n| share(*n, half as u32).ln()).collect();
    let right = |guess: &mut dyn FnMut(usize) -> Vec<f64>| {
        let (mut right, mut all) = (0, 0);
        for (token, chosen) in recording.by_token(layer).enumerate().skip(half) {
            right += best(&guess(token), recording.k).iter().filter(|e| chosen.contains(e)).count();
            all += chosen.len();
        }
        right as f64 / f64::from(all.max(1) as u32)
    };
    // 1. the hottest, whatever the token
    let hottest = right(&mut |_| prior.clone());
    // 2. by the layer before
    let layer_before = match layer.checked_sub(1) {
        None => f64::NAN,
        Some(before) => {
            let mut together = vec![0u32; recording.experts * recording.experts];
            let mut uses_before = vec![0u32; recording.experts];
            for (from, to) in recording.by_token(before).zip(recording.by_token(layer)).take(half) {
                for a in from {
                    uses_before[*a as usize] += 1;
                    to.iter().for_each(|b| together[*a as usize * recording.experts + *b as usize] += 1);
                }
            }
            let lift: Vec<f64> = (0..recording.experts * recording.experts)
                .map(|i| share(together[i], uses_before[i / recording.experts]).ln() - prior[i % recording.experts])
                .collect();
            let chosen_before = &recording.layers[before];
            right(&mut |token| {
                let mut scores = prior.clone();
                for a in &chosen_before[token * recording.k..(token + 1) * recording.k] {
                    let row = &lift[*a as usize * recording.experts..][..recording.experts];
                    scores.iter_mut().zip(row).for_each(|(s, l)| *s += l);
                }
                scores
            })
        }
    };
    Guesses { layer_before, token_before: overlap(recording, layer), hottest }
}

/// The experts with the highest scores.
fn best(scores: &[f64], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    let by_score = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    if k < order.len() {
        order.select_nth_unstable_by(k, by_score);
        order.truncate(k);
    }
    order
}

/// Share of all uses that go to the hottest `part` of the experts.
pub fn share_of_hottest(uses: &[u64], part: f64) -> f64 {
    let mut uses = uses.to_vec();
    uses.sort_unstable_by(|a, b| b.cmp(a));
    let all: u64 = uses.iter().sum();
    let hottest: u64 = uses[..(uses.len() as f64 * part).round() as usize].iter().sum();
    hottest as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layer 1 does what layer 0 does, shifted by one; tokens alternate between experts {0, 1} and {2, 3}, of 6.
    fn alternating() -> Recording {
        let layer = |shift: u32| (0..100).flat_map(|t| [(t % 2) * 2 + shift, (t % 2) * 2 + 1 + shift]).collect();
        Recording { experts: 6, k: 2, layers: vec![layer(0), layer(1)] }
    }

    #[test]
    fn diversity_and_overlap_are_counted() {
        let recording = alternating();
        assert_eq!(recording.tokens(), 100);
        assert_eq!(diversity(&recording, 0, 1), Some(2.0 / 6.0));
        assert_eq!(diversity(&recording, 0, 30), Some(4.0 / 6.0));
        assert_eq!(diversity(&recording, 0, 101), None);
        assert_eq!(overlap(&recording, 0), 0.0);
        let same = Recording { experts: 4, k: 2, layers: vec![[1, 3].repeat(10)] };
        assert_eq!(overlap(&same, 0), 1.0);
        assert_eq!(diversity(&same, 0, 5), Some(0.5));
    }

    #[test]
    fn a_cache_hits_once_it_holds_the_pattern() {
        let recording = alternating();
        assert_eq!(lru_hits(&recording, 0, 2), 0.0);
        // The two experts that a token wanted are equally old, so only one of them outlives the other token.
        assert_eq!(lru_hits(&recording, 0, 3), 1.0 - 102.0 / 200.0);
        assert_eq!(lru_hits(&recording, 0, 4), 1.0 - 4.0 / 200.0);
    }

    #[test]
    fn a_layer_that_follows_another_is_foretold_by_it() {
        let recording = alternating();
        let second = guesses(&recording, 1);
        assert_eq!((second.layer_before, second.token_before, second.hottest), (1.0, 0.0, 0.5));
        assert!(guesses(&recording, 0).layer_before.is_nan());
    }

    #[test]
    fn the_hottest_part_has_its_share() {
        assert_eq!(share_of_hottest(&[1, 7, 1, 1], 0.25), 0.7);
        assert_eq!(share_of_hottest(&[0, 0], 0.5), 0.0);
    }
}
