//! Slots as they are on disk, for a store that replicas share.

use std::sync::Arc;

use super::cipher::Cipher;
use super::index::Key;
use super::lookups::Lookups;
use super::reads;
use super::slot::{self, Label};

impl Lookups {
    /// What slots are opened with.
    pub(crate) fn cipher(&self) -> Option<Arc<Cipher>> {
        self.cipher.clone()
    }

    /// The slot of a part with its checksum or seal, as it is on disk; `None` if the entry is gone, or the slot is not right.
    pub(crate) fn sealed_slot(&self, key: &Key, part: u32) -> Option<Vec<u8>> {
        self.pin(key).then_some(())?;
        let slot = self.read_sealed(key, part);
        reads::lock(&self.desk).pins.push(*key);
        slot
    }

    fn read_sealed(&self, key: &Key, part: u32) -> Option<Vec<u8>> {
        let entry = self.find(key).ok()??;
        let (_, bytes, place) = entry.parts.iter().find(|(p, ..)| *p == part)?;
        let source = self.source(*bytes, *place)?;
        let mut slot = vec![0; source.len];
        source.file.read_at(source.offset, &mut slot).ok()?;
        // What is damaged here must not be spread.
        let is_right = |cipher: Option<&Cipher>, slot: &mut [u8]| {
            if cipher.is_some_and(|cipher| !cipher.open(slot)) {
                return false;
            }
            slot::label_of(slot).is_some_and(|(label, tokens)| {
                let is_it = (label.model, label.hash, label.part, label.bytes) == (key.0, key.1, part, *bytes);
                is_it && slot::holds(&Label { tokens: &tokens, ..label }, cipher.is_none(), slot)
            })
        };
        let right = match &self.cipher {
            Some(cipher) => is_right(Some(cipher), &mut slot.clone()),
            None => is_right(None, &mut slot),
        };
        right.then_some(slot)
    }
}
