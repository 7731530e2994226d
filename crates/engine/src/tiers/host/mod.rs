//! The tier in host memory.

pub(crate) mod slots;
pub(crate) mod tier;
