//! An answer as a sequence of blocks: thoughts, text, tool calls. Dialects whose streams mark where each block starts and ends make their events from the
//! changes of blocks.

use sluice_engine::Finish;
use sluice_engine::text::Piece;

use crate::api::answer::Delta;

/// What a block is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// Reasoning.
    Thought,
    /// Text of the answer.
    Text,
    /// A call of the tool with this name; the block's text is its arguments.
    Call(String),
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What it is.
    pub kind: BlockKind,
    /// Its text so far.
    pub text: String,
}

/// What happens to a block, given by its index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It starts, without any text.
    Started(usize),
    /// This text is appended to it.
    Appended(usize, String),
    /// It is complete.
    Ended(usize),
}

/// The blocks of one choice.
#[derive(Default)]
pub struct Blocks {
    /// In order of their start.
    pub all: Vec<Block>,
    is_open: bool,
    /// Why the choice is complete; `None` while it is not.
    pub finish: Option<Finish>,
    /// Number of generated tokens that belong to thoughts.
    pub thought_tokens: usize,
}

impl Blocks {
    /// Applies a delta, and returns what it changes.
    pub fn apply(&mut self, delta: &Delta) -> Vec<Change> {
        let mut changes = Vec::new();
        for piece in &delta.pieces {
            match piece {
                Piece::Thought(text) => self.append(BlockKind::Thought, text, &mut changes),
                Piece::Text(text) => self.append(BlockKind::Text, text, &mut changes),
                Piece::Call { name, .. } => self.start(BlockKind::Call(name.clone()), &mut changes),
                Piece::Arguments { json, .. } => {
                    let last = self.open_block().filter(|i| matches!(self.all[*i].kind, BlockKind::Call(_)));
                    if let Some(i) = last.filter(|_| !json.is_empty()) {
                        self.all[i].text += json;
                        changes.push(Change::Appended(i, json.clone()));
                    }
                }
            }
        }
        let thinks = self.open_block().is_some_and(|i| self.all[i].kind == BlockKind::Thought);
        if thinks || delta.pieces.iter().any(|p| matches!(p, Piece::Thought(_))) {
            self.thought_tokens += delta.tokens.len();
        }
        if delta.finish.is_some() {
            self.finish = delta.finish;
            self.end(&mut changes);
        }
        changes
    }

    /// Name and arguments of a tool call; `None` for other blocks.
    pub fn call(&self, index: usize) -> Option<(&str, &str)> {
        let Block { kind, text } = &self.all[index];
        if let BlockKind::Call(name) = kind { Some((name, text)) } else { None }
    }

    /// Whether a block is a thought.
    pub fn is_thought(&self, index: usize) -> bool {
        self.all[index].kind == BlockKind::Thought
    }

    /// Whether the answer calls any tool.
    pub fn has_calls(&self) -> bool {
        self.all.iter().any(|block| matches!(block.kind, BlockKind::Call(_)))
    }

    /// The block that is not complete, if there is one. Only the last can be.
    pub fn open_block(&self) -> Option<usize> {
        self.is_open.then(|| self.all.len() - 1)
    }

    fn append(&mut self, kind: BlockKind, text: &str, changes: &mut Vec<Change>) {
        if text.is_empty() {
            return;
        }
        if self.open_block().is_none_or(|i| self.all[i].kind != kind) {
            self.start(kind, changes);
        }
        let last = self.all.len() - 1;
        self.all[last].text += text;
        changes.push(Change::Appended(last, text.to_owned()));
    }

    fn start(&mut self, kind: BlockKind, changes: &mut Vec<Change>) {
        self.end(changes);
        changes.push(Change::Started(self.all.len()));
        self.all.push(Block { kind, text: String::new() });
        self.is_open = true;
    }

    fn end(&mut self, changes: &mut Vec<Change>) {
        changes.extend(self.open_block().map(Change::Ended));
        self.is_open = false;
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A delta of one token.
    pub fn delta(pieces: &[Piece]) -> Delta {
        Delta {
            choice: 0,
            text: String::new(),
            pieces: pieces.to_vec(),
            tokens: vec![(0, None)],
            finish: None,
            stopped: false,
        }
    }

    /// The last delta, which has no token.
    pub fn finished(finish: Finish) -> Delta {
        Delta { tokens: Vec::new(), finish: Some(finish), ..delta(&[]) }
    }

    /// An answer that thinks, says something and calls two tools.
    pub fn rich() -> Vec<Delta> {
        let text = |t: &str| Piece::Text(t.into());
        let thought = |t: &str| Piece::Thought(t.into());
        let call = |index, name: &str| Piece::Call { index, name: name.into() };
        let arguments = |index, json: &str| Piece::Arguments { index, json: json.into() };
        vec![
            delta(&[thought("Let me ")]),
            delta(&[thought("look.")]),
            delta(&[text("I'll ")]),
            delta(&[text("look.")]),
            delta(&[call(0, "read"), arguments(0, "{\"path\": ")]),
            delta(&[arguments(0, "\"b\", \"a\": 1}")]),
            delta(&[call(1, "ls"), arguments(1, "{}")]),
            finished(Finish::Stop),
        ]
    }

    #[test]
    fn blocks_begin_grow_and_end_one_after_the_other() {
        let mut blocks = Blocks::default();
        let changes: Vec<Change> = rich().iter().flat_map(|d| blocks.apply(d)).collect();
        let outline: Vec<(char, usize)> = changes
            .iter()
            .map(|change| match change {
                Change::Started(i) => ('b', *i),
                Change::Appended(i, _) => ('g', *i),
                Change::Ended(i) => ('e', *i),
            })
            .collect();
        let expected = "b0 g0 g0 e0 b1 g1 g1 e1 b2 g2 g2 e2 b3 g3 e3";
        let found: Vec<String> = outline.iter().map(|(c, i)| format!("{c}{i}")).collect();
        assert_eq!(found.join(" "), expected);
        let texts: Vec<&str> = blocks.all.iter().map(|b| b.text.as_str()).collect();
        assert_eq!(texts, ["Let me look.", "I'll look.", "{\"path\": \"b\", \"a\": 1}", "{}"]);
        assert_eq!((blocks.thought_tokens, blocks.has_calls(), blocks.open_block()), (2, true, None));
    }

    #[test]
    fn nothing_said_is_no_block() {
        let mut blocks = Blocks::default();
        assert!(blocks.apply(&delta(&[Piece::Text(String::new())])).is_empty());
        assert!(blocks.apply(&finished(Finish::Length)).is_empty());
        assert_eq!(blocks.finish, Some(Finish::Length));
    }
}
