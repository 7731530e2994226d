//! Memory: how much there is, how much this process may have, and how fast it is.

use std::fs;

use serde::Serialize;

use crate::{plan, units};
use sluice_front::machine;

/// All in bytes; what cannot be read is left out.
#[derive(Serialize)]
pub struct Memory {
    pub total: Option<u64>,
    pub available: Option<u64>,
    pub swap: Option<u64>,
    pub swap_used: Option<u64>,
    /// The tightest control group's limit, and what is left of it.
    pub group_limit: Option<u64>,
    pub group_left: Option<u64>,
    /// `always`, `madvise` or `never`.
    pub large_pages: Option<String>,
    /// Bytes per second read by all threads.
    pub bandwidth: Option<f64>,
}

impl Memory {
    pub fn find(measures: bool) -> Memory {
        let swap = machine::of_machine("SwapTotal");
        let group = machine::cgroup();
        let pages = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok();
        Memory {
            total: machine::of_machine("MemTotal"),
            available: machine::available(),
            swap,
            swap_used: swap.zip(machine::of_machine("SwapFree")).map(|(all, free)| all.saturating_sub(free)),
            group_limit: group.map(|group| group.limit),
            group_left: group.map(|group| group.left),
            large_pages: pages.as_deref().and_then(chosen),
            bandwidth: measures.then(plan::memory_bandwidth).and_then(Result::ok),
        }
    }

    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let known = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), units::bytes);
        let mut text = format!("{}, {} available", known(self.total), known(self.available));
        if let Some((limit, left)) = self.group_limit.zip(self.group_left) {
            text += &format!("; control group: {} of {} left", units::bytes(left), units::bytes(limit));
        }
        match self.swap.zip(self.swap_used) {
            Some((swap, used)) if swap > 0 => {
                text += &format!("; swap {} of {} used", units::bytes(used), units::bytes(swap))
            }
            _ => text += "; no swap",
        }
        let mut rest = Vec::new();
        rest.extend(
            self.bandwidth.map(|speed| format!("read at {}/s by all threads (measured)", units::bytes(speed as u64))),
        );
        rest.extend(self.large_pages.as_ref().map(|pages| format!("large pages: {pages}")));
        [("memory", text), ("", rest.join("; "))].into_iter().filter(|(_, text)| !text.is_empty()).collect()
    }
}

/// The word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_of_large_pages_is_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(chosen("always madvise"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let found = Memory::find(false);
        assert!(found.total.unwrap() >= found.available.unwrap() && found.bandwidth.is_none());
    }
}
