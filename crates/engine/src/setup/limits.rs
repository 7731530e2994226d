//! The memory limits of this process.

use std::time::Duration;

use sluice_backend::DeviceMemory;

use super::budget::{AdmittedMemory, Division, Limit, LimitOf, Refusal};
use crate::options::Options;

/// How long the counters of a control group may lag. The kernel collects them from processors every two seconds or so. Until then it counts file pages, which
/// it could reclaim, as memory that it could not.
const LAG: Duration = Duration::from_millis(4400);
/// How often the counters are read again meanwhile.
const RETRIES: u32 = 4;

/// Calls `divide`, which returns the hard limits and how memory is divided within them. If a control group's limit is too small, it is called again until the
/// group's counters are up to date.
///
/// # Errors
/// The refusal with the smallest limit.
pub(crate) fn divide_with_retries(
    divide: impl Fn() -> (Vec<Limit>, Result<Division, Refusal>),
) -> Result<(Vec<Limit>, Division), Refusal> {
    let mut smallest: Option<Refusal> = None;
    for attempt in 0..=RETRIES {
        let (hard, division) = divide();
        match division {
            Ok(division) => return Ok((hard, division)),
            Err(refusal) if hard.iter().any(|l| l.of == LimitOf::ControlGroup) && attempt < RETRIES => {
                smallest = Some(smallest.filter(|s| s.smallest <= refusal.smallest).unwrap_or(refusal));
                std::thread::sleep(LAG / RETRIES);
            }
            Err(refusal) => return Err(smallest.filter(|s| s.smallest <= refusal.smallest).unwrap_or(refusal)),
        }
    }
    unreachable!("the last attempt returns")
}

/// The limits that hold whatever other processes do.
pub(crate) fn hard_limits(options: &Options) -> Vec<Limit> {
    let admitted = options.admitted.map_or(AdmittedMemory { program: 0, group: None }, |admitted| admitted());
    let budget = options.memory_budget.map(|bytes| Limit {
        of: LimitOf::MemoryBudget,
        bytes,
        taken: admitted.program + options.caller_memory,
    });
    let group = admitted.group.map(|(bytes, taken)| Limit {
        of: LimitOf::ControlGroup,
        bytes,
        taken: taken + options.caller_memory,
    });
    budget.into_iter().chain(group).collect()
}

/// The limits beside `hard` where a device computes in the machine's memory: what that has left, and how much the options let the device take.
pub(crate) fn shared_limits(options: &Options, own: &DeviceMemory, hard: &[Limit]) -> impl Iterator<Item = Limit> {
    let machine = match options.load.copy_budget {
        Some(_) => machine_limit(options, hard),
        // A driver may count pages of files as taken, which the kernel would drop: it is asked where nobody else knows.
        None => hard.is_empty().then_some(Limit { of: LimitOf::Machine, bytes: own.free, taken: own.reserve }),
    };
    let asked = options.device_memory.map(|bytes| Limit { of: LimitOf::DeviceBudget, bytes, taken: 0 });
    machine.into_iter().chain(asked)
}

/// What the machine has left, if that is less than the hard limits leave.
pub(crate) fn machine_limit(options: &Options, hard: &[Limit]) -> Option<Limit> {
    let room = options.load.copy_budget.filter(|room| hard.iter().all(|l| l.bytes.saturating_sub(l.taken) > *room))?;
    Some(Limit { of: LimitOf::Machine, bytes: room - room / 16, taken: 0 })
}
