//! Families of cases.

use crate::case::Case;

/// The cases of one kind.
pub struct Family {
    pub name: &'static str,
    /// The usual number of seeds.
    pub cases: u64,
    pub run: fn(&mut Case),
}
