//! Parses an answer while it streams: into thoughts, text and calls.
//!
//! Text is held back only while it may be the beginning of a mark, or while the next mark decides what it is. How the answer was cut into pieces changes nothing. What
//! begins like a call and is none is returned as text. If a call turns out malformed after some of its arguments were returned, they end there, and the rest
//! is text.

mod parameters;
mod several;

use std::sync::Arc;

use super::call_syntax::{ParameterSyntax, call_head, mistral_head};
use super::harmony::HarmonyParser;
use super::json::{Scan, Scanner};
use super::marks::{CALLED, DSML_INVOKED};
use super::matching::Match;
use super::piece_list::PieceList;
use super::sections::SectionSyntax;
use super::style::{Calls, Opened, Style};
use super::tools::{ParameterType, Tools};
use super::xtml::XtmlParser;
use crate::text::pieces::Piece;
use crate::text::stop::overlap;

/// Bytes up to the end of a call's name, at most. A longer one is no call, however the text was cut.
const MAX_HEAD: usize = 4096;

/// Parses the text of one answer.
pub struct AnswerParser {
    /// The tools that may be called; `None`: calls are text.
    tools: Option<Arc<Tools>>,
    calls: Calls,
    syntax: ParameterSyntax,
    /// How calls in a section of their own are written, and what ends the current one.
    section: Option<SectionSyntax>,
    ends: &'static [&'static str],
    /// What begins and ends thoughts.
    thoughts: [&'static str; 2],
    /// Thoughts are on lines of their own, and so many line ends may follow.
    thought_lines: bool,
    gap: usize,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// Calls so far.
    count: usize,
    /// Whether there was text since the beginning, or since the last call.
    has_text: bool,
    /// White space before the current call, which is not returned.
    skipped: String,
    /// The current call is one of a list.
    is_list: bool,
    /// The answer was cut off: what may be the beginning of a mark is one.
    is_cut: bool,
    /// Parses everything, where answers are in the harmony format or in XTML.
    own: Option<OwnParser>,
}

/// The parser of a family that marks everything.
enum OwnParser {
    Harmony(HarmonyParser),
    Xtml(XtmlParser),
}

impl OwnParser {
    fn push(&mut self, text: &str, last: Option<bool>) -> Vec<Piece> {
        match self {
            OwnParser::Harmony(parser) => parser.push(text, last),
            OwnParser::Xtml(parser) => parser.push(text, last),
        }
    }

    fn calls(&self) -> usize {
        match self {
            OwnParser::Harmony(parser) => parser.count,
            OwnParser::Xtml(parser) => parser.count,
        }
    }
}

/// What is being parsed.
enum State {
    /// A thought may begin.
    Start,
    /// In a thought. `begun`: after the line end that follows its mark.
    Thought {
        begun: bool,
    },
    /// After a thought, of which up to this many line ends are part.
    Gap(usize),
    Text,
    /// After `<tool_call>`.
    Call,
    /// In a call whose fields come in an unusual order: waits for its end.
    Whole {
        searched: usize,
    },
    Arguments(Scanner),
    /// At the end of a call, before these marks.
    End(&'static [&'static str]),
    /// In a list of calls, before the next one or its end. `first`: before the first one.
    Item {
        first: bool,
    },
    /// In a call of a list, after its arguments.
    Rest,
    /// After a list of calls: a mark may follow.
    Listed,
    /// After a call: another one may follow before the mark that ends all.
    Next,
    /// Between parameters. `any`: there was one.
    Parameters {
        tool: String,
        any: bool,
    },
    Value {
        tool: String,
        kind: ParameterType,
        begun: bool,
    },
}

impl AnswerParser {
    /// A parser for an answer in this style. `tools`: those that may be called; without them calls are text.
    pub fn new(style: Style, tools: Option<Arc<Tools>>, opened: Opened) -> AnswerParser {
        let state = match opened {
            Opened::Yes { line } => State::Thought { begun: line },
            Opened::No if style.thoughts => State::Start,
            Opened::No | Opened::Closed => State::Text,
        };
        let own = match style.calls {
            Some(Calls::Harmony) => Some(OwnParser::Harmony(HarmonyParser::new(tools.is_some()))),
            Some(Calls::Xtml) => Some(OwnParser::Xtml(XtmlParser::new(tools.is_some(), opened))),
            _ => None,
        };
        AnswerParser {
            own,
            tools: tools.filter(|_| style.calls.is_some()),
            calls: style.calls.unwrap_or(Calls::Json),
            syntax: ParameterSyntax::of(style.calls.unwrap_or(Calls::Json)),
            section: style.calls.and_then(SectionSyntax::of),
            ends: &[],
            thoughts: style.thought_marks(),
            thought_lines: style.has_lines(),
            gap: style.gap(),
            state,
            held: String::new(),
            count: 0,
            has_text: false,
            skipped: String::new(),
            is_list: false,
            is_cut: false,
        }
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.own.as_ref().map_or(self.count, OwnParser::calls)
    }

    /// Parses the next part of the text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        if let Some(own) = &mut self.own {
            return own.push(text, None);
        }
        self.held.push_str(text);
        let mut out = PieceList::default();
        while self.step(&mut out, false) {}
        out.into_vec()
    }

    /// Returns what was held back, after the answer's end.
    pub fn finish(&mut self) -> Vec<Piece> {
        if let Some(own) = &mut self.own {
            return own.push("", Some(self.is_cut));
        }
        let mut out = PieceList::default();
        while self.step(&mut out, true) {}
        self.held.clear();
        out.into_vec()
    }

    /// [`AnswerParser::finish`] for an answer that was cut off: marks and calls that have only begun are dropped.
    pub fn cut(&mut self) -> Vec<Piece> {
        self.is_cut = true;
        self.finish()
    }

    /// Drops what is held: it is markup without its end.
    fn discard(&mut self) -> bool {
        self.held.clear();
        false
    }

    /// Moves to the next state, or takes what it can in this one. Returns whether there may be more to do. `last`: the answer has ended.
    fn step(&mut self, out: &mut PieceList, last: bool) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start => self.start(last),
            State::Thought { begun } => self.thought(begun, out, last),
            State::Gap(left) => self.gap(left),
            State::Text => self.text(out, last),
            State::Call => self.call(out, last),
            State::Whole { searched } => self.whole(searched, out, last),
            State::Arguments(scanner) => self.arguments(scanner, out),
            State::End(marks) => self.end(marks, last),
            State::Item { first } => self.item(first, out, last),
            State::Rest => self.rest(last),
            State::Listed => self.listed(last),
            State::Next => self.next(out, last),
            State::Parameters { tool, any } => self.parameters(tool, any, out, last),
            State::Value { tool, kind, begun } => self.value(tool, kind, begun, out, last),
        }
    }

    /// Waits in this state for more text.
    fn wait(&mut self, state: State) -> bool {
        self.state = state;
        false
    }

    /// Continues in this state.
    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    fn drop_held(&mut self, bytes: usize) {
        self.held.drain(..bytes);
    }

    fn start(&mut self, last: bool) -> bool {
        let (said, [think, _]) = (self.held.trim_start(), self.thoughts);
        if said.starts_with(think) {
            self.drop_held(self.held.len() - said.len() + think.len());
            self.go(State::Thought { begun: false })
        } else if think.starts_with(said) && !last {
            self.wait(State::Start)
        } else if think.starts_with(said) && !said.is_empty() && self.is_cut {
            self.discard()
        } else {
            self.go(State::Text)
        }
    }

    fn thought(&mut self, begun: bool, out: &mut PieceList, last: bool) -> bool {
        if !begun {
            if self.held.is_empty() {
                return if last { false } else { self.wait(State::Thought { begun }) };
            }
            let line = self.thought_lines && self.held.starts_with('\n');
            self.drop_held(usize::from(line));
        }
        match self.before(self.thoughts[1], self.thought_lines, last) {
            Ok(thought) => {
                out.thought(&thought);
                self.go(if self.gap > 0 { State::Gap(self.gap) } else { State::Text })
            }
            Err(thought) => {
                out.thought(&thought);
                !last && self.wait(State::Thought { begun: true })
            }
        }
    }

    /// The text before a mark, without the line end before it if there is one on `lines`; the mark is dropped. If the mark has not come, the error is the text that
    /// is certainly before it.
    fn before(&mut self, mark: &str, lines: bool, last: bool) -> Result<String, String> {
        if let Some(at) = self.held.find(mark) {
            let before = &self.held[..at];
            let before = before.strip_suffix('\n').filter(|_| lines).unwrap_or(before).to_owned();
            self.drop_held(at + mark.len());
            return Ok(before);
        }
        let mut known = self.held.len();
        let begun = if last && !self.is_cut { 0 } else { overlap(&self.held, mark) };
        if begun > 0 || !last {
            known -= begun;
            known -= usize::from(lines && self.held[..known].ends_with('\n'));
        }
        Err(self.held.drain(..known).collect())
    }

    fn gap(&mut self, mut left: usize) -> bool {
        let lines = self.held.bytes().take_while(|b| *b == b'\n').count().min(left);
        self.drop_held(lines);
        left -= lines;
        if left > 0 && self.held.is_empty() { self.wait(State::Gap(left)) } else { self.go(State::Text) }
    }

    fn text(&mut self, out: &mut PieceList, last: bool) -> bool {
        if self.tools.is_none() {
            out.text(&std::mem::take(&mut self.held));
            return false;
        }
        let call = self.calls.mark();
        if let Some(at) = self.held.find(call) {
            let before = &self.held[..at];
            let mut shown = 0;
            if self.has_text || !before.trim().is_empty() {
                let lines = before.len() - before.trim_end_matches('\n').len();
                shown = before.len() - lines.min(self.calls.newlines());
            }
            out.text(&before[..shown]);
            self.skipped = before[shown..].to_owned();
            self.drop_held(at + call.len());
            return self.go(State::Call);
        }
        let mut known = self.held.len();
        let begun = if last && !self.is_cut { 0 } else { overlap(&self.held, call) };
        if begun > 0 || !last {
            known -= begun;
            known = self.held[..known].trim_end_matches('\n').len();
        }
        let blank = !self.has_text && self.held[..known].trim().is_empty();
        if blank && (!last || self.count > 0) {
            return false;
        }
        let text: String = self.held.drain(..known).collect();
        self.has_text |= !text.is_empty();
        out.text(&text);
        false
    }

    /// What looked like a call is text.
    fn no_call(&mut self, out: &mut PieceList) -> bool {
        out.text(&std::mem::take(&mut self.skipped));
        out.text(self.calls.mark());
        self.has_text = true;
        self.go(State::Text)
    }

    fn begin_call(&mut self, name: &str, out: &mut PieceList) {
        out.push(Piece::Call { index: self.count, name: name.to_owned() });
        self.count += 1;
    }

    fn call(&mut self, out: &mut PieceList, last: bool) -> bool {
        let inside = self.held.trim_start();
        let space = self.held.len() - inside.len();
        let too_long = inside.len() > MAX_HEAD;
        if self.calls == Calls::Gemma {
            return self.go(State::Whole { searched: 0 });
        }
        if let Some(section) = self.section {
            return self.first_in_section(section, out, last);
        }
        if inside.starts_with('[') && matches!(self.calls, Calls::Mistral | Calls::List) {
            self.drop_held(space + 1);
            return self.go(State::Item { first: true });
        }
        if self.calls == Calls::Mistral {
            return match mistral_head(inside) {
                Match::Yes((name, len)) if len <= MAX_HEAD => {
                    let name = name.to_owned();
                    self.begin_call(&name, out);
                    self.drop_held(space + len);
                    self.go(State::Arguments(Scanner::new()))
                }
                Match::Partial if !last && !too_long => self.wait(State::Call),
                Match::Partial if self.is_cut => self.discard(),
                _ => self.no_call(out),
            };
        }
        if inside.starts_with('{') {
            return match call_head(inside) {
                Match::Yes((name, len)) if len <= MAX_HEAD => {
                    self.begin_call(&name, out);
                    self.drop_held(space + len);
                    self.go(State::Arguments(Scanner::new()))
                }
                Match::Partial if !last && !too_long => self.wait(State::Call),
                _ => self.go(State::Whole { searched: 0 }),
            };
        }
        match (self.syntax.head)(inside) {
            Match::Yes((name, len)) if len <= MAX_HEAD => {
                let name = name.to_owned();
                self.begin_call(&name, out);
                self.drop_held(space + len);
                self.go(State::Parameters { tool: name, any: false })
            }
            Match::Partial if !last && !too_long => self.wait(State::Call),
            Match::Partial if self.is_cut => self.discard(),
            _ => self.no_call(out),
        }
    }

    fn add_arguments(&self, json: &str, out: &mut PieceList) {
        out.arguments(self.count - 1, json);
    }

    fn arguments(&mut self, mut scanner: Scanner, out: &mut PieceList) -> bool {
        let scanned = scanner.scan(&self.held);
        let (Scan::Ends(taken) | Scan::Bad(taken)) = scanned else {
            let json = std::mem::take(&mut self.held);
            self.add_arguments(&json, out);
            return self.wait(State::Arguments(scanner));
        };
        let json: String = self.held.drain(..taken).collect();
        self.add_arguments(&json, out);
        match (scanned == Scan::Ends(taken), self.calls) {
            (false, _) => self.end_malformed(),
            (true, Calls::List) => self.go(State::Rest),
            (true, Calls::Mistral) if self.is_list => self.go(State::Rest),
            (true, Calls::Mistral) => self.end_call(),
            (true, _) if self.section.is_some() => self.go(State::End(self.ends)),
            (true, Calls::Dsml(_)) => self.go(State::End(&[DSML_INVOKED])),
            (true, _) => self.go(State::End(&["}", CALLED])),
        }
    }

    /// A call has ended, and so have its marks.
    fn end_call(&mut self) -> bool {
        self.has_text = false;
        self.go(State::Text)
    }

    /// A call is malformed whose beginning was returned already.
    fn end_malformed(&mut self) -> bool {
        self.has_text = true;
        self.go(State::Text)
    }

    fn end(&mut self, marks: &'static [&'static str], last: bool) -> bool {
        let rest = self.held.trim_start();
        let [mark, others @ ..] = marks else {
            self.has_text = false;
            let may_follow = self.section.is_some() || matches!(self.calls, Calls::Dsml(_));
            return self.go(if may_follow { State::Next } else { State::Text });
        };
        if rest.starts_with(mark) {
            self.drop_held(self.held.len() - rest.len() + mark.len());
            self.go(State::End(others))
        } else if mark.starts_with(rest) {
            // An answer that ends here is complete.
            if last {
                self.held.clear();
                return false;
            }
            self.wait(State::End(marks))
        } else {
            self.end_malformed()
        }
    }
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
