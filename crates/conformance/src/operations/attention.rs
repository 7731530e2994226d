//! Attention over paged caches: prefill and decode together, contexts of several partitions, windows, sinks, caps, forks.

use sluice_backend::{
    AttentionLayer, AttentionMode, Float, KvLayout, KvPool, KvType, RotaryFrequencies, RotaryId, SequenceInput,
    StepInputs, Wanted, WeightFormat,
};

use crate::case::Case;
use crate::case::Placed;
use crate::setup::CAPACITY;
use crate::weights::encode;

/// Positions that rotary embeddings are made for.
pub const POSITIONS: usize = 1200;

/// A block of ordinary numbers in the layout's element type.
pub fn random_block(c: &mut Case, layout: &KvLayout) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(layout.block_bytes());
    let rows = layout.kv_heads * layout.block_rows();
    for _ in 0..layout.layers {
        for dim in [layout.k_dim, layout.v_dim].into_iter().filter(|dim| *dim > 0) {
            match layout.kv_type {
                KvType::F32 => bytes.extend(encode(Float::F32, &c.small(rows * dim, 2.0))),
                KvType::Bf16 => bytes.extend(encode(Float::Bf16, &c.small(rows * dim, 2.0))),
                KvType::F16 => bytes.extend(encode(Float::F16, &c.small(rows * dim, 2.0))),
                KvType::Int8 | KvType::Int16 => {
                    let (from, size) = (bytes.len(), layout.kv_type.size());
                    bytes.resize(from + rows * dim * size, 0);
                    c.random.fill(&mut bytes[from..]);
                    // -128 is never stored, but in low bytes.
                    for high in bytes[from..].chunks_mut(dim).step_by(size) {
                        high.iter_mut().for_each(|b| *b = if *b == 128 { 0 } else { *b });
                    }
                    let greatest = if size == 1 { 0.02 } else { 1e-4 };
                    let scales: Vec<f32> = c.small(rows, greatest).iter().map(|s| s.abs()).collect();
                    bytes.extend(encode(Float::F32, &scales));
                }
            }
        }
    }
    bytes.resize(layout.block_bytes(), 0);
    bytes
}

/// An attention layer with its own tensors.
pub struct AttentionCase {
    pub inner: AttentionLayer,
    pub out: Placed,
}

pub struct Group {
    pub pool: KvPool,
    pub layers: Vec<AttentionCase>,
    /// The window of all its layers.
    pub window: Option<usize>,
    /// Free blocks, in random order.
    free: Vec<u32>,
    used: Vec<u32>,
    blocks: usize,
    committed: usize,
}

/// A sequence: its length, and its blocks in each group.
#[derive(Clone, Default)]
pub struct Sequence {
    pub len: usize,
    pub tables: Vec<Vec<u32>>,
    pub state: u32,
}

impl Case {
    pub fn rotary(&mut self, pairs: usize, positions: usize) -> RotaryId {
        let inv_freq = (0..pairs).map(|i| 10f32.powf(-(i as f32) * 4.0 / pairs as f32)).collect();
        let scaling = self.one_of(&[1.0, 1.0, 1.138]);
        self.backend.rotary(&RotaryFrequencies { inv_freq, scaling }, positions).expect("a rotary embedding")
    }

    /// A layer of a group, for steps of at most `tokens` tokens at so many positions. With `heads` per KV head, and q of a model's own width.
    pub fn attention_layer(
        &mut self,
        layout: &KvLayout,
        place: (usize, usize),
        window: Option<usize>,
        (positions, tokens): (usize, usize),
    ) -> AttentionCase {
        let per_kv = if self.once_in(4) { self.random.usize(5..=9) } else { self.random.usize(1..=4) };
        let heads = per_kv * layout.kv_heads;
        let gated = layout.k_dim == layout.v_dim && self.coin();
        let pairs = if self.coin() { layout.k_dim / 2 } else { self.random.usize(1..=layout.k_dim / 2) };
        let q = self.tensor(tokens, heads * layout.k_dim * if gated { 2 } else { 1 });
        let [k, v, out] = [layout.kv_heads * layout.k_dim, layout.kv_heads * layout.v_dim, heads * layout.v_dim]
            .map(|cols| self.tensor(tokens, cols));
        let sinks = self.once_in(3).then(|| self.small(heads, 3.0)).map(|values| self.vector(&values));
        let inner = AttentionLayer {
            q: q.tensor,
            k: k.tensor,
            v: v.tensor,
            out: out.tensor,
            heads,
            gated,
            q_norm: self.coin().then(|| self.norm(layout.k_dim)),
            k_norm: self.coin().then(|| self.norm(layout.k_dim)),
            rotary: self.rotary(pairs, positions),
            group: place.0,
            layer: place.1,
            shared: false,
            scale: (layout.k_dim as f32).sqrt().recip(),
            window,
            softcap: if self.once_in(3) { Some(self.one_of(&[5.0, 50.0])) } else { None },
            sinks,
            selected: false,
        };
        let AttentionLayer { softcap, q_norm, k_norm, .. } = &inner;
        let (norms, sinks) = ((q_norm.is_some(), k_norm.is_some()), inner.sinks.is_some());
        self.shape(format!(
            "layer {place:?}: {heads} heads, gated {gated}, {pairs} pairs turned, norms {norms:?}, cap {softcap:?}, sinks {sinks}"
        ));
        AttentionCase { inner, out }
    }

    /// A cache group with its layers; blocks for so many positions in all.
    pub fn group(&mut self, number: usize, positions: usize, tokens: usize) -> Group {
        let layout = self.kv_layout();
        self.group_of(layout, number, (positions, POSITIONS), tokens)
    }

    /// A group of this layout, with positions for all sequences and for one.
    fn group_of(
        &mut self,
        layout: KvLayout,
        number: usize,
        (positions, of_one): (usize, usize),
        tokens: usize,
    ) -> Group {
        let window = if self.coin() { Some(self.random.usize(1..=300)) } else { None };
        self.group_with(layout, number, positions, window, |c| {
            (0..layout.layers).map(|l| c.attention_layer(&layout, (number, l), window, (of_one, tokens))).collect()
        })
    }

    /// A group with the caller's layers.
    pub fn group_with(
        &mut self,
        layout: KvLayout,
        number: usize,
        positions: usize,
        window: Option<usize>,
        layers: impl FnOnce(&mut Case) -> Vec<AttentionCase>,
    ) -> Group {
        let blocks = positions.div_ceil(layout.block_tokens) + 24;
        self.shape(format!("group {number}: window {window:?}, {blocks} blocks of {layout:?}"));
        let pool = self.backend.alloc_kv(layout, blocks).expect("memory for keys and values");
        let layers = layers(self);
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        self.random.shuffle(&mut free);
        Group { pool, layers, window, free, used: Vec::new(), blocks, committed: 0 }
    }

    /// Observes the contents of all blocks in use.
    pub fn see_blocks(&mut self, groups: &[Group]) {
        for (number, group) in groups.iter().enumerate() {
            let mut bytes = vec![0; group.pool.layout.block_bytes()];
            for &block in &group.used {
                self.backend.read_block(&group.pool, block, &mut bytes);
                self.see_bytes(format!("block {block} of group {number}"), bytes.clone());
            }
        }
    }

    /// A sequence whose first `len` positions hold random keys and values.
    pub fn begun(&mut self, groups: &mut [Group], len: usize) -> Sequence {
        let mut sequence = Sequence { len: 0, tables: vec![vec![]; groups.len()], state: 0 };
        for (group, table) in groups.iter_mut().zip(&mut sequence.tables) {
            group.grow(self, table, len);
            for &block in table.iter() {
                let bytes = random_block(self, &group.pool.layout);
                self.backend.write_block(&group.pool, block, &bytes);
            }
        }
        Sequence { len, ..sequence }
    }

    /// Another sequence with the same past: whole blocks are shared, the last one is copied.
    pub fn fork(&mut self, groups: &mut [Group], from: &Sequence) -> Sequence {
        let mut to = from.clone();
        for (group, table) in groups.iter_mut().zip(&mut to.tables) {
            let whole = from.len / group.pool.layout.block_tokens;
            table.truncate(whole + 1);
            if let Some(last) = table.get_mut(whole) {
                let mut own = Vec::new();
                group.grow(self, &mut own, 1);
                self.backend.copy_blocks(&group.pool, &[(*last, own[0])]);
                *last = own[0];
            }
        }
        to
    }

    /// Another sequence, which has the first `common` positions of one, and random ones of its own up to `len`.
    pub fn branch(&mut self, groups: &mut [Group], from: &Sequence, common: usize, len: usize) -> Sequence {
        let mut to = self.fork(groups, &Sequence { len: common, ..from.clone() });
        for (group, table) in groups.iter_mut().zip(&mut to.tables) {
            let there = table.len();
            group.grow(self, table, len);
            for &block in &table[there..] {
                let bytes = random_block(self, &group.pool.layout);
                self.backend.write_block(&group.pool, block, &bytes);
            }
        }
        Sequence { len, ..to }
    }

    /// Up to `most` sequences, each from an empty context to 600 positions; some begin as the first one does.
    pub fn relatives(&mut self, groups: &mut [Group], most: usize) -> Vec<Sequence> {
        let mut sequences: Vec<Sequence> = Vec::new();
        for _ in 0..self.random.usize(1..=most) {
            let longest = self.one_of(&[1, 60, 300, 600]);
            let len = self.random.usize(..longest);
            let sequence = match sequences.first().cloned().filter(|_| self.coin()) {
                Some(from) => {
                    let common = from.len.min(len);
                    self.branch(groups, &from, common, len)
                }
                None => self.begun(groups, len),
            };
            sequences.push(sequence);
        }
        sequences
    }

    /// A step in which some of the sequences take part, each with one token or several, with `most` tokens in all.
    pub fn take_some(&mut self, groups: &mut [Group], sequences: &mut [Sequence], most: usize) -> StepInputs {
        let mut inputs = inputs_for(groups);
        let mut left = most;
        for s in sequences {
            let most = self.one_of(&[0, 1, 1, 8, 70]).min(left);
            let n = if most > 1 { self.random.usize(1..=most) } else { most };
            if n > 0 {
                self.shape(format!("{n} tokens from {}", s.len));
                self.take(groups, s, n, 2, Wanted::None, &mut inputs);
                left -= n;
            }
        }
        inputs
    }

    /// Adds the next `n` tokens of a sequence to a step.
    pub fn take(
        &mut self,
        groups: &mut [Group],
        s: &mut Sequence,
        n: usize,
        vocabulary: u32,
        wanted: Wanted,
        inputs: &mut StepInputs,
    ) {
        for (group, table) in groups.iter_mut().zip(&mut s.tables) {
            group.grow(self, table, s.len + n);
            if let Some(window) = group.window {
                // Blocks that no query sees are gone.
                let whole = (s.len + 1).saturating_sub(window) / group.pool.layout.block_tokens;
                table.iter_mut().take(whole).for_each(|block| *block = u32::MAX);
            }
        }
        let tokens: Vec<u32> = (0..n).map(|_| self.random.u32(..vocabulary)).collect();
        inputs.push(&SequenceInput { tokens: &tokens, position: s.len, state: s.state, tables: &s.tables, wanted });
        s.len += n;
    }
}

impl Group {
    fn grow(&mut self, c: &mut Case, table: &mut Vec<u32>, tokens: usize) {
        while table.len() < tokens.div_ceil(self.pool.layout.block_tokens) {
            let block = self.free.pop().expect("enough blocks");
            self.used.push(block);
            table.push(block);
            if self.committed <= block as usize {
                self.committed = c.random.usize(block as usize + 1..=self.blocks);
                c.backend.commit_kv(&self.pool, self.committed).expect("memory for blocks");
            }
        }
    }
}

pub fn inputs_for(groups: &[Group]) -> StepInputs {
    let block_tokens: Vec<usize> = groups.iter().map(|g| g.pool.layout.block_tokens).collect();
    StepInputs::new(&block_tokens, CAPACITY)
}

pub fn attention(c: &mut Case) {
    const SEQUENCES: usize = 4;
    const TOKENS: usize = 150;
    let mut groups = Vec::new();
    for number in 0..c.random.usize(1..=2) {
        let mut group = c.group(number, (SEQUENCES + 1) * POSITIONS, TOKENS);
        if c.once_in(3) {
            // One more layer, which shares the keys and values of an earlier one.
            let layer = c.random.usize(..group.layers.len());
            let mut last = c.attention_layer(&group.pool.layout, (number, layer), group.window, (POSITIONS, TOKENS));
            last.inner.shared = true;
            c.shape("it has those of the layer before it there".into());
            group.layers.push(last);
        }
        groups.push(group);
    }
    // 1. Some sequences are in the middle of a context
    let mut sequences = Vec::new();
    for _ in 0..c.random.usize(1..=SEQUENCES) {
        let most = c.one_of(&[1, 60, 300, 700]);
        let len = c.random.usize(..most);
        let sequence = c.begun(&mut groups, len);
        sequences.push(sequence);
    }
    for _ in 0..c.random.usize(1..=3) {
        // 2. Any of them take part, with one token or several
        let inputs = c.take_some(&mut groups, &mut sequences, TOKENS);
        if inputs.sequences() == 0 {
            continue;
        }
        for layer in groups.iter().flat_map(|g| &g.layers) {
            let AttentionLayer { q, k, v, .. } = layer.inner;
            [q, k, v].into_iter().for_each(|t| c.fill(t));
        }
        c.backend.begin(&inputs);
        groups.iter().flat_map(|g| &g.layers).for_each(|layer| c.backend.attention(&layer.inner));
        c.backend.end();
        for layer in groups.iter().flat_map(|g| &g.layers) {
            c.see(format!("layer {:?}", (layer.inner.group, layer.inner.layer)), layer.out.whole);
        }
        c.see_blocks(&groups);
        // 3. One of them goes two ways
        let which = c.random.usize(..sequences.len());
        if sequences.len() < SEQUENCES && groups.iter().all(|g| g.window.is_none()) && c.coin() {
            let fork = c.fork(&mut groups, &sequences[which]);
            sequences.push(fork);
        }
    }
}

/// Groups of sequences with common prefixes. All of them read the common blocks, with one token or several.
pub fn shared_prefixes(c: &mut Case) {
    const TOKENS: usize = 150;
    const POSITIONS_OF_ALL: usize = 5 * POSITIONS;
    let mut groups = Vec::new();
    for number in 0..c.random.usize(1..=2) {
        let group = c.group(number, POSITIONS_OF_ALL + 200, TOKENS);
        groups.push(group);
    }
    // 1. A forest: each is new, or parts from one before it somewhere
    let mut sequences: Vec<Sequence> = Vec::new();
    let mut left = POSITIONS_OF_ALL;
    for _ in 0..c.random.usize(2..=7) {
        let most = c.one_of(&[200, 600, 1000]);
        let len = c.random.usize(1..most).min(left);
        let parent = if sequences.is_empty() || c.once_in(5) { None } else { Some(c.random.usize(..sequences.len())) };
        let sequence = match parent {
            None => c.begun(&mut groups, len),
            Some(parent) => {
                let from = sequences[parent].clone();
                // To the end of either, as far as not.
                let most = from.len.min(len);
                let common = if c.coin() { most } else { c.random.usize(..=most) };
                c.shape(format!("{common} of {len} in common with {parent}"));
                c.branch(&mut groups, &from, common, len)
            }
        };
        left -= len;
        sequences.push(sequence);
        // What grows in the steps to come.
        if left < 300 {
            break;
        }
    }
    // 2. Some of them take part, most with a token
    for _ in 0..c.random.usize(1..=2) {
        let mut inputs = inputs_for(&groups);
        let mut left = TOKENS;
        for s in &mut sequences {
            let most = c.one_of(&[0, 1, 1, 1, 1, 40]).min(left);
            let n = if most > 1 { c.random.usize(1..=most) } else { most };
            if n > 0 {
                c.shape(format!("{n} tokens from {}", s.len));
                c.take(&mut groups, s, n, 2, Wanted::None, &mut inputs);
                left -= n;
            }
        }
        if inputs.sequences() == 0 {
            continue;
        }
        for layer in groups.iter().flat_map(|g| &g.layers) {
            let AttentionLayer { q, k, v, .. } = layer.inner;
            [q, k, v].into_iter().for_each(|t| c.fill(t));
        }
        c.backend.begin(&inputs);
        groups.iter().flat_map(|g| &g.layers).for_each(|layer| c.backend.attention(&layer.inner));
        c.backend.end();
        for layer in groups.iter().flat_map(|g| &g.layers) {
            c.see(format!("layer {:?}", (layer.inner.group, layer.inner.layer)), layer.out.whole);
        }
    }
}

/// A token of each sequence behind many partitions, mostly with heads of 128 elements of sixteen bits; at times behind more than 128 of them, or of many sequences.
pub fn deep_contexts(c: &mut Case) {
    let (very, many) = (c.once_in(4), c.once_in(4));
    let (most, tokens) = match (very, many) {
        (true, _) => (17_000, 1),
        (_, true) => (500, 48),
        _ => (POSITIONS - 10, 3),
    };
    let mut layout = KvLayout { layers: 1, ..c.kv_layout() };
    if !very && !c.once_in(4) {
        let kv_type = c.one_of(&[KvType::Bf16, KvType::F16]);
        layout = KvLayout { k_dim: 128, v_dim: 128, kv_type, mode: AttentionMode::F32, ..layout };
    }
    if very {
        layout = KvLayout { k_dim: 16, v_dim: c.one_of(&[8, 40]), block_tokens: 512, kv_heads: 1, ..layout };
    }
    let mut groups = vec![c.group_of(layout, 0, (tokens * most + 600, most + 600), tokens)];
    let mut sequences = Vec::new();
    for _ in 0..if many { tokens } else { c.random.usize(1..=tokens) } {
        let len = if very { c.random.usize(16_384..most) } else { c.random.usize(..most) };
        let sequence = c.begun(&mut groups, len);
        sequences.push(sequence);
    }
    // The output goes into a product, as it does in a layer.
    let (out, rows) = (groups[0].layers[0].inner.out.first_rows(sequences.len()), c.random.usize(1..100));
    if out.cols.is_multiple_of(64) && !c.once_in(4) {
        c.uniform = Some(WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 });
    }
    let linear = c.linear(rows, out.cols, false);
    let sum = c.tensor(sequences.len(), rows);
    for _ in 0..2 {
        let mut inputs = inputs_for(&groups);
        for s in &mut sequences {
            c.shape(format!("a token at {}", s.len));
            c.take(&mut groups, s, 1, 2, Wanted::None, &mut inputs);
        }
        let AttentionLayer { q, k, v, .. } = groups[0].layers[0].inner;
        [q, k, v].into_iter().for_each(|t| c.fill(t));
        c.backend.begin(&inputs);
        c.backend.attention(&groups[0].layers[0].inner);
        c.backend.project_add(out, &linear, sum.tensor);
        c.backend.end();
        c.see("attention".to_string(), groups[0].layers[0].out.whole);
        c.see("sum", sum.whole);
        c.see_blocks(&groups);
    }
}
