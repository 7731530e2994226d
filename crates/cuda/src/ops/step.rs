//! The inputs of a step on the device, copied there at once.

use anyhow::Result;
use sluice_backend::StepInputs;

use crate::device::memory::{Scratch, bytes_of};
use crate::device::pinned::PinnedBuffer;
use crate::device::stream::Gpu;
use crate::device::sys::Address;

/// Addresses of a cache group's arrays.
#[derive(Clone, Copy, Default)]
pub struct GroupTables {
    /// `[tokens]`, u64
    pub slots: Address,
    /// u32: the block tables of all sequences, and `[sequences]` where each begins
    pub tables: Address,
    pub table_starts: Address,
}

/// Addresses of the step's arrays, `[tokens]` u32 unless noted.
#[derive(Default)]
pub struct StepTables {
    pub tokens: Address,
    pub positions: Address,
    /// The sequence of each row.
    pub sequences: Address,
    /// `[sequences + 1]`: where the rows of each sequence begin
    pub starts: Address,
    /// `[sequences]`: rows of the pool of states
    pub states: Address,
    /// `[wanted rows]`: rows that have logits
    pub wanted: Address,
    /// Rows of the pool of states that keep the state after a token, or [`sluice_backend::NOT_KEPT`]. Null where no state is kept.
    pub kept: Address,
    pub groups: Vec<GroupTables>,
    device: Scratch,
    host: PinnedBuffer,
    packed: Vec<u8>,
}

/// Alignment in bytes of each array.
const ALIGNMENT: usize = 16;

/// The least bytes of a group's block tables.
const MIN_TABLE_BYTES: usize = 4096;

impl StepTables {
    /// Uploads a step's inputs; `groups`: the number of cache groups.
    pub fn begin(&mut self, gpu: &Gpu, inputs: &StepInputs, groups: usize) -> Result<()> {
        // 1. Pack all arrays
        let packed = &mut self.packed;
        packed.clear();
        let count = inputs.sequences();
        let tokens = add(packed, bytes_of(inputs.tokens()));
        let positions = add(packed, bytes_of(inputs.positions()));
        let wanted = add(packed, bytes_of(inputs.wanted()));
        let sequences = pad(packed);
        (0..count).for_each(|s| inputs.rows(s).for_each(|_| add_number(packed, s)));
        let starts = pad(packed);
        (0..count).for_each(|s| add_number(packed, inputs.rows(s).start));
        add_number(packed, inputs.tokens().len());
        let states = pad(packed);
        (0..count).for_each(|s| add_number(packed, inputs.state(s)));
        self.groups.clear();
        for group in 0..groups {
            let slots = add(packed, bytes_of(inputs.slots(group)));
            let tables = pad(packed);
            (0..count).for_each(|s| packed.extend_from_slice(bytes_of(inputs.table(group, s))));
            // Rounded to few sizes, so that the arrays behind it keep their addresses from step to step.
            let len = packed.len() - tables;
            packed.resize(tables + len.next_power_of_two().max(MIN_TABLE_BYTES), 0);
            let table_starts = pad(packed);
            let mut start = 0;
            for s in 0..count {
                add_number(packed, start);
                start += inputs.table(group, s).len();
            }
            let [slots, tables, table_starts] = [slots, tables, table_starts].map(|at| at as u64);
            self.groups.push(GroupTables { slots, tables, table_starts });
        }
        // Last, so that the others keep their places.
        let kept = inputs.kept().map(|kept| add(packed, bytes_of(kept)));
        // 2. Copy them
        let host = self.host.reserve(gpu, packed.len())?;
        host[..packed.len()].copy_from_slice(packed);
        let at = self.device.reserve(gpu, packed.len())?;
        // SAFETY: the scratch was just reserved; the pinned copy is written again only when the next step begins, after this one has ended.
        unsafe { gpu.write_async(at, &host[..packed.len()])? };
        let place = |offset: usize| at + offset as u64;
        (self.tokens, self.positions, self.wanted) = (place(tokens), place(positions), place(wanted));
        (self.sequences, self.starts, self.states) = (place(sequences), place(starts), place(states));
        self.kept = kept.map_or(0, place);
        for group in &mut self.groups {
            for address in [&mut group.slots, &mut group.tables, &mut group.table_starts] {
                *address += at;
            }
        }
        Ok(())
    }

    /// Bytes on the device and pinned bytes on the host.
    pub fn bytes(&self) -> (usize, usize) {
        (self.device.bytes(), self.host.bytes())
    }
}

/// Pads to the alignment and returns the offset of the next array.
fn pad(packed: &mut Vec<u8>) -> usize {
    packed.resize(packed.len().next_multiple_of(ALIGNMENT), 0);
    packed.len()
}

fn add(packed: &mut Vec<u8>, bytes: &[u8]) -> usize {
    let at = pad(packed);
    packed.extend_from_slice(bytes);
    at
}

fn add_number(packed: &mut Vec<u8>, n: usize) {
    packed.extend_from_slice(&(n as u32).to_le_bytes());
}
