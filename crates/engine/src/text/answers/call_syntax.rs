//! How calls are written: in JSON, or in XML with parameters.

use super::json;
use super::tools::ParameterType;

pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";

/// Whether a text matches, as far as it has come.
pub(super) enum Match<T> {
    Yes(T),
    No,
    /// The text is too short to tell.
    Partial,
}

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
        "true" | "True" if kind.boolean && (said == "true" || !kind.text) => "true".into(),
        "false" | "False" if kind.boolean && (said == "false" || !kind.text) => "false".into(),
        "null" | "None" if kind.null && (said == "null" || !kind.text) => "null".into(),
        // Parameters are not quoted, so quotes are part of the text.
        _ if kind.other && (said == text || !kind.text) && !said.starts_with('"') && json::is_json(said) => said.into(),
        _ => format!("\"{}\"", json::escaped(text)),
    }
}
