//! Divides memory before a byte of a matrix is read: how long steps may be, how many tokens the context has room for, and what is left for experts. If the
//! model does not fit, the refusal names the limit, what each class takes, and the smallest limit that would do.

use std::fmt::Write;

use super::kv_need::KvNeed;

/// The kinds of limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitOf {
    /// `--memory-budget`: everything that the process holds, mapped weights included.
    MemoryBudget,
    /// The memory control group of the process. The kernel may drop pages of mapped files and read them again.
    ControlGroup,
    /// What this machine has left. Other processes may take it as well.
    Machine,
    /// `--gpu-memory`: a limit on a device's own memory.
    DeviceBudget,
    /// What a device has free.
    Device,
}

/// A limit of memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub of: LimitOf,
    pub bytes: u64,
    /// Memory that is taken before weights are read: by the program, and by the other processes of a control group.
    pub taken: u64,
}

/// Memory that is held now, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmittedMemory {
    /// This process's own memory, and all files of its program.
    pub program: u64,
    /// The limit of its memory control group, and how much of it the kernel cannot reclaim. It can reclaim all file pages.
    pub group: Option<(u64, u64)>,
}

/// An allowance for memory that is not counted: stacks of threads, queued output. Not a measurement: `cli/tests/program/budget.rs` checks that it is enough for the
/// demo and golden models.
const GROWTH: u64 = 2 << 20;
/// File pages, of the program and of mapped weights, that a control group must have room for. With less, pages that one thread reads push out pages that another
/// waits for, and the kernel gives up.
const FILE_PAGES: u64 = 21 << 19;
/// How much held memory differs between starts: a megabyte and more, which threads freed and the allocator keeps. Added to a limit that is to do next time.
const NOISE: u64 = 2 << 20;
/// Tokens of context that there must be room for, unless the model or the caller wants fewer.
const MIN_CONTEXT: usize = 512;
/// Positions whose keys and values get memory before experts take the rest.
const USUAL_CONTEXT: usize = 8192;
/// The part of the memory that scratch may take, as long as steps can be shorter: experts have more use for it.
const SCRATCH_PART: f64 = 1.0 / 12.0;
/// Steps of this many tokens or fewer may take twice that part: in shorter ones each expert that is read serves few tokens.
const SHORT_CHUNK: usize = 256;
/// Tokens of a step, at least.
const SHORTEST_CHUNK: usize = 16;
/// Tokens of a step, at most.
const CHUNK: usize = 512;
/// The same if experts are read from disk, so that each that is read serves several tokens, or if a device computes, whose tiles of experts are half empty with
/// fewer.
const LONG_CHUNK: usize = 2048;

impl LimitOf {
    pub fn is_device(self) -> bool {
        matches!(self, LimitOf::DeviceBudget | LimitOf::Device)
    }
}

impl Limit {
    fn name(&self) -> &'static str {
        match self.of {
            LimitOf::MemoryBudget => "--memory-budget",
            LimitOf::ControlGroup => "the memory control group's limit",
            LimitOf::Machine => "this machine's available memory",
            LimitOf::DeviceBudget => "--gpu-memory",
            LimitOf::Device => "the device's free memory",
        }
    }

    /// What weights, caches, scratch and experts may take together.
    fn room(&self) -> u64 {
        self.bytes.saturating_sub(self.taken + GROWTH)
    }

    /// How many bytes of mapped weights there has to be room for. In a control group: file pages, the program's included.
    fn mapped(&self, bytes: u64) -> u64 {
        if self.of == LimitOf::ControlGroup { FILE_PAGES } else { bytes }
    }
}

/// Candidates for the tokens of a step, the best first. `asked`: what the options ask for; `long`: whether long steps pay.
pub(crate) fn chunks(asked: Option<usize>, long: bool) -> Vec<usize> {
    let most = if long { LONG_CHUNK } else { CHUNK };
    asked.map_or_else(
        || std::iter::successors(Some(most), |n| Some(n / 2)).take_while(|n| *n >= SHORTEST_CHUNK).collect(),
        |chunk| vec![chunk],
    )
}

/// Memory of experts that stay on disk, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamedNeed {
    /// Slots of as many as a token uses in a layer, and the tables of all of them.
    pub least: u64,
    /// `--expert-budget`, but no more than all experts take; 0 without.
    pub asked: u64,
}

/// What a model needs, in bytes unless said otherwise.
#[derive(Clone, Debug)]
pub(crate) struct Need {
    /// Weights that are used in mapped files, without experts that stay on disk.
    pub mapped: u64,
    /// Weights that are copied, without experts that stay on disk.
    pub copied: u64,
    /// Recurrent states.
    pub state: u64,
    /// (tokens of a step, its scratch memory), the longest first.
    pub scratch: Vec<(usize, u64)>,
    /// Keys and values, and what grows with them.
    pub kv: KvNeed,
    /// Sequences of a step. Each gets a usual context before experts take the rest.
    pub sequences: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Tokens whose keys and values are resident from the start.
    pub reserved: usize,
    /// Tokens that a sequence may have.
    pub max_context: usize,
    /// Whether the options ask for that context.
    pub context_asked: bool,
    pub streamed: Option<StreamedNeed>,
    pub has_experts: bool,
}

/// How memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// Tokens of a step.
    pub chunk: usize,
    /// Bytes of its scratch memory.
    pub scratch: u64,
    /// Bytes for experts that stay on disk.
    pub experts: u64,
    /// Bytes of weights that every token uses and that do not fit.
    pub squeezed: u64,
}

/// A limit that is too small.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Refusal {
    text: String,
    /// The smallest limit that would do, in bytes.
    pub smallest: u64,
    pub of: LimitOf,
}

/// Whether an engine could not be opened because a device's own memory is too small. The model may still fit the host's.
pub fn refused_by_device(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refusal>().is_some_and(|r| r.of.is_device())
}

impl Need {
    /// Keys and values of so many tokens of so many sequences.
    fn cache(&self, context: usize, sequences: usize) -> u64 {
        self.kv.bytes((context.div_ceil(self.block_tokens) as u64).saturating_mul(sequences as u64))
    }

    fn least_context(&self) -> usize {
        MIN_CONTEXT.max(self.reserved).min(self.max_context).max(1)
    }

    fn least_experts(&self) -> u64 {
        self.streamed.map_or(0, |s| s.least.max(s.asked))
    }

    /// Keys and values of all sequences with a usual context, or the one that was asked for.
    fn usual_cache(&self) -> u64 {
        let context = if self.context_asked { self.max_context } else { self.max_context.min(USUAL_CONTEXT) };
        self.cache(context, self.sequences)
    }

    /// The same need with a copy of the weights on each of `nodes` NUMA nodes, if they fit beside `scratch` and a usual context. Mapped files stay in the page cache.
    ///
    /// # Errors
    /// Why there are no copies, as a clause.
    pub fn replicated(&self, nodes: usize, limits: &[Limit], scratch: u64) -> Result<Need, String> {
        if self.streamed.is_some() {
            return Err("experts are read from disk".into());
        }
        let copied = (self.mapped + self.copied).saturating_mul(nodes as u64);
        let with = Need { mapped: 0, copied, ..self.clone() };
        for limit in limits {
            let all = with.fixed(limit, scratch).saturating_add(self.usual_cache());
            if all > limit.room() {
                let (all, name, room) = (bytes(all), limit.name(), bytes(limit.room()));
                return Err(format!("with {nodes} copies everything takes {all}, and {name} leaves {room}"));
            }
        }
        Ok(with)
    }

    /// Everything but keys and values and experts.
    fn fixed(&self, limit: &Limit, scratch: u64) -> u64 {
        limit.mapped(self.mapped) + self.copied + self.state + scratch
    }

    /// Divides the memory within all limits.
    ///
    /// # Errors
    /// When one of the limits is too small.
    pub fn divide(&self, limits: &[Limit]) -> Result<Division, Refusal> {
        let (chunk, scratch) = self.scratch[0];
        let mut all = Division { chunk, scratch, experts: u64::MAX, squeezed: 0 };
        for limit in limits {
            let one = self.within(limit)?;
            if one.chunk < all.chunk {
                (all.chunk, all.scratch) = (one.chunk, one.scratch);
            }
            all.experts = all.experts.min(one.experts);
            all.squeezed = all.squeezed.max(one.squeezed);
        }
        Ok(all)
    }

    fn within(&self, limit: &Limit) -> Result<Division, Refusal> {
        let room = limit.room();
        let least = self.cache(self.least_context(), 1) + self.least_experts();
        let fits = |scratch: u64| self.fixed(limit, scratch).saturating_add(least) <= room;
        let good = |(tokens, bytes): (usize, u64)| {
            let part = if tokens <= SHORT_CHUNK { 2.0 * SCRATCH_PART } else { SCRATCH_PART };
            bytes as f64 <= room as f64 * part
        };
        let asked = self.scratch.len() == 1;
        let found =
            self.scratch.iter().copied().find(|&one| fits(one.1) && (asked || good(one) || one.0 <= SHORTEST_CHUNK));
        let Some((chunk, scratch)) = found else { return Err(self.refusal(limit)) };
        // A usual context has priority over more experts, but gets no more than half of the rest.
        let spare = room - self.fixed(limit, scratch) - self.least_experts();
        let cache = self.usual_cache().min(spare / 2).max(self.cache(self.least_context(), 1));
        let others = self.mapped.max(limit.mapped(self.mapped)) + self.copied + self.state + scratch + cache;
        let experts = room.saturating_sub(others).max(self.least_experts());
        let squeezed = (others + experts).saturating_sub(room);
        Ok(Division { chunk, scratch, experts, squeezed })
    }

    /// How many positions of all sequences fit beside `scratch` and `experts`; unlimited if a token takes no memory.
    ///
    /// # Errors
    /// When not even the fewest fit.
    pub fn positions_within(&self, limit: &Limit, scratch: u64, experts: u64) -> Result<usize, Refusal> {
        let left = limit.room().checked_sub(self.fixed(limit, scratch) + experts);
        let left = left.filter(|left| *left >= self.cache(self.least_context(), 1));
        let Some(left) = left else { return Err(self.refusal(limit)) };
        Ok(usize::try_from(self.kv.within(left)).unwrap_or(usize::MAX).saturating_mul(self.block_tokens))
    }

    /// Says what takes how much, the smallest limit that would do, and what else would help.
    fn refusal(&self, limit: &Limit) -> Refusal {
        let &(tokens, scratch) = self.scratch.last().expect("a step takes some tokens");
        let (context, experts) = (self.least_context(), self.least_experts());
        let others = self.fixed(limit, scratch) + self.cache(context, 1);
        let total = limit.taken + GROWTH + others + experts;
        let smallest = total + NOISE;
        let mut text = format!("{} of {} is too little: ", limit.name(), bytes(limit.bytes));
        let who = match limit.of {
            LimitOf::ControlGroup => "program and others in the group",
            of if of.is_device() => "reserve",
            _ => "program",
        };
        let mapped = limit.mapped(self.mapped);
        let weights = if limit.of == LimitOf::ControlGroup { "pages of files" } else { "mapped weights" };
        let classes = [
            (who.to_owned(), limit.taken + GROWTH),
            (weights.to_owned(), mapped),
            (if limit.of.is_device() { "weights" } else { "copied weights" }.to_owned(), self.copied),
            (format!("scratch of {tokens} tokens at once"), scratch),
            ("state".to_owned(), self.state),
            (format!("keys and values of {context} tokens"), self.cache(context, 1)),
            ("experts".to_owned(), experts),
        ];
        let classes = classes.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {}", bytes(*n)));
        let _ = write!(text, "{} = {}", classes.collect::<Vec<_>>().join(" + "), bytes(total));
        let _ = match limit.of {
            LimitOf::MemoryBudget => {
                write!(text, "; the smallest that would do is --memory-budget {}", figure(smallest))
            }
            LimitOf::DeviceBudget => write!(text, "; the smallest that would do is --gpu-memory {}", figure(smallest)),
            _ => write!(text, "; the smallest that would do is {}", figure(smallest)),
        };
        let left = limit.room().saturating_sub(others + NOISE);
        if self.streamed.is_some_and(|s| s.asked > s.least && left >= s.least) {
            let _ = write!(text, ", or --expert-budget {} at most", figure(left / 100_000 * 100_000));
        } else if self.reserved > 0 {
            text += ", or reserve fewer tokens (--kv reserve=TOKENS) or none (--kv dynamic)";
        } else if self.has_experts && self.streamed.is_none() {
            text += ", or stream the experts from disk (--experts slots)";
        } else {
            text += ", or fewer bits (`sluice pack`)";
        }
        if limit.of.is_device() {
            text += ", or the CPU (--device cpu)";
        }
        Refusal { text, smallest, of: limit.of }
    }
}

/// The message for an `--expert-budget` that is too small.
pub(crate) fn expert_budget_refusal(asked: u64, least: u64) -> String {
    format!(
        "--expert-budget of {} is too little; the smallest that would do is --expert-budget {}",
        bytes(asked),
        figure(least)
    )
}

/// `4.294 GB`, for people.
pub(crate) fn bytes(n: u64) -> String {
    match n {
        0..1_000_000 => format!("{:.1} kB", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.3} GB", n as f64 / 1e9),
    }
}

/// Bytes as flags take them, rounded up: `36.1M`.
fn figure(n: u64) -> String {
    let tenths = n.div_ceil(100_000);
    format!("{}.{}M", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn need() -> Need {
        Need {
            mapped: 40 * MIB,
            copied: MIB,
            state: 2 * MIB,
            scratch: vec![(512, 8 * MIB), (256, 4 * MIB), (16, MIB)],
            kv: KvNeed::full(MIB / 4),
            sequences: 1,
            block_tokens: 32,
            reserved: 0,
            max_context: 4096,
            context_asked: false,
            streamed: None,
            has_experts: false,
        }
    }

    fn limit(of: LimitOf, bytes: u64) -> Limit {
        Limit { of, bytes, taken: 3 * MIB }
    }

    fn smallest(need: &Need, of: LimitOf) -> u64 {
        need.divide(&[limit(of, MIB)]).unwrap_err().smallest
    }

    #[test]
    fn from_the_smallest_figure_on_a_limit_is_enough() {
        let streamed = Some(StreamedNeed { least: 6 * MIB, asked: 0 });
        for need in [
            need(),
            Need { streamed, ..need() },
            Need { reserved: 2048, ..need() },
            Need { kv: KvNeed::default(), ..need() },
        ] {
            for of in [LimitOf::MemoryBudget, LimitOf::ControlGroup, LimitOf::Machine] {
                let enough = smallest(&need, of) - NOISE;
                let least = need.divide(&[limit(of, enough)]).unwrap();
                assert!(least.chunk == 16 && least.experts >= need.least_experts());
                assert!(need.divide(&[limit(of, enough - 1)]).is_err(), "{of:?}");
                let context = need.positions_within(&limit(of, enough), least.scratch, need.least_experts()).unwrap();
                assert!(context >= need.least_context(), "{of:?}: {context}");
            }
        }
    }

    #[test]
    fn no_division_is_larger_than_its_limit() {
        let streamed = Some(StreamedNeed { least: 6 * MIB, asked: 0 });
        let need = Need { streamed, ..need() };
        for room in 60..400 {
            let limit = limit(LimitOf::MemoryBudget, room * MIB);
            let Ok(d) = need.divide(&[limit]) else { continue };
            let context = need.positions_within(&limit, d.scratch, d.experts).unwrap();
            let all = limit.taken + GROWTH + need.fixed(&limit, d.scratch) + d.experts + need.cache(context, 1);
            assert!(all <= limit.bytes && d.squeezed == 0, "{room}: {all}");
        }
    }

    #[test]
    fn the_tightest_limit_counts() {
        let streamed = Some(StreamedNeed { least: 6 * MIB, asked: 0 });
        let need = Need { streamed, ..need() };
        let [wide, tight] = [limit(LimitOf::MemoryBudget, 300 * MIB), limit(LimitOf::ControlGroup, 100 * MIB)];
        let both = need.divide(&[wide, tight]).unwrap();
        assert_eq!(both, need.divide(&[tight]).unwrap());
        assert!(both.experts < need.divide(&[wide]).unwrap().experts);
    }

    #[test]
    fn copies_for_each_node_come_after_steps_and_a_usual_context() {
        let need = Need { sequences: 2, ..need() };
        let scratch = need.scratch[0].1;
        // Two copies of 41 MiB, and two contexts of 128 blocks.
        let enough = 3 * MIB + GROWTH + (2 * 41 + 2 + 8 + 2 * 128 / 4) * MIB;
        let budget = |bytes| [limit(LimitOf::MemoryBudget, bytes)];
        let with = need.replicated(2, &budget(enough), scratch).unwrap();
        assert_eq!((with.mapped, with.copied), (0, 82 * MIB));
        assert_eq!(with.positions_within(&budget(enough)[0], scratch, 0).unwrap(), 2 * 4096);
        let refused = need.replicated(2, &budget(enough - 1), scratch).unwrap_err();
        assert!(refused.contains("2 copies") && refused.contains("--memory-budget leaves"), "{refused}");
        // A control group counts copies, though it does not what is mapped.
        let group = [limit(LimitOf::ControlGroup, enough + FILE_PAGES)];
        assert!(need.replicated(2, &group, scratch).is_ok() && need.replicated(3, &group, scratch).is_err());
        assert!(need.replicated(2, &[], scratch).is_ok());
        let streamed = Need { streamed: Some(StreamedNeed::default()), ..need };
        assert_eq!(streamed.replicated(2, &[], scratch).unwrap_err(), "experts are read from disk");
    }

    #[test]
    fn a_group_has_room_for_mapped_weights_that_are_read_again() {
        let group = smallest(&need(), LimitOf::ControlGroup);
        assert_eq!(smallest(&need(), LimitOf::MemoryBudget) - group, 40 * MIB - FILE_PAGES);
        assert!(
            need().divide(&[limit(LimitOf::ControlGroup, group)]).unwrap().squeezed >= 40 * MIB - FILE_PAGES - NOISE
        );
    }

    #[test]
    fn a_refusal_shows_its_arithmetic_and_what_else_there_is() {
        let refused = |need: Need, of| need.divide(&[limit(of, 40_000_000)]).unwrap_err().to_string();
        let said = refused(need(), LimitOf::MemoryBudget);
        for part in [
            "--memory-budget of 40.0 MB",
            "mapped weights 41.9 MB",
            "copied weights 1.0 MB",
            "scratch of 16 tokens at once 1.0 MB",
            "state 2.1 MB",
            " = ",
            "`sluice pack`",
        ] {
            assert!(said.contains(part), "{part:?} is not in: {said}");
        }
        let said = refused(Need { has_experts: true, ..need() }, LimitOf::MemoryBudget);
        assert!(said.contains("--experts slots"), "{said}");
        let said = refused(Need { reserved: 4096, ..need() }, LimitOf::ControlGroup);
        assert!(
            said.contains("control group") && said.contains("4096 tokens") && said.contains("--kv dynamic"),
            "{said}"
        );
    }

    #[test]
    fn figures_are_never_below_what_is_needed() {
        assert_eq!([1, 100_000, 100_001, 36_000_000].map(figure), ["0.1M", "0.1M", "0.2M", "36.0M"]);
    }
}
