//! Parts of a parsed answer. Endpoints turn them into events.

/// A part of an answer. Parts of the same kind in a row belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Part of a thought.
    Thought(String),
    /// Part of the text.
    Text(String),
    /// A call of a tool begins.
    Call {
        /// Counts the calls of an answer from 0.
        index: usize,
        /// The tool's name.
        name: String,
    },
    /// Part of the arguments of the last call. Together they are one JSON object, in the model's order.
    Arguments {
        /// The index of the call.
        index: usize,
        /// Part of the object's text.
        json: String,
    },
}

/// The text of an answer, without thoughts and calls.
pub fn text_of(pieces: &[Piece]) -> String {
    let text = |piece: &Piece| match piece {
        Piece::Text(text) => Some(text.clone()),
        _ => None,
    };
    pieces.iter().filter_map(text).collect()
}
