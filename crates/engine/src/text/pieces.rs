//! What an answer consists of, once its model family's way of writing thoughts and calls is understood. Endpoints make their events of these.

/// A part of an answer, as it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Of what the model thinks to itself.
    Thought(String),
    /// Of what it says.
    Text(String),
    /// A call of a tool begins; calls of one answer are counted from 0.
    Call { index: usize, name: String },
    /// Goes on with the arguments of the call that began last, which together are one JSON object, in the order in which the model wrote its fields.
    Arguments { index: usize, json: String },
}

/// All that an answer says, without thoughts and calls.
pub fn text_of(pieces: &[Piece]) -> String {
    let text = |piece: &Piece| match piece {
        Piece::Text(text) => Some(text.clone()),
        _ => None,
    };
    pieces.iter().filter_map(text).collect()
}
