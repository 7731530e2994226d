//! What is decided before an engine runs: limits of memory, how they are divided, and where experts are stored.

pub(crate) mod budget;
pub(crate) mod device_share;
pub(crate) mod kv_need;
pub(crate) mod limits;
pub(crate) mod needs;
pub(crate) mod placement;
pub(crate) mod tables;
