//! Where experts are on the device: buffers of one size for each class of layers, which of them are free, stay, pass or linger, and what a layer's table says of them.

use anyhow::Result;
use sluice_experts::{ExpertPool, TierMove};

use super::{Streaming, Wanted};
use crate::driver::Address;
use crate::expert_pool::{Division, EXPERT_ARRAYS, ExpertLayout, Rooms};
use crate::memory::Memory;
use crate::mixture::operands;
use crate::parameters as p;
use crate::streams::Point;
use crate::weights::{ARRAYS, Weights};

/// A matrix that no kernel multiplies with.
const NOBODYS: u32 = u32::MAX;

/// Buffers of one size.
pub(super) struct Class {
    pub memory: Memory,
    pub division: Division,
    pub rooms: Rooms,
    /// Experts that have fallen, or passed, with their layers, and are still there, in buffers that may be taken: the device looks for none of them before it has asked.
    pub lingering: Vec<(usize, Transient)>,
}

impl Class {
    fn at(&self, buffer: u32) -> Address {
        self.memory.at + u64::from(buffer) * self.division.stride as u64
    }

    /// How many buffers may be taken.
    pub fn room(&self) -> usize {
        self.rooms.free() + self.lingering.len()
    }

    /// Takes one: that of what lingers and is worth least, if none is free.
    fn take(&mut self, store: &ExpertPool) -> Option<u32> {
        let worth = |(layer, p): &(usize, Transient)| store.long_term_score(*layer, p.expert as usize);
        let least = |class: &Class| {
            let all = 0..class.lingering.len();
            all.min_by(|a, b| worth(&class.lingering[*a]).total_cmp(&worth(&class.lingering[*b])))
        };
        self.rooms.take().or_else(|| least(self).map(|i| self.lingering.swap_remove(i).1.buffer))
    }
}

/// An expert that passes, in a buffer.
#[derive(Clone, Copy)]
pub(super) struct Transient {
    pub expert: u32,
    pub buffer: u32,
}

/// An expert that falls, until it is copied back from its buffer.
pub(super) struct Demoting {
    pub moved: TierMove,
    pub buffer: u32,
    pub done: Point,
}

impl Streaming {
    /// Those of a layer's experts that fell or passed and are still where they were: they are no longer among those.
    pub(super) fn found(&mut self, layer: usize, wanted: &[u32]) -> Vec<Transient> {
        let is_wanted = |(of, p): &mut (usize, Transient)| *of == layer && wanted.binary_search(&p.expert).is_ok();
        let lingering = &mut self.classes[self.store.class_of_layer(layer)].lingering;
        let found = self.parting.extract_if(.., is_wanted).chain(lingering.extract_if(.., is_wanted));
        found.map(|(_, passing)| passing).collect()
    }

    /// Copies an expert that rises and is in no buffer.
    pub(super) fn copy_up(&mut self, weights: &Weights, moved: &TierMove) -> Result<u32> {
        let (buffer, lie) = (self.take_buffer(moved.layer)?, self.lie(moved.layer, moved.expert));
        for (from, to) in &lie.runs {
            let bytes = self.store.promoted_bytes(moved, from.clone());
            // SAFETY: a buffer that nobody else has; waited for below.
            unsafe { self.up.write(self.buffer(moved.layer, buffer) + *to as u64, bytes)? };
        }
        self.up.wait()?;
        self.know(weights, moved.layer, moved.expert, buffer, &lie);
        Ok(buffer)
    }

    /// Takes in what was copied back.
    pub(super) fn land(&mut self) {
        let landed: Vec<Demoting> = self.falling.extract_if(.., |f| f.done.is_past()).collect();
        for Demoting { moved, buffer, done } in landed {
            let (layer, expert) = moved.demoted.expect("an expert that falls");
            self.parting.push((layer, Transient { expert: expert as u32, buffer }));
            self.store.finish_promotion(moved);
            self.points.push(done);
        }
    }

    /// The same, once all that is wanted of a layer is copied back.
    pub(super) fn land_wanted(&mut self, layer: usize, Wanted { experts, .. }: &Wanted) -> Result<()> {
        let is_wanted =
            |m: &TierMove| m.demoted.is_some_and(|(l, e)| l == layer && experts.binary_search(&(e as u32)).is_ok());
        self.falling.iter().filter(|f| is_wanted(&f.moved)).try_for_each(|f| f.done.wait())?;
        self.land();
        Ok(())
    }

    /// The device looks for nothing where it fell, or passed: it is idle, or waits and is told before it goes on.
    pub(super) fn part(&mut self) {
        for (layer, passing) in self.parting.drain(..) {
            self.classes[self.store.class_of_layer(layer)].lingering.push((layer, passing));
        }
    }

    /// A buffer for an expert of a layer. Where there is no room, the device must not go on. There are enough for all that a layer can want, if nothing else has them.
    pub(super) fn take_buffer(&mut self, layer: usize) -> Result<u32> {
        let class = self.store.class_of_layer(layer);
        if self.classes[class].room() == 0 {
            self.down.wait()?;
            self.land();
            self.part();
        }
        Ok(self.classes[class].take(&self.store).expect("buffers for all of a layer's experts"))
    }

    pub(super) fn give_back(&mut self, layer: usize, buffer: u32) {
        self.classes[self.store.class_of_layer(layer)].rooms.give_back(buffer);
    }

    pub(super) fn buffer(&self, layer: usize, buffer: u32) -> Address {
        self.classes[self.store.class_of_layer(layer)].at(buffer)
    }

    /// How an expert lies in a buffer.
    pub(super) fn lie(&self, layer: usize, expert: usize) -> ExpertLayout {
        let parts: [_; EXPERT_ARRAYS] = std::array::from_fn(|array| self.store.array_range(layer, expert, array));
        ExpertLayout::of(&parts)
    }

    /// Writes down where an expert is, which is being copied there.
    pub(super) fn know(&mut self, weights: &Weights, layer: usize, expert: usize, buffer: u32, lie: &ExpertLayout) {
        self.stats.uploads += 1;
        self.stats.uploaded_bytes += lie.bytes() as u64;
        // Nowhere else.
        let Class { rooms, lingering, .. } = &mut self.classes[self.store.class_of_layer(layer)];
        let is_known = |(of, p): &mut (usize, Transient)| *of == layer && p.expert as usize == expert;
        lingering.extract_if(.., is_known).for_each(|(_, p)| rooms.give_back(p.buffer));
        let at = self.buffer(layer, buffer);
        for (projection, operand) in operands(&self.layers[layer].experts, expert).into_iter().enumerate() {
            let places: [Address; ARRAYS] = std::array::from_fn(|i| at + lie.at[projection * ARRAYS + i] as u64);
            let matrix = weights.all[operand.weight].described(places, self.mode);
            self.tables.write(layer, projection, expert, matrix);
        }
    }

    /// No kernel multiplies with an expert until it is known again.
    pub(super) fn forget(&mut self, weights: &Weights, layer: usize, expert: usize) {
        let at = [self.buffer(layer, 0); ARRAYS];
        for (projection, operand) in operands(&self.layers[layer].experts, expert).into_iter().enumerate() {
            let nobodys = p::Matrix { kind: NOBODYS, ..weights.all[operand.weight].described(at, self.mode) };
            self.tables.write(layer, projection, expert, nobodys);
        }
    }

    /// An expert that has risen is in this buffer from now on; the one that was kept for its slot.
    pub(super) fn stay(&mut self, moved: &TierMove, buffer: u32) -> u32 {
        let class = self.store.class_of_layer(moved.layer);
        self.tables.stay(moved.layer, moved.expert, true);
        self.classes[class].rooms.stay(moved.to, buffer)
    }
}
