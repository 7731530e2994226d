//! What it is worth to keep an expert in memory, from past routing. It knows experts by number and layers by their order, and nothing of
//! where an expert lies.

use super::forecast::Forecast;

/// How it is decided which expert has to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The one that was wanted longest ago.
    Lru,
    /// The one that was wanted least often, where a use counts half after [`HALF_LIFE`] tokens.
    Lfu,
    /// The one whose slot is expected to serve least while it waits, from how likely visits of its layer are to want it and how many visits of
    /// other layers come before: layers are visited in order, so that what was used last waits longest.
    #[default]
    Scan,
}

impl Policy {
    pub const ALL: [Policy; 3] = [Policy::Lru, Policy::Lfu, Policy::Scan];

    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Scan => "scan",
        }
    }
}

/// Tokens after which a use counts half in [`Policy::Lfu`].
pub(super) const HALF_LIFE: f64 = 64.0;

/// An expert of one of the layers, numbered through.
pub(super) type Key = u32;

/// What is known of the experts of some layers.
#[derive(Debug)]
pub(super) struct Worth {
    pub policy: Policy,
    /// By layer: where its keys end.
    ends: Vec<Key>,
    forecast: Forecast,
    /// By key: the last visit that wanted it, from 1.
    last_wanted: Vec<u64>,
    /// By key, where the policy looks back: the least is evicted first.
    past: Vec<f64>,
    /// By key, where it looks ahead: probability to be wanted at the layer's next visit; at those after it.
    soon: Vec<f32>,
    later: Vec<f32>,
    visits: u64,
    /// The layer of the last visit.
    pub current: usize,
    /// By layer: tokens that have visited it.
    tokens: Vec<f64>,
    /// The fewest uses that a visit had: experts per token, once a step had one token.
    fewest_uses: f64,
}

impl Worth {
    /// Of `experts[layer]` experts; what is learned about pairs of experts may take `pairs` bytes. Where nothing is ever evicted, nothing is learned.
    pub fn new(experts: &[usize], policy: Policy, pairs: u64, all_fit: bool) -> Worth {
        let sum = |all: &mut Key, n: &usize| {
            *all += *n as Key;
            Some(*all)
        };
        let ends: Vec<Key> = experts.iter().scan(0, sum).collect();
        let keys = ends.last().copied().unwrap_or(0) as usize;
        Worth {
            policy,
            forecast: Forecast::new(if policy == Policy::Scan && !all_fit { experts } else { &[] }, pairs),
            last_wanted: vec![0; keys],
            past: vec![f64::NEG_INFINITY; keys],
            soon: vec![0.0; keys],
            later: vec![0.0; keys],
            visits: 0,
            current: 0,
            tokens: vec![0.0; experts.len()],
            fewest_uses: f64::INFINITY,
            ends,
        }
    }

    pub fn layers(&self) -> usize {
        self.ends.len()
    }

    pub fn keys(&self, layer: usize) -> std::ops::Range<Key> {
        layer.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[layer]
    }

    pub fn key(&self, layer: usize, expert: usize) -> Key {
        let keys = self.keys(layer);
        debug_assert!(expert < keys.len());
        keys.start + expert as Key
    }

    pub fn layer_of(&self, key: Key) -> usize {
        self.ends.partition_point(|end| *end <= key)
    }

    /// A step has come to `layer`, and `tokens[i]` of its tokens want expert `wanted[i]`.
    pub fn visit(&mut self, layer: usize, wanted: &[u32], tokens: &[u32]) {
        debug_assert_eq!(wanted.len(), tokens.len());
        self.current = layer;
        self.visits += 1;
        let n = self.count_tokens(tokens);
        self.tokens[layer] += n;
        let keys = self.keys(layer);
        let keys = keys.start as usize..keys.end as usize;
        let first = keys.start;
        wanted.iter().for_each(|e| self.last_wanted[first + *e as usize] = self.visits);
        match self.policy {
            Policy::Lru => wanted.iter().for_each(|e| self.past[first + *e as usize] = self.visits as f64),
            Policy::Lfu => {
                // Uses count double every half-life, rather than those before half: log2 of the sum, so that it does not overflow.
                let now = self.tokens[layer] / HALF_LIFE;
                for (expert, n) in wanted.iter().zip(tokens) {
                    let past = &mut self.past[first + *expert as usize];
                    let (a, b) = (*past, now + f64::from(*n).log2());
                    let (low, high) = (a.min(b), a.max(b));
                    *past = high + (low - high).exp2().ln_1p() / std::f64::consts::LN_2;
                }
            }
            Policy::Scan if self.forecast.is_empty() => {}
            Policy::Scan => {
                let (soon, later) = (&mut self.soon[keys.clone()], &mut self.later[keys]);
                self.forecast.visit(layer, wanted, tokens, n as f32, soon, later);
            }
        }
    }

    /// How many tokens a visit had at least, from how many of them want each expert: all want the same number of experts, and each once.
    fn count_tokens(&mut self, uses: &[u32]) -> f64 {
        let all = uses.iter().map(|n| f64::from(*n)).sum::<f64>().max(1.0);
        let most = uses.iter().copied().max().map_or(1.0, f64::from);
        self.fewest_uses = self.fewest_uses.min(all);
        most.max(all / self.fewest_uses)
    }

    /// Visits until this layer's next one, the next layer's being 1.
    pub fn distance(&self, layer: usize) -> u32 {
        let ahead = if layer > self.current { layer - self.current } else { layer + self.layers() - self.current };
        ahead as u32
    }

    /// What keeping an expert is worth where it may be read again whenever it is wanted, `distance` visits before its layer's next one.
    pub fn of(&self, key: Key, distance: u32) -> f64 {
        match self.policy {
            Policy::Lru | Policy::Lfu => self.past[key as usize],
            // Hits per visit for which it holds its slot: until its layer's next visit, or, if that is more, until it is wanted. (Wherever one would
            // rather stop in between, one of these is no less: every visit after the next gives the same for the same.)
            Policy::Scan => {
                let (soon, later) = (self.soon[key as usize], self.later[key as usize]);
                let (distance, scan) = (distance as f32, self.layers() as f32);
                f64::from((soon / distance).max(later / (distance * later + (1.0 - soon) * scan)))
            }
        }
    }

    /// What it is worth to have it in a faster tier permanently: regardless of where the scan of the layers is now.
    pub fn lasting(&self, key: Key) -> f64 {
        match self.policy {
            Policy::Lru | Policy::Lfu => self.past[key as usize],
            Policy::Scan => f64::from(self.later[key as usize]),
        }
    }

    pub fn is_wanted_now(&self, key: Key) -> bool {
        self.visits > 0 && self.last_wanted[key as usize] == self.visits
    }

    /// Bytes for each expert at the most, beside what experts say about each other.
    pub const BYTES_PER_EXPERT: usize = size_of::<(u64, f64, f32, f32)>() + Forecast::BYTES_PER_EXPERT;

    /// Bytes for each key, and of the forecast: with [`Policy::Scan`] mostly a number for each pair of a layer's experts.
    pub fn bytes(&self) -> usize {
        self.past.len() * size_of::<(u64, f64, f32, f32)>() + self.forecast.bytes()
    }
}
