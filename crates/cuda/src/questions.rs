//! What the device asks the host in the middle of a step: which experts a token takes, so that the host brings those that are missing. The device waits at a
//! kernel (`ask_one`) until it is answered; all that comes behind it is enqueued already, so that nothing else stands between the answer and the experts.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

use crate::driver::{Address, Gpu};
use crate::memory::Pinned;

/// Experts that a token takes at most, as the kernel has it.
pub const MOST_CHOSEN: usize = 16;
/// Words of a question: the experts, and whether it is answered; lines of their own.
const WORDS: usize = 32;
/// No expert.
const NOT_YET: u32 = u32::MAX;
/// Looks at an answer before the device is asked whether it is still there.
const LOOKS: u32 = 1 << 16;

pub struct Questions {
    words: Pinned,
    /// Layers whose kernel is enqueued and has no answer yet, in order.
    asked: VecDeque<usize>,
}

impl Questions {
    pub fn new(gpu: &Gpu, layers: usize) -> Result<Questions> {
        let mut words = Pinned::default();
        words.room(gpu, layers * WORDS * size_of::<u32>())?;
        Ok(Questions { words, asked: VecDeque::new() })
    }

    /// Where a layer asks, which it is about to do.
    pub fn ask(&mut self, layer: usize) -> Address {
        let question = self.question(layer);
        question[..MOST_CHOSEN].iter().for_each(|word| word.store(NOT_YET, Ordering::Relaxed));
        question[MOST_CHOSEN].store(0, Ordering::Release);
        let at = question.as_ptr() as Address;
        self.asked.push_back(layer);
        at
    }

    /// The layer that asks next; nothing was answered that it waits for.
    pub fn next(&self) -> Option<usize> {
        self.asked.front().copied()
    }

    /// The `k` experts that it wants, ascending: waits until the device has come to it.
    ///
    /// # Errors
    /// Where the device has failed before.
    pub fn wait(&mut self, gpu: &Gpu, k: usize) -> Result<Vec<u32>> {
        let layer = self.next().expect("a layer that asks");
        let question = &self.question(layer)[..k];
        let mut looks = 0u32;
        loop {
            if question.iter().all(|word| word.load(Ordering::Acquire) != NOT_YET) {
                return Ok(question.iter().map(|word| word.load(Ordering::Relaxed)).collect());
            }
            spin_loop();
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) && gpu.is_idle()? {
                bail!("the device has ended without asking for the experts of layer {layer}");
            }
        }
    }

    /// Lets the device go on: it has all that was wanted.
    pub fn open(&mut self) {
        if let Some(layer) = self.asked.pop_front() {
            self.question(layer)[MOST_CHOSEN].store(1, Ordering::Release);
        }
    }

    /// The same for all that ask, whatever they have: what the device computes from here on means nothing.
    pub fn open_all(&mut self) {
        while !self.asked.is_empty() {
            self.open();
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
