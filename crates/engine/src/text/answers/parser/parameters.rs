//! Calls with parameters, each between marks: Qwen3-Coder's, GLM's, MiniMax's and DSML.

use super::{AnswerParser, MAX_HEAD, State};
use crate::text::answers::call_syntax::{ParameterSyntax, parameter_json};
use crate::text::answers::json::{self, Scanner};
use crate::text::answers::marks::CALLED;
use crate::text::answers::matching::{Match, ParameterHead};
use crate::text::answers::piece_list::PieceList;
use crate::text::answers::style::Calls;
use crate::text::answers::tools::ParameterType;

/// Ends a tag without contents.
const EMPTY: &str = "/>";

impl AnswerParser {
    pub(super) fn parameters(&mut self, tool: String, any: bool, out: &mut PieceList, last: bool) -> bool {
        let inside = self.held.trim_start();
        let space = self.held.len() - inside.len();
        let syntax = self.syntax;
        if matches!(self.calls, Calls::Dsml(_)) && !any {
            // A call may also be a tag without contents, or have its arguments as an object.
            if inside.starts_with(EMPTY) {
                self.add_arguments("{}", out);
                self.drop_held(space + EMPTY.len());
                return self.go(State::Next);
            }
            if inside.starts_with('{') {
                self.drop_held(space);
                return self.go(State::Arguments(Scanner::new()));
            }
        }
        if inside.starts_with(syntax.end) {
            self.add_arguments(if any { "}" } else { "{}" }, out);
            self.drop_held(space + syntax.end.len());
            return match self.calls {
                Calls::Keys => self.end_call(),
                Calls::Invokes | Calls::Dsml(_) => self.go(State::Next),
                _ => self.go(State::End(&[CALLED])),
            };
        }
        match (syntax.parameter)(inside) {
            Match::Yes(ParameterHead { name, len, kind }) if len <= MAX_HEAD => {
                let stated = || self.tools.as_ref().map_or(ParameterType::any(), |tools| tools.kind(&tool, name));
                let kind = kind.unwrap_or_else(stated);
                let begin = format!("{}\"{}\": ", if any { ", " } else { "{" }, json::escaped(name));
                self.add_arguments(&begin, out);
                self.drop_held(space + len);
                self.go(State::Value { tool, kind, begun: false })
            }
            Match::Partial if !last && inside.len() <= MAX_HEAD => self.wait(State::Parameters { tool, any }),
            Match::No if syntax.end.starts_with(inside) && !last => self.wait(State::Parameters { tool, any }),
            Match::Partial if self.is_cut => self.discard(),
            Match::No if syntax.end.starts_with(inside) && self.is_cut => self.discard(),
            _ => self.end_malformed(),
        }
    }

    pub(super) fn value(
        &mut self,
        tool: String,
        kind: ParameterType,
        begun: bool,
        out: &mut PieceList,
        last: bool,
    ) -> bool {
        let ParameterSyntax { value_end, lines, .. } = self.syntax;
        if !kind.is_text() {
            let Some(end) = self.held.find(value_end) else {
                return !last && self.wait(State::Value { tool, kind, begun });
            };
            let value = &self.held[..end];
            let value = value.strip_prefix('\n').filter(|_| lines).unwrap_or(value);
            let value = value.strip_suffix('\n').filter(|_| lines).unwrap_or(value);
            self.add_arguments(&parameter_json(kind, value), out);
            self.drop_held(end + value_end.len());
            return self.go(State::Parameters { tool, any: true });
        }
        if !begun {
            if self.held.is_empty() {
                return !last && self.wait(State::Value { tool, kind, begun });
            }
            let line = usize::from(lines && self.held.starts_with('\n'));
            self.drop_held(line);
            self.add_arguments("\"", out);
        }
        match self.before(value_end, lines, last) {
            Ok(value) => {
                self.add_arguments(&(json::escaped(&value) + "\""), out);
                self.go(State::Parameters { tool, any: true })
            }
            Err(value) => {
                self.add_arguments(&json::escaped(&value), out);
                !last && self.wait(State::Value { tool, kind, begun: true })
            }
        }
    }
}
