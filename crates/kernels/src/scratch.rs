//! Working memory of one thread: cache-line aligned, grown on demand, sized ahead by callers that must not allocate.

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Working memory of one thread's [`matmul`](crate::matmul::matmul) calls. Its contents mean nothing between calls.
#[derive(Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl Scratch {
    /// Room for calls that need up to `bytes` (see [`scratch_bytes`](crate::matmul::scratch_bytes)).
    pub fn with_bytes(bytes: usize) -> Scratch {
        Scratch { lines: vec![Line([0; 64]); bytes.div_ceil(64)] }
    }

    /// Makes room as [`Scratch::with_bytes`] does, unless it is there.
    pub fn reserve(&mut self, bytes: usize) {
        if self.bytes() < bytes {
            self.lines.resize(bytes.div_ceil(64), Line([0; 64]));
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.lines.len() * 64
    }

    /// Cuts aligned pieces of the given sizes (in bytes, rounded up to lines).
    pub(crate) fn cut<const N: usize>(&mut self, sizes: [usize; N]) -> [*mut u8; N] {
        let total: usize = sizes.iter().map(|s| s.div_ceil(64)).sum();
        if self.lines.len() < total {
            self.lines.resize(total, Line([0; 64]));
        }
        let mut next = self.lines.as_mut_ptr();
        sizes.map(|s| {
            let piece = next.cast::<u8>();
            // SAFETY: the sum of the steps is `total`, which the vector holds.
            next = unsafe { next.add(s.div_ceil(64)) };
            piece
        })
    }
}

/// Bytes that [`Scratch::cut`] takes for these sizes.
pub(crate) fn cut_bytes<const N: usize>(sizes: [usize; N]) -> usize {
    sizes.iter().map(|s| s.div_ceil(64) * 64).sum()
}
