//! Experts of a mixture that stay on disk until tokens want them: one policy and one pool for whatever computes with them, a CPU or a device.
//!
//! | module | |
//! |---|---|
//! | `policy` | how likely an expert is to be wanted again, learned online from past routing |
//! | `residency` | which expert has which slot of which tier, and which is evicted or promoted |
//! | `pool` | [`ExpertPool`]: slots in memory that it is lent, read from disk when a layer asks for experts, and before |
//! | `rows` | [`RowTable`]: tables of which a token uses one row, read by row |
//! | `routing` | recorded routing, and the simulator that drives the same residency with it |
//!
//! Nothing here computes or knows a device. A backend with a faster tier says how many slots it has, and copies.
#![warn(missing_docs)]

mod error;
mod layout;
mod options;
mod policy;
mod pool;
mod residency;
mod routing;
mod rows;

pub use error::Error;
pub use layout::LayerLayout;
pub use options::{ExpertOptions, ExpertStats, Keep};
pub use policy::Policy;
pub use pool::{ExpertPool, FetchId, Next, PinnedExpert, SlotClass, TierMove, no_faster};
pub use residency::{Promotion, Residency};
pub use routing::{MAX_RECORDING, Recording, simulate};
pub use rows::{RowOptions, RowStats, RowTable, Wave};
pub use sluice_store::requests::{ReadFaults, SPIN};
