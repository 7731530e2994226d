//! How much static shared memory kernels may have that can be launched with all the dynamic shared memory of a block. The limits are in
//! `kernels/shared_memory.txt`, which the build of the kernels checks.

use super::families::Kernel;

// `STATIC_SHARED`: the most bytes that such a kernel may have. `LARGE_SHARED`: which kernels these are, by the beginnings of their names, and the most of each.
include!(concat!(env!("OUT_DIR"), "/shared_memory.rs"));

/// Bytes of static shared memory that a kernel may have, where it may be launched with all the rest that a block can have.
pub fn large_shared(name: &str) -> Option<usize> {
    LARGE_SHARED.iter().find(|(begin, _)| name.starts_with(begin)).map(|(_, bytes)| *bytes)
}

impl Kernel {
    /// Bytes of static shared memory that it may have, at most.
    pub fn static_shared(self) -> usize {
        large_shared(&self.name()).unwrap_or(STATIC_SHARED)
    }
}
