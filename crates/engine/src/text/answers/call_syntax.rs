//! How calls are written: in JSON, or with marks around parameters.

use super::dsml;
use super::json;
use super::marks::{CALLED, DSML_INVOKED, DSML_VALUED, KEY, KEYED, MISTRAL_ARGUMENTS, MISTRAL_ID, VALUE, VALUED};
use super::matching::{Match, ParameterHead};
use super::style::Calls;
use super::tools::ParameterType;

pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";

/// Matches `begin`, a name and `>`. Returns the name and the length of the match.
pub(super) fn tag<'a>(text: &'a str, begin: &str) -> Match<(&'a str, usize)> {
    let Some(rest) = text.strip_prefix(begin) else {
        return if begin.starts_with(text) { Match::Partial } else { Match::No };
    };
    match rest.find(['>', '<', '\n']) {
        Some(at) if at > 0 && rest.as_bytes()[at] == b'>' => Match::Yes((&rest[..at], begin.len() + at + 1)),
        Some(_) => Match::No,
        None => Match::Partial,
    }
}

/// How a family writes a call with parameters.
#[derive(Clone, Copy)]
pub(super) struct ParameterSyntax {
    /// Matches what begins a call, with its name.
    pub head: fn(&str) -> Match<(&str, usize)>,
    /// Matches what begins a parameter.
    pub parameter: fn(&str) -> Match<ParameterHead<'_>>,
    /// Ends a parameter.
    pub value_end: &'static str,
    /// Ends a call.
    pub end: &'static str,
    /// Values stand on lines of their own.
    pub lines: bool,
}

impl ParameterSyntax {
    pub fn of(calls: Calls) -> ParameterSyntax {
        match calls {
            Calls::Keys => ParameterSyntax {
                head: name_before_keys,
                parameter: |text| key(text).untyped(),
                value_end: VALUED,
                end: CALLED,
                lines: false,
            },
            Calls::Dsml(_) => ParameterSyntax {
                head: dsml::head,
                parameter: dsml::parameter,
                value_end: DSML_VALUED,
                end: DSML_INVOKED,
                lines: false,
            },
            Calls::Invokes => ParameterSyntax {
                head: |text| quoted_tag(text, "<invoke name=\""),
                parameter: |text| quoted_tag(text, "<parameter name=\"").untyped(),
                value_end: PARAMETER_END,
                end: "</invoke>",
                lines: false,
            },
            _ => ParameterSyntax {
                head: |text| tag(text, FUNCTION),
                parameter: |text| tag(text, PARAMETER).untyped(),
                value_end: PARAMETER_END,
                end: FUNCTION_END,
                lines: true,
            },
        }
    }
}

/// Matches `begin`, a name and `">`.
fn quoted_tag<'a>(text: &'a str, begin: &str) -> Match<(&'a str, usize)> {
    let Some(rest) = text.strip_prefix(begin) else {
        return if begin.starts_with(text) { Match::Partial } else { Match::No };
    };
    match rest.find(['"', '\n']) {
        Some(at) if at > 0 && rest[at..].starts_with("\">") => Match::Yes((&rest[..at], begin.len() + at + 2)),
        Some(at) if at > 0 && &rest[at..] == "\"" => Match::Partial,
        Some(_) => Match::No,
        None => Match::Partial,
    }
}

/// Matches the name of a GLM's call, which a line end or a mark follows that is left.
fn name_before_keys(text: &str) -> Match<(&str, usize)> {
    match text.find(['\n', '<']) {
        Some(at) if at > 0 && !text.starts_with('{') => Match::Yes((text[..at].trim_end(), at)),
        Some(_) => Match::No,
        None => Match::Partial,
    }
}

/// Matches `<arg_key>NAME</arg_key>`, white space and `<arg_value>`.
fn key(text: &str) -> Match<(&str, usize)> {
    let Some(rest) = text.strip_prefix(KEY) else {
        return if KEY.starts_with(text) { Match::Partial } else { Match::No };
    };
    let Some(at) = rest.find(KEYED) else { return Match::Partial };
    let behind = rest[at + KEYED.len()..].trim_start();
    match behind.strip_prefix(VALUE) {
        Some(value) => Match::Yes((rest[..at].trim(), text.len() - value.len())),
        None if VALUE.starts_with(behind) => Match::Partial,
        None => Match::No,
    }
}

/// Matches what Mistral writes before a call's arguments: NAME, perhaps `[CALL_ID]` and an id, and `[ARGS]`.
pub(super) fn mistral_head(text: &str) -> Match<(&str, usize)> {
    match text.find(MISTRAL_ARGUMENTS) {
        Some(at) => {
            let name = text[..at].split(MISTRAL_ID).next().unwrap_or_default().trim();
            let is_name = !name.is_empty() && !name.contains(['{', '[', '\n']);
            if is_name { Match::Yes((name, at + MISTRAL_ARGUMENTS.len())) } else { Match::No }
        }
        None => Match::Partial,
    }
}

/// Bytes up to and with the end of an object of which the first fields were read; `None`: it has not come.
pub(super) fn rest_of_object(text: &str) -> Option<usize> {
    let (mut depth, mut quoted, mut escaped) = (0, false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth > 0 => depth -= 1,
            b'}' => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Matches `{"name": NAME, "arguments": ` before an object. Returns the name and the length of the match.
pub(super) fn call_head(text: &str) -> Match<(String, usize)> {
    let mut rest = text;
    let skip = |rest: &mut &str, mark: &str| {
        let found = rest.trim_start();
        match found.strip_prefix(mark) {
            Some(behind) => {
                *rest = behind;
                Match::Yes(())
            }
            None if mark.starts_with(found) => Match::Partial,
            None => Match::No,
        }
    };
    macro_rules! expect {
        ($mark:expr) => {
            match skip(&mut rest, $mark) {
                Match::Yes(()) => {}
                Match::No => return Match::No,
                Match::Partial => return Match::Partial,
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
    let Some(end) = end else { return Match::Partial };
    let name = match serde_json::from_str::<String>(&format!("\"{}\"", &rest[..end])) {
        Ok(name) if !name.is_empty() => name,
        _ => return Match::No,
    };
    rest = &rest[end + 1..];
    expect!(",");
    expect!("\"arguments\"");
    expect!(":");
    let object = rest.trim_start();
    match object.chars().next() {
        Some('{') => Match::Yes((name, text.len() - object.len())),
        Some(_) => Match::No,
        None => Match::Partial,
    }
}

/// The name and arguments of a call whose fields come in any order.
pub(super) fn whole_call(json: &str) -> Option<(String, String)> {
    let fields = json::fields(json)?;
    let field = |names: &[&str]| fields.iter().find(|(name, _)| names.contains(&name.as_str())).map(|(_, v)| *v);
    let name: String = serde_json::from_str(field(&["name"])?).ok()?;
    let arguments = field(&["arguments", "parameters"]).unwrap_or("{}");
    // Some models write the arguments as a string.
    let arguments = serde_json::from_str::<String>(arguments).unwrap_or_else(|_| arguments.to_owned());
    (!name.is_empty() && json::fields(&arguments).is_some()).then_some((name, arguments))
}

/// A parameter's text as JSON of its type.
pub(super) fn parameter_json(kind: ParameterType, text: &str) -> String {
    let said = text.trim();
    match said {
        _ if kind.json && json::is_json(said) => said.into(),
        "true" | "True" if kind.boolean && (said == "true" || !kind.text) => "true".into(),
        "false" | "False" if kind.boolean && (said == "false" || !kind.text) => "false".into(),
        "null" | "None" if kind.null && (said == "null" || !kind.text) => "null".into(),
        // Parameters are not quoted, so quotes are part of the text.
        _ if kind.other && (said == text || !kind.text) && !said.starts_with('"') && json::is_json(said) => said.into(),
        _ => format!("\"{}\"", json::escaped(text)),
    }
}
