//! Records a step's launches and runs them as one graph if the same launches were recorded before.
//!
//! The launches of a step and their parameters depend only on the step's shape: the number of tokens and sequences, the length of the block tables (rounded up) and the
//! number of partitions (rounded up). Everything else is in memory whose address stays. So launches are compared byte by byte and a graph is used only if all bytes are
//! equal; nothing has to know which steps are alike. The first launches form a graph of their own, which runs as soon as they have been recorded again: the device works
//! while the host records the rest. Launches that wait for the host ([`crate::moe::mailbox`]) are held until the whole step is recorded, and have no early graph.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::device::sys::{DriverError, checked, sys};
use crate::kernels::{Kernel, Kernels};

/// The most graphs that are kept.
const MAX_GRAPHS: usize = 24;
/// Fewer launches than these are enqueued one by one.
const MIN_LAUNCHES: usize = 4;
/// The most launches of a step that may be enqueued one by one while one of them waits for the host, not counting those of one more operation: the driver queues about
/// a thousand.
pub const MAX_HELD_LAUNCHES: usize = 640;
/// How many steps without a graph are remembered: with drafts, steps of several widths take turns.
const SEEN: usize = 4;
/// Launches of the early graph, which runs while the rest is recorded.
const EARLY_LAUNCHES: usize = 16;

/// A kernel and how it is launched; its parameters follow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Launch {
    pub kernel: u32,
    pub grid: [u32; 3],
    pub block: u32,
    pub shared: u32,
}

/// A sequence of launches: for each the words of a [`Launch`], then those of its parameters.
#[derive(Clone, Default, Hash, PartialEq, Eq)]
struct LaunchList {
    words: Vec<u64>,
    count: usize,
}

const HEAD: usize = size_of::<Launch>() / size_of::<u64>();

impl LaunchList {
    fn clear(&mut self) {
        self.words.clear();
        self.count = 0;
    }

    fn push(&mut self, launch: Launch, parameters: &[u8]) {
        let Launch { kernel, grid: [x, y, z], block, shared } = launch;
        for [low, high] in [[kernel, x], [y, z], [block, shared]] {
            self.words.push(u64::from(low) | u64::from(high) << 32);
        }
        let (words, rest) = parameters.as_chunks::<8>();
        assert!(rest.is_empty(), "parameters are whole words");
        self.words.extend(words.iter().map(|word| u64::from_ne_bytes(*word)));
        self.count += 1;
    }

    /// Enqueues the launches in a range of words. If the device can, each kernel begins as soon as the one before it allows, and waits itself for its inputs; the first
    /// does so only if it `follows` a kernel.
    fn launch(
        &self,
        words: std::ops::Range<usize>,
        kernels: &Kernels,
        (stream, follows): (sys::CUstream, bool),
    ) -> Result<(), DriverError> {
        // SAFETY: a struct of numbers and unions of numbers.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let mut at = words.start;
        while at < words.end {
            let halves = |word: u64| [word as u32, (word >> 32) as u32];
            let [[kernel, x], [y, z], [block, shared]] = [0, 1, 2].map(|i| halves(self.words[at + i]));
            let kernel = Kernel::from_index(kernel as usize);
            let end = at + HEAD + kernel.parameters() / size_of::<u64>();
            let parameters = &self.words[at + HEAD..end];
            let mut list = [parameters.as_ptr().cast_mut().cast::<c_void>()];
            let config = sys::CUlaunchConfig {
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: block,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: shared,
                hStream: stream,
                attrs: &mut attribute,
                numAttrs: u32::from((follows || at > words.start) && kernels.overlap),
            };
            // SAFETY: the caller of `launch` vouched for what the parameters point to; they are as long as the kernel expects, and the driver copies them.
            checked(unsafe {
                sys::cuLaunchKernelEx(&config, kernels.function(kernel), list.as_mut_ptr(), std::ptr::null_mut())
            })?;
            at = end;
        }
        Ok(())
    }
}

/// Launches as the driver has instantiated them.
struct Executable(sys::CUgraphExec);

impl Executable {
    fn capture(
        of: &LaunchList,
        words: std::ops::Range<usize>,
        kernels: &Kernels,
        stream: sys::CUstream,
    ) -> Result<Executable, DriverError> {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, its context current; only launches are captured.
        unsafe {
            checked(sys::cuStreamBeginCapture_v2(stream, mode))?;
            let launched = of.launch(words, kernels, (stream, false));
            let ended = checked(sys::cuStreamEndCapture(stream, &mut graph));
            launched.and(ended)?;
            let made = checked(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            let _ = sys::cuGraphDestroy(graph);
            made?;
        }
        Ok(Executable(executable))
    }

    fn launch(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: the caller of `launch` vouched for these launches in this step.
        checked(unsafe { sys::cuGraphLaunch(self.0, stream) })
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: made by `capture`; the driver keeps it while it runs.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// The graph of a step's launches: the first ones, if there are enough, and the rest.
struct Graph {
    of: LaunchList,
    /// Words of the launches in `early`.
    early_words: usize,
    early: Option<Executable>,
    rest: Executable,
}

impl Graph {
    /// `early_words`: where the early launches end; 0 if there are none.
    fn capture(
        of: &LaunchList,
        early_words: usize,
        kernels: &Kernels,
        stream: sys::CUstream,
    ) -> Result<Graph, DriverError> {
        let early = match early_words {
            0 => None,
            words => Some(Executable::capture(of, 0..words, kernels, stream)?),
        };
        let rest = Executable::capture(of, early_words..of.words.len(), kernels, stream)?;
        Ok(Graph { of: of.clone(), early_words, early, rest })
    }
}

#[derive(Default)]
pub struct Graphs {
    is_recording: bool,
    /// Launches of this step so far.
    launches: usize,
    /// The number of the last [`HoldGuard`].
    holds: usize,
    /// The highest number of a [`HoldGuard`] that was dropped.
    dropped: Arc<AtomicUsize>,
    /// A recorded launch waits for the host, which answers once all of them have been enqueued.
    is_held: bool,
    recorded: LaunchList,
    /// Words of the first [`EARLY_LAUNCHES`] launches, once there are that many.
    early_words: usize,
    /// Words of the recorded launches that have been enqueued.
    launched: usize,
    /// The command enqueued last was a kernel.
    follows: bool,
    /// Hashes of the launches of the last few steps that had no graph, the newest last.
    seen: VecDeque<u64>,
    /// The graph used last comes last.
    kept: Vec<Graph>,
    /// Graphs to be dropped when the host may wait: the driver may wait for the device then.
    evicted: Vec<Graph>,
}

// SAFETY: the driver's graphs may be used by any thread, one at a time, on which their context is current.
unsafe impl Send for Graphs {}

/// Holds the recorded launches, because one of them waits for the host: none runs before all of them do. If the guard is dropped before that, they never run.
///
/// A drop only leaves the guard's number behind, and the next use of the recorded launches looks for it ([`Graphs::apply_drop`]). So launches need no lock: only the
/// thread that has the backend uses them.
pub struct HoldGuard {
    dropped: Arc<AtomicUsize>,
    number: usize,
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        // Guards may be dropped in any order; the latest counts.
        self.dropped.fetch_max(self.number, Ordering::Relaxed);
    }
}

impl Graphs {
    fn clear(&mut self) {
        self.recorded.clear();
        (self.early_words, self.launched) = (0, 0);
    }

    pub fn begin(&mut self) {
        self.launches = 0;
        self.restart_recording();
    }

    /// Starts recording again in the middle of a step.
    pub fn restart_recording(&mut self) {
        self.discard();
        self.is_recording = true;
    }

    /// Drops the recorded launches.
    pub fn discard(&mut self) {
        self.clear();
        (self.is_recording, self.is_held, self.follows) = (false, false, false);
    }

    /// Drops the recorded launches if their [`HoldGuard`] was dropped. Every use of them begins with this.
    fn apply_drop(&mut self) {
        if self.is_held && self.dropped.load(Ordering::Relaxed) == self.holds {
            self.discard();
        }
    }

    pub fn can_hold(&mut self) -> bool {
        self.apply_drop();
        self.is_recording && self.launched == 0
    }

    /// Holds the recorded launches until the guard's owner lets them run.
    pub fn hold(&mut self) -> HoldGuard {
        assert!(self.can_hold());
        self.is_held = true;
        self.holds += 1;
        HoldGuard { number: self.holds, dropped: Arc::clone(&self.dropped) }
    }

    /// Launches of this step.
    pub fn launches(&self) -> usize {
        self.launches
    }

    /// Whether none of the last few steps had the launches that were recorded. Notes them.
    fn is_new(&mut self) -> bool {
        let mut hasher = DefaultHasher::new();
        self.recorded.hash(&mut hasher);
        let own = hasher.finish();
        let is_new = !self.seen.contains(&own);
        if is_new {
            if self.seen.len() == SEEN {
                self.seen.pop_front();
            }
            self.seen.push_back(own);
        }
        is_new
    }

    /// Drops the graphs that were evicted.
    pub fn drop_evicted(&mut self) {
        self.evicted.clear();
    }

    pub fn is_held(&mut self) -> bool {
        self.apply_drop();
        self.is_held
    }

    /// # Safety
    /// As for [`crate::device::stream::Gpu::launch`].
    pub unsafe fn launch(
        &mut self,
        kernels: &Kernels,
        stream: sys::CUstream,
        launch: Launch,
        parameters: &[u8],
    ) -> Result<(), DriverError> {
        self.apply_drop();
        self.recorded.push(launch, parameters);
        self.launches += 1;
        if !self.is_recording {
            return self.launch_all(kernels, stream);
        }
        if self.recorded.count == EARLY_LAUNCHES && !self.is_held {
            self.early_words = self.recorded.words.len();
            let same = |graph: &&Graph| graph.of.words.starts_with(&self.recorded.words);
            if let Some(early) = self.kept.iter().rev().find(same).and_then(|graph| graph.early.as_ref()) {
                early.launch(stream)?;
                self.launched = self.early_words;
            }
        }
        Ok(())
    }

    /// Enqueues the recorded launches one by one and stops recording.
    fn launch_all(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        self.is_recording = false;
        self.is_held = false;
        if self.recorded.count == 0 {
            return Ok(());
        }
        let words = self.launched..self.recorded.words.len();
        let launched = self.recorded.launch(words, kernels, (stream, self.follows));
        self.follows = true;
        self.clear();
        launched
    }

    /// As [`Graphs::launch_all`], before a command that is no launch.
    pub fn interrupt(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        self.apply_drop();
        let launched = self.launch_all(kernels, stream);
        self.follows = false;
        launched
    }

    /// The step is recorded: runs it.
    pub fn end(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        self.apply_drop();
        if !self.is_recording || self.recorded.count < MIN_LAUNCHES {
            return self.launch_all(kernels, stream);
        }
        self.is_recording = false;
        let is_held = std::mem::take(&mut self.is_held);
        let found = self.kept.iter().rposition(|graph| graph.of == self.recorded);
        let graph = match found {
            Some(at) => self.kept.remove(at),
            // The first time its launches are only remembered: the same chunk of a prompt hardly ever comes again.
            None if self.is_new() => {
                let words = self.launched..self.recorded.words.len();
                let launched = self.recorded.launch(words, kernels, (stream, false));
                self.clear();
                return launched;
            }
            None => {
                if self.kept.len() == MAX_GRAPHS {
                    self.evicted.push(self.kept.remove(0));
                }
                let early = if self.recorded.count >= 3 * EARLY_LAUNCHES && !is_held { self.early_words } else { 0 };
                let captured = Graph::capture(&self.recorded, early, kernels, stream);
                captured.inspect_err(|_| self.clear())?
            }
        };
        let early = graph.early.as_ref().filter(|_| self.launched == 0);
        let launched = early.map_or(Ok(()), |early| early.launch(stream)).and_then(|()| match self.launched {
            // The early launches of another graph ran, and this one has no early part.
            at if at > graph.early_words => graph.of.launch(at..graph.of.words.len(), kernels, (stream, false)),
            _ => graph.rest.launch(stream),
        });
        self.clear();
        self.kept.push(graph);
        launched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(n: usize) -> Graphs {
        let mut graphs = Graphs::default();
        graphs.begin();
        for _ in 0..n {
            graphs.recorded.push(Launch { kernel: 0, grid: [1; 3], block: 32, shared: 0 }, &[0; 8]);
        }
        graphs
    }

    #[test]
    fn launches_whose_hold_is_dropped_never_run() {
        let mut graphs = recorded(3);
        drop(graphs.hold());
        assert!(!graphs.is_held() && graphs.recorded == LaunchList::default());
        graphs.begin();
        assert!(graphs.can_hold());
    }

    #[test]
    fn steps_that_take_turns_are_known_again() {
        let mut graphs = Graphs::default();
        let mut step = |n: usize| {
            graphs.recorded = recorded(n).recorded;
            graphs.is_new()
        };
        assert_eq!([1, 2, 3, 1, 2, 4, 5].map(&mut step), [true, true, true, false, false, true, true]);
        assert_eq!([3, 1].map(step), [false, true]);
    }

    #[test]
    fn an_earlier_hold_does_not_affect_the_present_one() {
        let mut graphs = recorded(3);
        let before = graphs.hold();
        graphs.restart_recording();
        let now = graphs.hold();
        drop(before);
        assert!(graphs.is_held());
        drop(now);
        assert!(!graphs.is_held());
    }

    #[test]
    fn the_later_of_two_dropped_holds_counts_in_any_order() {
        let mut graphs = recorded(3);
        let before = graphs.hold();
        graphs.restart_recording();
        drop(graphs.hold());
        drop(before);
        assert!(!graphs.is_held());
    }
}
