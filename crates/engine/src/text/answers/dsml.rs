//! DSML, the notation of DeepSeek-V3.2 and V4: tags whose names follow a token of their own. A parameter says whether it is a text, as it is, or JSON.

use serde_json::Value;

use super::json;
use super::marks::DSML_VALUED;
use super::matching::{Match, ParameterHead};
use super::stand_in::Written;
use super::tools::ParameterType;
use crate::text::template::tojson::dumps;

const INVOKE: &str = "<｜DSML｜invoke name=\"";
const PARAMETER: &str = "<｜DSML｜parameter name=\"";
/// Between a parameter's name and whether it is a text.
const STRING: &str = " string=\"";

/// Matches what begins a call. The end of a tag without contents (`/>`) is left.
pub(super) fn head(text: &str) -> Match<(&str, usize)> {
    match quoted(text, INVOKE) {
        Match::Yes((name, len)) => match &text[len..] {
            rest if rest.starts_with('>') => Match::Yes((name, len + 1)),
            rest if rest.starts_with("/>") => Match::Yes((name, len)),
            "" | "/" => Match::Partial,
            _ => Match::No,
        },
        other => other,
    }
}

/// Matches what begins a parameter.
pub(super) fn parameter(text: &str) -> Match<ParameterHead<'_>> {
    let (name, len) = match quoted(text, PARAMETER) {
        Match::Yes(found) => found,
        Match::No => return Match::No,
        Match::Partial => return Match::Partial,
    };
    let (is_text, more) = match quoted(&text[len..], STRING) {
        Match::Yes(found) => found,
        Match::No => return Match::No,
        Match::Partial => return Match::Partial,
    };
    let kind = match is_text {
        "true" => ParameterType { text: true, ..ParameterType::default() },
        _ => ParameterType { boolean: true, null: true, other: true, json: true, ..ParameterType::default() },
    };
    match text.as_bytes().get(len + more) {
        Some(b'>') => Match::Yes(ParameterHead { name, len: len + more + 1, kind: Some(kind) }),
        Some(_) => Match::No,
        None => Match::Partial,
    }
}

/// Matches `begin`, a word and a quotation mark.
fn quoted<'a>(text: &'a str, begin: &str) -> Match<(&'a str, usize)> {
    let Some(rest) = text.strip_prefix(begin) else {
        return if begin.starts_with(text) { Match::Partial } else { Match::No };
    };
    match rest.find(['"', '\n']) {
        Some(at) if at > 0 && rest.as_bytes()[at] == b'"' => Match::Yes((&rest[..at], begin.len() + at + 1)),
        Some(_) => Match::No,
        None => Match::Partial,
    }
}

/// Writes arguments, a JSON object, as parameters on lines of their own. `None`: they are no object, or an empty one, which templates write in their own ways.
pub(super) fn written(arguments: &str) -> Option<Vec<Written>> {
    let values = said_values(arguments)?;
    let mut parts = Vec::with_capacity(5 * values.len());
    for (i, (name, value, said)) in values.into_iter().enumerate() {
        let begin = if i == 0 { "" } else { "\n" };
        parts.extend([
            Written::Markup(format!("{begin}{PARAMETER}")),
            Written::Said(name),
            Written::Markup(format!("\"{STRING}{}\">", value.is_string())),
            Written::Said(said),
            Written::Markup(DSML_VALUED.to_owned()),
        ]);
    }
    Some(parts)
}

/// Name, value and what is written of it: a text as it is, or JSON. `None`: the arguments are no object, or an empty one.
///
/// Values are as they were written, unless a client has written the object anew without spaces.
pub(super) fn said_values(arguments: &str) -> Option<Vec<(String, Value, String)>> {
    let fields = json::fields(arguments).filter(|fields| !fields.is_empty())?;
    let joined: Vec<String> =
        fields.iter().map(|(name, value)| format!("\"{}\": {value}", json::escaped(name))).collect();
    let is_own = arguments.trim() == format!("{{{}}}", joined.join(", "));
    let one = |(name, written): (String, &str)| {
        let value: Value = serde_json::from_str(written).ok()?;
        let said = match &value {
            Value::String(text) => text.clone(),
            Value::Array(_) | Value::Object(_) if !is_own && !json::is_spaced(written) => dumps(&value),
            _ => written.to_owned(),
        };
        Some((name, value, said))
    };
    fields.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(arguments: &str) -> String {
        let one = |part: Written| match part {
            Written::Markup(text) | Written::Said(text) => text,
        };
        written(arguments).unwrap().into_iter().map(one).collect()
    }

    #[test]
    fn beginnings_are_matched_when_they_are_complete() {
        let tag = "<｜DSML｜parameter name=\"a b\" string=\"false\">";
        for end in (0..tag.len()).filter(|end| tag.is_char_boundary(*end)) {
            assert!(matches!(parameter(&tag[..end]), Match::Partial), "{end}");
        }
        let Match::Yes(found) = parameter(tag) else { panic!("no match") };
        assert!(found.name == "a b" && found.len == tag.len() && found.kind.unwrap().json);
        for wrong in [tag.replace(" string", ""), tag.replace("string", "text"), tag.replace("\">", "\" >")] {
            assert!(matches!(parameter(&wrong), Match::No), "{wrong}");
        }
        assert!(matches!(head("<｜DSML｜invoke name=\"f\">\n"), Match::Yes(("f", 27))));
        assert!(matches!(head("<｜DSML｜invoke name=\"f\"/>"), Match::Yes(("f", 26))));
        assert!(matches!(head("<｜DSML｜invoke name=\"f\"/"), Match::Partial));
        assert!(matches!(head("<｜DSML｜invoke>"), Match::No));
    }

    #[test]
    fn values_are_written_as_they_were() {
        let one = |is_text: bool, value: &str| {
            format!("<｜DSML｜parameter name=\"a\" string=\"{is_text}\">{value}</｜DSML｜parameter>")
        };
        for (json, is_text, value) in [
            (r#"{"a": 1.50}"#, false, "1.50"),
            (r#"{"a": "x\n<b>"}"#, true, "x\n<b>"),
            (r#"{"a": [1,2]}"#, false, "[1,2]"),
            (r#"{"a": [1,  2]}"#, false, "[1,  2]"),
            // As a client has written it.
            (r#"{"a":[1,2.50]}"#, false, "[1, 2.5]"),
            (r#"{"a":1.50}"#, false, "1.50"),
        ] {
            assert_eq!(text(json), one(is_text, value), "{json}");
        }
        assert_eq!(text(r#"{"a": true, "a": null}"#), format!("{}\n{}", one(false, "true"), one(false, "null")));
        assert!(written("{}").is_none() && written("[1]").is_none() && written("{\"a").is_none());
    }
}
