//! What an engine is opened for, and on what.

use anyhow::Result;
use sluice_backend::Backend;

use crate::options::Options;

/// What an engine is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It answers.
    Answers,
    /// It drafts for one that does: see [`super::drafting::Follower`].
    Follows,
}

/// Makes the backend of an engine with these options.
pub type MakeBackend<'a> = &'a dyn Fn(&Options) -> Result<Box<dyn Backend>>;
