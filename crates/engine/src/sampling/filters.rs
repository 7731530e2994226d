//! The filters: top-k and top-p.

use std::cmp::Ordering;

/// A token that is still in the running.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub logit: f32,
    pub token: u32,
    /// exp((logit - highest) / temperature) in units of 1 / `ONE`.
    pub weight: u64,
}

/// Most likely first, then lower id first.
pub(super) fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    // No logit is NaN here, and -0 equals 0.
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// The least sum of weights that top-p keeps, of `all` weights.
pub(super) fn needed(all: u64, p: f64) -> u64 {
    ((p * all as f64) as u64).clamp(1, all)
}

/// Keeps the fewest of the likeliest candidates whose weights sum to `need` at least. All of them together do.
pub(super) fn keep_nucleus(candidates: &mut Vec<Candidate>, mut need: u64) {
    let total: u64 = candidates.iter().map(|c| c.weight).sum();
    // All lighter tokens together weigh less than what may be left out.
    let lightest = (total - need) / candidates.len() as u64;
    candidates.retain(|c| c.weight >= lightest);

    // Bisect for the end of the nucleus. Sums are exact, so the halves need not be sorted.
    let (mut from, mut to) = (0, candidates.len());
    while to - from > 1 {
        let half = (to - from) / 2;
        candidates[from..to].select_nth_unstable_by(half, by_rank);
        let better: u64 = candidates[from..from + half].iter().map(|c| c.weight).sum();
        if better >= need {
            to = from + half;
        } else {
            need -= better;
            from += half;
        }
    }
    candidates.truncate(from + 1);
}

/// Candidates held while looking for the k best: enough that throwing out the worse ones is rare.
fn top_k_room(k: usize) -> usize {
    4 * k + 1024
}

/// Puts the `k` best of `logits` into `candidates`, in no order.
pub(super) fn keep_top_k(candidates: &mut Vec<Candidate>, logits: &[f32], k: usize) {
    // A caller may want more than there are.
    let k = k.min(logits.len());
    let room = top_k_room(k).min(logits.len());
    candidates.clear();
    // Once k candidates are known, a later token needs more than the worst of them has: an equal logit loses to the lower id.
    let mut bar = f32::NEG_INFINITY;
    let mut base = 0;
    for chunk in logits.chunks(16) {
        if chunk.iter().fold(false, |any, x| any | (*x > bar)) {
            for (i, logit) in chunk.iter().enumerate() {
                if *logit > bar {
                    if candidates.len() == room {
                        candidates.select_nth_unstable_by(k - 1, by_rank);
                        candidates.truncate(k);
                        bar = candidates[k - 1].logit;
                        if *logit <= bar {
                            continue;
                        }
                    }
                    candidates.push(Candidate { logit: *logit, token: (base + i) as u32, weight: 0 });
                }
            }
        }
        base += chunk.len();
    }
    if candidates.len() > k {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
    }
}
