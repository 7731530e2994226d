//! Takes an answer apart as it comes.
//!
//! Text is held back only as long as it may be the beginning of a mark, or of what is decided by the mark behind it. How it was cut into pieces changes nothing. What begins
//! like a call and is none comes as the text that it is. Where a call goes wrong in its arguments, which were told already, they end there, and the rest is text.

use std::sync::Arc;

use super::json::{self, Scan, Scanner};
use super::style::Opened;
use super::tools::{ParameterType, Tools};
use super::{CALL, CALLED, Calls, Style, THINK, THOUGHT};
use crate::text::pieces::Piece;
use crate::text::stop::overlap;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// Line ends between a thought and what is said, as all families write them.
const GAP: usize = 2;
/// Bytes up to which a call's name is waited for; one that ends beyond is none, however the text was cut.
const MAX_HEAD: usize = 4096;

/// Makes pieces of an answer's text.
pub struct AnswerParser {
    /// Whose calls are understood; `None`: calls are text.
    tools: Option<Arc<Tools>>,
    calls: Calls,
    at: At,
    /// What is not decided.
    held: String,
    /// Calls so far.
    count: usize,
    /// Something was said since the beginning, or since the last call.
    said: bool,
    /// White space that was left out before the call that is being read.
    left_out: String,
    /// The answer has no end of its own: what may be the beginning of a mark is one that was cut.
    is_cut: bool,
}

enum At {
    /// A thought may begin.
    Start,
    /// `begun`: behind the line end of its mark.
    Thought {
        begun: bool,
    },
    /// Behind a thought: so many line ends are its own.
    Gap(usize),
    Text,
    /// Behind `<tool_call>`.
    Call,
    /// In a call that is written in an order of its own: it is waited for.
    Whole {
        searched: usize,
    },
    Arguments(Scanner),
    /// Before what ends a call.
    End(&'static [&'static str]),
    /// Between parameters; `any`: there was one.
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

/// What a text that begins with something is known to be.
enum Seen<T> {
    Yes(T),
    No,
    /// It is too short to tell.
    More,
}

impl AnswerParser {
    /// For an answer in this style. `tools`: those that may be called; without any, calls are text.
    pub fn new(style: Style, tools: Option<Arc<Tools>>, opened: Opened) -> AnswerParser {
        let at = match opened {
            Opened::Yes { line } => At::Thought { begun: line },
            Opened::No if style.thoughts => At::Start,
            Opened::No | Opened::Closed => At::Text,
        };
        AnswerParser {
            tools: tools.filter(|_| style.calls.is_some()),
            calls: style.calls.unwrap_or(Calls::Json),
            at,
            held: String::new(),
            count: 0,
            said: false,
            left_out: String::new(),
            is_cut: false,
        }
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.count
    }

    /// What the next part of the text adds.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut out = Pieces::default();
        while self.step(&mut out, false) {}
        out.0
    }

    /// What was held back, for an answer that has ended.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut out = Pieces::default();
        while self.step(&mut out, true) {}
        self.held.clear();
        out.0
    }

    /// The same for an answer that was cut off: of a mark or a call that has only begun nothing is told.
    pub fn cut(&mut self) -> Vec<Piece> {
        self.is_cut = true;
        self.finish()
    }

    /// Leaves out what is held: it is markup without its end.
    fn lose(&mut self) -> bool {
        self.held.clear();
        false
    }

    /// Goes from one state to the next, or takes what it can in this one. Whether there may be more to do. `last`: nothing more comes.
    fn step(&mut self, out: &mut Pieces, last: bool) -> bool {
        match std::mem::replace(&mut self.at, At::Text) {
            At::Start => self.start(last),
            At::Thought { begun } => self.thought(begun, out, last),
            At::Gap(left) => self.gap(left),
            At::Text => self.text(out, last),
            At::Call => self.call(out, last),
            At::Whole { searched } => self.whole(searched, out, last),
            At::Arguments(scanner) => self.arguments(scanner, out),
            At::End(marks) => self.end(marks, last),
            At::Parameters { tool, any } => self.parameters(tool, any, out, last),
            At::Value { tool, kind, begun } => self.value(tool, kind, begun, out, last),
        }
    }

    /// Waits in this state.
    fn wait(&mut self, at: At) -> bool {
        self.at = at;
        false
    }

    fn go(&mut self, at: At) -> bool {
        self.at = at;
        true
    }

    fn drop_held(&mut self, bytes: usize) {
        self.held.drain(..bytes);
    }

    fn start(&mut self, last: bool) -> bool {
        let said = self.held.trim_start();
        if said.starts_with(THINK) {
            self.drop_held(self.held.len() - said.len() + THINK.len());
            self.go(At::Thought { begun: false })
        } else if THINK.starts_with(said) && !last {
            self.wait(At::Start)
        } else if THINK.starts_with(said) && !said.is_empty() && self.is_cut {
            self.lose()
        } else {
            self.go(At::Text)
        }
    }

    fn thought(&mut self, begun: bool, out: &mut Pieces, last: bool) -> bool {
        if !begun {
            if self.held.is_empty() {
                return if last { false } else { self.wait(At::Thought { begun }) };
            }
            let lines = usize::from(self.held.starts_with('\n'));
            self.drop_held(lines);
        }
        match self.before(THOUGHT, last) {
            Ok(thought) => {
                out.thought(&thought);
                self.go(At::Gap(GAP))
            }
            Err(thought) => {
                out.thought(&thought);
                !last && self.wait(At::Thought { begun: true })
            }
        }
    }

    /// What is held before a mark, which is dropped, without the line end before it; or what is known to be before it where it has not come.
    fn before(&mut self, mark: &str, last: bool) -> Result<String, String> {
        if let Some(at) = self.held.find(mark) {
            let before = self.held[..at].strip_suffix('\n').unwrap_or(&self.held[..at]).to_owned();
            self.drop_held(at + mark.len());
            return Ok(before);
        }
        let mut known = self.held.len();
        let begun = if last && !self.is_cut { 0 } else { overlap(&self.held, mark) };
        if begun > 0 || !last {
            known -= begun;
            known -= usize::from(self.held[..known].ends_with('\n'));
        }
        Err(self.held.drain(..known).collect())
    }

    fn gap(&mut self, mut left: usize) -> bool {
        let lines = self.held.bytes().take_while(|b| *b == b'\n').count().min(left);
        self.drop_held(lines);
        left -= lines;
        if left > 0 && self.held.is_empty() { self.wait(At::Gap(left)) } else { self.go(At::Text) }
    }

    fn text(&mut self, out: &mut Pieces, last: bool) -> bool {
        if self.tools.is_none() {
            out.text(&std::mem::take(&mut self.held));
            return false;
        }
        if let Some(at) = self.held.find(CALL) {
            let before = &self.held[..at];
            let mut shown = 0;
            if self.said || !before.trim().is_empty() {
                let lines = before.len() - before.trim_end_matches('\n').len();
                shown = before.len() - lines.min(self.calls.newlines());
            }
            out.text(&before[..shown]);
            self.left_out = before[shown..].to_owned();
            self.drop_held(at + CALL.len());
            return self.go(At::Call);
        }
        let mut known = self.held.len();
        let begun = if last && !self.is_cut { 0 } else { overlap(&self.held, CALL) };
        if begun > 0 || !last {
            known -= begun;
            known = self.held[..known].trim_end_matches('\n').len();
        }
        let blank = !self.said && self.held[..known].trim().is_empty();
        if blank && (!last || self.count > 0) {
            return false;
        }
        let text: String = self.held.drain(..known).collect();
        self.said |= !text.is_empty();
        out.text(&text);
        false
    }

    /// What was taken for a call is text.
    fn no_call(&mut self, out: &mut Pieces) -> bool {
        out.text(&std::mem::take(&mut self.left_out));
        out.text(CALL);
        self.said = true;
        self.go(At::Text)
    }

    fn begin(&mut self, name: &str, out: &mut Pieces) {
        out.0.push(Piece::Call { index: self.count, name: name.to_owned() });
        self.count += 1;
    }

    fn call(&mut self, out: &mut Pieces, last: bool) -> bool {
        let inside = self.held.trim_start();
        let space = self.held.len() - inside.len();
        let too_long = inside.len() > MAX_HEAD;
        if inside.starts_with('{') {
            return match head(inside) {
                Seen::Yes((name, len)) if len <= MAX_HEAD => {
                    self.begin(&name, out);
                    self.drop_held(space + len);
                    self.go(At::Arguments(Scanner::new()))
                }
                Seen::More if !last && !too_long => self.wait(At::Call),
                _ => self.go(At::Whole { searched: 0 }),
            };
        }
        match tag(inside, FUNCTION) {
            Seen::Yes((name, len)) if len <= MAX_HEAD => {
                let name = name.to_owned();
                self.begin(&name, out);
                self.drop_held(space + len);
                self.go(At::Parameters { tool: name, any: false })
            }
            Seen::More if !last && !too_long => self.wait(At::Call),
            Seen::More if self.is_cut => self.lose(),
            _ => self.no_call(out),
        }
    }

    fn whole(&mut self, searched: usize, out: &mut Pieces, last: bool) -> bool {
        let mut from = searched.min(self.held.len());
        while !self.held.is_char_boundary(from) {
            from -= 1;
        }
        let end = self.held[from..].find(CALLED).map(|at| from + at);
        if end.is_none() && !last {
            return self.wait(At::Whole { searched: self.held.len().saturating_sub(CALLED.len()) });
        }
        match whole_call(&self.held[..end.unwrap_or(self.held.len())]) {
            Some((name, arguments)) => {
                self.begin(&name, out);
                self.arguments_are(&arguments, out);
                self.drop_held(end.map_or(self.held.len(), |at| at + CALLED.len()));
                self.said = false;
                self.go(At::Text)
            }
            None if end.is_none() && self.is_cut => self.lose(),
            None => self.no_call(out),
        }
    }

    fn arguments_are(&self, json: &str, out: &mut Pieces) {
        out.arguments(self.count - 1, json);
    }

    fn arguments(&mut self, mut scanner: Scanner, out: &mut Pieces) -> bool {
        let scanned = scanner.scan(&self.held);
        let (Scan::Ends(taken) | Scan::Bad(taken)) = scanned else {
            let json = std::mem::take(&mut self.held);
            self.arguments_are(&json, out);
            return self.wait(At::Arguments(scanner));
        };
        let json: String = self.held.drain(..taken).collect();
        self.arguments_are(&json, out);
        if scanned == Scan::Ends(taken) { self.go(At::End(&["}", CALLED])) } else { self.go_wrong() }
    }

    /// A call has gone wrong that was told already.
    fn go_wrong(&mut self) -> bool {
        self.said = true;
        self.go(At::Text)
    }

    fn end(&mut self, marks: &'static [&'static str], last: bool) -> bool {
        let rest = self.held.trim_start();
        let [mark, others @ ..] = marks else {
            self.said = false;
            return self.go(At::Text);
        };
        if rest.starts_with(mark) {
            self.drop_held(self.held.len() - rest.len() + mark.len());
            self.go(At::End(others))
        } else if mark.starts_with(rest) {
            // An answer that ends here has said all that matters.
            if last {
                self.held.clear();
                return false;
            }
            self.wait(At::End(marks))
        } else {
            self.go_wrong()
        }
    }

    fn parameters(&mut self, tool: String, any: bool, out: &mut Pieces, last: bool) -> bool {
        let inside = self.held.trim_start();
        let space = self.held.len() - inside.len();
        if inside.starts_with(FUNCTION_END) {
            self.arguments_are(if any { "}" } else { "{}" }, out);
            self.drop_held(space + FUNCTION_END.len());
            return self.go(At::End(&[CALLED]));
        }
        match tag(inside, PARAMETER) {
            Seen::Yes((name, len)) if len <= MAX_HEAD => {
                let kind = self.tools.as_ref().map_or(ParameterType::any(), |tools| tools.kind(&tool, name));
                let begin = format!("{}\"{}\": ", if any { ", " } else { "{" }, json::escaped(name));
                self.arguments_are(&begin, out);
                self.drop_held(space + len);
                self.go(At::Value { tool, kind, begun: false })
            }
            Seen::More if !last && inside.len() <= MAX_HEAD => self.wait(At::Parameters { tool, any }),
            Seen::No if FUNCTION_END.starts_with(inside) && !last => self.wait(At::Parameters { tool, any }),
            Seen::More if self.is_cut => self.lose(),
            Seen::No if FUNCTION_END.starts_with(inside) && self.is_cut => self.lose(),
            _ => self.go_wrong(),
        }
    }

    fn value(&mut self, tool: String, kind: ParameterType, begun: bool, out: &mut Pieces, last: bool) -> bool {
        if !kind.is_text() {
            let Some(end) = self.held.find(PARAMETER_END) else {
                return !last && self.wait(At::Value { tool, kind, begun });
            };
            let value = &self.held[..end];
            let value = value.strip_prefix('\n').unwrap_or(value);
            self.arguments_are(&json_of(kind, value.strip_suffix('\n').unwrap_or(value)), out);
            self.drop_held(end + PARAMETER_END.len());
            return self.go(At::Parameters { tool, any: true });
        }
        if !begun {
            if self.held.is_empty() {
                return !last && self.wait(At::Value { tool, kind, begun });
            }
            let lines = usize::from(self.held.starts_with('\n'));
            self.drop_held(lines);
            self.arguments_are("\"", out);
        }
        match self.before(PARAMETER_END, last) {
            Ok(value) => {
                self.arguments_are(&(json::escaped(&value) + "\""), out);
                self.go(At::Parameters { tool, any: true })
            }
            Err(value) => {
                self.arguments_are(&json::escaped(&value), out);
                !last && self.wait(At::Value { tool, kind, begun: true })
            }
        }
    }
}

/// Pieces, those that go on with the one before them joined to it.
#[derive(Default)]
struct Pieces(Vec<Piece>);

impl Pieces {
    fn text(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Piece::Text(text)) => text.push_str(more),
            _ => self.0.push(Piece::Text(more.to_owned())),
        }
    }

    fn thought(&mut self, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Piece::Thought(text)) => text.push_str(more),
            _ => self.0.push(Piece::Thought(more.to_owned())),
        }
    }

    fn arguments(&mut self, index: usize, more: &str) {
        match self.0.last_mut() {
            _ if more.is_empty() => {}
            Some(Piece::Arguments { index: of, json }) if *of == index => json.push_str(more),
            _ => self.0.push(Piece::Arguments { index, json: more.to_owned() }),
        }
    }
}

/// The name between `begin` and `>`, and the length of all that.
fn tag<'a>(text: &'a str, begin: &str) -> Seen<(&'a str, usize)> {
    let Some(rest) = text.strip_prefix(begin) else {
        return if begin.starts_with(text) { Seen::More } else { Seen::No };
    };
    match rest.find(['>', '<', '\n']) {
        Some(at) if at > 0 && rest.as_bytes()[at] == b'>' => Seen::Yes((&rest[..at], begin.len() + at + 1)),
        Some(_) => Seen::No,
        None => Seen::More,
    }
}

/// `{"name": NAME, "arguments": `, before an object: the name and the length of it.
fn head(text: &str) -> Seen<(String, usize)> {
    let mut rest = text;
    let skip = |rest: &mut &str, mark: &str| {
        let found = rest.trim_start();
        match found.strip_prefix(mark) {
            Some(behind) => {
                *rest = behind;
                Seen::Yes(())
            }
            None if mark.starts_with(found) => Seen::More,
            None => Seen::No,
        }
    };
    macro_rules! expect {
        ($mark:expr) => {
            match skip(&mut rest, $mark) {
                Seen::Yes(()) => {}
                Seen::No => return Seen::No,
                Seen::More => return Seen::More,
            }
        };
    }
    expect!("{");
    expect!("\"name\"");
    expect!(":");
    expect!("\"");
    let mut escaped = false;
    let end = rest.bytes().position(|b| match b {
        _ if escaped => {
            escaped = false;
            false
        }
        b'\\' => {
            escaped = true;
            false
        }
        b => b == b'"',
    });
    let Some(end) = end else { return Seen::More };
    let name = match serde_json::from_str::<String>(&format!("\"{}\"", &rest[..end])) {
        Ok(name) if !name.is_empty() => name,
        _ => return Seen::No,
    };
    rest = &rest[end + 1..];
    expect!(",");
    expect!("\"arguments\"");
    expect!(":");
    let object = rest.trim_start();
    match object.chars().next() {
        Some('{') => Seen::Yes((name, text.len() - object.len())),
        Some(_) => Seen::No,
        None => Seen::More,
    }
}

/// A call whose fields come in any order: its name and arguments.
fn whole_call(json: &str) -> Option<(String, String)> {
    let fields = json::fields(json)?;
    let field = |names: &[&str]| fields.iter().find(|(name, _)| names.contains(&name.as_str())).map(|(_, v)| *v);
    let name: String = serde_json::from_str(field(&["name"])?).ok()?;
    let arguments = field(&["arguments", "parameters"]).unwrap_or("{}");
    // Some write them as a text again.
    let arguments = serde_json::from_str::<String>(arguments).unwrap_or_else(|_| arguments.to_owned());
    (!name.is_empty() && json::fields(&arguments).is_some()).then_some((name, arguments))
}

/// The JSON of a parameter's text.
fn json_of(kind: ParameterType, text: &str) -> String {
    let said = text.trim();
    match said {
        "true" | "True" if kind.boolean && (said == "true" || !kind.text) => "true".into(),
        "false" | "False" if kind.boolean && (said == "false" || !kind.text) => "false".into(),
        "null" | "None" if kind.null && (said == "null" || !kind.text) => "null".into(),
        // A text in quotes is a text with quotes: none are written around it.
        _ if kind.other && (said == text || !kind.text) && !said.starts_with('"') && json::is_json(said) => said.into(),
        _ => format!("\"{}\"", json::escaped(text)),
    }
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
