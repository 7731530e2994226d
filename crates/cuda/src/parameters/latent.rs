//! What the kernels of latent attention and of its indexers are given.

use super::{Cache, Matrix, Norm, Parameters, Tensor};
use crate::device::sys::Address;

parameters! {
    /// Rows of latent attention that are cached, and queries of some heads, which are taken to the space of these rows.
    LatentQueries {
        /// The matrix of keys, from its row 0 on.
        keys: Matrix,
        q: Tensor,
        to: Address,
        plain_to: Address,
        angles: Address,
        positions: Address,
        slots: Address,
        cache: Cache,
        kv: Tensor,
        norm: Norm,
        tokens: u32,
        first: u32,
        heads: u32,
        plain: u32,
        rotated: u32,
        rank: u32,
        adjacent: u32,
        /// Rows of keys from head to head, and the first of head 0.
        stride: u32,
        offset: u32,
        unused: u32,
    }
    /// Where each head's rows of a matrix are, and the head of each output.
    LatentHeads {
        first: Matrix,
        /// Bytes from head to head of each array.
        steps: [u64; 3],
        matrices: Address,
        numbers: Address,
        tiles: Address,
        order: Address,
        tokens: u32,
        heads: u32,
        outputs: u32,
        of_tile: u32,
        run: u32,
        unused: u32,
    }
    /// Outputs of heads, and where they go.
    LatentGather {
        from: Address,
        to: Address,
        token: u64,
        head: u64,
        cols: u32,
        heads: u32,
        run: u32,
        unused: u32,
    }
    /// A sparse indexer.
    Index {
        cache: Cache,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        logits: Tensor,
        norm: Norm,
        bias: Address,
        pool_bias: Address,
        angles: Address,
        positions: Address,
        sequences: Address,
        slots: Address,
        tables: Address,
        table_starts: Address,
        row_tables: Address,
        row_starts: Address,
        scores: Address,
        selected: Address,
        tokens: u32,
        heads: u32,
        half: u32,
        adjacent: u32,
        top: u32,
        reach: u32,
        first: u32,
        row_block: u32,
        scale: f32,
        weight_scale: f32,
        pool: u32,
        key_rows: u32,
        entry_rows: u32,
        unused: u32,
    }
}
