//! What the tiers ask of the memory that the caches' blocks and states are in. The engine's backend provides it; a test can do with vectors.

use std::borrow::Cow;
use std::io;

use anyhow::Result;
use sluice_cache::RestoreTarget;
use sluice_store::Memory;

/// Access to the caches' blocks and states by number. Groups, blocks and rows are those of `sluice_cache`.
pub(crate) trait BlockIo {
    /// Makes the first `blocks` blocks of a group usable.
    ///
    /// # Errors
    /// When there is no memory for them.
    fn commit(&mut self, group: usize, blocks: usize) -> Result<()>;

    /// Copies a block within its group. The target is committed already.
    fn copy_block(&mut self, group: usize, from: u32, to: u32);

    /// Copies one recurrent state over another.
    fn copy_state(&mut self, from: u32, to: u32);

    /// Sets a recurrent state to zeros.
    fn zero_state(&mut self, row: u32);

    /// Reads a block's bytes into `out`: `[block_bytes]`.
    fn read_block(&mut self, group: usize, block: u32, out: &mut [u8]);

    /// Writes a block's bytes: `[block_bytes]`. The block is committed already.
    fn write_block(&mut self, group: usize, block: u32, bytes: &[u8]);

    /// Reads a recurrent state into `out`: `[state_len]`.
    fn read_state(&mut self, row: u32, out: &mut [f32]);

    /// Writes a recurrent state: `[state_len]`.
    fn write_state(&mut self, row: u32, state: &[f32]);

    /// Host memory that blocks and states can be copied to and from quickly.
    ///
    /// # Errors
    /// When there is none.
    fn host_memory(&mut self, bytes: usize) -> io::Result<Box<dyn Memory>>;

    /// Commits the memory of a restore target.
    ///
    /// # Errors
    /// Those of [`BlockIo::commit`].
    fn commit_target(&mut self, target: RestoreTarget) -> Result<()> {
        match target {
            RestoreTarget::Block { group, block, .. } => self.commit(group, block as usize + 1),
            RestoreTarget::State { .. } => Ok(()),
        }
    }

    /// Writes bytes to a restore target, which is committed first.
    ///
    /// # Errors
    /// Those of [`BlockIo::commit`].
    fn fill(&mut self, target: RestoreTarget, bytes: &[u8]) -> Result<()> {
        self.commit_target(target)?;
        match target {
            RestoreTarget::Block { group, block, .. } => self.write_block(group, block, bytes),
            RestoreTarget::State { row, .. } => {
                // Bytes from disk start at a page, so that they are usually aligned.
                let state: Cow<[f32]> = match bytemuck::try_cast_slice(bytes) {
                    Ok(state) if cfg!(target_endian = "little") => state.into(),
                    _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                };
                self.write_state(row, &state);
            }
        }
        Ok(())
    }
}
