//! Attention over paged keys and values: one KV head, for the query heads that share it and any number of query tokens, of one sequence or of
//! several.
//!
//! Keys and values are read through block tables, in the type they are stored in. `docs/numerics.md` fixes the arithmetic:
//! partitions of 128 positions aligned to position 0, joined in ascending order; so one token at a time, a whole prompt, several sequences at once and
//! partitions on several threads give the same bits, whatever the size of a block. Threads split KV heads, runs of query tokens and,
//! where these are few, partitions ([`attend_partition`], [`join`]). A partition that is in the same blocks for several sequences is read once for all
//! their queries ([`Together`]). Nothing here allocates.

mod head;
mod index;
mod integers;
mod join;
mod kv;
mod paged;
mod partition;
mod pool;
mod prefill;
mod shared_prefix;
#[cfg(test)]
mod tests;

use crate::Isa;
use crate::rows::{Rows, RowsMut};

pub use head::{Head, Run};
pub use index::{best_positions, index_scores};
use integers::{DIRECT, Packed, attend_directly, attend_integers, pack, quantise_query};
use join::{finish, join_two};
pub use kv::{AttentionMode, KvShape, KvType, KvView, store_row};
pub use paged::PARTITION;
use paged::{Paged, key_at};
use partition::{QueryRow, Rule, partition, rows_at_once};
pub use pool::{MOST_POOLED, Pooled, average_rows};
use prefill::{PrefillScratch, Target, Widened, attend_rows, join_rows, widen};
pub use shared_prefix::{RUNS, SharedPrefix, begin_alike};

/// From so many query rows on, keys and values are widened and laid out once for all of them. Fewer read the cache directly at the same speed or better, which
/// is fetched ahead.
const WIDEN_ROWS: usize = 40;
/// A single token's query heads that share a KV head are seldom more.
const FEW: usize = 8;

impl Head<'_> {
    /// Elements of scratch for [`attend`] on runs of `tokens` query tokens in all, or for [`attend_partition`] on so many runs.
    pub fn scratch_len(&self, tokens: usize) -> usize {
        scratch_len(&self.kv.shape, self.group, tokens)
    }

    fn rule(&self) -> Rule {
        Rule { scale: self.scale, softcap: self.softcap }
    }

    /// Checks all that the kernels rely on, for these runs.
    fn check(&self, runs: &[Run]) {
        let s = &self.kv.shape;
        assert!(self.group > 0 && s.k_dim > 0 && s.v_dim > 0 && s.block_tokens > 0, "nothing to attend to");
        assert!(self.kv_head < s.kv_heads, "KV head {} of {}", self.kv_head, s.kv_heads);
        assert!(self.window != Some(0), "a window of no positions");
        assert!(self.sinks.is_none_or(|s| s.len() == self.group), "one sink per query head");
        assert!(runs.len() <= RUNS, "{} runs at once", runs.len());
        for run in runs {
            assert!(run.tokens > 0, "a run of no tokens");
            let last = run.last();
            assert!(last / s.entry_tokens() < run.table.len(), "position {last} in {} blocks", run.table.len());
        }
        assert!(s.mode.takes(s.kv_type), "attention in mode {:?}, of keys and values in {:?}", s.mode, s.kv_type);
        assert!(!s.values_in_keys || s.v_dim <= s.k_dim, "values of {} elements within keys of {}", s.v_dim, s.k_dim);
        let exact = s.mode != AttentionMode::Int16 || s.k_dim <= AttentionMode::LONGEST_INT16;
        assert!(exact, "keys of {} elements of sixteen bits", s.k_dim);
    }
}

/// As [`Head::scratch_len`], for sizing scratch ahead: it grows with `group` and `tokens`.
pub fn scratch_len(shape: &KvShape, group: usize, tokens: usize) -> usize {
    let rows = group * tokens;
    if shape.mode != AttentionMode::F32 {
        return 2 * rows + integers::scratch_len(shape, rows);
    }
    let few = rows.min(WIDEN_ROWS) * (PARTITION + shape.v_dim);
    2 * rows + if rows < WIDEN_ROWS { few } else { few.max(prefill::scratch_len(shape, rows)) }
}

/// Attention of some runs of query tokens, of one sequence or of several, whose own keys and values are already in the cache. `q`: `[.., group * k_dim]`, `out`:
/// `[.., group * v_dim]`, of which only the rows of the runs are used; `scratch`: at least [`Head::scratch_len`] elements. Vaswani et al. 2017; grouped
/// queries Ainslie et al. 2023; the online softmax of Milakov and Gimelshein 2018, in fixed partitions. A sink joins at the end as one more
/// term of the sum of weights.
pub fn attend(isa: Isa, head: &Head, runs: &[Run], q: Rows, out: &mut RowsMut, scratch: &mut [f32]) {
    let group = head.group;
    let KvShape { k_dim, v_dim, .. } = head.kv.shape;
    head.check(runs);
    assert_eq!(q.cols(), group * k_dim, "queries of {group} heads");
    assert_eq!(out.cols(), group * v_dim, "outputs of {group} heads");
    let rows = runs.iter().map(|run| run.tokens).sum::<usize>() * group;
    let (m, rest) = scratch.split_at_mut(rows);
    let (l, rest) = rest.split_at_mut(rows);
    let mut reader = Reader::new(isa, head, runs, q, rest);
    let partitions = runs.iter().map(|run| head.first_visible(run.position) / PARTITION).min().unwrap_or(0)
        ..runs.iter().map(|run| run.last() / PARTITION + 1).max().unwrap_or(0);
    let mut together = SharedPrefix::default();
    for p in partitions {
        together.find(head, runs, p);
        for leader in together.leaders(runs.len()) {
            reader.read(p, leader, |i| together.follows(i, leader), &mut |targets, queries, sums, stride| {
                join_rows(isa, targets, v_dim, stride, queries, m, l, sums, out);
            });
        }
    }
    let mut row = 0;
    for run in runs {
        for t in run.row..run.row + run.tokens {
            for (g, o) in out.row(t).chunks_exact_mut(v_dim).enumerate() {
                finish(isa, m[row], l[row], o, head.sinks.map(|s| s[g]));
                row += 1;
            }
        }
    }
}

/// What becomes of some query rows' part of a partition: where each goes, its greatest score and sum of weights, and the weighted sums, so many
/// elements apart.
type Sink<'a> = dyn FnMut(&[Target], &[QueryRow], &[f32], usize) + 'a;

/// A partition's keys and values, as its queries need them.
enum Laid<'a> {
    /// As the cache stores them.
    Stored,
    Widened(Widened<'a>),
    Packed(Packed<'a>),
    /// Integers as the cache stores them.
    Integers,
}

/// Takes the queries of some runs through partitions.
struct Reader<'a> {
    isa: Isa,
    head: &'a Head<'a>,
    runs: &'a [Run<'a>],
    q: Rows<'a>,
    /// Where each run's query rows begin, among those of all.
    starts: [usize; RUNS],
    room: PrefillScratch<'a>,
}

impl<'a> Reader<'a> {
    fn new(isa: Isa, head: &'a Head, runs: &'a [Run], q: Rows<'a>, scratch: &'a mut [f32]) -> Reader<'a> {
        let (group, k_dim) = (head.group, head.kv.shape.k_dim);
        let mut starts = [0; RUNS];
        let mut rows = 0;
        for (start, run) in starts.iter_mut().zip(runs) {
            *start = rows;
            rows += run.tokens * group;
        }
        // Queries one after the other, at any stride.
        let tokens = runs.iter().flat_map(|run| run.row..run.row + run.tokens);
        let queries = tokens.flat_map(|t| q.row(t).chunks_exact(k_dim));
        let shape = &head.kv.shape;
        let room = match shape.mode {
            AttentionMode::Int8 | AttentionMode::Int16 => {
                let room = integers::room(shape, rows, scratch);
                for (query, to) in queries.zip(room.q.chunks_exact_mut(room.q_stride)) {
                    quantise_query(isa, shape.mode, query, to);
                }
                room
            }
            AttentionMode::F32 if rows < WIDEN_ROWS => PrefillScratch::few(shape, rows, scratch),
            AttentionMode::F32 => {
                let room = PrefillScratch::new(shape, rows, scratch);
                // With zeros at their ends.
                for (query, to) in queries.zip(room.q.chunks_exact_mut(room.q_stride)) {
                    to[..k_dim].copy_from_slice(query);
                    to[k_dim..].fill(0.0);
                }
                room
            }
        };
        Reader { isa, head, runs, q, starts, room }
    }

    /// Partition `p` of the runs that `member` names, whose keys and values the leader's table finds for all of them.
    fn read(&mut self, p: usize, leader: usize, member: impl Fn(usize) -> bool, sink: &mut Sink) {
        let members = (0..self.runs.len()).filter(|i| member(*i));
        let rows = members.map(|i| self.runs[i].tokens).sum::<usize>() * self.head.group;
        // A single token's few rows are most of all calls: for them the lists of as many as there can be would cost more than what they list.
        if rows <= FEW {
            self.read_rows::<FEW>(p, leader, member, rows, sink)
        } else {
            self.read_rows::<{ prefill::BATCH }>(p, leader, member, rows, sink)
        }
    }

    /// As [`Reader::read`], of `rows` query rows, up to `N` at a time.
    fn read_rows<const N: usize>(
        &mut self,
        p: usize,
        leader: usize,
        member: impl Fn(usize) -> bool,
        rows: usize,
        sink: &mut Sink,
    ) {
        let Reader { isa, head, runs, starts, ref q, .. } = *self;
        let (group, base) = (head.group, p * PARTITION);
        let KvShape { k_dim, v_dim, .. } = head.kv.shape;
        let members = (0..runs.len()).filter(|i| member(*i));
        let lead = &runs[leader];
        let seen = head.seen(lead.position, lead.last(), p);
        let mut located = Paged::new(&head.kv, lead.table, head.kv_head, base, seen);
        let PrefillScratch { widened, q: copied, scores, sums, q_stride, v_stride } = &mut self.room;
        let (copied, q_stride, v_stride) = (&**copied, *q_stride, *v_stride);
        let integers = head.kv.shape.mode != AttentionMode::F32;
        if (integers || rows < WIDEN_ROWS) && p < lead.last() / PARTITION {
            located.followed_by(key_at(&head.kv, lead.table, head.kv_head, base + PARTITION));
        }
        let laid = if integers && rows <= DIRECT {
            Laid::Integers
        } else if integers {
            Laid::Packed(pack(isa, &located, widened))
        } else if rows < WIDEN_ROWS {
            Laid::Stored
        } else {
            Laid::Widened(widen(isa, &located, widened))
        };
        let mut take = |targets: &[Target], queries: &mut [QueryRow]| {
            let (n, rule) = (queries.len(), head.rule());
            let stride = match &laid {
                Laid::Stored => {
                    partition(isa, &located, rule, queries, scores, sums);
                    v_dim
                }
                Laid::Widened(widened) => {
                    attend_rows(isa, widened, rule, queries, scores, sums);
                    v_stride
                }
                Laid::Integers => {
                    attend_directly(isa, &located, rule, queries, scores, sums);
                    v_stride
                }
                Laid::Packed(packed) => {
                    attend_integers(isa, packed, rule, queries, scores, sums);
                    v_stride
                }
            };
            sink(targets, queries, &sums[..n * stride], stride);
        };
        let stored = matches!(laid, Laid::Stored);
        let at_once = if stored { rows_at_once(k_dim).min(N) } else { N };
        let (mut targets, mut queries) = ([Target::default(); N], [const { QueryRow::EMPTY }; N]);
        let mut n = 0;
        for i in members {
            let run = &runs[i];
            for t in 0..run.tokens {
                let at = run.position + t;
                let visible = head.first_visible(at).saturating_sub(base)..(at + 1).saturating_sub(base).min(PARTITION);
                let begun = head.first_visible(at) / PARTITION < p;
                for g in 0..group {
                    let row = starts[i] + t * group + g;
                    let query = match stored {
                        true => &q.row(run.row + t)[g * k_dim..(g + 1) * k_dim],
                        false => &copied[row * q_stride..(row + 1) * q_stride],
                    };
                    targets[n] = Target { row, token: run.row + t, head: g, begun };
                    queries[n] = QueryRow::new(query, visible.clone());
                    n += 1;
                    if n == at_once {
                        take(&targets[..n], &mut queries[..n]);
                        n = 0;
                    }
                }
            }
        }
        if n > 0 {
            take(&targets[..n], &mut queries[..n]);
        }
    }
}

/// One partition of the attention of runs of a token each, which all see it, of [`Head::partitions`], and find it where the first one does
/// ([`Together`]). `q` as for [`attend`]; `parts`: [`Head::part_len`] elements of each run, for [`join`]; `scratch`: [`Head::scratch_len`] for as many tokens.
pub fn attend_partition(
    isa: Isa,
    head: &Head,
    runs: &[Run],
    q: Rows,
    p: usize,
    parts: &mut [f32],
    scratch: &mut [f32],
) {
    let (group, v_dim, len) = (head.group, head.kv.shape.v_dim, head.part_len());
    head.check(runs);
    assert_eq!(q.cols(), group * head.kv.shape.k_dim, "queries of {group} heads");
    assert_eq!(parts.len(), runs.len() * len, "room for the parts of {} runs", runs.len());
    for run in runs {
        assert!(run.tokens == 1 && head.partitions(run.position).contains(&p), "partition {p} from {}", run.position);
        let alike = std::ptr::eq(run, &runs[0]) || shared_prefix::alike(head, &runs[0], run, p);
        assert!(alike, "partition {p} lies elsewhere for one of the runs");
    }
    Reader::new(isa, head, runs, q, scratch).read(p, 0, |_| true, &mut |targets, queries, sums, stride| {
        for (to, (query, sums)) in targets.iter().zip(queries.iter().zip(sums.chunks_exact(stride))) {
            let part = &mut parts[to.row / group * len..][..len];
            let (part, ends) = part.split_at_mut(group * v_dim);
            part[to.head * v_dim..(to.head + 1) * v_dim].copy_from_slice(&sums[..v_dim]);
            (ends[2 * to.head], ends[2 * to.head + 1]) = (query.m, query.l);
        }
    });
}

/// Joins all partitions of a token, in ascending order: the result of [`attend`], to the bit. `out`: `[group * v_dim]`.
pub fn join<'a>(isa: Isa, head: &Head, parts: impl Iterator<Item = &'a [f32]> + Clone, out: &mut [f32]) {
    let (group, v_dim, len) = (head.group, head.kv.shape.v_dim, head.part_len());
    assert_eq!(out.len(), group * v_dim, "outputs of {group} heads");
    assert!(head.sinks.is_none_or(|s| s.len() == group), "one sink per query head");
    for (g, o) in out.chunks_exact_mut(v_dim).enumerate() {
        let (mut m, mut l) = (0.0, 0.0);
        for (i, part) in parts.clone().enumerate() {
            assert_eq!(part.len(), len, "the part of {group} heads");
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
