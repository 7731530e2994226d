//! The processors of a thread, and the nodes of its memory.

use std::io::Result;

use crate::platform;

/// Processors are numbered below this.
const MOST: usize = 8192;

/// Processors that a thread may run on, a bit each.
#[derive(Clone, PartialEq, Eq)]
pub struct Mask([u64; MOST / 64]);

impl Mask {
    /// The mask of a thread, by its kernel number. 0: the calling thread.
    ///
    /// # Errors
    /// When there is no such thread, or more processors than are known here.
    pub fn of(thread: i32) -> Result<Mask> {
        let mut mask = Mask([0; MOST / 64]);
        platform::affinity(thread, &mut mask.0)?;
        Ok(mask)
    }

    /// A mask of these processors. Leaves out numbers that are too high.
    pub fn from_processors(all: impl IntoIterator<Item = usize>) -> Mask {
        let mut mask = Mask([0; MOST / 64]);
        all.into_iter().filter(|p| *p < MOST).for_each(|p| mask.0[p / 64] |= 1 << (p % 64));
        mask
    }

    pub fn processors(&self) -> Vec<usize> {
        (0..MOST).filter(|p| self.0[p / 64] >> (p % 64) & 1 == 1).collect()
    }

    /// Restricts a thread to these processors. 0: the calling thread.
    ///
    /// # Errors
    /// When there is no such thread, or it may use none of these processors.
    pub fn bind(&self, thread: i32) -> Result<()> {
        platform::set_affinity(thread, &self.0)
    }
}

/// Binds the thread that computes steps to its processors for the duration of a step. It does other things too, and threads that it starts would inherit the mask.
pub struct CoreBinding {
    own: Mask,
    elsewhere: Option<Mask>,
}

impl CoreBinding {
    pub fn new(own: Mask) -> CoreBinding {
        CoreBinding { own, elsewhere: None }
    }

    /// A processor that has gone meanwhile is no reason to stop.
    pub fn take(&mut self) {
        self.elsewhere = Mask::of(0).ok().filter(|_| self.own.bind(0).is_ok());
    }

    pub fn leave(&mut self) {
        self.elsewhere.take().map(|mask| mask.bind(0));
    }
}

/// The processor that the calling thread runs on.
pub fn current() -> usize {
    platform::current_processor()
}

/// The nodes from which the calling thread, and threads that it starts later, take memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFrom<'a> {
    /// Page by page in turn.
    Each(&'a [usize]),
    /// As long as it has any.
    First(usize),
}

impl MemoryFrom<'_> {
    /// # Errors
    /// When the kernel knows no nodes, or forbids it (containers do).
    pub fn set(self) -> Result<()> {
        let (in_turn, nodes) = match self {
            MemoryFrom::Each(nodes) => (true, nodes.to_vec()),
            MemoryFrom::First(node) => (false, vec![node]),
        };
        platform::set_memory_nodes(in_turn, &Mask::from_processors(nodes).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_runs_where_it_is_bound() {
        // A thread of its own: what it is bound to ends with it.
        std::thread::spawn(|| {
            let all = Mask::of(0).unwrap();
            for one in all.processors() {
                let mask = Mask::from_processors([one]);
                mask.bind(0).unwrap();
                assert!(Mask::of(0).unwrap() == mask);
                assert_eq!(current(), one);
            }
            all.bind(0).unwrap();
            assert!(Mask::of(0).unwrap() == all);
            let nowhere = Mask::from_processors([MOST - 1]);
            assert!(nowhere.bind(0).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn memory_comes_from_where_it_was_asked() {
        std::thread::spawn(|| {
            for (from, mode) in
                [(MemoryFrom::Each(&[0]), libc::MPOL_INTERLEAVE), (MemoryFrom::First(0), libc::MPOL_PREFERRED)]
            {
                if let Err(e) = from.set() {
                    println!("SKIPPED: the kernel does not let this process choose its memory: {e}");
                    return;
                }
                let (mut found, mut nodes) = (0i32, Mask::from_processors([]));
                let (no_address, no_flags) = (0usize, 0usize);
                // SAFETY: the kernel writes a number, and as many bits as the mask has.
                let done = unsafe {
                    libc::syscall(libc::SYS_get_mempolicy, &mut found, nodes.0.as_mut_ptr(), MOST, no_address, no_flags)
                };
                assert_eq!((done, found, nodes.processors()), (0, mode, vec![0]));
            }
        })
        .join()
        .unwrap();
    }
}
