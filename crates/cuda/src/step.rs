//! What a step is told, on the device: one upload of everything.

use anyhow::Result;
use sluice_backend::StepInputs;

use crate::driver::{Address, Gpu};
use crate::memory::{Pinned, Scratch, bytes_of};

/// Where the arrays of a cache group are.
#[derive(Clone, Copy, Default)]
pub struct Group {
    /// `[tokens]`, u64
    pub slots: Address,
    /// The block tables of all sequences, and `[sequences]` where each begins.
    pub tables: Address,
    pub table_starts: Address,
}

/// The step's arrays, `[tokens]` u32 unless said otherwise.
#[derive(Default)]
pub struct Step {
    pub tokens: Address,
    pub positions: Address,
    /// Which sequence a row belongs to.
    pub sequences: Address,
    /// `[sequences + 1]`
    pub starts: Address,
    /// `[sequences]`
    pub states: Address,
    pub wanted: Address,
    pub groups: Vec<Group>,
    device: Scratch,
    host: Pinned,
    packed: Vec<u8>,
}

/// What lies behind one another is aligned to so many bytes.
const ALIGNMENT: usize = 16;

/// Bytes that block tables take at least.
const LEAST_TABLES: usize = 4096;

impl Step {
    /// Uploads the inputs; `groups`: of the cache.
    pub fn begin(&mut self, gpu: &Gpu, inputs: &StepInputs, groups: usize) -> Result<()> {
        // 1. Everything behind one another
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
            // Few sizes, so that what lies behind it does not move with each block.
            let len = packed.len() - tables;
            packed.resize(tables + len.next_power_of_two().max(LEAST_TABLES), 0);
            let table_starts = pad(packed);
            let mut start = 0;
            for s in 0..count {
                add_number(packed, start);
                start += inputs.table(group, s).len();
            }
            let [slots, tables, table_starts] = [slots, tables, table_starts].map(|at| at as u64);
            self.groups.push(Group { slots, tables, table_starts });
        }
        // 2. One copy
        let host = self.host.room(gpu, packed.len())?;
        host[..packed.len()].copy_from_slice(packed);
        let at = self.device.room(gpu, packed.len())?;
        // SAFETY: the room was just made; the pinned copy is written again when the next step begins, after this one has ended.
        unsafe { gpu.write_later(at, &host[..packed.len()])? };
        let place = |offset: usize| at + offset as u64;
        (self.tokens, self.positions, self.wanted) = (place(tokens), place(positions), place(wanted));
        (self.sequences, self.starts, self.states) = (place(sequences), place(starts), place(states));
        for group in &mut self.groups {
            for address in [&mut group.slots, &mut group.tables, &mut group.table_starts] {
                *address += at;
            }
        }
        Ok(())
    }

    /// Bytes on the device, and pinned on the host.
    pub fn bytes(&self) -> (usize, usize) {
        (self.device.bytes(), self.host.bytes())
    }
}

/// Where what comes next begins.
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
