//! The control tokens of the harmony format.

pub(crate) const START: &str = "<|start|>";
pub(crate) const END: &str = "<|end|>";
pub(crate) const MESSAGE: &str = "<|message|>";
pub(crate) const CHANNEL: &str = "<|channel|>";
pub(crate) const CONSTRAIN: &str = "<|constrain|>";
pub(crate) const RETURN: &str = "<|return|>";
pub(crate) const CALL: &str = "<|call|>";

/// All of them, to be kept while an answer is decoded.
pub(crate) const ALL: [&str; 7] = [START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL];

/// What stands before a tool's name where one is called.
pub(crate) const FUNCTIONS: &str = "functions.";
