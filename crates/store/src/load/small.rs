//! The small tensors of a checkpoint: norms, biases, taps of convolutions. They are all needed before the first step, and lie scattered among the matrices. So
//! they are read at once and in parallel, not with the chunks around them.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use super::options::LoadMode;
use super::source::Source;
use crate::bytes::Bytes;
use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::Error;

/// The most bytes of a small tensor. No vector of a model is longer.
const LARGEST: usize = 256 << 10;
/// Elements of a row, at most: the taps of a short convolution.
const ROW: usize = 8;

fn is_small(tensor: &Tensor, left: &HashSet<String>) -> bool {
    let row: usize = tensor.shape.iter().skip(1).product();
    tensor.bytes.len() <= LARGEST && row <= ROW && !left.contains(&*tensor.name)
}

/// Sets the bytes of each tensor: small ones are read now into memory of their own, the others become views of what will be loaded.
///
/// # Errors
/// The first small tensor that cannot be read.
pub(crate) fn replace(
    checkpoint: &mut Checkpoint,
    sources: &[Arc<Source>],
    left: &HashSet<String>,
    threads: usize,
) -> Result<(), Error> {
    let mut wanted = Vec::new();
    let mut number = 0;
    checkpoint.replace_bytes(|tensor, file, range| {
        // A mapped tensor that is cached can stay where it is.
        if is_small(tensor, left) && !(sources[file].mode == LoadMode::Mmap && sources[file].is_ready(&range)) {
            wanted.push((number, file, range.clone()));
        }
        number += 1;
        Bytes::loaded(&sources[file], range)
    });
    if wanted.is_empty() {
        return Ok(());
    }
    // All at once, where they are not there yet.
    wanted.iter().for_each(|(_, file, range)| sources[*file].file.ask(&(range.start as u64..range.end as u64), true));
    let (next, read) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(wanted.len())));
    let work = || {
        while let Some((tensor, file, range)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut bytes = vec![0; range.len()];
            let source = &sources[*file];
            let there = source.file.wait_for(range.start as u64..range.end as u64);
            let done = there.and_then(|()| {
                // SAFETY: a buffer of exactly this length, borrowed mutably.
                let done = unsafe { source.file.read_buffered(bytes.as_mut_ptr(), range.start as u64, bytes.len()) };
                done.map_err(|(at, cause)| source.naming(source.file.error(at, cause)))
            });
            let done = done.map(|()| (*tensor, bytes));
            read.lock().unwrap_or_else(|e| e.into_inner()).push(done);
        }
    };
    thread::scope(|scope| {
        // Requests wait for the disk, not for a processor; a few of them are not worth a thread.
        let helpers = (2 * threads).min(wanted.len() / 8);
        (0..helpers).for_each(|_| drop(thread::Builder::new().spawn_scoped(scope, work)));
        work();
    });
    for done in read.into_inner().unwrap_or_else(|e| e.into_inner()) {
        let (tensor, bytes) = done?;
        checkpoint.set_bytes(tensor, Bytes::from(bytes));
    }
    Ok(())
}
