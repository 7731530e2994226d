//! Hands nodes to the writer, with copies of their blocks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use sluice_cache::EvictedNode;
use sluice_cache::disk::STATE;

use super::limits::MAX_QUEUED;
use super::shared::Shared;
use super::writer::{OutgoingNode, WriterCommand};
use crate::tiers::block_io::BlockIo;
use crate::tiers::shape::CacheShape;

/// The engine's end of the writer's queue.
pub(super) struct Outbox {
    pub commands: Sender<WriterCommand>,
    pub shared: Arc<Shared>,
    pub shape: CacheShape,
    /// Nodes that were not copied, because too much was queued.
    pub dropped: u64,
}

impl Outbox {
    /// Sends a command, if the cache is in use. Returns whether it was sent.
    pub fn send(&self, command: WriterCommand) -> bool {
        self.shared.is_ready() && self.commands.send(command).is_ok()
    }

    /// Whether more may be queued.
    pub fn can_grow(&self) -> bool {
        self.shared.queued.load(Ordering::Relaxed) < MAX_QUEUED
    }

    /// Bytes of a node's blocks and state.
    pub fn bytes_of(&self, node: &EvictedNode) -> u64 {
        let blocks = node.blocks.iter().zip(&self.shape.block_bytes).filter(|(b, _)| b.is_some());
        let state = node.state.map_or(0, |_| self.shape.state_bytes);
        (blocks.map(|(_, bytes)| *bytes).sum::<usize>() + state) as u64
    }

    /// Copies a node and queues it. Returns whether it was queued.
    pub fn copy_out(&mut self, node: &EvictedNode, io: &mut dyn BlockIo) -> bool {
        if !self.shared.is_ready() {
            return false;
        }
        if !self.can_grow() {
            self.dropped += 1;
            return false;
        }
        let bytes = self.bytes_of(node);
        let mut parts: Vec<(u32, Vec<u8>)> = Vec::with_capacity(self.shape.groups() + 1);
        for (group, (len, block)) in self.shape.block_bytes.iter().zip(&node.blocks).enumerate() {
            if let Some(block) = block {
                let mut out = vec![0; *len];
                io.read_block(group, *block, &mut out);
                parts.push((group as u32, out));
            }
        }
        if let Some(row) = node.state {
            let mut state = vec![0f32; self.shape.state_bytes / size_of::<f32>()];
            io.read_state(row, &mut state);
            parts.push((STATE, state.iter().flat_map(|x| x.to_le_bytes()).collect()));
        }
        let EvictedNode { hash, before, position, tokens, .. } = node.clone();
        self.shared.queued.fetch_add(bytes, Ordering::Relaxed);
        let sent = self.send(WriterCommand::Store(OutgoingNode { hash, before, position, tokens, parts, bytes }));
        if !sent {
            self.shared.queued.fetch_sub(bytes, Ordering::Relaxed);
        }
        sent
    }
}
