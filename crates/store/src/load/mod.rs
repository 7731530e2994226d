//! From files to weights that can be computed with. Loading decides for each file how it is read, reads in the order in which weights will be used, and lets a
//! caller wait for just the part that it needs.
//!
//! Three readers fill the same views: a map whose pages are brought in ahead of use, buffered positional reads, and direct reads past the page cache. They
//! write through [`ChunkSink`], so that the same code can feed other memory. Bytes that are not the file's never pass without an error that names file, tensor
//! and offset.

mod bring;
mod choose;
mod delivery;
mod opened;
mod options;
mod pending;
mod probe;
mod queue;
mod read;
mod readahead;
#[cfg_attr(not(target_os = "linux"), path = "no_ring.rs")]
mod ring;
mod sink;
mod small;
mod source;
mod staging;
mod threads;

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::bytes::Bytes;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::memory::Memory;
use crate::stamp::Stamp;
pub use delivery::Piece;
pub use opened::{OpenCheckpoint, OpenFile};
pub use options::{FileReport, LoadError, LoadMode, LoadOptions};
pub use probe::Speeds;
#[doc(hidden)]
pub use probe::remembered_speeds;
use queue::ChunkQueue;
pub use read::ALIGNMENT;
pub(crate) use read::{ReadFile, refuses_direct, resume_at};
pub use readahead::ReadAhead;
pub use sink::Chunk;
pub(crate) use source::Source;
pub use staging::{Filled, Staging, measure_disk};

/// The speeds of the disk that a file is on, remembered or measured on parts of the file that are not cached. `None` if there is too little to measure with, or
/// the file cannot be read.
pub fn disk_speeds(file: &Path, options: &LoadOptions) -> Option<Speeds> {
    let file = ReadFile::open(file).ok()?;
    let (speeds, _) = probe::speeds(&file, options)?;
    // Speeds are remembered per device; this file may still refuse direct reads.
    let direct = speeds.direct.filter(|_| file.open_direct().is_none());
    Some(Speeds { direct, ..speeds })
}

/// A load in progress. Reading stops when this is dropped; the weights may be used as long as it lives.
///
/// ```
/// use sluice_store::{Dtype, LoadOptions, TensorPlan, Writer, load};
///
/// let folder = tempfile::tempdir()?;
/// let plan = [TensorPlan { name: "w".into(), dtype: Dtype::U8, shape: vec![4] }];
/// let mut writer = Writer::create(&folder.path().join("model.safetensors"), &plan, &Default::default())?;
/// writer.write_at(&[1, 2, 3, 4], 0)?;
/// writer.finish()?;
///
/// let (checkpoint, loading) = load::open(folder.path(), &LoadOptions::default())?;
/// let bytes = checkpoint.tensor("w").unwrap().bytes.clone();
/// loading.start([&bytes]);
/// // Waits for this tensor alone.
/// assert_eq!(bytes[..], [1, 2, 3, 4]);
/// // What was computed counts only if this succeeds.
/// loading.check()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Loading {
    queue: Arc<ChunkQueue>,
    files: Vec<FileReport>,
}

/// The progress of a load: for any thread, and also when the load is over.
#[derive(Clone, Debug)]
pub struct LoadProgress(Arc<ChunkQueue>);

impl LoadProgress {
    /// Bytes that have been read, of those that were asked for.
    pub fn bytes(&self) -> (u64, u64) {
        self.0.progress()
    }

    /// Waits until nothing more will come.
    pub fn wait(&self) {
        self.0.finish();
    }

    /// Whether the load is complete or has failed.
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }
}

/// Opens a checkpoint to be loaded. Nothing is read but headers; [`Loading::start`] begins with the rest, as does waiting for a tensor.
///
/// # Errors
/// As for [`Checkpoint::open`], and when there is no address space for a file's image.
pub fn open(folder: &Path, options: &LoadOptions) -> Result<(Checkpoint, Loading), Error> {
    open_except(folder, options, |_| HashSet::new())
}

/// As [`open`], but leaves some tensors on disk for others to read in parts: those that `left` names, given the checkpoint with its headers.
///
/// # Errors
/// Those of [`open`].
pub fn open_except(
    folder: &Path,
    options: &LoadOptions,
    left: impl FnOnce(&Checkpoint) -> HashSet<String>,
) -> Result<(Checkpoint, Loading), Error> {
    begin(OpenCheckpoint::safetensors(folder)?, options, left)
}

/// As [`open_except`], for a checkpoint of any kind.
///
/// # Errors
/// When there is no address space for a file's image.
pub fn begin(
    opened: OpenCheckpoint,
    options: &LoadOptions,
    left: impl FnOnce(&Checkpoint) -> HashSet<String>,
) -> Result<(Checkpoint, Loading), Error> {
    let OpenCheckpoint { mut checkpoint, files } = opened;
    let left = left(&checkpoint);
    let tensors = checkpoint.tensors_by_file();
    let mut sources = Vec::with_capacity(files.len());
    let mut reports = Vec::with_capacity(files.len());
    let wanted = |tensors: &[(std::ops::Range<u64>, Arc<str>)]| -> u64 {
        tensors.iter().filter(|(_, name)| !left.contains(&**name)).map(|(range, _)| range.end - range.start).sum()
    };
    let mut chooser = choose::Chooser::new(options, tensors.iter().map(|t| wanted(t)).sum());
    for (file, tensors) in files.into_iter().zip(tensors) {
        let (mode, reason, resident) = chooser.choose(&file, wanted(&tensors))?;
        reports.push(FileReport {
            name: file.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: file.len,
            mode,
            reason,
        });
        sources.push(Arc::new(Source::new(file, mode, resident, options, tensors, &left)?));
    }
    let queue = ChunkQueue::new(sources, options);
    small::replace(&mut checkpoint, queue.sources(), &left, options.threads)?;
    Ok((checkpoint, Loading { queue, files: reports }))
}

impl Loading {
    /// Bytes of memory that these views take, once they are read: of files that are mapped, and of those that are copied. Files are read in whole chunks.
    pub fn bytes_in_memory<'a>(&self, views: impl IntoIterator<Item = &'a Bytes>) -> [u64; 2] {
        self.queue.chunk_bytes(views)
    }

    /// Bytes of memory that [`Loading::deliver`] asks for at most.
    pub fn bytes_to_deliver(&self) -> u64 {
        let (count, size) = self.queue.buffers();
        count as u64 * size as u64
    }

    /// Prefers this node for the memory that files are copied to, while the node has free memory. Mapped files stay where the page cache put them. To be called
    /// before [`Loading::start`].
    ///
    /// # Errors
    /// When the kernel knows no such node, or forbids it.
    pub fn prefer_node(&self, node: usize) -> io::Result<()> {
        self.queue.sources().iter().filter(|s| !s.is_mapped()).try_for_each(|s| s.memory().prefer_node(node))
    }

    /// Starts reading these views, in this order. Everything else is read only when somebody waits for it. Call it once.
    pub fn start<'a>(&self, order: impl IntoIterator<Item = &'a Bytes>) {
        self.queue.start(order);
    }

    /// Instead of [`Loading::start`]: reads these views, in about this order, into a few buffers of memory that `lend` gives, and hands each chunk to `take`.
    /// Several threads call `take` at once. Nothing of them stays here: if a view is used anyway, it is read once more. Errors of `take` fail the load. Views that
    /// are to stay, `stays`, are read to their own places meanwhile, as by [`Loading::start`]. Returns the views, of those that are handed over, that are not of
    /// this load's files. Call it once.
    ///
    /// # Errors
    /// Where there is no memory.
    pub fn deliver(
        &self,
        views: &[&Bytes],
        stays: &[&Bytes],
        lend: &mut dyn FnMut(usize) -> io::Result<Box<dyn Memory>>,
        take: impl Fn(&[Piece]) -> io::Result<()> + Send + Sync + 'static,
    ) -> io::Result<Vec<usize>> {
        self.queue.deliver((views, stays), lend, take)
    }

    /// Waits until everything that was asked for is there.
    ///
    /// # Errors
    /// As for [`Loading::check`].
    pub fn finish(&self) -> Result<(), LoadError> {
        self.queue.finish();
        self.check()
    }

    /// Checks that all bytes handed out so far were the files' own. Call it after weights were used and before the results are trusted: a part that cannot be
    /// read becomes zeros.
    ///
    /// # Errors
    /// A file that could not be read, that is shorter than it was, that was replaced while it was read, or that was written to while it is mapped or parts
    /// of it are still read.
    pub fn check(&self) -> Result<(), LoadError> {
        self.queue.check()
    }

    /// How far the load has come: also for other threads, and when it is over.
    pub fn progress(&self) -> LoadProgress {
        LoadProgress(Arc::clone(&self.queue))
    }

    /// Time from [`Loading::start`] until everything that was asked for was read; `None` before that.
    pub fn time(&self) -> Option<Duration> {
        self.queue.time()
    }

    /// How each file is read, in order of name.
    pub fn files(&self) -> &[FileReport] {
        &self.files
    }

    /// Each file of weights with its stamp as it was opened, in order of name.
    pub fn opened(&self) -> impl Iterator<Item = (&Path, Stamp)> {
        self.queue.sources().iter().map(|source| (&*source.file.path, source.file.stamp))
    }

    /// Fallbacks so far, a clause each.
    pub fn notes(&self) -> Vec<String> {
        self.queue.notes()
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.queue.stop();
    }
}
