//! The rotation of a part of a token's elements, whose pairs are half of them apart or beside each other.

use sluice_kernels::{Isa, rotary};

use crate::memory::Place;

/// Turns the elements `from` of a token, into `to`.
#[derive(Clone, Copy)]
pub(super) struct Turn<'a> {
    pub isa: Isa,
    pub angles: Place,
    pub positions: &'a [u32],
    pub adjacent_pairs: bool,
}

impl Turn<'_> {
    pub fn token(&self, t: usize, from: &[f32], to: &mut [f32]) {
        self.at(self.positions[t] as usize, from, to);
    }

    /// By this position's angles.
    pub fn at(&self, position: usize, from: &[f32], to: &mut [f32]) {
        if self.adjacent_pairs {
            let (first, second) = to.split_at_mut(from.len() / 2);
            for ((pair, first), second) in from.as_chunks::<2>().0.iter().zip(first).zip(second) {
                [*first, *second] = *pair;
            }
        } else {
            to.copy_from_slice(from);
        }
        // SAFETY: angles are written before a step.
        let (cos, sin) = unsafe { self.angles.get(position, 0..from.len()) }.split_at(from.len() / 2);
        rotary::rotate(self.isa, to, cos, sin);
    }
}
