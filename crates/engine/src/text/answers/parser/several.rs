//! Calls that are read as a whole, and several between one pair of marks: lists in JSON (Mistral, Phi-4-mini, Granite 3), sections (DeepSeek, Kimi), MiniMax's and DSML.

use super::{AnswerParser, MAX_HEAD, State};
use crate::text::answers::call_syntax::{call_head, rest_of_object, whole_call};
use crate::text::answers::gemma;
use crate::text::answers::json::{Scan, Scanner};
use crate::text::answers::marks::{CALLED, GEMMA_CALLED, LISTED, MINIMAX_CALLED};
use crate::text::answers::matching::Match;
use crate::text::answers::piece_list::PieceList;
use crate::text::answers::sections::SectionSyntax;
use crate::text::answers::style::Calls;

impl AnswerParser {
    /// Waits for the end of a call whose fields may come in any order.
    pub(super) fn whole(&mut self, searched: usize, out: &mut PieceList, last: bool) -> bool {
        let mut from = searched.min(self.held.len());
        while !self.held.is_char_boundary(from) {
            from -= 1;
        }
        let is_gemma = self.calls == Calls::Gemma;
        let called = if is_gemma { GEMMA_CALLED } else { CALLED };
        let end = self.held[from..].find(called).map(|at| from + at);
        if end.is_none() && !last {
            return self.wait(State::Whole { searched: self.held.len().saturating_sub(called.len()) });
        }
        let inside = &self.held[..end.unwrap_or(self.held.len())];
        match if is_gemma { gemma::call(inside) } else { whole_call(inside) } {
            Some((name, arguments)) => {
                self.begin_call(&name, out);
                self.add_arguments(&arguments, out);
                self.drop_held(end.map_or(self.held.len(), |at| at + called.len()));
                self.has_text = false;
                self.go(State::Text)
            }
            None if end.is_none() && self.is_cut => self.discard(),
            None => self.no_call(out),
        }
    }

    pub(super) fn item(&mut self, first: bool, out: &mut PieceList, last: bool) -> bool {
        let inside = self.held.trim_start();
        let inside = inside.strip_prefix(',').filter(|_| !first).unwrap_or(inside).trim_start();
        let space = self.held.len() - inside.len();
        self.is_list = true;
        if inside.starts_with(']') {
            self.drop_held(space + 1);
            return self.go(State::Listed);
        }
        match call_head(inside) {
            Match::Yes((name, len)) if len <= MAX_HEAD => {
                self.begin_call(&name, out);
                self.drop_held(space + len);
                return self.go(State::Arguments(Scanner::new()));
            }
            Match::Partial if !last && inside.len() <= MAX_HEAD => return self.wait(State::Item { first }),
            Match::Partial if !last || self.is_cut => return self.discard(),
            _ => {}
        }
        // Fields in another order.
        match Scanner::new().scan(inside) {
            Scan::Ends(taken) => match whole_call(&inside[..taken]) {
                Some((name, arguments)) => {
                    self.begin_call(&name, out);
                    self.add_arguments(&arguments, out);
                    self.drop_held(space + taken);
                    self.go(State::Item { first: false })
                }
                None => self.no_item(first, out),
            },
            Scan::Bad(_) => self.no_item(first, out),
            _ if !last => self.wait(State::Item { first }),
            _ if self.is_cut => self.discard(),
            _ => self.no_item(first, out),
        }
    }

    /// What looked like a call of a list is text, with the beginning of the list if it is the first.
    fn no_item(&mut self, first: bool, out: &mut PieceList) -> bool {
        if !first {
            return self.end_malformed();
        }
        self.held.insert(0, '[');
        self.no_call(out)
    }

    pub(super) fn rest(&mut self, last: bool) -> bool {
        match rest_of_object(&self.held) {
            Some(end) if end <= MAX_HEAD => {
                self.drop_held(end);
                self.go(State::Item { first: false })
            }
            None if self.held.len() <= MAX_HEAD && !last => self.wait(State::Rest),
            None if self.held.len() <= MAX_HEAD && (self.is_cut || self.held.trim().is_empty()) => self.discard(),
            _ => self.end_malformed(),
        }
    }

    pub(super) fn listed(&mut self, last: bool) -> bool {
        let rest = self.held.trim_start();
        self.is_list = false;
        if self.calls == Calls::List {
            if rest.starts_with(LISTED) {
                self.drop_held(self.held.len() - rest.len() + LISTED.len());
            } else if LISTED.starts_with(rest) && !last {
                return self.wait(State::Listed);
            } else if LISTED.starts_with(rest) && self.is_cut {
                return self.discard();
            }
        }
        self.end_call()
    }

    /// At the beginning of a section.
    pub(super) fn first_in_section(&mut self, section: SectionSyntax, out: &mut PieceList, last: bool) -> bool {
        let inside = self.held.trim_start();
        let space = self.held.len() - inside.len();
        match section.head(inside) {
            Match::Yes(head) if head.len <= MAX_HEAD => {
                let (name, len, ends) = (head.name.to_owned(), head.len, head.ends);
                self.begin_in_section(&name, space + len, ends, out)
            }
            Match::Partial if !last && inside.len() <= MAX_HEAD => self.wait(State::Call),
            Match::Partial if self.is_cut => self.discard(),
            _ => self.no_call(out),
        }
    }

    /// A call in a section begins, after so many bytes.
    fn begin_in_section(
        &mut self,
        name: &str,
        bytes: usize,
        ends: &'static [&'static str],
        out: &mut PieceList,
    ) -> bool {
        self.begin_call(name, out);
        self.drop_held(bytes);
        self.ends = ends;
        self.go(State::Arguments(Scanner::new()))
    }

    /// After a call in a section.
    fn next_in_section(&mut self, section: SectionSyntax, out: &mut PieceList, last: bool) -> bool {
        let inside = self.held.trim_start();
        let space = self.held.len() - inside.len();
        if inside.starts_with(section.end) {
            self.drop_held(space + section.end.len());
            return self.end_call();
        }
        let may_end = section.end.starts_with(inside);
        match section.head(inside) {
            Match::Yes(head) if head.len <= MAX_HEAD => {
                let (name, len, ends) = (head.name.to_owned(), head.len, head.ends);
                self.begin_in_section(&name, space + len, ends, out)
            }
            // An answer that ends here is complete.
            _ if inside.is_empty() && last => self.discard(),
            Match::Partial if !last && inside.len() <= MAX_HEAD => self.wait(State::Next),
            Match::No if may_end && !last => self.wait(State::Next),
            Match::No if may_end => self.discard(),
            Match::Partial if self.is_cut => self.discard(),
            _ => self.end_malformed(),
        }
    }

    pub(super) fn next(&mut self, out: &mut PieceList, last: bool) -> bool {
        if let Some(section) = self.section {
            return self.next_in_section(section, out, last);
        }
        let inside = self.held.trim_start();
        let space = self.held.len() - inside.len();
        let called = if let Calls::Dsml(block) = self.calls { block.marks()[1] } else { MINIMAX_CALLED };
        if inside.starts_with(called) {
            self.drop_held(space + called.len());
            return self.end_call();
        }
        match (self.syntax.head)(inside) {
            Match::Yes((name, len)) if len <= MAX_HEAD => {
                let name = name.to_owned();
                self.begin_call(&name, out);
                self.drop_held(space + len);
                self.go(State::Parameters { tool: name, any: false })
            }
            // An answer that ends here is complete.
            _ if inside.is_empty() && last => self.discard(),
            Match::Partial if !last && inside.len() <= MAX_HEAD => self.wait(State::Next),
            Match::No if called.starts_with(inside) && !last => self.wait(State::Next),
            Match::No if called.starts_with(inside) => self.discard(),
            Match::Partial if self.is_cut => self.discard(),
            _ => self.end_malformed(),
        }
    }
}
