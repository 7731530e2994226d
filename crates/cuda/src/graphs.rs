//! A step's launches, gathered and carried out as one graph where the very same were gathered before.
//!
//! What a step launches, and with what, hangs on its shape alone: how many tokens and sequences, how long their block tables are (rounded up), how many partitions they see
//! (rounded up). All else lies in memory whose address stays. So two launches are compared by their bytes, and a graph is used only where every byte is the same: nothing
//! has to know which steps are alike. The first launches are a graph of their own, which is carried out as soon as the same were gathered again: the device works while the
//! host gathers the rest. What waits for the host itself (`questions.rs`) is held back until all of the step is gathered, and has no first launches.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{DriverError, sys};

use crate::driver::checked;
use crate::kernels::{Kernel, Kernels};

/// Graphs that are kept.
const KEPT: usize = 24;
/// Fewer launches are not worth a graph.
const WORTH: usize = 4;
/// Launches of a step that may be enqueued one by one while one of them waits for the host, but for those of an operation: the driver takes about a thousand.
pub const MOST_HELD: usize = 640;
/// Launches that are carried out while the rest is gathered, where there are several times as many.
const EARLY: usize = 16;

/// A kernel and how it is launched; its parameters come behind it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Launch {
    pub kernel: u32,
    pub grid: [u32; 3],
    pub block: u32,
    pub shared: u32,
}

/// Launches one behind the other: numbers of a [`Launch`], then words of its parameters.
#[derive(Clone, Default, PartialEq, Eq)]
struct Launches {
    words: Vec<u64>,
    count: usize,
}

const HEAD: usize = size_of::<Launch>() / size_of::<u64>();

impl Launches {
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

    /// Enqueues those in a range of words. Where the device can do that, each begins when the one before it lets it, and waits itself for what it needs; the first only
    /// if it `follows` a kernel.
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
            // SAFETY: whoever launched it has vouched for what its parameters point to; there are as many as the kernel takes, and the driver copies them.
            checked(unsafe {
                sys::cuLaunchKernelEx(&config, kernels.function(kernel), list.as_mut_ptr(), std::ptr::null_mut())
            })?;
            at = end;
        }
        Ok(())
    }
}

/// What the driver makes of launches.
struct Executable(sys::CUgraphExec);

impl Executable {
    fn capture(
        of: &Launches,
        words: std::ops::Range<usize>,
        kernels: &Kernels,
        stream: sys::CUstream,
    ) -> Result<Executable, DriverError> {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, its context current; nothing but launches is captured.
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
        // SAFETY: whoever launched what it is made of has vouched for it, just now.
        checked(unsafe { sys::cuGraphLaunch(self.0, stream) })
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: it was made so; the driver keeps what is still running.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// A graph, made of these launches: the first of them, if there are enough, and the rest.
struct Graph {
    of: Launches,
    /// Words of the first launches.
    early_words: usize,
    early: Option<Executable>,
    rest: Executable,
}

impl Graph {
    /// `early_words`: where the first launches end, where they may be carried out early.
    fn capture(
        of: &Launches,
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
    gathers: bool,
    /// Launches of this step.
    launches: usize,
    /// How often something was held back.
    held: usize,
    /// Something that is gathered waits for the host, which answers once all of it is carried out.
    holds_back: bool,
    gathered: Launches,
    /// Words of the first [`EARLY`] launches, once there are so many.
    early_words: usize,
    /// Words of what was gathered that are carried out already.
    launched: usize,
    /// A kernel was the last that was enqueued.
    follows: bool,
    /// What the step before gathered.
    before: Launches,
    /// The last used comes last.
    kept: Vec<Graph>,
    /// Those that are not kept any more: the driver may wait when they go.
    gone: Vec<Graph>,
}

// SAFETY: what the driver made may be used by any thread, one at a time, on which its context is current.
unsafe impl Send for Graphs {}

/// Something that is gathered waits for the host: nothing of it is carried out before all of it is. Dropped before that, what was gathered never is.
pub struct HeldBack {
    graphs: Arc<Mutex<Graphs>>,
    number: usize,
}

impl HeldBack {
    pub fn new(graphs: &Arc<Mutex<Graphs>>) -> HeldBack {
        let mut own = graphs.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(own.can_hold_back());
        own.holds_back = true;
        own.held += 1;
        HeldBack { number: own.held, graphs: Arc::clone(graphs) }
    }
}

impl Drop for HeldBack {
    fn drop(&mut self) {
        let mut own = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        if own.holds_back && own.held == self.number {
            own.abandon();
        }
    }
}

impl Graphs {
    fn clear(&mut self) {
        self.gathered.clear();
        (self.early_words, self.launched) = (0, 0);
    }

    pub fn begin(&mut self) {
        self.launches = 0;
        self.gather();
    }

    /// What comes next in the step is gathered anew.
    pub fn gather(&mut self) {
        self.abandon();
        self.gathers = true;
    }

    /// What was gathered is not carried out.
    pub fn abandon(&mut self) {
        self.clear();
        (self.gathers, self.holds_back, self.follows) = (false, false, false);
    }

    pub fn can_hold_back(&self) -> bool {
        self.gathers && self.launched == 0
    }

    /// Launches of this step.
    pub fn launches(&self) -> usize {
        self.launches
    }

    /// Graphs that are not kept any more go.
    pub fn drop_gone(&mut self) {
        self.gone.clear();
    }

    pub fn holds_back(&self) -> bool {
        self.holds_back
    }

    /// # Safety
    /// As for [`crate::driver::Gpu::launch`].
    pub unsafe fn launch(
        &mut self,
        kernels: &Kernels,
        stream: sys::CUstream,
        launch: Launch,
        parameters: &[u8],
    ) -> Result<(), DriverError> {
        self.gathered.push(launch, parameters);
        self.launches += 1;
        if !self.gathers {
            return self.launch_all(kernels, stream);
        }
        if self.gathered.count == EARLY && !self.holds_back {
            self.early_words = self.gathered.words.len();
            let alike = |graph: &&Graph| graph.of.words.starts_with(&self.gathered.words);
            if let Some(early) = self.kept.iter().rev().find(alike).and_then(|graph| graph.early.as_ref()) {
                early.launch(stream)?;
                self.launched = self.early_words;
            }
        }
        Ok(())
    }

    /// Launches what was gathered; what comes next is no longer gathered.
    fn launch_all(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        self.gathers = false;
        self.holds_back = false;
        if self.gathered.count == 0 {
            return Ok(());
        }
        let words = self.launched..self.gathered.words.len();
        let launched = self.gathered.launch(words, kernels, (stream, self.follows));
        self.follows = true;
        self.clear();
        launched
    }

    /// The same, before something is enqueued that is no launch.
    pub fn interrupt(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        let launched = self.launch_all(kernels, stream);
        self.follows = false;
        launched
    }

    /// The step has gathered all.
    pub fn end(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        if !self.gathers || self.gathered.count < WORTH {
            return self.launch_all(kernels, stream);
        }
        self.gathers = false;
        let holds_back = std::mem::take(&mut self.holds_back);
        let known = self.kept.iter().rposition(|graph| graph.of == self.gathered);
        let graph = match known {
            Some(at) => self.kept.remove(at),
            // The first time it is only remembered: a prompt's chunk hardly ever comes again.
            None if self.before != self.gathered => {
                std::mem::swap(&mut self.before, &mut self.gathered);
                let words = self.launched..self.before.words.len();
                let launched = self.before.launch(words, kernels, (stream, false));
                self.clear();
                return launched;
            }
            None => {
                if self.kept.len() == KEPT {
                    self.gone.push(self.kept.remove(0));
                }
                let early = if self.gathered.count >= 3 * EARLY && !holds_back { self.early_words } else { 0 };
                let captured = Graph::capture(&self.gathered, early, kernels, stream);
                captured.inspect_err(|_| self.clear())?
            }
        };
        let early = graph.early.as_ref().filter(|_| self.launched == 0);
        let launched = early.map_or(Ok(()), |early| early.launch(stream)).and_then(|()| match self.launched {
            // Another graph's first launches were the same, and this one has none of its own.
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

    fn gathered(n: usize) -> Arc<Mutex<Graphs>> {
        let mut graphs = Graphs::default();
        graphs.begin();
        for _ in 0..n {
            graphs.gathered.push(Launch { kernel: 0, grid: [1; 3], block: 32, shared: 0 }, &[0; 8]);
        }
        Arc::new(Mutex::new(graphs))
    }

    #[test]
    fn what_is_held_back_and_let_go_is_never_carried_out() {
        let graphs = gathered(3);
        drop(HeldBack::new(&graphs));
        let mut own = graphs.lock().unwrap();
        assert!(!own.holds_back() && own.gathered == Launches::default());
        own.begin();
        assert!(own.can_hold_back());
    }

    #[test]
    fn what_was_held_back_before_does_not_touch_what_is_held_back_now() {
        let graphs = gathered(3);
        let before = HeldBack::new(&graphs);
        graphs.lock().unwrap().gather();
        let now = HeldBack::new(&graphs);
        drop(before);
        assert!(graphs.lock().unwrap().holds_back());
        drop(now);
        assert!(!graphs.lock().unwrap().holds_back());
    }
}
