//! What a layer has asked for: each expert with its state. Several fetches may be in progress at once.

use std::sync::Arc;

use sluice_store::Error;

use super::slots::Ticket;

/// Names a fetch until its last expert is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchId {
    pub(super) index: u32,
    pub(super) number: u64,
}

/// What [`super::ExpertPool::next`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The expert at this position of what was asked for is in memory, and stays there until it is released.
    Expert(usize),
    /// The expert at this position cannot be read: [`super::ExpertPool::take_error`] says why.
    Failed(usize),
    /// More are being read.
    Later,
    /// All were handed over.
    Over,
}

/// The state of an expert that a fetch asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Item {
    /// It has no slot.
    Missing,
    /// This read brings it.
    Reading(Ticket),
    /// It is in this slot, and not handed over.
    Ready(u32),
    /// It could not be read; the fetch has the error.
    Failed,
    /// The caller has it, in this slot.
    HandedOver(u32),
    /// It was released, or its failure reported.
    Over,
}

/// A fetch has nothing to hand over yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotReady {
    /// Experts are handed over in order, and the next one has no slot.
    pub needs_slot: bool,
}

/// The experts that a layer asked for.
#[derive(Debug, Default)]
pub(super) struct Fetch {
    /// Which fetch this is, of all that were begun; 0 if none.
    pub number: u64,
    pub layer: usize,
    pub wanted: Vec<u32>,
    pub items: Vec<Item>,
    /// (Position, why the expert there cannot be read)
    errors: Vec<(u32, Arc<Error>)>,
    /// All before this position were handed over, or (unordered) at least requested.
    pub next: usize,
    pub ordered: bool,
    /// Items that are not handed over yet.
    left: usize,
    /// Items that are not released yet.
    open: usize,
}

impl Fetch {
    /// A fetch that is over, with room for so many experts.
    pub fn with_capacity(experts: usize) -> Fetch {
        Fetch { wanted: Vec::with_capacity(experts), items: Vec::with_capacity(experts), ..Fetch::default() }
    }

    /// Resets it for a new fetch; the caller pushes an item for each expert.
    pub fn begin(&mut self, number: u64, layer: usize, wanted: &[u32], ordered: bool) {
        debug_assert!(!self.is_live());
        (self.number, self.layer, self.ordered, self.next) = (number, layer, ordered, 0);
        (self.left, self.open) = (wanted.len(), wanted.len());
        self.wanted.clear();
        self.wanted.extend_from_slice(wanted);
        self.items.clear();
        self.errors.clear();
    }

    /// Whether anything of it is not over.
    pub fn is_live(&self) -> bool {
        self.open > 0
    }

    /// Whether any are yet to be handed over.
    pub fn waits(&self) -> bool {
        self.left > 0
    }

    /// Whether [`Fetch::hand_over`] has something to hand over.
    pub fn is_ready(&self) -> bool {
        let ready = |item: &Item| matches!(item, Item::Ready(_) | Item::Failed);
        let mut rest = self.items[self.next..].iter().skip_while(|i| matches!(i, Item::HandedOver(_) | Item::Over));
        !self.waits() || if self.ordered { rest.next().is_some_and(ready) } else { rest.any(ready) }
    }

    /// Whether an expert that it waits for has no slot.
    pub fn is_missing_some(&self) -> bool {
        self.waits() && self.items.contains(&Item::Missing)
    }

    /// The expert at position `i` cannot be read.
    pub fn fail(&mut self, i: usize, error: Arc<Error>) {
        self.items[i] = Item::Failed;
        self.errors.push((i as u32, error));
    }

    /// Why the expert at position `i` cannot be read. To be asked once.
    pub fn take_error(&mut self, i: usize) -> Arc<Error> {
        let at = self.errors.iter().position(|(item, _)| *item as usize == i).expect("failed, and not asked before");
        self.errors.swap_remove(at).1
    }

    /// The next expert that is ready or has failed.
    ///
    /// # Errors
    /// None is.
    pub fn hand_over(&mut self) -> Result<Next, NotReady> {
        if self.left == 0 {
            return Ok(Next::Over);
        }
        let mut i = self.next;
        while i < self.items.len() {
            match self.items[i] {
                Item::Ready(slot) => {
                    self.items[i] = Item::HandedOver(slot);
                    self.left -= 1;
                    return Ok(Next::Expert(i));
                }
                Item::Failed => {
                    self.items[i] = Item::Over;
                    self.left -= 1;
                    self.open -= 1;
                    return Ok(Next::Failed(i));
                }
                Item::HandedOver(_) | Item::Over if i == self.next => self.next += 1,
                Item::HandedOver(_) | Item::Over => {}
                Item::Missing if self.ordered => return Err(NotReady { needs_slot: true }),
                Item::Reading(_) if self.ordered => return Err(NotReady { needs_slot: false }),
                Item::Missing | Item::Reading(_) => {}
            }
            i += 1;
        }
        Err(NotReady { needs_slot: false })
    }

    /// The slot of the expert at position `i`, which the caller has.
    pub fn handed_over(&self, i: usize) -> u32 {
        let Item::HandedOver(slot) = self.items[i] else { panic!("not handed over, or released before") };
        slot
    }

    /// The caller gives the expert at position `i` back: its slot.
    pub fn release(&mut self, i: usize) -> u32 {
        let slot = self.handed_over(i);
        self.items[i] = Item::Over;
        self.open -= 1;
        slot
    }
}
