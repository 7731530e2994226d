//! Mixtures of experts: routing, the kernels of many tokens and of one, and experts that do not all fit on the device.

pub mod activate;
pub mod expert_pool;
pub mod experts;
pub mod gather;
pub mod grouped;
pub mod host_split;
pub mod layer;
pub mod layout;
pub mod mailbox;
pub mod mixture;
pub mod offload;
pub mod pairs;
pub mod route;
pub mod single;
pub mod tables;
