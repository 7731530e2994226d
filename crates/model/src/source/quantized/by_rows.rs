//! Matrices that loading makes anew, some rows at a time on several threads.

use std::num::NonZero;
use std::thread;

/// Rows that are copied together: of AWQ, those of the words in a cache line.
pub(super) const TOGETHER: usize = 128;
/// Threads that copy, at most.
const MAX_THREADS: usize = 16;

/// Calls `copy(first row, bytes of these rows)` for all rows of `to`, on several threads.
pub(super) fn copy_by_rows(to: &mut [u8], rows: usize, copy: impl Fn(usize, &mut [u8]) + Sync) {
    let row = to.len() / rows.max(1);
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS);
    let per_thread = rows.div_ceil(threads).next_multiple_of(TOGETHER);
    thread::scope(|scope| {
        for (i, part) in to.chunks_mut((per_thread * row).max(1)).enumerate() {
            let copy = &copy;
            scope.spawn(move || {
                for (j, rows) in part.chunks_mut(TOGETHER * row).enumerate() {
                    copy(i * per_thread + j * TOGETHER, rows);
                }
            });
        }
    });
}
