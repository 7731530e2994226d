//! What model families write around thoughts and calls.

pub(crate) const THINK: &str = "<think>";
pub(crate) const THOUGHT: &str = "</think>";
pub(crate) const CALL: &str = "<tool_call>";
pub(crate) const CALLED: &str = "</tool_call>";
