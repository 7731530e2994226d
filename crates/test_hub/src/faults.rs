//! How a hub misbehaves.

use std::time::Duration;

/// What is wrong with the servers; nothing by default.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The first so many requests for lists get this status, with `Retry-After` if there are seconds.
    pub list_status: Option<(u16, u32, Option<u64>)>,
    /// The same for requests for bytes.
    pub bytes_status: Option<(u16, u32, Option<u64>)>,
    /// A connection for bytes ends after so many bytes.
    pub cut_after: Option<u64>,
    /// So many connections are cut; all by default.
    pub cuts: Option<u32>,
    /// Answers with bytes end where they are, also those that were begun before.
    pub ends: bool,
    /// A connection for bytes falls silent after so many bytes. It does so only so many times.
    pub stall_after: Option<(u64, u32)>,
    /// A pause after every 64 KiB.
    pub slow: Option<Duration>,
    /// Bytes per second of all connections for bytes together.
    pub bandwidth: Option<u64>,
    /// When so many bytes were sent in all, connections for them fall silent until this is another number.
    pub hold_after: Option<u64>,
    /// So many answers have one wrong byte.
    pub wrong_bytes: u32,
    /// Bytes come without ranges: always the whole file.
    pub no_ranges: bool,
    /// Answers to ranges name another range.
    pub wrong_ranges: bool,
    /// How often a signed address can be used.
    pub signature_uses: Option<u32>,
    /// Only this token opens the repositories.
    pub token: Option<String>,
    /// Repositories are gated: without the token 401 or 403 with `GatedRepo`.
    pub gated: bool,
    /// The list has no sizes and checksums.
    pub bare_list: bool,
    /// Entity tags are no checksums.
    pub odd_etags: bool,
    /// This repository was renamed to that one.
    pub renamed: Option<(String, String)>,
    /// Sizes are announced so many bytes too large.
    pub larger: u64,
    /// Files of this name are listed too, though nobody has them.
    pub extra_names: Vec<String>,
}

impl Faults {
    /// The status to answer with instead, if that fault is left.
    pub(crate) fn take(fault: &mut Option<(u16, u32, Option<u64>)>) -> Option<(u16, Option<u64>)> {
        let (status, left, after) = fault.as_mut()?;
        let taken = (*status, *after);
        *left = left.checked_sub(1)?;
        Some(taken)
    }
}
