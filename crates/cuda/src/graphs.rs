//! A step's launches, gathered and carried out as one graph where the very same were gathered before.
//!
//! What a step launches, and with what, hangs on its shape alone: how many tokens and sequences, how long their block tables are (rounded up), how many partitions they see
//! (rounded up). All else lies in memory whose address stays. So two launches are compared by their bytes, and a graph is used only where every byte is the same: nothing
//! has to know which steps are alike.

use std::ffi::c_void;

use cudarc::driver::{DriverError, sys};

use crate::driver::checked;
use crate::kernels::{Kernel, Kernels};

/// Graphs that are kept.
const KEPT: usize = 24;
/// Fewer launches are not worth a graph.
const WORTH: usize = 4;

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

    /// Enqueues all of them. Where the device can do that, each but the first begins when the one before it lets it, and waits itself for what it needs.
    fn launch(&self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: a struct of numbers and unions of numbers.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let mut at = 0;
        while at < self.words.len() {
            let halves = |word: u64| [word as u32, (word >> 32) as u32];
            let [[kernel, x], [y, z], [block, shared]] = [0, 1, 2].map(|i| halves(self.words[at + i]));
            let kernel = Kernel::ALL[kernel as usize];
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
                numAttrs: u32::from(at > 0 && kernels.overlap),
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

/// A graph, made of these launches.
struct Graph {
    of: Launches,
    executable: sys::CUgraphExec,
}

impl Graph {
    fn capture(of: &Launches, kernels: &Kernels, stream: sys::CUstream) -> Result<Graph, DriverError> {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive, its context current; nothing but launches is captured.
        unsafe {
            checked(sys::cuStreamBeginCapture_v2(stream, mode))?;
            let launched = of.launch(kernels, stream);
            let ended = checked(sys::cuStreamEndCapture(stream, &mut graph));
            launched.and(ended)?;
            let made = checked(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            let _ = sys::cuGraphDestroy(graph);
            made?;
        }
        Ok(Graph { of: of.clone(), executable })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it was made so; the driver keeps what is still running.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

#[derive(Default)]
pub struct Graphs {
    gathers: bool,
    gathered: Launches,
    /// What the step before gathered.
    before: Launches,
    /// The last used comes last.
    kept: Vec<Graph>,
}

impl Graphs {
    pub fn begin(&mut self) {
        // Of a step that failed there may be something left.
        self.gathered.clear();
        self.gathers = true;
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
        if self.gathers { Ok(()) } else { self.launch_all(kernels, stream) }
    }

    /// Launches what was gathered; what comes next is no longer gathered.
    pub fn launch_all(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        self.gathers = false;
        if self.gathered.count == 0 {
            return Ok(());
        }
        let launched = self.gathered.launch(kernels, stream);
        self.gathered.clear();
        launched
    }

    /// The step has gathered all.
    pub fn end(&mut self, kernels: &Kernels, stream: sys::CUstream) -> Result<(), DriverError> {
        if !self.gathers || self.gathered.count < WORTH {
            return self.launch_all(kernels, stream);
        }
        self.gathers = false;
        let known = self.kept.iter().rposition(|graph| graph.of == self.gathered);
        let graph = match known {
            Some(at) => self.kept.remove(at),
            // The first time it is only remembered: a prompt's chunk hardly ever comes again.
            None if self.before != self.gathered => {
                std::mem::swap(&mut self.before, &mut self.gathered);
                self.gathered.clear();
                return self.before.launch(kernels, stream);
            }
            None => {
                if self.kept.len() == KEPT {
                    self.kept.remove(0);
                }
                Graph::capture(&self.gathered, kernels, stream)?
            }
        };
        self.gathered.clear();
        // SAFETY: whoever launched what it is made of has vouched for it, just now.
        let launched = checked(unsafe { sys::cuGraphLaunch(graph.executable, stream) });
        self.kept.push(graph);
        launched
    }
}
