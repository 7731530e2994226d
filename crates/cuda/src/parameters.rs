//! What kernels are given: the structs of the kernels' sources (`kernels/`), field by field. A test on emulated devices holds that both sides agree on their sizes.

use crate::device::sys::Address;

/// A struct that a kernel takes.
///
/// # Safety
/// The struct has no padding.
pub unsafe trait Parameters: Copy {
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: the struct has no padding, as its implementation promises.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}

/// Makes structs that kernels take, of numbers and device addresses only.
macro_rules! parameters {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        // SAFETY: numbers and addresses without padding, as the test of sizes holds.
        unsafe impl Parameters for $name {}
    )* };
}

mod compressed;
mod int11;
mod latent;
mod recurrent;

pub use compressed::{Compress, Compressed};
pub use int11::{Arrange, ExpertProducts, OneToken, Records, Split};
pub use latent::{Index, LatentGather, LatentHeads, LatentQueries};
pub use recurrent::{Convolution, Delta, Ngrams, StateSpace};

/// The most products of one input that a kernel computes together.
pub const PARTS: usize = 3;
/// The most runs of rows that a head has in a matrix.
pub const RUNS: usize = 4;
/// The most rows of logits that a sampling kernel looks at.
pub const MOST_DRAWN: usize = 32;
/// Gate, up and down.
pub const PROJECTIONS: usize = 3;

parameters! {
    /// A row-major matrix of f32.
    Tensor {
        at: Address,
        /// Elements from row to row.
        stride: u64,
    }
    Norm {
        /// 0: no norm.
        weight: Address,
        eps: f32,
        unused: u32,
    }
    /// A weight matrix from its first used row on.
    Matrix {
        data: Address,
        scales: Address,
        biases: Address,
        row_bytes: u64,
        groups: u32,
        kind: u32,
        element: u32,
        group: u32,
        bits: u32,
        unused: u32,
    }
    /// Activations; 0 for an encoding that is not needed.
    Encoded {
        f: Address,
        h: Address,
        q: Address,
        sx: Address,
        mx: Address,
        n: Address,
        sn: Address,
        tn: Address,
        padded: u32,
        unused: u32,
    }
    Quantize {
        x: Tensor,
        up: Tensor,
        norm: Norm,
        taken: Address,
        rows: u32,
        cols: u32,
        to: Encoded,
    }
    Embed {
        table: Matrix,
        tokens: Address,
        out: Tensor,
        rows: u32,
        cols: u32,
    }
    /// Rows of blocks, and where they go as kernels take them.
    Rearrange {
        file: Address,
        scales: Address,
        own: Address,
        /// 0: none; on the way back the numbers of its entries
        codebook: Address,
        own_bytes: u64,
        rows: u32,
        cols: u32,
        format: u32,
        codes_at: u32,
        units_at: u32,
        global: u32,
    }
    CopyRows {
        from: Tensor,
        to: Tensor,
        rows: u32,
        cols: u32,
    }
    Between {
        x: Tensor,
        other: Tensor,
        norm: Norm,
        positions: Address,
        rows: u32,
        cols: u32,
        /// Elements of a head; positions that share a factor.
        head: u32,
        by: f32,
        steps: u32,
        unused: u32,
    }
    /// Several residual streams.
    Streams {
        streams: Tensor,
        x: Tensor,
        weights: Tensor,
        bias: Address,
        scales: [f32; 3],
        eps: f32,
        rounds: u32,
        count: u32,
        rows: u32,
        hidden: u32,
        alone: u32,
        unused: u32,
    }
    Matmul {
        matrix: Matrix,
        table: Address,
        experts: Address,
        tiles: Address,
        order: Address,
        per_row: u32,
        rows: u32,
        cols: u32,
        outputs: u32,
        x: Encoded,
        out: Tensor,
        bias: Address,
        accumulate: u32,
        run: u32,
        run_rows: u32,
        run_columns: u32,
    }
    Products {
        parts: [Matmul; PARTS],
    }
    GemvBatched {
        parts: [Matmul; PARTS],
        x: Tensor,
        norm: Norm,
        tokens: u32,
        count: u32,
        gated: u32,
        of: u32,
        element: u32,
        unused: u32,
    }
    /// A matrix of [`GemvFused`]. The rows of a launch are numbered across its matrices, and each address is that of the launch's row 0.
    FusedMatrix {
        data: Address,
        scales: Address,
        biases: Address,
        out: Address,
    }
    /// Where the rows of a matrix with interleaved heads go.
    Interleaved {
        outs: [Address; RUNS],
        starts: [u32; RUNS],
        columns: [u32; RUNS],
        period: u32,
        unused: u32,
    }
    GemvFused {
        parts: [FusedMatrix; PARTS],
        heads: [Interleaved; PARTS],
        x: Address,
        /// 0: no norm.
        norm: Address,
        row_bytes: u64,
        eps: f32,
        cols: u32,
        sets: u32,
        second: u32,
        third: u32,
        log_lanes: u32,
        gated: u32,
        accumulate: u32,
        element: u32,
        interleaved: u32,
    }
    /// A row to be normed and quantized.
    NormedRow {
        x: Address,
        norm: Address,
        eps: f32,
        cols: u32,
    }
    RouterSingle {
        x: NormedRow,
        router: Matrix,
        gate: Matrix,
        logits: Address,
        encoded: Address,
        normed: Address,
        answer: Address,
        experts: u32,
        rows: u32,
    }
    SingleToken {
        route: Route,
        x: Address,
        table: Address,
        shared: [Matrix; PROJECTIONS],
        gate: Address,
        hidden: Address,
        residual: Address,
        question: Address,
        here: Address,
        answer: Address,
        normed: Address,
        input: Address,
        outputs: Address,
        cols: u32,
        intermediate: u32,
        slots: u32,
        element: u32,
    }
    Cache {
        pool: Address,
        block_bytes: u64,
        k: u64,
        v: u64,
        k_scales: u64,
        v_scales: u64,
        block_tokens: u32,
        k_dim: u32,
        v_dim: u32,
        kv_type: u32,
        before_value: u32,
        unused: u32,
    }
    Attention {
        cache: Cache,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        q_norm: Norm,
        k_norm: Norm,
        angles: Address,
        sinks: Address,
        positions: Address,
        sequences: Address,
        slots: Address,
        tables: Address,
        table_starts: Address,
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        gated: u32,
        half: u32,
        window: u32,
        scale: f32,
        cap: f32,
        capped: u32,
        partitions: u32,
        parts: Address,
        counters: Address,
        integers: u32,
        run: u32,
        encoded: Encoded,
        selected: Address,
        top: u32,
        flat: u32,
        /// Positions of a pool, where some were selected.
        pool: u32,
        stored: u32,
    }
    Route {
        logits: Address,
        bias: Address,
        scales: Address,
        chosen: Address,
        weights: Address,
        tokens: u32,
        experts: u32,
        k: u32,
        scoring: u32,
        renormalise: u32,
        groups: u32,
        top_groups: u32,
        scale: f32,
        table: Address,
        numbers: Address,
    }
    Pairs {
        chosen: Address,
        counts: Address,
        tiles: Address,
        order: Address,
        pairs: u32,
        experts: u32,
        of_tile: u32,
        unused: u32,
    }
    /// The router of up to 32 tokens.
    RouterFew {
        x: Quantize,
        router: Matrix,
        logits: Address,
        experts: u32,
        row_blocks: u32,
        block_rows: u32,
        unused: u32,
    }
    TopkFew {
        route: Route,
        tiles: Address,
        order: Address,
        counter: Address,
        of_tile: u32,
        unused: u32,
    }
    /// Experts with a few tokens each, or one matrix for a few tokens.
    GroupedGemm {
        table: Address,
        up: Address,
        tiles: Address,
        order: Address,
        x: Encoded,
        hidden: Encoded,
        out: Tensor,
        per_row: u32,
        rows: u32,
        cols: u32,
        element: u32,
        most_tiles: u32,
        experts: u32,
        matrix: Matrix,
        tokens: u32,
        unused: u32,
    }
    Tops {
        logits: Address,
        out: Address,
        groups: Address,
        vocabulary: u32,
        unused: u32,
    }
    Ranked {
        row: u32,
        rank: u32,
    }
    Best {
        logits: Address,
        groups: Address,
        out: Address,
        of: [Ranked; MOST_DRAWN],
        vocabulary: u32,
        unused: u32,
    }
    Scaled {
        scale: f64,
        highest: f32,
        row: u32,
    }
    Sums {
        logits: Address,
        out: Address,
        of: [Scaled; MOST_DRAWN],
        vocabulary: u32,
        unused: u32,
    }
    Combine {
        outputs: Address,
        weights: Address,
        shared: Address,
        gates: Address,
        residual: Tensor,
        tokens: u32,
        cols: u32,
        k: u32,
        unused: u32,
        experts: Address,
        bias: Tensor,
    }
    /// The inputs of pairs of a token and an expert, in the experts' orders.
    Gather {
        x: Tensor,
        order: Tensor,
        out: Tensor,
        experts: Address,
        pairs: u32,
        cols: u32,
        per_token: u32,
        unused: u32,
    }
    Activate {
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor,
        up_bias: Tensor,
        experts: Address,
        rows: u32,
        cols: u32,
        activation: u32,
        alpha: f32,
        limit: f32,
        added: f32,
        to: Encoded,
    }
}

impl Tensor {
    /// `[.., cols]`, rows next to each other.
    pub fn dense(at: Address, cols: usize) -> Tensor {
        Tensor { at, stride: cols as u64 }
    }

    /// The same from a row on.
    pub fn rows_from(self, row: usize) -> Tensor {
        Tensor { at: self.at + 4 * row as u64 * self.stride, ..self }
    }
}

impl Matrix {
    /// The bytes of matrices, as they are on the device.
    pub fn bytes(matrices: &[Matrix]) -> &[u8] {
        // SAFETY: a struct of numbers without padding, as the test of sizes holds.
        unsafe { std::slice::from_raw_parts(matrices.as_ptr().cast(), size_of_val(matrices)) }
    }
}

/// A count as kernels take it.
///
/// # Panics
/// From 2^32 on.
pub fn number(n: usize) -> u32 {
    u32::try_from(n).expect("fewer than 2^32")
}
