//! What a caller hears of a transfer, and how it stops one.

use std::path::Path;

/// Something that happened.
#[derive(Debug)]
pub enum Event<'a> {
    /// What will be fetched, before the first byte of weights is.
    Planned(Planned<'a>),
    /// Bytes of all files that are there, and all of them.
    Progress {
        /// Bytes that are there.
        done: u64,
        /// All bytes.
        all: u64,
    },
    /// Something that the user should know: a pause, a fallback. One line.
    Note(String),
}

/// A transfer that is about to begin.
#[derive(Debug)]
pub struct Planned<'a> {
    /// The model's name, with its quantisation.
    pub name: &'a str,
    /// Files that are missing.
    pub files: usize,
    /// Bytes of these files.
    pub bytes: u64,
    /// Bytes of them that an earlier try left.
    pub kept: u64,
    /// Bytes of the model, with what is there already.
    pub all: u64,
    /// Bytes that are free where the cache is.
    pub free: u64,
    /// Where the cache is.
    pub cache: &'a Path,
    /// The model's `config.json`, if the repository has one: it is there by now.
    pub config: Option<&'a Path>,
}

/// Hears of a transfer, from its calling thread.
pub trait Watch {
    /// Something happened.
    fn event(&self, event: Event);

    /// Whether to stop. What has arrived is kept.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Nobody.
impl Watch for () {
    fn event(&self, _: Event) {}
}
