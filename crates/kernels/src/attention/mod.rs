//! Attention over paged keys and values: one KV head of one sequence, for the query heads that share it and any number of
//! query tokens.
//!
//! Keys and values are read through a block table, in the type they are stored in. `docs/numerics.md` fixes the arithmetic:
//! partitions of 128 positions aligned to position 0, joined in ascending order; so one token at a time, a whole prompt and
//! partitions on several threads give the same bits, whatever the size of a block. Threads split KV heads, runs of query tokens and,
//! for a single token far into a context, partitions ([`attend_partition`], [`join`]). Nothing here allocates.

mod join;
mod kv;
mod located;
mod many;
mod partition;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::Isa;
use crate::rows::{Rows, RowsMut};

use join::{finish, join_two};
pub use kv::{KvShape, KvType, KvView, store_row};
use located::Located;
pub use located::PARTITION;
use many::{Batch, Room, attend_rows, join_rows, widen};
use partition::{QueryRow, ROWS, Rule, partition, rows_at_once};

/// From so many query rows on, keys and values are widened and laid out once for all of them.
const WIDEN_ROWS: usize = 12;

/// One KV head of one sequence in one layer, and how its queries look at it.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    pub kv: KvView<'a>,
    /// Block numbers in ascending position.
    pub table: &'a [u32],
    pub kv_head: usize,
    /// Query heads that share the KV head.
    pub group: usize,
    pub scale: f32,
    /// Only the last so many positions are visible, the token's own among them; at least 1.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(s / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// One logit per query head of the group, `[group]`, that takes part in the softmax and has no value (gpt-oss).
    pub sinks: Option<&'a [f32]>,
}

impl Head<'_> {
    /// The first position that a token at `position` sees.
    fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    /// The partitions that a token at `position` sees, of which some may be seen in part.
    pub fn partitions(&self, position: usize) -> Range<usize> {
        self.first_visible(position) / PARTITION..position / PARTITION + 1
    }

    /// Elements of a part ([`attend_partition`]): for each query head `v_dim` weighted sums, the greatest score and the sum of weights.
    pub fn part_len(&self) -> usize {
        self.group * (self.kv.shape.v_dim + 2)
    }

    /// Elements of scratch for [`attend`] on `tokens` query tokens ([`attend_partition`]: 1).
    pub fn scratch_len(&self, tokens: usize) -> usize {
        scratch_len(&self.kv.shape, self.group, tokens)
    }

    fn rule(&self) -> Rule {
        Rule { scale: self.scale, softcap: self.softcap }
    }

    /// Checks all that the kernels rely on, for queries at positions up to `last`.
    fn check(&self, last: usize) {
        let s = &self.kv.shape;
        assert!(self.group > 0 && s.k_dim > 0 && s.v_dim > 0 && s.block_tokens > 0, "nothing to attend to");
        assert!(self.kv_head < s.kv_heads, "KV head {} of {}", self.kv_head, s.kv_heads);
        assert!(self.window != Some(0), "a window of no positions");
        assert!(self.sinks.is_none_or(|s| s.len() == self.group), "one sink per query head");
        assert!(last / s.block_tokens < self.table.len(), "position {last} in {} blocks", self.table.len());
    }
}

/// As [`Head::scratch_len`], for sizing scratch ahead: it grows with `group` and `tokens`.
pub fn scratch_len(shape: &KvShape, group: usize, tokens: usize) -> usize {
    let rows = group * tokens;
    let few = rows.min(WIDEN_ROWS) * (PARTITION + shape.v_dim);
    2 * rows + if rows < WIDEN_ROWS { few } else { few.max(many::scratch_len(shape, rows)) }
}

/// Attention of consecutive query tokens, the first at `position`, whose own keys and values are already in the cache. `q`: `[tokens,
/// group * k_dim]`, `out`: `[tokens, group * v_dim]`, `scratch`: at least [`Head::scratch_len`] elements. Vaswani et al. 2017; grouped
/// queries Ainslie et al. 2023; the online softmax of Milakov and Gimelshein 2018, in fixed partitions. A sink joins at the end as one more
/// term of the sum of weights.
pub fn attend(isa: Isa, head: &Head, q: Rows, position: usize, out: &mut RowsMut, scratch: &mut [f32]) {
    let (tokens, group) = (q.rows(), head.group);
    let KvShape { k_dim, v_dim, .. } = head.kv.shape;
    if tokens == 0 {
        return;
    }
    let last = position + tokens - 1;
    head.check(last);
    assert_eq!(q.cols(), group * k_dim, "queries of {group} heads");
    assert!(out.rows() == tokens && out.cols() == group * v_dim, "outputs of {group} heads");
    let rows = tokens * group;
    let (m, rest) = scratch.split_at_mut(rows);
    let (l, rest) = rest.split_at_mut(rows);
    // What any of the tokens sees of a partition.
    let seen = |p: usize| {
        let base = p * PARTITION;
        head.first_visible(position).saturating_sub(base)..(last + 1 - base).min(PARTITION)
    };
    let partitions = head.first_visible(position) / PARTITION..last / PARTITION + 1;
    let located = |p: usize, seen| Located::new(&head.kv, head.table, head.kv_head, p * PARTITION, seen);
    // What the token of a row sees of a partition, and whether it has seen one before.
    let visible = |row: usize, p: usize| {
        let (at, base) = (position + row / group, p * PARTITION);
        head.first_visible(at).saturating_sub(base)..(at + 1).saturating_sub(base).min(PARTITION)
    };
    let begun = |row: usize, p: usize| head.first_visible(position + row / group) / PARTITION < p;
    if rows < WIDEN_ROWS {
        let (scores, parts) = rest.split_at_mut(rows * PARTITION);
        for p in partitions.clone() {
            let mut located_here = located(p, seen(p));
            if p + 1 < partitions.end {
                located_here.followed_by(&located(p + 1, 0..1));
            }
            let at_once = rows_at_once(k_dim);
            for first in (0..rows).step_by(at_once) {
                let mut queries = [QueryRow::EMPTY; ROWS];
                let queries = &mut queries[..at_once.min(rows - first)];
                for (row, query) in (first..).zip(queries.iter_mut()) {
                    let (t, g) = (row / group, row % group);
                    *query = QueryRow::new(&q.row(t)[g * k_dim..(g + 1) * k_dim], visible(row, p));
                }
                partition(isa, &located_here, head.rule(), queries, scores, parts);
                for (i, (row, query)) in (first..).zip(queries.iter()).enumerate() {
                    if query.visible.is_empty() {
                        continue;
                    }
                    let (t, g) = (row / group, row % group);
                    let o = &mut out.row(t)[g * v_dim..(g + 1) * v_dim];
                    let part = &parts[i * v_dim..(i + 1) * v_dim];
                    if begun(row, p) {
                        join_two(isa, &mut m[row], &mut l[row], o, query.m, query.l, part);
                    } else {
                        (m[row], l[row]) = (query.m, query.l);
                        o.copy_from_slice(part);
                    }
                }
            }
        }
    } else {
        let room = Room::new(&head.kv.shape, rows, rest);
        let stride = room.q_stride;
        // Queries one after the other, whatever lies between them, and with zeros at their ends.
        for row in 0..rows {
            let (t, g) = (row / group, row % group);
            let to = &mut room.q[row * stride..(row + 1) * stride];
            to[..k_dim].copy_from_slice(&q.row(t)[g * k_dim..(g + 1) * k_dim]);
            to[k_dim..].fill(0.0);
        }
        for p in partitions {
            let located_here = located(p, seen(p));
            let widened = widen(isa, &located_here, room.widened);
            for first in (0..rows).step_by(many::BATCH) {
                let mut queries = [QueryRow::EMPTY; many::BATCH];
                let mut joins = [false; many::BATCH];
                let n = many::BATCH.min(rows - first);
                let (queries, joins) = (&mut queries[..n], &mut joins[..n]);
                for (i, row) in (first..first + n).enumerate() {
                    queries[i] = QueryRow::new(&room.q[row * stride..(row + 1) * stride], visible(row, p));
                    joins[i] = begun(row, p);
                }
                attend_rows(isa, &widened, head.rule(), queries, room.scores, room.sums);
                let batch = Batch { first, group, v_dim, stride: room.v_stride };
                let (m, l) = (&mut m[first..first + n], &mut l[first..first + n]);
                join_rows(isa, batch, queries, joins, m, l, room.sums, out);
            }
        }
    }
    for row in 0..rows {
        let (t, g) = (row / group, row % group);
        let o = &mut out.row(t)[g * v_dim..(g + 1) * v_dim];
        finish(isa, m[row], l[row], o, head.sinks.map(|s| s[g]));
    }
}

/// One partition, of [`Head::partitions`], of the attention of a single token. `q`: `[group * k_dim]`; `part`:
/// [`Head::part_len`] elements for [`join`]; `scratch`: [`Head::scratch_len`] for 1 token.
pub fn attend_partition(
    isa: Isa,
    head: &Head,
    q: &[f32],
    position: usize,
    p: usize,
    part: &mut [f32],
    scratch: &mut [f32],
) {
    let KvShape { k_dim, v_dim, .. } = head.kv.shape;
    head.check(position);
    assert_eq!(q.len(), head.group * k_dim, "queries of {} heads", head.group);
    assert_eq!(part.len(), head.part_len(), "room for the part of {} heads", head.group);
    assert!(head.partitions(position).contains(&p), "partition {p} is not seen from {position}");
    let base = p * PARTITION;
    let visible = head.first_visible(position).saturating_sub(base)..(position + 1 - base).min(PARTITION);
    let located = Located::new(&head.kv, head.table, head.kv_head, base, visible.clone());
    let (sums, ends) = part.split_at_mut(head.group * v_dim);
    let at_once = rows_at_once(k_dim);
    for first in (0..head.group).step_by(at_once) {
        let mut queries = [QueryRow::EMPTY; ROWS];
        let queries = &mut queries[..at_once.min(head.group - first)];
        for (g, query) in (first..).zip(queries.iter_mut()) {
            *query = QueryRow::new(&q[g * k_dim..(g + 1) * k_dim], visible.clone());
        }
        let sums = &mut sums[first * v_dim..(first + queries.len()) * v_dim];
        partition(isa, &located, head.rule(), queries, scratch, sums);
        for (g, query) in (first..).zip(queries.iter()) {
            (ends[2 * g], ends[2 * g + 1]) = (query.m, query.l);
        }
    }
}

/// Joins all partitions of a token, ascending and beside each other: the result of [`attend`], to the bit. `out`:
/// `[group * v_dim]`.
pub fn join(isa: Isa, head: &Head, parts: &[f32], out: &mut [f32]) {
    let (group, v_dim, len) = (head.group, head.kv.shape.v_dim, head.part_len());
    assert!(!parts.is_empty() && parts.len().is_multiple_of(len), "{} elements in parts of {len}", parts.len());
    assert_eq!(out.len(), group * v_dim, "outputs of {group} heads");
    assert!(head.sinks.is_none_or(|s| s.len() == group), "one sink per query head");
    for (g, o) in out.chunks_exact_mut(v_dim).enumerate() {
        let (mut m, mut l) = (0.0, 0.0);
        for (i, part) in parts.chunks_exact(len).enumerate() {
            let (sums, ends) = part.split_at(group * v_dim);
            let (sums, m_next, l_next) = (&sums[g * v_dim..(g + 1) * v_dim], ends[2 * g], ends[2 * g + 1]);
            if i == 0 {
                (m, l) = (m_next, l_next);
                o.copy_from_slice(sums);
            } else {
                join_two(isa, &mut m, &mut l, o, m_next, l_next, sums);
            }
        }
        finish(isa, m, l, o, head.sinks.map(|s| s[g]));
    }
}
