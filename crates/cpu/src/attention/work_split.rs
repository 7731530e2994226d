//! Divides a layer's attention among threads: which queries read the cache together, and which partitions are separate tasks.
//!
//! Sequences whose block tables have a common prefix form a *crowd*. Their queries read the cache together, so that common blocks are read
//! once for all of them. Where their tables diverge, the crowd is divided. If that leaves too few tasks for the threads, single tokens are split by
//! partitions, which are joined afterwards. Each unit of work is one task per KV head. A step divides the work once for all layers with
//! the same blocks and the same window.

use std::ops::Range;

use sluice_kernels::attention::{Head, PARTITION, RUNS, Run, SharedPrefix, begin_alike};

use sluice_backend::StepInputs;

/// Query rows (heads of tokens) of one task, at least and at most. With more rows, keys and
/// values are widened less often, as long as they stay in the second-level cache. With fewer, threads share the work better.
pub const ROWS: std::ops::RangeInclusive<usize> = 128..=256;
/// Tasks per thread that are enough to share.
const TASKS: usize = 8;
/// With fewer tasks per thread, single tokens are split by partitions.
const FEW_TASKS: usize = 2;

/// Some of a sequence's new tokens.
#[derive(Clone, Copy)]
pub struct Piece {
    pub sequence: u32,
    /// Index of the first, among the sequence's new tokens.
    pub first: u32,
    pub tokens: u32,
}

/// Pieces whose queries read the cache together.
#[derive(Clone)]
pub struct Unit {
    pieces: Range<u32>,
    /// One of the pieces' partitions, or all.
    pub partition: Option<u32>,
    /// The part of its first piece, among those of a KV head. The others follow.
    pub part: u32,
}

impl Unit {
    pub fn pieces(&self) -> Range<usize> {
        self.pieces.start as usize..self.pieces.end as usize
    }
}

/// A sequence whose only token is split by partitions.
#[derive(Clone)]
pub struct Split {
    pub sequence: u32,
    /// Its range in the list of parts, in ascending partition.
    pub parts: Range<u32>,
}

/// What the split depends on, apart from the step.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Look {
    cache_group: usize,
    window: Option<usize>,
    group: usize,
    kv_heads: usize,
}

/// The work of a layer. Kept between steps, so that nothing is allocated.
#[derive(Default)]
pub struct WorkSplit {
    look: Option<Look>,
    /// The sequences, crowd after crowd.
    order: Vec<u32>,
    /// Where each crowd ends in it.
    crowds: Vec<u32>,
    pub pieces: Vec<Piece>,
    pub units: Vec<Unit>,
    pub splits: Vec<Split>,
    /// For each partition of each split sequence, its part among those of a KV head.
    pub parts: Vec<u32>,
}

/// Bytes of a split for each sequence, for each token, and for each partition that the cache has room for.
pub const SEQUENCE_BYTES: usize = 8 + size_of::<Split>() + PARTITION_BYTES;
pub const TOKEN_BYTES: usize = size_of::<Piece>() + size_of::<Unit>();
pub const PARTITION_BYTES: usize = TOKEN_BYTES + 4;

/// A sequence's tokens as a run.
pub fn run_of<'a>(inputs: &'a StepInputs, cache_group: usize, piece: &Piece) -> Run<'a> {
    let (sequence, first) = (piece.sequence as usize, piece.first as usize);
    Run {
        table: inputs.table(cache_group, sequence),
        position: inputs.position(sequence) + first,
        row: inputs.rows(sequence).start + first,
        tokens: piece.tokens as usize,
    }
}

fn all_of<'a>(inputs: &'a StepInputs, cache_group: usize, sequence: u32) -> Run<'a> {
    let tokens = inputs.rows(sequence as usize).len() as u32;
    run_of(inputs, cache_group, &Piece { sequence, first: 0, tokens })
}

impl WorkSplit {
    pub fn bytes(&self) -> usize {
        4 * (self.order.capacity() + self.crowds.capacity() + self.parts.capacity())
            + self.pieces.capacity() * size_of::<Piece>()
            + self.units.capacity() * size_of::<Unit>()
            + self.splits.capacity() * size_of::<Split>()
    }

    /// Begins another step.
    pub fn forget(&mut self) {
        self.look = None;
    }

    /// Divides a layer whose heads are like `head`. Partitions leave at most `most` parts per KV head.
    pub fn fill(&mut self, inputs: &StepInputs, cache_group: usize, head: &Head, threads: usize, most: usize) {
        let (window, group, kv_heads) = (head.window, head.group, head.kv.shape.kv_heads);
        let look = Some(Look { cache_group, window, group, kv_heads });
        if self.look == look {
            return;
        }
        self.look = look;
        let sequences = inputs.sequences();
        self.clear(sequences, inputs.tokens().len(), most);
        self.find_crowds(inputs, cache_group, head);
        // 1. As many queries together as threads allow
        let mut queries = (ROWS.end() / group).max(1);
        let runs = |queries: usize| -> usize { (0..sequences).map(|s| inputs.rows(s).len().div_ceil(queries)).sum() };
        while queries > 1 && queries * group > *ROWS.start() && kv_heads * runs(queries) < TASKS * threads {
            queries = queries.div_ceil(2);
        }
        self.by_runs(inputs, queries, |_| true);
        // 2. Too few tasks: single tokens by partitions
        let partitions = |s: usize| head.partitions(inputs.position(s)).len();
        let splits = |s: usize| inputs.rows(s).len() == 1 && partitions(s) > 1;
        let parts: usize = (0..sequences).filter(|s| splits(*s)).map(partitions).sum();
        if threads > 1 && kv_heads * self.units.len() < FEW_TASKS * threads && (1..=most).contains(&parts) {
            self.by_runs(inputs, queries, |s| !splits(s));
            self.by_partitions(inputs, cache_group, head, queries, splits);
        }
    }

    fn clear(&mut self, sequences: usize, tokens: usize, most: usize) {
        self.order.clear();
        self.order.reserve_exact(sequences);
        self.crowds.clear();
        self.crowds.reserve_exact(sequences);
        self.splits.clear();
        self.splits.reserve_exact(sequences);
        self.parts.clear();
        self.parts.reserve_exact(most);
        self.pieces.clear();
        self.pieces.reserve_exact(most + tokens);
        self.units.clear();
        self.units.reserve_exact(most + tokens);
    }

    /// Orders the sequences by crowds. In each crowd, sequences with a single token come first, then those with shorter contexts: a window that shows a position of a
    /// partition to later ones also shows it to the first.
    fn find_crowds(&mut self, inputs: &StepInputs, cache_group: usize, head: &Head) {
        self.order.extend(0..inputs.sequences() as u32);
        let run = |s: u32| all_of(inputs, cache_group, s);
        let mut from = 0;
        while from < self.order.len() {
            let first = run(self.order[from]);
            let mut end = from + 1;
            for i in from + 1..self.order.len() {
                if begin_alike(head, &first, &run(self.order[i])) {
                    self.order.swap(end, i);
                    end += 1;
                }
            }
            let key = |s: &u32| (inputs.rows(*s as usize).len() > 1, inputs.position(*s as usize), *s);
            self.order[from..end].sort_unstable_by_key(key);
            self.crowds.push(end as u32);
            from = end;
        }
    }

    /// Units of up to `queries` tokens of a crowd's sequences, of those that `take` names, each with all of its partitions.
    fn by_runs(&mut self, inputs: &StepInputs, queries: usize, take: impl Fn(usize) -> bool) {
        self.pieces.clear();
        self.units.clear();
        let mut from = 0;
        for &end in &self.crowds {
            let (mut tokens, mut begun) = (0, self.pieces.len());
            for &sequence in &self.order[from as usize..end as usize] {
                if !take(sequence as usize) {
                    continue;
                }
                let own = inputs.rows(sequence as usize).len();
                // The longest first: the last queries, which see most.
                for i in (0..own.div_ceil(queries)).rev() {
                    let (first, n) = (i * queries, queries.min(own - i * queries));
                    if tokens > 0 && (tokens + n > queries || self.pieces.len() - begun == RUNS) {
                        self.units.push(whole(begun..self.pieces.len()));
                        (tokens, begun) = (0, self.pieces.len());
                    }
                    self.pieces.push(Piece { sequence, first: first as u32, tokens: n as u32 });
                    tokens += n;
                }
            }
            if tokens > 0 {
                self.units.push(whole(begun..self.pieces.len()));
            }
            from = end;
        }
    }

    /// Units of a partition each, of the sequences that `take` names, which have a token each.
    fn by_partitions(
        &mut self,
        inputs: &StepInputs,
        cache_group: usize,
        head: &Head,
        queries: usize,
        take: impl Fn(usize) -> bool,
    ) {
        let mut next = 0;
        let mut from = 0;
        for &end in &self.crowds {
            let tuner = &self.order[from as usize..end as usize];
            from = end;
            // Single tokens come first in their crowd.
            let single = tuner.iter().position(|s| inputs.rows(*s as usize).len() > 1).unwrap_or(tuner.len());
            for some in tuner[..single].chunks(RUNS.min(queries)) {
                // 1. The list of each sequence's parts
                let (mut runs, mut lists) = ([Run::EMPTY; RUNS], [(0, 0); RUNS]);
                let mut n = 0;
                for &sequence in some.iter().filter(|s| take(**s as usize)) {
                    runs[n] = all_of(inputs, cache_group, sequence);
                    let seen = head.partitions(runs[n].position);
                    let at = self.parts.len();
                    self.parts.resize(at + seen.len(), 0);
                    self.splits.push(Split { sequence, parts: at as u32..(at + seen.len()) as u32 });
                    lists[n] = (sequence, at as isize - seen.start as isize);
                    n += 1;
                }
                let runs = &runs[..n];
                // 2. Each partition once for all sequences that have it in the same blocks
                let first = runs.iter().map(|run| head.partitions(run.position).start).min().unwrap_or(0);
                let last = runs.iter().map(|run| run.position / PARTITION + 1).max().unwrap_or(0);
                let mut together = SharedPrefix::default();
                for p in first..last {
                    together.find(head, runs, p);
                    for leader in together.leaders(n) {
                        let begun = self.pieces.len();
                        let part = next;
                        for i in (0..n).filter(|i| together.follows(*i, leader)) {
                            let (sequence, list) = lists[i];
                            self.pieces.push(Piece { sequence, first: 0, tokens: 1 });
                            self.parts[(list + p as isize) as usize] = next;
                            next += 1;
                        }
                        let unit = whole(begun..self.pieces.len());
                        self.units.push(Unit { partition: Some(p as u32), part, ..unit });
                    }
                }
            }
        }
    }
}

fn whole(pieces: Range<usize>) -> Unit {
    Unit { pieces: pieces.start as u32..pieces.end as u32, partition: None, part: 0 }
}
