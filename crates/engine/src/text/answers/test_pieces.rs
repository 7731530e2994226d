//! What the tests of all parsers share: pieces of an answer, and texts that are cut everywhere.

use super::piece_list::PieceList;
use crate::text::Piece;

/// Pieces of one kind beside each other are one.
pub fn join(all: Vec<Piece>) -> Vec<Piece> {
    let mut out = PieceList::default();
    for piece in all {
        match piece {
            Piece::Text(text) => out.text(&text),
            Piece::Thought(text) => out.thought(&text),
            Piece::Arguments { index, json } => out.arguments(index, &json),
            Piece::Call { .. } => out.push(piece),
        }
    }
    out.into_vec()
}

/// What `parse` makes of a text at once, which it must make of it cut anywhere, too.
pub fn cut_everywhere(text: &str, parse: impl Fn(&[&str]) -> Vec<Piece>) -> Vec<Piece> {
    let whole = parse(&[text]);
    for cut in (0..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
        assert_eq!(parse(&[&text[..cut], &text[cut..]]), whole, "{:?}", &text[..cut]);
    }
    let characters: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(parse(&characters.iter().map(String::as_str).collect::<Vec<_>>()), whole);
    whole
}

pub fn text(text: &str) -> Piece {
    Piece::Text(text.into())
}

pub fn thought(text: &str) -> Piece {
    Piece::Thought(text.into())
}

pub fn call(index: usize, name: &str, json: &str) -> [Piece; 2] {
    [Piece::Call { index, name: name.into() }, Piece::Arguments { index, json: json.into() }]
}
