//! Writing and reading buffers, blocks and states.

use sluice_backend::{AttentionMode, KvLayout, MemoryClass};

use super::attention::random_block;
use crate::case::Case;

const CLASSES: [MemoryClass; 4] =
    [MemoryClass::WeightsCopied, MemoryClass::State, MemoryClass::Scratch, MemoryClass::Experts];

pub fn buffers(c: &mut Case) {
    let bytes_of = |c: &mut Case, class| -> usize {
        c.backend.memory().iter().filter(|m| m.class == class).map(|m| m.bytes).sum()
    };
    for _ in 0..c.random.usize(1..5) {
        let (rows, cols) = (c.random.usize(1..40), c.random.usize(1..90));
        let class = c.one_of(&CLASSES);
        c.shape(format!("{rows} x {cols} of {}", class.name()));
        let before = bytes_of(c, class);
        let all = c.backend.alloc(class, rows, cols).unwrap();
        // Experts are counted by their slots alone.
        let more = bytes_of(c, class) - before;
        c.see_text("counted", format!("{}", class == MemoryClass::Experts || more >= 4 * rows * cols));
        c.see("zeros", all);
        for _ in 0..c.random.usize(1..4) {
            let (some_rows, some_cols) = (c.run_of(rows), c.run_of(cols));
            let part = all.rows(some_rows).columns(some_cols);
            c.fill(part);
            c.see("a part", part);
            c.see("all", all);
        }
    }
}

pub fn caches(c: &mut Case) {
    // 1. Blocks
    let layout = c.kv_layout();
    let blocks = c.random.usize(3..20);
    c.shape(format!("{blocks} blocks of {layout:?}"));
    let pool = c.backend.alloc_kv(layout, blocks).unwrap();
    let first = c.random.usize(1..=blocks);
    c.backend.commit_kv(&pool, first).unwrap();
    c.backend.commit_kv(&pool, blocks).unwrap();
    let mut bytes = vec![1; layout.block_bytes()];
    c.backend.read_block(&pool, blocks as u32 - 1, &mut bytes);
    c.see_bytes("a new block", bytes.clone());
    for _ in 0..blocks {
        let block = random_block(c, &layout);
        let to = c.random.u32(..blocks as u32);
        c.backend.write_block(&pool, to, &block);
        let pairs: Vec<(u32, u32)> =
            (0..c.random.usize(..4)).map(|_| (c.random.u32(..blocks as u32), c.random.u32(..blocks as u32))).collect();
        // In the order in which they are given: a block may be copied on.
        c.backend.copy_blocks(&pool, &pairs);
    }
    for block in 0..blocks as u32 {
        c.backend.read_block(&pool, block, &mut bytes);
        c.see_bytes(format!("block {block}"), bytes.clone());
    }
    // 2. States
    let (rows, len) = (c.random.usize(1..6), c.random.usize(1..300));
    c.shape(format!("{rows} states of {len}"));
    c.backend.alloc_states(rows, len).unwrap();
    for _ in 0..12 {
        let (from, to) = (c.random.u32(..rows as u32), c.random.u32(..rows as u32));
        match c.random.u8(..4) {
            0 => c.backend.zero_state(to),
            1 => c.backend.copy_state(from, to),
            _ => {
                let state = c.small(len, 3.0);
                c.backend.write_state(to, &state);
            }
        }
        c.see_states(rows, len);
    }
}

impl Case {
    /// The layout of a random cache group.
    pub fn kv_layout(&mut self) -> KvLayout {
        use sluice_backend::KvType::*;
        let k_dim = match self.random.u8(..6) {
            0 => self.random.usize(2..40),
            _ => self.one_of(&[8, 16, 32, 64, 80, 128]),
        };
        let kv_type = self.one_of(&[F32, Bf16, F16, Int8, Int16]);
        let mode = match kv_type {
            Int16 => AttentionMode::Int16,
            Int8 if self.coin() => AttentionMode::Int8,
            _ => AttentionMode::F32,
        };
        let layout = KvLayout {
            layers: self.random.usize(1..=2),
            kv_heads: self.random.usize(1..=3),
            k_dim,
            v_dim: if self.once_in(6) { self.one_of(&[8, 24, 64]) } else { k_dim },
            kv_type,
            mode,
            block_tokens: if self.coin() { self.one_of(&[16, 32]) } else { self.random.usize(1..70) },
            every: 1,
        };
        // Widths that have kernels of their own, for attention on integers and else.
        match self.random.u8(..9) {
            0 | 1 => {
                let dim = self.one_of(&[64, 128, 256]);
                let (kv_type, mode) = self.one_of(&[(Int8, AttentionMode::Int8), (Int16, AttentionMode::Int16)]);
                KvLayout { k_dim: dim, v_dim: dim, kv_type, mode, ..layout }
            }
            2 => {
                let kv_type = self.one_of(&[Bf16, F16]);
                KvLayout { k_dim: 256, v_dim: 256, kv_type, mode: AttentionMode::F32, ..layout }
            }
            _ => layout,
        }
    }

    /// All states must be equal.
    pub fn see_states(&mut self, rows: usize, len: usize) {
        let mut state = vec![0.0; len];
        for row in 0..rows {
            self.backend.read_state(row as u32, &mut state);
            self.see_floats(format!("state {row}"), len, state.clone());
        }
    }
}
