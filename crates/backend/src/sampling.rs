//! Sampling on the device that holds the logits.

use crate::Logits;

/// Looks at logits row by row on the device that holds them, so that they need not be copied to the host.
pub trait DeviceSampling {
    /// The likeliest token of each row, the first of equals. `None` where one of the row's logits is NaN, or where the device did not look for it.
    fn tops(&mut self, logits: Logits) -> Option<&[Top]>;
    /// The likeliest tokens of each of these rows, of ranks up to [`MAX_RANKS`].
    fn best(&mut self, logits: Logits, of: &[Ranked]) -> &[Best];
    /// For each of these rows the sums of its logits' weights ([`crate::sample::total`]), [`DRAWN_TOGETHER`] logits per sum: `[of, blocks]`.
    fn sums(&mut self, logits: Logits, of: &[Scaled]) -> &[u64];
    /// Blocks of [`DRAWN_TOGETHER`] logits, by (row, block number): `[of, DRAWN_TOGETHER]`. A row's last block may be shorter.
    fn blocks(&mut self, logits: Logits, of: &[(usize, usize)]) -> &[f32];
}

/// Logits whose weights are summed at once.
pub const DRAWN_TOGETHER: usize = 1024;

/// The most of a row's likeliest tokens that [`DeviceSampling::best`] finds.
pub const MAX_RANKS: usize = 192;

/// A row whose `rank` likeliest tokens are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Ranked {
    /// The row of the logits.
    pub row: usize,
    /// How many tokens are wanted.
    pub rank: usize,
}

/// All tokens of a row whose logits are at least `bar`, in any order: as many as were wanted, or more. Empty where there are too many.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Best {
    /// The bound.
    pub bar: f32,
    /// The tokens.
    pub found: Vec<Top>,
}

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Top {
    /// The token's logit.
    pub logit: f32,
    /// The token's number.
    pub token: u32,
}

/// A row whose weights are wanted: of `(logit - highest) * scale`.
#[derive(Clone, Copy, Debug)]
pub struct Scaled {
    /// The row of the logits.
    pub row: usize,
    /// The row's highest logit.
    pub highest: f32,
    /// What is multiplied with the distance from the highest logit.
    pub scale: f64,
}
