//! Parses an answer in the harmony format while it streams. Headers are never shown; what has none is text. How the answer was cut into pieces changes nothing.

use super::marks::{CALL, CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, RETURN, START};
use crate::text::answers::json::{Scan, Scanner};
use crate::text::answers::piece_list::PieceList;
use crate::text::pieces::Piece;
use crate::text::stop::overlap;

/// The most bytes of a header. Longer text is no header, however the pieces that it came in were cut.
const MAX_HEAD: usize = 4096;
/// What ends a message. The last two begin the next one.
const ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];
/// How a header begins. The first follows `<|start|>assistant` of the prompt.
const HEADS: [&str; 4] = [" to=", START, CHANNEL, MESSAGE];
/// Between two thoughts, and between two texts.
const GAP: &str = "\n\n";
/// Recipients that are no tools.
const NO_TOOLS: [&str; 3] = ["user", "assistant", "all"];

/// Parses the text of one answer.
pub struct HarmonyParser {
    /// Calls are told apart from text.
    calls: bool,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// Calls so far.
    pub count: usize,
    /// Whether there was a thought, and whether there was text since the beginning or the last call.
    has_thought: bool,
    has_text: bool,
}

enum State {
    /// Before the text of a message.
    Header,
    /// In a message. `begun`: some of it was returned.
    Body {
        thought: bool,
        begun: bool,
    },
    /// Before the arguments of a call of this tool.
    Call(String),
    Arguments(Scanner),
    /// After the arguments of a call.
    Called,
}

/// What a header says.
enum Kind {
    Thought,
    Text,
    Call(String),
}

impl HarmonyParser {
    /// `calls`: whether tools may be called; otherwise calls are text.
    pub fn new(calls: bool) -> HarmonyParser {
        HarmonyParser {
            calls,
            state: State::Header,
            held: String::new(),
            count: 0,
            has_thought: false,
            has_text: false,
        }
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
        match std::mem::replace(&mut self.state, State::Header) {
            State::Header => self.header(out, last),
            State::Body { thought, begun } => self.body(thought, begun, out, last),
            State::Call(name) => self.call(name, out, last),
            State::Arguments(scanner) => self.arguments(scanner, out),
            State::Called => self.called(last),
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

    fn header(&mut self, out: &mut PieceList, last: Option<bool>) -> bool {
        let text = State::Body { thought: false, begun: false };
        // White space may stand before the marks.
        let said = self.held.trim_start();
        let begins = HEADS.iter().any(|head| said.starts_with(head) || self.held.starts_with(head));
        let may_begin = HEADS.iter().any(|head| head.starts_with(said) || head.starts_with(&*self.held));
        if !begins {
            return match (may_begin, last) {
                (true, None) => self.wait(State::Header),
                // A mark that has only begun, or white space.
                (true, Some(is_cut)) if is_cut || said.is_empty() => false,
                _ => self.go(text),
            };
        }
        match self.held.find(MESSAGE) {
            Some(at) if at <= MAX_HEAD => {
                let kind = kind_of(&self.held[..at]);
                self.held.drain(..at + MESSAGE.len());
                match kind {
                    Kind::Call(name) if self.calls => self.go(State::Call(name)),
                    Kind::Thought => self.go(State::Body { thought: true, begun: false }),
                    Kind::Text | Kind::Call(_) => self.go(text),
                }
            }
            None if self.held.len() <= MAX_HEAD + MESSAGE.len() => match last {
                None => self.wait(State::Header),
                // Markup without a message.
                Some(_) => false,
            },
            // No header, and what looks like one would be found again.
            _ => {
                let mark = self.held.len() - said.len() + said.chars().next().map_or(0, char::len_utf8);
                let taken: String = self.held.drain(..mark).collect();
                self.say(false, false, &taken, out);
                self.go(State::Body { thought: false, begun: true })
            }
        }
    }

    /// Returns text, or a thought, with a gap before it where a message begins.
    fn say(&mut self, thought: bool, begun: bool, text: &str, out: &mut PieceList) {
        if text.is_empty() {
            return;
        }
        let has_some = if thought { &mut self.has_thought } else { &mut self.has_text };
        let gap = if *has_some && !begun { GAP } else { "" };
        *has_some = true;
        match thought {
            true => [gap, text].into_iter().for_each(|part| out.thought(part)),
            false => [gap, text].into_iter().for_each(|part| out.text(part)),
        }
    }

    fn body(&mut self, thought: bool, begun: bool, out: &mut PieceList, last: Option<bool>) -> bool {
        let end = ENDS.iter().filter_map(|mark| Some((self.held.find(mark)?, *mark))).min();
        if let Some((at, mark)) = end {
            let text: String = self.held.drain(..at).collect();
            self.say(thought, begun, &text, out);
            if ![START, CHANNEL].contains(&mark) {
                self.held.drain(..mark.len());
            }
            return self.go(State::Header);
        }
        let open = match last {
            Some(false) => 0,
            _ => ENDS.iter().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0),
        };
        let text: String = self.held.drain(..self.held.len() - open).collect();
        self.say(thought, begun, &text, out);
        let begun = begun || !text.is_empty();
        self.wait(State::Body { thought, begun })
    }

    fn call(&mut self, name: String, out: &mut PieceList, last: Option<bool>) -> bool {
        let said = self.held.trim_start();
        let ends = ENDS.iter().any(|mark| said.starts_with(mark));
        let may_end = ENDS.iter().any(|mark| mark.starts_with(said));
        match last {
            None if may_end && !ends => self.wait(State::Call(name)),
            Some(true) if may_end && !ends => false,
            _ if ends || said.is_empty() => {
                self.begin_call(name, out);
                out.arguments(self.count - 1, "{}");
                self.go(State::Called)
            }
            _ if said.starts_with('{') => {
                let space = self.held.len() - said.len();
                self.begin_call(name, out);
                self.held.drain(..space);
                self.go(State::Arguments(Scanner::new()))
            }
            // Something else than arguments.
            _ => self.go(State::Body { thought: false, begun: false }),
        }
    }

    fn begin_call(&mut self, name: String, out: &mut PieceList) {
        out.push(Piece::Call { index: self.count, name });
        self.count += 1;
        self.has_text = false;
    }

    fn arguments(&mut self, mut scanner: Scanner, out: &mut PieceList) -> bool {
        let scanned = scanner.scan(&self.held);
        let taken = match scanned {
            Scan::Ends(taken) | Scan::Bad(taken) => taken,
            _ => self.held.len(),
        };
        let json: String = self.held.drain(..taken).collect();
        out.arguments(self.count - 1, &json);
        match scanned {
            Scan::Ends(_) => self.go(State::Called),
            Scan::Bad(_) => self.go(State::Body { thought: false, begun: false }),
            _ => self.wait(State::Arguments(scanner)),
        }
    }

    fn called(&mut self, last: Option<bool>) -> bool {
        let said = self.held.trim_start();
        let space = self.held.len() - said.len();
        if let Some(mark) = ENDS.iter().find(|mark| said.starts_with(**mark)) {
            let mark = if [START, CHANNEL].contains(mark) { 0 } else { mark.len() };
            self.held.drain(..space + mark);
            return self.go(State::Header);
        }
        let may_end = ENDS.iter().any(|mark| mark.starts_with(said));
        match last {
            None if may_end => self.wait(State::Called),
            Some(_) if may_end => false,
            _ => self.go(State::Body { thought: false, begun: false }),
        }
    }
}

/// What the header `text` says, which ends before `<|message|>`.
fn kind_of(text: &str) -> Kind {
    let (role, channel) = text.rsplit_once(CHANNEL).unwrap_or((text, ""));
    let before = |text: &str| text.split(CONSTRAIN).next().unwrap_or_default().to_owned();
    let (role, channel) = (before(role), before(channel));
    let recipient = [&channel, &role]
        .into_iter()
        .flat_map(|part| part.split_whitespace())
        .find_map(|word| word.strip_prefix("to="));
    let name = recipient.map(|to| to.strip_prefix(FUNCTIONS).unwrap_or(to)).filter(|name| !name.is_empty());
    match name.filter(|name| !NO_TOOLS.contains(name)) {
        Some(name) => Kind::Call(name.to_owned()),
        None if channel.split_whitespace().next() == Some("analysis") => Kind::Thought,
        None => Kind::Text,
    }
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
