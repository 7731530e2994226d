//! How much it is worth to keep an expert in memory, from past routing. A policy knows experts by number and layers by their order; where an expert is, it
//! does not know.

mod forecast;

pub(crate) use forecast::Forecast;

/// Which expert is evicted when another needs its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The least recently used one.
    Lru,
    /// The least frequently used one, where a use counts half after 64 tokens.
    Lfu,
    /// The one whose slot is expected to serve least until its layer's next visit: how likely that visit is to want it, divided by how many visits of other
    /// layers come before. Layers are visited in order, so the expert that was used last waits longest.
    #[default]
    Scan,
}

impl Policy {
    /// All policies.
    pub const ALL: [Policy; 3] = [Policy::Lru, Policy::Lfu, Policy::Scan];

    /// The name that the command line gives it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Scan => "scan",
        }
    }
}

/// Tokens after which a use counts half in [`Policy::Lfu`].
pub(crate) const HALF_LIFE: f64 = 64.0;

/// An expert, numbered through all layers.
pub(crate) type Key = u32;

/// What is known of the experts of some layers, and how much each is worth keeping.
#[derive(Debug)]
pub(crate) struct EvictionScores {
    pub policy: Policy,
    /// By layer: one beyond its last key.
    ends: Vec<Key>,
    forecast: Forecast,
    /// By key: the last visit that wanted it, from 1.
    last_wanted: Vec<u64>,
    /// By key, for policies that look back: the least is evicted first.
    past: Vec<f64>,
    /// By key, for policies that look ahead: the probability that the layer's next visit wants it.
    soon: Vec<f32>,
    /// By key: the probability that a later visit does, if the next does not.
    later: Vec<f32>,
    /// Visits so far.
    visits: u64,
    /// The layer of the last visit.
    pub current: usize,
    /// By layer: tokens that have visited it.
    tokens: Vec<f64>,
    /// The fewest uses that a visit had: experts per token, once a step had one token.
    fewest_uses: f64,
}

impl EvictionScores {
    /// Scores of `experts[layer]` experts of each layer. What is learned about pairs of experts takes at most `pairs` bytes. If all experts fit, nothing is ever
    /// evicted and nothing is learned.
    pub fn new(experts: &[usize], policy: Policy, pairs: u64, all_fit: bool) -> EvictionScores {
        let sum = |all: &mut Key, n: &usize| {
            *all += *n as Key;
            Some(*all)
        };
        let ends: Vec<Key> = experts.iter().scan(0, sum).collect();
        let keys = ends.last().copied().unwrap_or(0) as usize;
        EvictionScores {
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

    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.ends.len()
    }

    /// The keys of a layer's experts.
    pub fn keys(&self, layer: usize) -> std::ops::Range<Key> {
        layer.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[layer]
    }

    /// The key of an expert.
    pub fn key(&self, layer: usize, expert: usize) -> Key {
        let keys = self.keys(layer);
        debug_assert!(expert < keys.len());
        keys.start + expert as Key
    }

    /// The layer of a key.
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

    /// The number of tokens of a visit, or less, from how many of them want each expert: every token wants the same number of experts, each once.
    fn count_tokens(&mut self, uses: &[u32]) -> f64 {
        let all = uses.iter().map(|n| f64::from(*n)).sum::<f64>().max(1.0);
        let most = uses.iter().copied().max().map_or(1.0, f64::from);
        self.fewest_uses = self.fewest_uses.min(all);
        most.max(all / self.fewest_uses)
    }

    /// How many visits away this layer's next one is: 1 for the layer that comes next.
    pub fn distance(&self, layer: usize) -> u32 {
        let ahead = if layer > self.current { layer - self.current } else { layer + self.layers() - self.current };
        ahead as u32
    }

    /// What a slot of the last tier gains by keeping an expert, `distance` visits before its layer's next one.
    pub fn short_term(&self, key: Key, distance: u32) -> f64 {
        match self.policy {
            Policy::Lru | Policy::Lfu => self.past[key as usize],
            // Hits per visit while the expert occupies the slot. It may stay until its layer's next visit, or until it is wanted: the better of both counts.
            // (To stop at a visit in between is never better than both: each later visit adds the same gain for the same time.)
            Policy::Scan => {
                let (soon, later) = (self.soon[key as usize], self.later[key as usize]);
                let (distance, scan) = (distance as f32, self.layers() as f32);
                f64::from((soon / distance).max(later / (distance * later + (1.0 - soon) * scan)))
            }
        }
    }

    /// What a slot of a faster tier gains by keeping an expert for good, whichever layer is being visited now.
    pub fn long_term(&self, key: Key) -> f64 {
        match self.policy {
            Policy::Lru | Policy::Lfu => self.past[key as usize],
            Policy::Scan => f64::from(self.later[key as usize]),
        }
    }

    /// Whether the present visit wants it.
    pub fn is_wanted_now(&self, key: Key) -> bool {
        self.visits > 0 && self.last_wanted[key as usize] == self.visits
    }

    /// Bytes for each expert at most, without what is learned about pairs.
    pub const BYTES_PER_EXPERT: usize = size_of::<(u64, f64, f32, f32)>() + Forecast::BYTES_PER_EXPERT;

    /// Bytes of memory: with [`Policy::Scan`] mostly a number for each pair of a layer's experts.
    pub fn bytes(&self) -> usize {
        self.past.len() * size_of::<(u64, f64, f32, f32)>() + self.forecast.bytes()
    }
}
