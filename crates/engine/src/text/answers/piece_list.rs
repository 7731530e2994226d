//! Pieces of an answer, in order.

use crate::text::pieces::Piece;

/// Pieces. Consecutive ones of the same kind are joined.
#[derive(Default)]
pub(super) struct PieceList(Vec<Piece>);

impl PieceList {
    pub fn into_vec(self) -> Vec<Piece> {
        self.0
    }

    pub fn push(&mut self, piece: Piece) {
        self.0.push(piece);
    }

    pub fn text(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Piece::Text(text)) => text.push_str(more),
            _ => self.0.push(Piece::Text(more.to_owned())),
        }
    }

    pub fn thought(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Piece::Thought(text)) => text.push_str(more),
            _ => self.0.push(Piece::Thought(more.to_owned())),
        }
    }

    pub fn arguments(&mut self, index: usize, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Piece::Arguments { index: current, json }) if *current == index => json.push_str(more),
            _ => self.0.push(Piece::Arguments { index, json: more.to_owned() }),
        }
    }
}
