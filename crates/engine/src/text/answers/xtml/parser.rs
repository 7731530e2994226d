//! Parses an answer in XTML while it streams. Tags are never shown; what has none is text. How the answer was cut into pieces changes nothing.

use super::{ARGUMENT, CALL, attribute, tag};
use crate::text::answers::call_syntax::parameter_json;
use crate::text::answers::json::{self, Scan, Scanner};
use crate::text::answers::marks::{
    XTML_CALLED, XTML_JSON, XTML_JSON_END, XTML_MESSAGE_END, XTML_RESPONDED, XTML_RESPONSE, XTML_THINK, XTML_THOUGHT,
    XTML_TOOLS, XTML_TOOLS_END, XTML_VALUED,
};
use crate::text::answers::matching::Match;
use crate::text::answers::piece_list::PieceList;
use crate::text::answers::style::Opened;
use crate::text::answers::tools::ParameterType;
use crate::text::pieces::Piece;
use crate::text::stop::overlap;

/// The most bytes of a tag. Longer text is no tag, however the pieces that it came in were cut.
const MAX_TAG: usize = 4096;
/// What ends a thought. A model may leave out the first.
const THOUGHT_ENDS: [&str; 5] = [XTML_THOUGHT, XTML_RESPONSE, XTML_TOOLS, XTML_RESPONDED, XTML_MESSAGE_END];
/// What ends a text.
const TEXT_ENDS: [&str; 3] = [XTML_RESPONDED, XTML_TOOLS, XTML_MESSAGE_END];
/// What may stand between channels.
const TAGS: [&str; 6] = [XTML_THINK, XTML_RESPONSE, XTML_TOOLS, XTML_THOUGHT, XTML_RESPONDED, XTML_MESSAGE_END];
/// A value that is no text.
const JSON: ParameterType = ParameterType { text: false, boolean: true, null: true, other: true, json: true };

/// Parses the text of one answer.
pub struct XtmlParser {
    /// Calls are told apart from text.
    calls: bool,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// Calls so far.
    pub count: usize,
}

enum State {
    /// Between channels.
    Between,
    Thought,
    Text,
    /// In calls that are text.
    Raw,
    /// Before a call, or the end of all.
    Tools {
        first: bool,
    },
    /// In a call, between arguments. `any`: there was one.
    Call {
        any: bool,
    },
    /// In a value that is a text. `begun`: its quotation mark was returned.
    Quoted {
        begun: bool,
    },
    /// In another value.
    Value,
    /// Before arguments that are an object, and in it.
    Object,
    Scan(Scanner),
    /// Before what ends such a call.
    End(&'static [&'static str]),
}

impl XtmlParser {
    /// `calls`: whether tools may be called; otherwise calls are text.
    pub fn new(calls: bool, opened: Opened) -> XtmlParser {
        let state = match opened {
            Opened::Yes { .. } => State::Thought,
            Opened::Closed => State::Text,
            Opened::No => State::Between,
        };
        XtmlParser { calls, state, held: String::new(), count: 0 }
    }

    /// Parses the next part of the text. `last`: `None` if more may follow, else whether the answer was cut off here.
    pub fn push(&mut self, text: &str, last: Option<bool>) -> Vec<Piece> {
        self.held.push_str(text);
        let mut out = PieceList::default();
        while self.step(&mut out, last) {}
        if last.is_some() {
            self.held.clear();
        }
        out.into_vec()
    }

    /// Moves to the next state, or takes what it can in this one. Returns whether there may be more to do.
    fn step(&mut self, out: &mut PieceList, last: Option<bool>) -> bool {
        match std::mem::replace(&mut self.state, State::Between) {
            State::Between => self.between(last),
            State::Thought => {
                let (thought, ends) = self.until(&THOUGHT_ENDS, last);
                out.thought(&thought);
                if ends { self.go(State::Between) } else { self.wait(State::Thought) }
            }
            State::Text => {
                let (text, ends) = self.until(&TEXT_ENDS, last);
                out.text(&text);
                if ends { self.go(State::Between) } else { self.wait(State::Text) }
            }
            State::Raw => {
                let (text, ends) = self.until(&[XTML_MESSAGE_END], last);
                out.text(&text);
                if ends { self.go(State::Between) } else { self.wait(State::Raw) }
            }
            State::Tools { first } => self.tools(first, out, last),
            State::Call { any } => self.call(any, out, last),
            State::Quoted { begun } => self.quoted(begun, out, last),
            State::Value => self.value(out),
            State::Object => self.object(last),
            State::Scan(scanner) => self.scan(scanner, out),
            State::End(marks) => self.end(marks, last),
        }
    }

    fn wait(&mut self, state: State) -> bool {
        self.state = state;
        false
    }

    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// Waits for the rest of a tag; an answer that ends here has none.
    fn unfinished(&mut self, state: State, last: Option<bool>) -> bool {
        match last {
            None => self.wait(state),
            Some(is_cut) if is_cut || self.held.trim().is_empty() => {
                self.held.clear();
                false
            }
            Some(_) => self.go(State::Text),
        }
    }

    fn drop_tag(&mut self, said: usize, tag: &str) {
        self.held.drain(..self.held.len() - said + tag.len());
    }

    /// The text before the first of these marks, and whether there is one; or as much text as is certain.
    fn until(&mut self, marks: &[&str], last: Option<bool>) -> (String, bool) {
        if let Some(at) = marks.iter().filter_map(|mark| self.held.find(mark)).min() {
            return (self.held.drain(..at).collect(), true);
        }
        let open = match last {
            Some(false) => 0,
            _ => marks.iter().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0),
        };
        (self.held.drain(..self.held.len() - open).collect(), false)
    }

    fn between(&mut self, last: Option<bool>) -> bool {
        let said = self.held.trim_start();
        let Some(tag) = TAGS.into_iter().find(|tag| said.starts_with(tag)) else {
            let may_follow = TAGS.iter().any(|tag| tag.starts_with(said));
            return if may_follow { self.unfinished(State::Between, last) } else { self.go(State::Text) };
        };
        if tag == XTML_TOOLS && !self.calls {
            return self.go(State::Raw);
        }
        self.drop_tag(said.len(), tag);
        self.go(match tag {
            XTML_THINK => State::Thought,
            XTML_RESPONSE => State::Text,
            XTML_TOOLS => State::Tools { first: true },
            _ => State::Between,
        })
    }

    fn tools(&mut self, first: bool, out: &mut PieceList, last: Option<bool>) -> bool {
        let said = self.held.trim_start();
        if said.starts_with(XTML_TOOLS_END) {
            self.drop_tag(said.len(), XTML_TOOLS_END);
            return self.go(State::Between);
        }
        let may_end = XTML_TOOLS_END.starts_with(said);
        match tag(said, CALL) {
            Match::Yes((attributes, len)) if len <= MAX_TAG => {
                if let Some(name) = attribute(attributes, "tool").filter(|name| !name.is_empty()) {
                    self.held.drain(..self.held.len() - said.len() + len);
                    out.push(Piece::Call { index: self.count, name });
                    self.count += 1;
                    return self.go(State::Call { any: false });
                }
            }
            Match::Partial if said.len() <= MAX_TAG => return self.unfinished(State::Tools { first }, last),
            Match::No if may_end => return self.unfinished(State::Tools { first }, last),
            _ => {}
        }
        // No call.
        if first {
            out.text(XTML_TOOLS);
        }
        self.go(State::Text)
    }

    fn call(&mut self, any: bool, out: &mut PieceList, last: Option<bool>) -> bool {
        let said = self.held.trim_start();
        let index = self.count - 1;
        if said.starts_with(XTML_CALLED) {
            out.arguments(index, if any { "}" } else { "{}" });
            self.drop_tag(said.len(), XTML_CALLED);
            return self.go(State::Tools { first: false });
        }
        if !any && said.starts_with(XTML_JSON) {
            self.drop_tag(said.len(), XTML_JSON);
            return self.go(State::Object);
        }
        let may_follow = XTML_CALLED.starts_with(said) || (!any && XTML_JSON.starts_with(said));
        match tag(said, ARGUMENT) {
            Match::Yes((attributes, len)) if len <= MAX_TAG => {
                if let Some(name) = attribute(attributes, "key") {
                    let is_text = attribute(attributes, "type").is_none_or(|kind| kind == "string");
                    self.held.drain(..self.held.len() - said.len() + len);
                    out.arguments(index, &format!("{}\"{}\": ", if any { ", " } else { "{" }, json::escaped(&name)));
                    return self.go(if is_text { State::Quoted { begun: false } } else { State::Value });
                }
                self.go(State::Text)
            }
            Match::Partial if said.len() <= MAX_TAG => self.unfinished(State::Call { any }, last),
            Match::No if may_follow => self.unfinished(State::Call { any }, last),
            _ => self.go(State::Text),
        }
    }

    fn quoted(&mut self, begun: bool, out: &mut PieceList, last: Option<bool>) -> bool {
        let index = self.count - 1;
        if !begun {
            if self.held.is_empty() {
                return self.wait(State::Quoted { begun });
            }
            out.arguments(index, "\"");
        }
        let (text, ends) = self.until(&[XTML_VALUED], last);
        out.arguments(index, &json::escaped(&text));
        if !ends {
            return self.wait(State::Quoted { begun: true });
        }
        out.arguments(index, "\"");
        self.held.drain(..XTML_VALUED.len());
        self.go(State::Call { any: true })
    }

    fn value(&mut self, out: &mut PieceList) -> bool {
        let Some(at) = self.held.find(XTML_VALUED) else { return self.wait(State::Value) };
        out.arguments(self.count - 1, &parameter_json(JSON, &self.held[..at]));
        self.held.drain(..at + XTML_VALUED.len());
        self.go(State::Call { any: true })
    }

    fn object(&mut self, last: Option<bool>) -> bool {
        let said = self.held.trim_start();
        match said.chars().next() {
            Some('{') => {
                self.held.drain(..self.held.len() - said.len());
                self.go(State::Scan(Scanner::new()))
            }
            Some(_) => self.go(State::Text),
            None => self.unfinished(State::Object, last),
        }
    }

    fn scan(&mut self, mut scanner: Scanner, out: &mut PieceList) -> bool {
        let scanned = scanner.scan(&self.held);
        let taken = match scanned {
            Scan::Ends(taken) | Scan::Bad(taken) => taken,
            _ => self.held.len(),
        };
        let json: String = self.held.drain(..taken).collect();
        out.arguments(self.count - 1, &json);
        match scanned {
            Scan::Ends(_) => self.go(State::End(&[XTML_JSON_END, XTML_CALLED])),
            Scan::Bad(_) => self.go(State::Text),
            _ => self.wait(State::Scan(scanner)),
        }
    }

    fn end(&mut self, marks: &'static [&'static str], last: Option<bool>) -> bool {
        let [mark, others @ ..] = marks else { return self.go(State::Tools { first: false }) };
        let said = self.held.trim_start();
        if said.starts_with(mark) {
            self.drop_tag(said.len(), mark);
            self.go(State::End(others))
        } else if mark.starts_with(said) {
            self.unfinished(State::End(marks), last)
        } else {
            self.go(State::Text)
        }
    }
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
