//! What the device asks the host in the middle of a step: which experts a token takes, so that the host brings those that are missing, or computes them itself from
//! what the router has normed. The device waits at a kernel (`ask_one`) until it is answered; all that comes behind it is enqueued already, so that nothing else stands
//! between the answer and the experts.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Result, bail};

use crate::driver::{Address, Gpu};
use crate::memory::{Memory, Pinned};

/// Experts that a token takes at most, as the kernel has it.
pub const MOST_CHOSEN: usize = 16;
/// Words of a question: the experts, and whether it is answered; lines of their own.
const WORDS: usize = 32;
/// No expert.
const NOT_YET: u32 = u32::MAX;
/// Looks at an answer before the device is asked whether it is still there.
const LOOKS: u32 = 1 << 16;

/// Where a layer asks: places for its kernels.
#[derive(Clone, Copy)]
pub struct Question {
    pub at: Address,
    /// `[cols]` f32, where the host wants what was normed; else 0.
    pub input: Address,
    /// A word in which the device keeps which experts the host has computed, a bit each.
    pub by_host: Address,
    /// `[those experts, cols]` f32
    pub outputs: Address,
}

pub struct Questions {
    words: Pinned,
    by_host: Memory,
    /// What one layer's router has normed, and what experts give that the host computes: layers come one after the other. As wide as the widest, if the host computes any.
    input: Pinned,
    outputs: Pinned,
    /// Layers whose kernel is enqueued and has no answer yet, in order.
    asked: VecDeque<usize>,
}

impl Questions {
    /// `width`: columns of what the host may compute of a layer; 0 where it computes none.
    pub fn new(gpu: &Gpu, layers: usize, width: usize) -> Result<Questions> {
        let (mut words, mut input, mut outputs) = (Pinned::default(), Pinned::default(), Pinned::default());
        words.room(gpu, layers * WORDS * size_of::<u32>())?;
        input.room(gpu, width * size_of::<f32>())?;
        outputs.room(gpu, MOST_CHOSEN * width * size_of::<f32>())?;
        let by_host = Memory::zeroed(gpu, size_of::<u32>(), "a question")?;
        Ok(Questions { words, by_host, input, outputs, asked: VecDeque::new() })
    }

    /// Where a layer asks, which it is about to do.
    pub fn ask(&mut self, layer: usize) -> Question {
        let question = self.question(layer);
        question[..MOST_CHOSEN].iter().for_each(|word| word.store(NOT_YET, Ordering::Relaxed));
        question[MOST_CHOSEN].store(0, Ordering::Release);
        let at = question.as_ptr() as Address;
        self.asked.push_back(layer);
        Question { at, input: self.input.at(), by_host: self.by_host.at, outputs: self.outputs.at() }
    }

    /// Of the layer that asks: what was normed, `[width]`, and room for what so many experts give.
    pub fn for_host(&mut self, width: usize, experts: usize) -> (&mut [f32], &mut [f32]) {
        (self.input.floats_mut(width), self.outputs.floats_mut(width * experts))
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

    /// Lets the device go on: it has all that was wanted, but for experts that the host has computed, a bit each by their places in what was wanted.
    pub fn open(&mut self, by_host: u32) {
        if let Some(layer) = self.asked.pop_front() {
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
