//! Prefixes under random sequences: whatever is shared, copied, kept, evicted and taken up again, each sequence finds in its blocks and its state what it
//! would have computed itself.

use std::collections::HashMap;

use fastrand::Rng;
use sluice_cache::{
    BlockHash, BlockOp, EvictedNode, Group, KvCache, PrefixOptions, RestoreSpan, RestoreTarget, SequenceBlocks,
    block_hash,
};

const BLOCK: usize = 4;

/// What a position of a block, or a state, holds: all tokens up to there (the salt before them).
type Content = Vec<u32>;

/// Memory by number, as a backend has it.
#[derive(Default)]
struct Memory {
    blocks: HashMap<(usize, u32), [Content; BLOCK]>,
    states: HashMap<u32, Content>,
    /// What was copied out of it.
    disk: HashMap<BlockHash, Stored>,
}

/// A node that is kept elsewhere.
struct Stored {
    before: BlockHash,
    tokens: Vec<u32>,
    blocks: Vec<Option<[Content; BLOCK]>>,
    state: Option<Content>,
}

impl Memory {
    fn copy_out(&mut self, leaving: &EvictedNode) {
        let blocks = leaving.blocks.iter().enumerate().map(|(g, b)| b.map(|b| self.blocks[&(g, b)].clone()));
        let state = leaving.state.map(|row| self.states[&row].clone());
        let (before, tokens) = (leaving.before, leaving.tokens.clone());
        self.disk.insert(leaving.hash, Stored { before, tokens, blocks: blocks.collect(), state });
    }

    fn carry_out(&mut self, cache: &mut KvCache) {
        cache.drain_ops(|chore, leaving| match chore {
            BlockOp::CopyBlock { group, from, to } => {
                let copy = self.blocks.get(&(group, from)).cloned().unwrap_or_default();
                self.blocks.insert((group, to), copy);
            }
            BlockOp::CopyState { from, to } => {
                let copy = self.states[&from].clone();
                self.states.insert(to, copy);
            }
            BlockOp::ZeroState(row) => _ = self.states.insert(row, Content::new()),
            BlockOp::CopyOut(i) => self.copy_out(&leaving[i]),
        });
    }
}

struct Sequence {
    tokens: Vec<u32>,
    salt: u32,
    computed: usize,
    held: SequenceBlocks,
}

struct World {
    random: Rng,
    groups: Vec<Group>,
    cache: KvCache,
    has_states: bool,
    memory: Memory,
    sequences: Vec<Sequence>,
    adopted: usize,
    restored: usize,
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Rng::with_seed(seed);
        let windows: &[Option<usize>] = [&[None][..], &[Some(6)], &[None, Some(9)]][random.usize(..3)];
        let blocks = 12 + random.usize(..20);
        let groups: Vec<Group> = windows.iter().map(|w| Group { block_tokens: BLOCK, window: *w, blocks }).collect();
        let states = if random.bool() { 2 + random.usize(..5) } else { 0 };
        let prefixes = Some(PrefixOptions { key: [7; 32], snapshots: random.usize(..4) });
        let mut cache = KvCache::new(&groups, states, prefixes);
        if random.bool() {
            cache.enable_offload(random.usize(..12));
        }
        let (memory, has_states) = (Memory::default(), states > 0);
        World { random, groups, cache, has_states, memory, sequences: Vec::new(), adopted: 0, restored: 0 }
    }

    fn root(&self, salt: u32) -> BlockHash {
        self.cache.root(&salt.to_le_bytes())
    }

    /// Few tokens, so that many sequences begin alike.
    fn begin(&mut self) {
        let salt = self.random.u32(..2);
        let mut tokens: Vec<u32> = match self.sequences.len() {
            n if n > 0 && self.random.bool() => {
                let other = &self.sequences[self.random.usize(..n)].tokens;
                other[..self.random.usize(..=other.len())].to_vec()
            }
            _ => Vec::new(),
        };
        let more = 1 + self.random.usize(..14);
        tokens.extend((0..more).map(|_| self.random.u32(..2)));
        self.sequences.push(Sequence { tokens, salt, computed: 0, held: self.cache.new_sequence() });
    }

    /// What is at the end of these tokens, computed by itself.
    fn content(s: &Sequence, to: usize) -> Content {
        [s.salt].into_iter().chain(s.tokens[..to].iter().copied()).collect()
    }

    /// Takes a sequence some tokens further, if there is room.
    fn step(&mut self, i: usize) {
        let root = self.root(self.sequences[i].salt);
        let s = &mut self.sequences[i];
        // 1. What is there already
        if s.held.is_empty() && s.computed == 0 && self.random.bool() {
            self.restore(i);
        }
        let s = &mut self.sequences[i];
        if s.held.is_empty() && s.computed == 0 {
            let most = s.tokens.len() - 1;
            let found = self.cache.reuse_prefix(&mut s.held, root, &s.tokens, most);
            assert!(found.tokens <= most && found.tokens <= found.known);
            s.computed = found.tokens;
            self.adopted += found.tokens;
        }
        // 2. Room
        if s.computed == s.tokens.len() {
            s.tokens.push(self.random.u32(..2));
        }
        let to = s.computed + 1 + self.random.usize(..(s.tokens.len() - s.computed));
        let room = self.cache.can_grow(&s.held, to);
        assert_eq!(self.cache.grow(&mut s.held, to).is_ok(), room);
        self.memory.carry_out(&mut self.cache);
        self.check_all();
        let s = &mut self.sequences[i];
        if !room {
            self.cache.retire(&mut s.held, root, &s.tokens, s.computed);
            s.computed = 0;
            return;
        }
        // 3. Keys and values, and the state
        for position in s.computed..to {
            for (g, table) in s.held.tables.iter().enumerate() {
                let block = self.memory.blocks.entry((g, table.blocks()[position / BLOCK])).or_default();
                block[position % BLOCK] = World::content(s, position + 1);
            }
        }
        if let Some(row) = s.held.state {
            let before = self.memory.states.insert(row, World::content(s, to)).unwrap_or_default();
            let expected = if s.computed == 0 { Content::new() } else { World::content(s, s.computed) };
            assert_eq!(before, expected, "the state before");
        }
        s.computed = to;
        self.cache.publish(&mut s.held, root, &s.tokens, to);
        if self.random.u32(..4) == 0 {
            self.cache.snapshot(&mut s.held, root, &s.tokens, to);
        }
        self.cache.drop_before_window(&mut s.held, to);
        self.memory.carry_out(&mut self.cache);
        self.check_all();
    }

    /// Takes the longest prefix that memory and what was copied out of it have between them.
    fn restore(&mut self, i: usize) {
        let root = self.root(self.sequences[i].salt);
        let s = &mut self.sequences[i];
        let most = s.tokens.len() - 1;
        let mut path = vec![root];
        for block in s.tokens[..most].chunks_exact(BLOCK) {
            path.push(block_hash(&[7; 32], &path[path.len() - 1], block));
        }
        for whole in (0..path.len()).rev() {
            let disk = &self.memory.disk;
            let rest = &s.tokens[whole * BLOCK..most];
            let mut tails: Vec<(usize, BlockHash)> = vec![(0, path[whole])];
            let follow = disk.iter().filter(|(_, d)| d.before == path[whole]);
            if !self.has_states {
                // Also a part of what was stored.
                let common = |d: &Stored| d.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
                tails.extend(follow.map(|(h, d)| (common(d), *h)).filter(|(n, _)| (1..BLOCK).contains(n)));
                tails.sort_unstable_by_key(|(tail, _)| std::cmp::Reverse(*tail));
            } else {
                let ends = follow.filter(|(_, d)| d.tokens.len() < BLOCK);
                tails.extend(ends.filter(|(_, d)| rest.starts_with(&d.tokens)).map(|(h, d)| (d.tokens.len(), *h)));
                tails.sort_unstable_by_key(|(tail, _)| std::cmp::Reverse(*tail));
            }
            for (tail, end) in tails {
                let node = |node: usize| disk.get(if node < whole { &path[node + 1] } else { &end });
                let may_fill = |n: usize, group: usize| match group {
                    usize::MAX => node(n).is_some_and(|d| d.state.is_some()),
                    g => node(n).is_some_and(|d| d.blocks[g].is_some()),
                };
                let wanted = RestoreSpan { whole, tail };
                let to = whole * BLOCK + tail;
                if to == 0 {
                    continue;
                }
                let Some(fillings) = self.cache.reserve_restore(&mut s.held, root, &s.tokens, wanted, may_fill) else {
                    assert!(s.held.is_empty());
                    continue;
                };
                let filled: Vec<(RestoreTarget, &Stored)> = fillings
                    .into_iter()
                    .map(|f| {
                        (
                            f,
                            node(match f {
                                RestoreTarget::Block { node, .. } | RestoreTarget::State { node, .. } => node,
                            })
                            .unwrap(),
                        )
                    })
                    .collect();
                let blocks: Vec<_> = filled
                    .iter()
                    .filter_map(|(f, d)| match *f {
                        RestoreTarget::Block { group, block, .. } => {
                            Some(((group, block), d.blocks[group].clone().unwrap()))
                        }
                        RestoreTarget::State { .. } => None,
                    })
                    .collect();
                let state = filled.iter().find_map(|(f, d)| match *f {
                    RestoreTarget::State { row, .. } => Some((row, d.state.clone().unwrap())),
                    RestoreTarget::Block { .. } => None,
                });
                // What goes for it is copied out before it is overwritten.
                self.memory.carry_out(&mut self.cache);
                self.memory.blocks.extend(blocks);
                self.memory.states.extend(state);
                s.computed = to;
                self.restored += to;
                self.cache.publish(&mut s.held, root, &s.tokens, to);
                if self.has_states {
                    self.cache.snapshot(&mut s.held, root, &s.tokens, to);
                }
                self.cache.note_kept(root, &s.tokens, wanted);
                self.memory.carry_out(&mut self.cache);
                return self.check_all();
            }
        }
    }

    /// Now and then all that is worth it is copied out.
    fn save(&mut self) {
        self.memory.carry_out(&mut self.cache);
        while let Some(leaving) = self.cache.next_reused() {
            self.memory.copy_out(&leaving);
        }
        let ends = self.random.bool();
        for hash in self.cache.not_offloaded(ends) {
            let leaving = self.cache.offload_by_hash(&hash).expect("it was to be kept");
            self.memory.copy_out(&leaving);
        }
        assert_eq!(self.cache.not_offloaded(ends), Vec::<BlockHash>::new());
    }

    /// Every sequence sees what it would have computed.
    fn check_all(&self) {
        for s in &self.sequences {
            for (g, (table, group)) in s.held.tables.iter().zip(&self.groups).enumerate() {
                let seen = group.window.map_or(0, |w| (s.computed + 1).saturating_sub(w));
                for position in seen..s.computed {
                    let block = &self.memory.blocks[&(g, table.blocks()[position / BLOCK])];
                    assert_eq!(
                        block[position % BLOCK],
                        World::content(s, position + 1),
                        "group {g}, position {position}"
                    );
                }
            }
            if let Some(row) = s.held.state.filter(|_| s.computed > 0) {
                assert_eq!(self.memory.states[&row], World::content(s, s.computed));
            }
            assert!(s.computed == 0 || !self.has_states || s.held.state.is_some());
        }
    }

    fn end(&mut self, i: usize) {
        let mut s = self.sequences.swap_remove(i);
        let root = self.root(s.salt);
        if self.random.bool() {
            self.cache.retire(&mut s.held, root, &s.tokens, s.computed);
        } else {
            self.cache.release(&mut s.held);
        }
        assert!(s.held.is_empty());
        self.check_all();
    }
}

#[test]
fn every_sequence_finds_what_it_would_have_computed() {
    let (mut adopted, mut restored) = (0, 0);
    for seed in 0..5000 {
        let mut world = World::new(seed);
        for _ in 0..60 {
            let n = world.sequences.len();
            match world.random.u32(..10) {
                9 => world.save(),
                0..3 => world.begin(),
                3..9 if n > 0 => {
                    let i = world.random.usize(..n);
                    world.step(i);
                }
                _ if n > 0 => {
                    let i = world.random.usize(..n);
                    world.end(i);
                }
                _ => {}
            }
        }
        while !world.sequences.is_empty() {
            world.end(0);
        }
        adopted += world.adopted;
        restored += world.restored;
        // Nothing is lost: what is kept can all be given up.
        assert_eq!((world.cache.in_use().sum::<usize>(), world.cache.states_in_use()), (0, 0), "seed {seed}");
        world.cache.forget_prefixes();
        assert_eq!((world.cache.idle().sum::<usize>(), world.cache.snapshots()), (0, 0), "seed {seed}");
    }
    assert!(adopted > 30_000, "{adopted} tokens were taken up");
    assert!(restored > 5_000, "{restored} tokens came back");
}

/// A cache of blocks of 4 tokens, and a sequence's life in it: (adopted, known).
struct Lives {
    cache: KvCache,
}

impl Lives {
    fn new(blocks: usize, states: usize) -> Lives {
        let prefixes = Some(PrefixOptions { key: [1; 32], snapshots: states });
        let group = Group { block_tokens: BLOCK, window: None, blocks };
        Lives { cache: KvCache::new(&[group], states, prefixes) }
    }

    /// Computes these tokens, with a snapshot at each of `marks`, and ends.
    fn live(&mut self, salt: &[u8], tokens: &[u32], marks: &[usize]) -> (usize, usize) {
        let root = self.cache.root(salt);
        let mut held = self.cache.new_sequence();
        let found = self.cache.reuse_prefix(&mut held, root, tokens, tokens.len() - 1);
        for to in marks.iter().copied().filter(|m| *m > found.tokens).chain([tokens.len()]) {
            self.cache.grow(&mut held, to).unwrap();
            self.cache.publish(&mut held, root, tokens, to);
            if to < tokens.len() {
                assert!(self.cache.snapshot(&mut held, root, tokens, to));
            }
        }
        self.cache.retire(&mut held, root, tokens, tokens.len());
        (found.tokens, found.known)
    }
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).collect()
}

#[test]
fn a_prefix_is_found_to_the_token() {
    let mut lives = Lives::new(64, 0);
    assert_eq!(lives.live(b"", &tokens(10), &[]), (0, 0));
    // Two whole blocks, and a copy of the part of the third; one token must be left to compute.
    assert_eq!(lives.live(b"", &tokens(10), &[]), (9, 9));
    assert_eq!(lives.live(b"", &tokens(30), &[]), (10, 10));
    let mut other = tokens(30);
    other[17] = 99;
    assert_eq!(lives.live(b"", &other, &[]), (17, 17));
    assert_eq!(lives.live(b"somebody else's", &tokens(30), &[]), (0, 0));
    assert_eq!(lives.cache.in_use().sum::<usize>(), 0);
}

#[test]
fn a_hybrid_goes_on_where_a_state_was_kept() {
    let mut lives = Lives::new(64, 8);
    assert_eq!(lives.live(b"", &tokens(30), &[6, 16]), (0, 0));
    // The end of the sequence has a state too.
    assert_eq!(lives.live(b"", &tokens(40), &[]), (30, 30));
    let after = |shared: u32| {
        let mut all = tokens(40);
        all[shared as usize..].iter_mut().for_each(|t| *t += 1000);
        all
    };
    assert_eq!(lives.live(b"", &after(20), &[]), (16, 20));
    assert_eq!(lives.live(b"", &after(9), &[]), (6, 9));
    assert_eq!(lives.live(b"", &after(5), &[]), (0, 5));
}

#[test]
fn leaves_that_were_not_used_for_longest_go_first() {
    let mut lives = Lives::new(8, 0);
    let (a, b): (Vec<u32>, Vec<u32>) = (tokens(12), tokens(12).iter().map(|t| t + 100).collect());
    lives.live(b"", &a, &[]);
    lives.live(b"", &b, &[]);
    // Two blocks are free, a third is b's or a's: the last of a, which was used before b.
    lives.live(b"", &tokens(12).iter().map(|t| t + 200).collect::<Vec<_>>(), &[]);
    assert_eq!(lives.cache.evicted().blocks, 1);
    let root = lives.cache.root(b"");
    let mut known = |tokens: &[u32]| {
        let mut held = lives.cache.new_sequence();
        let found = lives.cache.reuse_prefix(&mut held, root, tokens, tokens.len());
        lives.cache.release(&mut held);
        found.known
    };
    assert_eq!((known(&a), known(&b)), (8, 12));
}

#[test]
fn sequences_that_compute_the_same_come_to_share_it() {
    let group = Group { block_tokens: BLOCK, window: None, blocks: 16 };
    let mut cache = KvCache::new(&[group], 0, Some(PrefixOptions { key: [1; 32], snapshots: 0 }));
    let (root, tokens) = (cache.root(b""), tokens(8));
    let mut both = [cache.new_sequence(), cache.new_sequence()];
    for held in &mut both {
        cache.grow(held, 8).unwrap();
    }
    assert_eq!(cache.in_use().sum::<usize>(), 4);
    for held in &mut both {
        cache.publish(held, root, &tokens, 8);
    }
    assert_eq!(cache.in_use().sum::<usize>(), 2);
    assert_eq!(both[0].tables[0].blocks(), both[1].tables[0].blocks());
}
