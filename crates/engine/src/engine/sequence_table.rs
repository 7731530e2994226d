//! The sequences of an engine.

use anyhow::{Context, Result};
use sluice_cache::{BlockHash, SequenceBlocks};

use crate::schedule::sequence::{Sequence, SequenceId};

/// All sequences, and why some of them failed.
#[derive(Default)]
pub(super) struct SequenceTable {
    /// In no order.
    pub list: Vec<Sequence>,
    next_id: u64,
    next_turn: u64,
    /// Failures until they are taken, or their sequences are started again.
    failures: Vec<(SequenceId, anyhow::Error)>,
}

impl SequenceTable {
    pub fn add(&mut self, root: BlockHash, held: SequenceBlocks, step: u64) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.list.push(Sequence { last_used: step, ..Sequence::new(id, root, held) });
        id
    }

    pub fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        self.position(id).map(|at| self.list.swap_remove(at))
    }

    pub fn position(&self, id: SequenceId) -> Option<usize> {
        self.list.iter().position(|s| s.id == id)
    }

    /// The index of a sequence.
    ///
    /// # Errors
    /// When there is no such sequence.
    pub fn index(&self, id: SequenceId) -> Result<usize> {
        self.position(id).context("no such sequence")
    }

    /// The number of the next generation: they are served in this order.
    pub fn take_turn(&mut self) -> u64 {
        self.next_turn += 1;
        self.next_turn - 1
    }

    pub fn any_running(&self) -> bool {
        self.list.iter().any(|s| s.running.is_some())
    }

    pub fn add_failure(&mut self, id: SequenceId, why: anyhow::Error) {
        self.failures.push((id, why));
    }

    pub fn has_failed(&self, id: SequenceId) -> bool {
        self.failures.iter().any(|(failed, _)| *failed == id)
    }

    pub fn take_failure(&mut self, id: SequenceId) -> Option<anyhow::Error> {
        let at = self.failures.iter().position(|(failed, _)| *failed == id)?;
        Some(self.failures.swap_remove(at).1)
    }

    pub fn drop_failures(&mut self, id: SequenceId) {
        self.failures.retain(|(failed, _)| *failed != id);
    }
}
