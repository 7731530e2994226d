//! Calls in a section of their own, each a name and an object between marks: DeepSeek and Kimi.

use super::marks::{
    DEEPSEEK_ARGUMENTS, DEEPSEEK_CALL, DEEPSEEK_CALLED, DEEPSEEK_CALLS_END, KIMI_ARGUMENTS, KIMI_CALL, KIMI_CALLED,
    KIMI_CALLS_END,
};
use super::matching::Match;
use super::style::Calls;

/// What DeepSeek-V3 and R1 write around arguments, behind a call's type and name. V3.1 writes the name alone.
const FENCE: &str = "```json";

/// How a family writes such calls.
#[derive(Clone, Copy)]
pub(super) struct SectionSyntax {
    /// Begins a call.
    begin: &'static str,
    /// Is between a call's name and its arguments.
    arguments: &'static str,
    /// What ends a call, where its arguments are in a fence and where not.
    fenced: &'static [&'static str],
    bare: &'static [&'static str],
    /// Ends all calls.
    pub end: &'static str,
    /// Names are within `functions.` and the number of the call.
    numbered: bool,
}

/// The beginning of a call: its name, bytes up to its arguments, and what ends it.
pub(super) struct SectionHead<'a> {
    pub name: &'a str,
    pub len: usize,
    pub ends: &'static [&'static str],
}

impl SectionSyntax {
    /// Of these calls, if they are written so.
    pub fn of(calls: Calls) -> Option<SectionSyntax> {
        match calls {
            Calls::DeepSeek => Some(SectionSyntax {
                begin: DEEPSEEK_CALL,
                arguments: DEEPSEEK_ARGUMENTS,
                fenced: &["```", DEEPSEEK_CALLED],
                bare: &[DEEPSEEK_CALLED],
                end: DEEPSEEK_CALLS_END,
                numbered: false,
            }),
            Calls::Kimi => Some(SectionSyntax {
                begin: KIMI_CALL,
                arguments: KIMI_ARGUMENTS,
                fenced: &["```", KIMI_CALLED],
                bare: &[KIMI_CALLED],
                end: KIMI_CALLS_END,
                numbered: true,
            }),
            _ => None,
        }
    }

    /// Matches the beginning of a call, up to the object of its arguments.
    pub fn head<'a>(&self, text: &'a str) -> Match<SectionHead<'a>> {
        let Some(rest) = text.strip_prefix(self.begin) else {
            return if self.begin.starts_with(text) { Match::Partial } else { Match::No };
        };
        let Some(at) = rest.find(self.arguments) else {
            return if rest.contains(['{', '\n']) { Match::No } else { Match::Partial };
        };
        let mut name = self.name(rest[..at].trim());
        let mut object = rest[at + self.arguments.len()..].trim_start();
        let is_fenced = !object.is_empty() && !object.starts_with('{');
        if is_fenced {
            let Some(fence) = object.find(FENCE) else { return Match::Partial };
            name = object[..fence].trim();
            object = object[fence + FENCE.len()..].trim_start();
        }
        let is_name = !name.is_empty() && !name.contains(['{', '\n']);
        match object.chars().next() {
            None => Match::Partial,
            Some('{') if is_name => Match::Yes(SectionHead {
                name,
                len: text.len() - object.len(),
                ends: if is_fenced { self.fenced } else { self.bare },
            }),
            Some(_) => Match::No,
        }
    }

    /// Without what Kimi writes around it: `functions.NAME:0`.
    fn name<'a>(&self, written: &'a str) -> &'a str {
        if !self.numbered {
            return written;
        }
        let name = written.strip_prefix("functions.").unwrap_or(written);
        match name.rsplit_once(':') {
            Some((name, number)) if number.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => name,
        }
    }
}
