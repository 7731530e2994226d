//! The promises of attention: the same bits however the work is cut, and close to the exact result.

mod integers;

use std::ops::Range;

use super::*;
use crate::Isa;
use crate::test_random::{assert_close, bits, random};
use proptest::prelude::*;

const TYPES: [KvType; 5] = [KvType::F32, KvType::Bf16, KvType::F16, KvType::Int8, KvType::Int16];
/// A type, and how attention works on it.
type Kind = (KvType, AttentionMode);
const KINDS: [Kind; 6] = {
    let [a, b, c, d, e] = TYPES;
    [
        (a, AttentionMode::F32),
        (b, AttentionMode::F32),
        (c, AttentionMode::F32),
        (d, AttentionMode::F32),
        (d, AttentionMode::Int8),
        (e, AttentionMode::Int16),
    ]
};

/// A sequence's keys and values in blocks at scattered places, and what the cache holds of them (rounded to its type).
struct Cache {
    bytes: Vec<u8>,
    table: Vec<u32>,
    shape: KvShape,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// What the cache holds of a row.
fn round(kv_type: KvType, x: &[f32]) -> Vec<f32> {
    let a = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let top = if kv_type == KvType::Int16 { 32639.0 } else { 127.0 };
    let inv = if (top / a).is_finite() { top / a } else { 0.0 };
    x.iter()
        .map(|x| match kv_type {
            KvType::F32 => *x,
            KvType::Bf16 => half::bf16::from_f32(*x).to_f32(),
            KvType::F16 => half::f16::from_f32(*x).to_f32(),
            KvType::Int8 => (x * inv).round_ties_even() * (a / 127.0),
            KvType::Int16 => (x * inv).round_ties_even() * (a / 32639.0),
        })
        .collect()
}

const KV_HEADS: usize = 2;
const HEAD: usize = 1;

/// `positions` tokens; a block also holds a layer before this one. Bytes that nobody wrote are NaNs.
fn cache((kv_type, mode): Kind, positions: usize, block_tokens: usize, k_dim: usize, v_dim: usize, seed: u64) -> Cache {
    let rows = KV_HEADS * block_tokens;
    let layer = kv_type.bytes(rows, k_dim) + kv_type.bytes(rows, v_dim);
    let v_offset = layer + 5 + kv_type.bytes(rows, k_dim);
    let shape = KvShape {
        block_bytes: 2 * layer + 7,
        k_offset: layer + 5,
        v_offset,
        block_tokens,
        kv_heads: KV_HEADS,
        k_dim,
        v_dim,
        values_in_keys: false,
        by_slot: false,
        every: 1,
        kv_type,
        mode,
    };
    let blocks = positions.div_ceil(block_tokens);
    // Blocks 1, 3, 5, .. and then 0, 2, ..: no order, and gaps.
    let table: Vec<u32> = (0..blocks as u32).map(|i| (2 * i + 1) % (blocks as u32 | 1)).collect();
    let mut bytes = vec![0xff; (blocks + 1) * shape.block_bytes];
    let (k, v) = (random(positions * k_dim, seed), random(positions * v_dim, seed + 1));
    for p in 0..positions {
        let slot = table[p / block_tokens] as usize * block_tokens + p % block_tokens;
        let mut store = |x: &[f32], row: Range<usize>, scale: Range<usize>| {
            let (mut to, mut scale_to) = (vec![0; row.len()], vec![0; scale.len()]);
            store_row(Isa::GENERIC, kv_type, x, &mut to, &mut scale_to);
            bytes[row].copy_from_slice(&to);
            bytes[scale].copy_from_slice(&scale_to);
        };
        store(&k[p * k_dim..(p + 1) * k_dim], shape.k_at(slot, HEAD), shape.k_scale_at(slot, HEAD));
        store(&v[p * v_dim..(p + 1) * v_dim], shape.v_at(slot, HEAD), shape.v_scale_at(slot, HEAD));
    }
    let held = |x: &[f32], dim| x.chunks(dim).flat_map(|row| round(kv_type, row)).collect();
    Cache { bytes, table, shape, k: held(&k, k_dim), v: held(&v, v_dim) }
}

impl Cache {
    fn head(&self, group: usize) -> Head<'_> {
        Head {
            kv: KvView { bytes: &self.bytes, shape: self.shape },
            kv_head: HEAD,
            group,
            scale: 0.3,
            window: None,
            softcap: None,
            sinks: None,
        }
    }
}

/// Values that are the ends of their keys give what values of the same numbers give that are stored beside them.
#[test]
fn values_within_keys_are_like_values_beside_them() {
    let (k_dim, v_dim, block_tokens, positions) = (40, 29, 48, 300usize);
    for (kv_type, mode) in KINDS {
        let (mut random, rows) = (fastrand::Rng::with_seed(3), block_tokens);
        let (k_bytes, v_bytes) = (kv_type.bytes(rows, k_dim), kv_type.bytes(rows, v_dim));
        let shape = |values_in_keys, block_bytes| KvShape {
            block_bytes,
            k_offset: 0,
            v_offset: k_bytes,
            block_tokens,
            kv_heads: 1,
            k_dim,
            v_dim,
            values_in_keys,
            by_slot: false,
            every: 1,
            kv_type,
            mode,
        };
        let (within, beside) = (shape(true, k_bytes), shape(false, k_bytes + v_bytes));
        let table: Vec<u32> = (0..positions.div_ceil(block_tokens) as u32).collect();
        let mut bytes = [within, beside].map(|s: KvShape| vec![0; table.len() * s.block_bytes]);
        for slot in 0..positions {
            let key: Vec<f32> = (0..k_dim).map(|_| 4.0 * random.f32() - 2.0).collect();
            let (mut row, mut scale) = (vec![0; k_dim * kv_type.size()], vec![0; kv_type.scale_size()]);
            store_row(Isa::GENERIC, kv_type, &key, &mut row, &mut scale);
            for (shape, bytes) in [within, beside].iter().zip(&mut bytes) {
                bytes[shape.k_at(slot, 0)].copy_from_slice(&row);
                bytes[shape.k_scale_at(slot, 0)].copy_from_slice(&scale);
            }
            // The same integers, scaled alike.
            let planes = if kv_type == KvType::Int16 { 2 } else { 1 };
            let end: Vec<u8> =
                row.chunks(row.len() / planes).flat_map(|p| &p[p.len() / k_dim * (k_dim - v_dim)..]).copied().collect();
            bytes[1][beside.v_at(slot, 0)].copy_from_slice(&end);
            bytes[1][beside.v_scale_at(slot, 0)].copy_from_slice(&scale);
        }
        for (group, chunk) in [(1, 1), (3, 1), (20, 1), (3, 40)] {
            let q = random_queries(&mut random, 60 * group * k_dim);
            for isa in Isa::supported() {
                let [got, wanted] = [(&bytes[0], within), (&bytes[1], beside)].map(|(bytes, shape)| {
                    let kv = KvView { bytes, shape };
                    let head = Head { kv, kv_head: 0, group, scale: 0.2, window: None, softcap: None, sinks: None };
                    in_chunks(isa, &head, &table, &q, 240..300, chunk)
                });
                assert_eq!(bits(&got), bits(&wanted), "{kv_type:?} {mode:?}, {group} heads, {isa}");
            }
        }
    }
}

fn random_queries(random: &mut fastrand::Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| 4.0 * random.f32() - 2.0).collect()
}

/// Queries of the tokens `range`, in chunks; they lie in wider rows, as do the outputs.
fn in_chunks(isa: Isa, head: &Head, table: &[u32], q: &[f32], range: Range<usize>, chunk: usize) -> Vec<f32> {
    let KvShape { k_dim, v_dim, .. } = head.kv.shape;
    let (q_cols, o_cols) = (head.group * k_dim, head.group * v_dim);
    let stride = o_cols + 3;
    let mut out = vec![f32::NAN; range.len() * stride];
    for from in range.clone().step_by(chunk) {
        let n = chunk.min(range.end - from);
        let q = Rows::dense(q, q_cols).part(from - range.start..from - range.start + n);
        let mut out = RowsMut::new(&mut out[(from - range.start) * stride..], n, o_cols, stride);
        let mut scratch = vec![f32::NAN; head.scratch_len(n)];
        attend(isa, head, &[Run { table, position: from, row: 0, tokens: n }], q, &mut out, &mut scratch);
    }
    out.chunks(stride).flat_map(|row| row[..o_cols].to_vec()).collect()
}

/// Each token by partitions and their join.
fn in_partitions(isa: Isa, head: &Head, table: &[u32], q: &[f32], range: Range<usize>) -> Vec<f32> {
    let KvShape { k_dim, v_dim, .. } = head.kv.shape;
    let mut out = Vec::new();
    for (position, q) in range.zip(q.chunks(head.group * k_dim)) {
        let partitions = head.partitions(position);
        let mut parts = vec![f32::NAN; partitions.len() * head.part_len()];
        let mut scratch = vec![f32::NAN; head.scratch_len(1)];
        // Any order will do.
        for (p, part) in partitions.zip(parts.chunks_mut(head.part_len())).rev() {
            let run = Run { table, position, row: 0, tokens: 1 };
            attend_partition(isa, head, &[run], Rows::dense(q, q.len()), p, part, &mut scratch);
        }
        let mut o = vec![0.0; head.group * v_dim];
        join(isa, head, parts.chunks(head.part_len()), &mut o);
        out.extend(o);
    }
    out
}

fn exact(head: &Head, c: &Cache, q: &[f32], range: Range<usize>) -> Vec<f64> {
    let KvShape { k_dim, v_dim, .. } = c.shape;
    let mut out = Vec::new();
    for (i, q) in q.chunks(k_dim).enumerate() {
        let (position, g) = (range.start + i / head.group, i % head.group);
        let visible = head.window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1;
        let scores: Vec<f64> = visible
            .clone()
            .map(|p| {
                let dot: f64 = (0..k_dim).map(|d| q[d] as f64 * c.k[p * k_dim + d] as f64).sum();
                let s = dot * head.scale as f64;
                head.softcap.map_or(s, |cap| cap as f64 * (s / cap as f64).tanh())
            })
            .collect();
        let sink = head.sinks.map(|s| s[g] as f64);
        let m = scores.iter().chain(&sink).fold(f64::NEG_INFINITY, |m, s| m.max(*s));
        let sum: f64 = scores.iter().chain(&sink).map(|s| (s - m).exp()).sum();
        out.extend((0..v_dim).map(|d| {
            let weigh = |(s, p): (&f64, usize)| (s - m).exp() / sum * c.v[p * v_dim + d] as f64;
            scores.iter().zip(visible.clone()).map(weigh).sum::<f64>()
        }));
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn chunks_partitions_blocks_and_instruction_sets_give_the_same_bits(
        shape in (0..KINDS.len(), 1usize..150, 1usize..150, 1usize..7),
        start in 0usize..300, tokens in 1usize..24, window in 0usize..200, seed in any::<u64>(),
    ) {
        let (kind, k_dim, v_dim, group) = (KINDS[shape.0], shape.1, shape.2, shape.3);
        let range = start..start + tokens;
        let q = random(tokens * group * k_dim, seed);
        let sinks = random(group, seed + 7);
        let mut oracle = None;
        for block_tokens in [16, 48, 256] {
            let c = cache(kind, range.end, block_tokens, k_dim, v_dim, seed + 1);
            let mut head = c.head(group);
            if window > 0 {
                head = Head { window: Some(window), softcap: Some(5.0), sinks: Some(&sinks), ..head };
            }
            let oracle = &*oracle.get_or_insert_with(|| bits(&in_chunks(Isa::GENERIC, &head, &c.table, &q, range.clone(), 1)));
            for isa in Isa::supported() {
                for chunk in [1, 7, tokens] {
                    prop_assert_eq!(&bits(&in_chunks(isa, &head, &c.table, &q, range.clone(), chunk)), oracle);
                }
                prop_assert_eq!(&bits(&in_partitions(isa, &head, &c.table, &q, range.clone())), oracle);
            }
        }
    }
}

/// A pool of random blocks, and sequences that share some of them: for each, its table and where its new tokens begin.
struct Shared {
    bytes: Vec<u8>,
    shape: KvShape,
    sequences: Vec<(Vec<u32>, Range<usize>)>,
}

/// A tree of prefixes: each sequence takes some blocks of one before it, and then has its own. Blocks before `window` may be anything.
fn shared(random: &mut fastrand::Rng, (kv_type, mode): Kind, dims: (usize, usize), window: Option<usize>) -> Shared {
    let (k_dim, v_dim) = dims;
    let block_tokens = [16, 32, 48, 100][random.usize(..4)];
    let rows = KV_HEADS * block_tokens;
    let v_offset = kv_type.bytes(rows, k_dim);
    let block_bytes = v_offset + kv_type.bytes(rows, v_dim);
    let shape = KvShape {
        block_bytes,
        k_offset: 0,
        v_offset,
        block_tokens,
        kv_heads: KV_HEADS,
        k_dim,
        v_dim,
        values_in_keys: false,
        by_slot: false,
        every: 1,
        kv_type,
        mode,
    };
    let (mut blocks, mut sequences) = (0, Vec::<(Vec<u32>, Range<usize>)>::new());
    for _ in 0..random.usize(2..7) {
        let start = random.usize(0..700);
        let range = start..start + if random.bool() { 1 } else { random.usize(1..20) };
        let from = sequences.get(random.usize(..sequences.len().max(1)));
        // Whole blocks before the first new token of either.
        let common = from.map_or(0, |(_, r)| r.start.min(start) / block_tokens);
        let common = if random.bool() { common } else { random.usize(..=common) };
        let mut table: Vec<u32> = from.map_or(vec![], |(table, _)| table[..common].to_vec());
        while table.len() < range.end.div_ceil(block_tokens) {
            table.push(blocks);
            blocks += 1;
        }
        sequences.push((table, range));
    }
    let mut bytes = vec![0; (blocks as usize + 1) * shape.block_bytes];
    for slot in 0..blocks as usize * block_tokens {
        for h in 0..KV_HEADS {
            for (row, scale, dim) in [
                (shape.k_at(slot, h), shape.k_scale_at(slot, h), k_dim),
                (shape.v_at(slot, h), shape.v_scale_at(slot, h), v_dim),
            ] {
                let (mut to, mut scale_to) = (vec![0; row.len()], vec![0; scale.len()]);
                let x: Vec<f32> = (0..dim).map(|_| random.f32() * 2.0 - 1.0).collect();
                store_row(Isa::GENERIC, kv_type, &x, &mut to, &mut scale_to);
                bytes[row].copy_from_slice(&to);
                bytes[scale].copy_from_slice(&scale_to);
            }
        }
    }
    if let Some(window) = window {
        for (table, range) in &mut sequences {
            let gone = (range.start + 1).saturating_sub(window) / block_tokens;
            table[..gone].iter_mut().for_each(|block| *block = random.u32(..));
        }
    }
    Shared { bytes, shape, sequences }
}

#[test]
fn sequences_that_share_blocks_have_the_same_bits_together_and_alone() {
    for seed in 0..75 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (kind, group) = (KINDS[seed as usize % KINDS.len()], random.usize(1..9));
        let dims = if random.bool() { (64, 64) } else { (random.usize(1..100), random.usize(1..100)) };
        let window = random.bool().then(|| random.usize(1..400));
        let c = shared(&mut random, kind, dims, window);
        let sinks: Vec<f32> = (0..group).map(|_| random.f32() * 4.0 - 2.0).collect();
        let head = Head {
            kv: KvView { bytes: &c.bytes, shape: c.shape },
            kv_head: HEAD,
            group,
            scale: 0.3,
            window,
            softcap: random.bool().then_some(5.0),
            sinks: random.bool().then_some(&sinks[..]),
        };
        let mut rows = 0;
        let mut runs: Vec<Run> = Vec::new();
        for (table, range) in &c.sequences {
            runs.push(Run { table, position: range.start, row: rows, tokens: range.len() });
            rows += range.len();
        }
        let (q_cols, o_cols) = (group * dims.0, group * dims.1);
        let q: Vec<f32> = (0..rows * q_cols).map(|_| random.f32() * 2.0 - 1.0).collect();
        let alone: Vec<f32> = c
            .sequences
            .iter()
            .zip(&runs)
            .flat_map(|((table, range), run)| {
                let q = &q[run.row * q_cols..(run.row + run.tokens) * q_cols];
                in_chunks(Isa::GENERIC, &head, table, q, range.clone(), 1)
            })
            .collect();
        for isa in Isa::supported() {
            // In one call
            let mut out = vec![f32::NAN; rows * o_cols];
            let mut scratch = vec![f32::NAN; head.scratch_len(rows)];
            attend(isa, &head, &runs, Rows::dense(&q, q_cols), &mut RowsMut::dense(&mut out, o_cols), &mut scratch);
            assert!(bits(&out) == bits(&alone), "seed {seed}, {isa}");
            // Single tokens, partition by partition
            let single: Vec<Run> = runs.iter().copied().filter(|run| run.tokens == 1).collect();
            let mut parts = vec![Vec::new(); single.len()];
            let mut together = SharedPrefix::default();
            for p in 0..single.iter().map(|run| head.partitions(run.position).end).max().unwrap_or(0) {
                together.find(&head, &single, p);
                for leader in together.leaders(single.len()) {
                    let members: Vec<usize> = (0..single.len()).filter(|i| together.follows(*i, leader)).collect();
                    let runs: Vec<Run> = members.iter().map(|i| single[*i]).collect();
                    let mut some = vec![f32::NAN; runs.len() * head.part_len()];
                    let mut scratch = vec![f32::NAN; head.scratch_len(runs.len())];
                    attend_partition(isa, &head, &runs, Rows::dense(&q, q_cols), p, &mut some, &mut scratch);
                    for (i, part) in members.iter().zip(some.chunks(head.part_len())) {
                        parts[*i].push(part.to_vec());
                    }
                }
            }
            for (run, parts) in single.iter().zip(&parts) {
                let mut out = vec![0.0; o_cols];
                join(isa, &head, parts.iter().map(|part| &part[..]), &mut out);
                assert!(bits(&out) == bits(&alone[run.row * o_cols..][..o_cols]), "seed {seed}, {isa}, parts");
            }
        }
    }
}

#[test]
fn a_partition_in_the_same_blocks_is_read_through_one_table() {
    let c = cache(KINDS[0], 1000, 32, 8, 8, 1);
    let head = c.head(2);
    let table = |own: usize| -> Vec<u32> {
        (0..32).map(|i| if i < 28 - own { i as u32 } else { 100 * own as u32 + i as u32 }).collect()
    };
    // 28, 26 and 8 blocks of 32 in common with the first: 7, 6 and 2 partitions.
    let tables = [table(0), table(2), table(20)];
    let run = |i: usize, position| Run { table: &tables[i], position, row: 0, tokens: 1 };
    let runs = [run(0, 1000), run(0, 900), run(1, 1000), run(2, 640)];
    let mut together = SharedPrefix::default();
    let leaders: Vec<Vec<usize>> = (0..8)
        .map(|p| {
            together.find(&head, &runs, p);
            (0..4).map(|i| (0..4).find(|j| together.follows(i, *j)).unwrap_or(9)).collect()
        })
        .collect();
    let wanted: [[usize; 4]; 8] = [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 3],
        [0, 0, 0, 3],
        [0, 0, 0, 3],
        [0, 0, 0, 3],
        [0, 0, 2, 9],
        [0, 1, 2, 9],
    ];
    assert_eq!(leaders, wanted);
    assert!(begin_alike(&head, &runs[0], &runs[3]) && !begin_alike(&head, &runs[0], &run(1, 100)));
}

#[test]
fn attention_is_close_to_f64() {
    let isa = *Isa::supported().last().unwrap();
    for kind in KINDS {
        // Queries and weights have 7 and 8 bits, or 15 and 16.
        let tolerance = match kind.1 {
            AttentionMode::F32 => 3e-6,
            AttentionMode::Int8 => 0.05,
            AttentionMode::Int16 => 2e-4,
        };
        for (k_dim, v_dim, group, range) in [(128, 128, 8, 250..270), (64, 80, 5, 0..40), (40, 33, 3, 500..501)] {
            let c = cache(kind, range.end, 32, k_dim, v_dim, 11);
            let q = random(range.len() * group * k_dim, 12);
            let sinks = random(group, 13);
            let plain = c.head(group);
            let window = Head { window: Some(100), ..plain };
            for head in [plain, window, Head { softcap: Some(4.0), ..plain }, Head { sinks: Some(&sinks), ..window }] {
                let got = in_chunks(isa, &head, &c.table, &q, range.clone(), range.len());
                assert_close(&got, &exact(&head, &c, &q, range.clone()), tolerance);
            }
        }
    }
}

#[test]
fn rows_are_stored_to_nearest_even() {
    let mut x = random(75, 3);
    x.extend([0.0, -0.0, 1e-40, 65504.0, 1e9, f32::INFINITY, f32::NAN, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::MAX]);
    for kv_type in TYPES.into_iter().filter(|t| t.scale_size() == 0) {
        let mut row = vec![0; x.len() * kv_type.size()];
        store_row(Isa::GENERIC, kv_type, &x, &mut row, &mut []);
        for isa in Isa::supported() {
            let mut again = vec![0; row.len()];
            store_row(isa, kv_type, &x, &mut again, &mut []);
            assert!(again == row, "{kv_type:?} {isa}");
        }
        let got: Vec<f32> = row
            .chunks(kv_type.size())
            .map(|b| match kv_type {
                KvType::F32 => f32::from_le_bytes(b.try_into().unwrap()),
                KvType::Bf16 => half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                KvType::F16 => half::f16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                KvType::Int8 | KvType::Int16 => unreachable!(),
            })
            .collect();
        for (g, e) in got.iter().zip(round(kv_type, &x)) {
            assert!(g.to_bits() == e.to_bits() || g.is_nan() && e.is_nan(), "{kv_type:?}: {g} {e}");
        }
    }
}
