//! Simulates tiers of memory on recorded routing, with the store's own bookkeeping.

use serde_json::{Value, json};
use sluice_experts::simulate::{self, MAX_PROMOTIONS, Served};
use sluice_experts::{Policy, Recording};

/// Slots of a faster tier and of the one below, such as a GPU's memory and the host's, as parts of all experts.
const SIZES: [(f64, f64); 5] = [(0.0625, 0.1875), (0.125, 0.375), (0.25, 0.25), (0.25, 0.75), (0.5, 0.25)];

/// Two tiers over the whole text.
pub struct Tiers {
    fast: usize,
    slow: usize,
    served: Served,
    tokens: usize,
    /// Share of all uses that the `fast` hottest experts would serve if they were in the faster tier from the start.
    hottest: f64,
}

impl Tiers {
    /// All sizes that hold one visit's experts; `each(n, f)` computes `f(0) .. f(n)`.
    pub fn of(
        recording: &Recording,
        each: impl Fn(usize, &(dyn Fn(usize) -> Tiers + Sync)) -> Vec<Tiers>,
    ) -> Vec<Tiers> {
        let trace = recording.trace();
        let all = recording.layers.len() * recording.experts;
        let slots = |part: f64| (part * all as f64).round() as usize;
        let mut sizes: Vec<(usize, usize)> = SIZES.iter().map(|(fast, slow)| (slots(*fast), slots(*slow))).collect();
        sizes.retain(|(fast, slow)| *fast > 0 && *slow >= recording.k);
        let mut uses: Vec<u64> = (0..recording.layers.len()).flat_map(|l| recording.uses(l)).collect();
        uses.sort_unstable_by(|a, b| b.cmp(a));
        let total = uses.iter().sum::<u64>();
        each(sizes.len(), &|i| {
            let (fast, slow) = sizes[i];
            Tiers {
                fast,
                slow,
                served: simulate::serve(&trace, &[fast, slow], MAX_PROMOTIONS, Policy::Scan, &[]),
                tokens: recording.tokens(),
                hottest: uses[..fast].iter().sum::<u64>() as f64 / total as f64,
            }
        })
    }

    /// Shares of all uses that the faster tier served, the slower one, and the disk.
    fn shares(&self) -> [f64; 3] {
        let shares = self.served.shares();
        [shares[0], shares[1], shares[2]]
    }

    fn rises(&self) -> f64 {
        self.served.promotions as f64 / self.tokens as f64
    }

    /// Headings of [`Tiers::row`].
    pub fn header() -> impl Iterator<Item = String> {
        ["slower", "served fast", "slower", "disk", "rises per token", "hottest"].into_iter().map(str::to_owned)
    }

    pub fn row(&self, percent: impl Fn(f64) -> String) -> Vec<String> {
        let shares = self.shares().map(&percent);
        let mut row = vec![self.fast.to_string(), self.slow.to_string()];
        row.extend(shares);
        row.extend([format!("{:.3}", self.rises()), percent(self.hottest)]);
        row
    }

    pub fn to_json(&self) -> Value {
        let [fast, slow, disk] = self.shares();
        json!({
            "slots": {"fast": self.fast, "slow": self.slow}, "served": {"fast": fast, "slow": slow, "disk": disk},
            "rises_per_token": self.rises(), "hottest": self.hottest,
        })
    }

    /// (Series, slots of the faster tier, value)
    pub fn figures(&self) -> [(&'static str, usize, f64); 5] {
        let [fast, slow, disk] = self.shares();
        [("fast", fast), ("slow", slow), ("disk", disk), ("rises", self.rises()), ("hottest", self.hottest)]
            .map(|(name, value)| (name, self.fast, value))
    }
}
