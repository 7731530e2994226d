//! What the device asks the host in the middle of a step: which experts a token takes, so that the host brings those that are missing, or computes them itself from
//! what the router has normed. Where the device has all of them it says so and goes on. Else the kernel that multiplies with them (`gate_up_asking`) waits for an answer,
//! beside those that are there; all that comes behind it is enqueued already, so that nothing else stands between the answer and the experts.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

use crate::driver::{Address, Gpu};
use crate::memory::{Memory, Pinned};
use crate::quiet::Asked;

/// Experts that a token takes at most, as the kernel has it.
pub const MOST_CHOSEN: usize = 16;
/// Beside an expert: the device has all of them and goes on.
const GOES_ON: u32 = 1 << 31;
/// Words of a question: the experts, and whether it is answered; lines of their own.
const WORDS: usize = 32;
/// No expert.
const NOT_YET: u32 = u32::MAX;
/// Looks at an answer before the device is asked whether it is still there.
const LOOKS: u32 = 1 << 16;

/// Where a layer asks: places for its kernels.
#[derive(Clone, Copy, Default)]
pub struct Question {
    pub at: Address,
    /// Bits of the layer's experts that are on the device to stay ([`Tables::here`](crate::tables::Tables::here)).
    pub here: Address,
    /// A word in which the device keeps the answer.
    pub answer: Address,
    /// `[cols]` f32, where the host may want what was normed, on the device and where it is written for the host; else 0.
    pub normed: Address,
    pub input: Address,
    /// `[experts that the host computes, cols]` f32
    pub outputs: Address,
}

/// What a layer's router has chosen.
pub struct Choice {
    /// Ascending.
    pub experts: Vec<u32>,
    /// Nothing is to be answered: the device had all of them.
    pub goes_on: bool,
}

impl Choice {
    /// What these words say, once all of them do.
    fn read(words: &[AtomicU32]) -> Option<Choice> {
        if words.iter().any(|word| word.load(Ordering::Acquire) == NOT_YET) {
            return None;
        }
        let words = || words.iter().map(|word| word.load(Ordering::Relaxed));
        let experts = words().map(|word| word & !GOES_ON).collect();
        Some(Choice { experts, goes_on: words().all(|word| word & GOES_ON != 0) })
    }

    /// The same, waiting for it; `None` where the device is idle and has not said it.
    fn wait(words: &[AtomicU32], mut is_idle: impl FnMut() -> Result<bool>) -> Result<Option<Choice>> {
        let mut looks = 0u32;
        loop {
            if let Some(choice) = Choice::read(words) {
                return Ok(Some(choice));
            }
            spin_loop();
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) && is_idle()? {
                // It may have said it since the last look, and gone on to its end.
                return Ok(Choice::read(words));
            }
        }
    }
}

pub struct Questions {
    words: Pinned,
    answer: Memory,
    normed: Memory,
    /// What one layer's router has normed, and what experts give that the host computes: layers come one after the other. As wide as the widest, if the host computes any.
    input: Pinned,
    outputs: Pinned,
    /// Layers whose kernel is enqueued and has no answer yet, in order.
    asked: VecDeque<usize>,
    /// Those of all devices.
    all: Asked,
}

impl Questions {
    /// `width`: columns of what the host may compute of a layer; 0 where it computes none.
    pub fn new(gpu: &Gpu, layers: usize, width: usize) -> Result<Questions> {
        let (mut words, mut input, mut outputs) = (Pinned::default(), Pinned::default(), Pinned::default());
        words.room(gpu, layers * WORDS * size_of::<u32>())?;
        input.room(gpu, width * size_of::<f32>())?;
        outputs.room(gpu, MOST_CHOSEN * width * size_of::<f32>())?;
        let answer = Memory::zeroed(gpu, size_of::<u32>(), "a question")?;
        let normed = Memory::zeroed(gpu, width * size_of::<f32>(), "a question")?;
        Ok(Questions { words, answer, normed, input, outputs, asked: VecDeque::new(), all: gpu.asked.clone() })
    }

    /// Where a layer asks, which it is about to do; `here`: where the device looks up what it has.
    pub fn ask(&mut self, layer: usize, here: Address) -> Question {
        let question = self.question(layer);
        question[..MOST_CHOSEN].iter().for_each(|word| word.store(NOT_YET, Ordering::Relaxed));
        question[MOST_CHOSEN].store(0, Ordering::Release);
        let at = question.as_ptr() as Address;
        self.asked.push_back(layer);
        self.all.ask();
        let (input, outputs) = (self.input.at(), self.outputs.at());
        let normed = if input == 0 { 0 } else { self.normed.at };
        Question { at, here, answer: self.answer.at, normed, input, outputs }
    }

    /// Of the layer that asks: what was normed, `[width]`, and room for what so many experts give.
    pub fn for_host(&mut self, width: usize, experts: usize) -> (&mut [f32], &mut [f32]) {
        (self.input.floats_mut(width), self.outputs.floats_mut(width * experts))
    }

    /// The layer that asks next; nothing was answered that it waits for.
    pub fn next(&self) -> Option<usize> {
        self.asked.front().copied()
    }

    /// The `k` experts that it wants: waits until the device has come to it. Where it goes on it asks no more.
    ///
    /// # Errors
    /// Where the device has failed before.
    pub fn wait(&mut self, gpu: &Gpu, k: usize) -> Result<Choice> {
        let layer = self.next().expect("a layer that asks");
        let Some(choice) = Choice::wait(&self.question(layer)[..k], || Ok(gpu.is_idle()?))? else {
            bail!("the device has ended without asking for the experts of layer {layer}");
        };
        if choice.goes_on {
            self.close();
        }
        Ok(choice)
    }

    /// The layer that asks next does not any more.
    fn close(&mut self) -> Option<usize> {
        let layer = self.asked.pop_front()?;
        self.all.answer();
        Some(layer)
    }

    /// Lets the device go on: it has all that was wanted, but for experts that the host has computed, a bit each by their places in what was wanted.
    pub fn open(&mut self, by_host: u32) {
        if let Some(layer) = self.close() {
            self.question(layer)[MOST_CHOSEN].store(1 | by_host << 1, Ordering::Release);
        }
    }

    /// The same for all that ask, whatever they have: what the device computes from here on means nothing.
    pub fn open_all(&mut self) {
        while !self.asked.is_empty() {
            self.open(0);
        }
    }

    fn question(&self, layer: usize) -> &[AtomicU32] {
        &self.words.words()[layer * WORDS..][..WORDS]
    }
}

impl Drop for Questions {
    fn drop(&mut self) {
        self.open_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_between_the_last_look_and_the_end_is_heard() {
        let words = [const { AtomicU32::new(NOT_YET) }; 2];
        let says_and_ends = || {
            words.iter().zip([3, 5]).for_each(|(word, expert)| word.store(expert | GOES_ON, Ordering::Release));
            Ok(true)
        };
        let choice = Choice::wait(&words, says_and_ends).unwrap().expect("it was said");
        assert_eq!((choice.experts, choice.goes_on), (vec![3, 5], true));
    }

    #[test]
    fn a_device_that_ends_without_a_word_is_not_waited_for() {
        let words = [AtomicU32::new(7), AtomicU32::new(NOT_YET)];
        let mut busy = 3;
        let ends = || {
            busy -= 1;
            Ok(busy == 0)
        };
        assert!(Choice::wait(&words, ends).unwrap().is_none());
    }
}
