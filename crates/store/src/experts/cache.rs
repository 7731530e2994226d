//! Which expert lies in which slot of memory, and which has to go when another comes. Bookkeeping only: reading is done elsewhere, and the
//! simulator drives the same code with recorded traces.

/// How it is decided which expert has to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The one that was wanted longest ago.
    #[default]
    Lru,
}

impl Policy {
    pub const ALL: [Policy; 1] = [Policy::Lru];

    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
        }
    }
}

const NONE: u32 = u32::MAX;

/// An expert of one of the layers, numbered through.
type Key = u32;

/// Experts in slots of equal size.
#[derive(Debug)]
pub struct ExpertCache {
    policy: Policy,
    /// Key of each layer's first expert.
    first: Vec<Key>,
    /// By key.
    slots: Vec<u32>,
    last_wanted: Vec<u64>,
    /// By slot.
    keys: Vec<Key>,
    locks: Vec<u32>,
    pinned: Vec<bool>,
    free: Vec<u32>,
    visits: u64,
}

impl ExpertCache {
    /// `slots` slots for the experts of some layers, of which there are `experts[layer]`. `pinned`: (layer, expert) that stay once they are there.
    pub fn new(experts: &[usize], slots: usize, policy: Policy, pinned: &[(usize, usize)]) -> ExpertCache {
        let mut first = Vec::with_capacity(experts.len());
        let mut all = 0;
        for &n in experts {
            first.push(all);
            all += n as Key;
        }
        let mut cache = ExpertCache {
            policy,
            first,
            slots: vec![NONE; all as usize],
            last_wanted: vec![0; all as usize],
            keys: vec![NONE; slots],
            locks: vec![0; slots],
            pinned: vec![false; all as usize],
            free: (0..slots as u32).rev().collect(),
            visits: 0,
        };
        for &(layer, expert) in pinned {
            let key = cache.key(layer, expert);
            cache.pinned[key as usize] = true;
        }
        cache
    }

    fn key(&self, layer: usize, expert: usize) -> Key {
        self.first[layer] + expert as Key
    }

    /// A step has come to `layer`, and `tokens[i]` of its tokens want expert `wanted[i]`. To be called before the slots of these experts are asked for.
    pub fn visit(&mut self, layer: usize, wanted: &[u32], tokens: &[u32]) {
        debug_assert_eq!(wanted.len(), tokens.len());
        self.visits += 1;
        for &expert in wanted {
            let key = self.key(layer, expert as usize);
            self.last_wanted[key as usize] = self.visits;
        }
    }

    /// The slot of an expert that has one.
    pub fn slot(&self, layer: usize, expert: usize) -> Option<u32> {
        Some(self.slots[self.key(layer, expert) as usize]).filter(|s| *s != NONE)
    }

    /// A slot for an expert that has none: a free one, or that of an expert which then has none. Locked once. `None` if all are locked or pinned.
    pub fn place(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let key = self.key(layer, expert);
        debug_assert_eq!(self.slots[key as usize], NONE);
        let slot = self.free.pop().or_else(|| self.victim())?;
        let old = std::mem::replace(&mut self.keys[slot as usize], key);
        if old != NONE {
            self.slots[old as usize] = NONE;
        }
        self.slots[key as usize] = slot;
        self.locks[slot as usize] = 1;
        Some(slot)
    }

    /// The slot whose expert has to go.
    fn victim(&self) -> Option<u32> {
        let movable = |s: &u32| self.locks[*s as usize] == 0 && !self.pinned[self.keys[*s as usize] as usize];
        let worth = |s: &u32| match self.policy {
            Policy::Lru => self.last_wanted[self.keys[*s as usize] as usize],
        };
        (0..self.keys.len() as u32).filter(movable).min_by_key(worth)
    }

    /// Keeps a slot's expert where it is until it is unlocked as often as it was locked.
    pub fn lock(&mut self, slot: u32) {
        self.locks[slot as usize] += 1;
    }

    pub fn is_locked(&self, slot: u32) -> bool {
        self.locks[slot as usize] > 0
    }

    pub fn unlock(&mut self, slot: u32) {
        self.locks[slot as usize] -= 1;
    }

    /// Frees a slot: what it should hold could not be read.
    pub fn forget(&mut self, slot: u32) {
        let key = std::mem::replace(&mut self.keys[slot as usize], NONE);
        self.slots[key as usize] = NONE;
        self.locks[slot as usize] = 0;
        self.free.push(slot);
    }

    /// How many slots there are.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}
