//! XTML, the notation of Kimi-K3: tags with attributes between tokens. Thoughts, text and calls are in channels of a message. An argument says its type.

mod parser;

use serde_json::Value;

use super::dsml;
use super::marks::{XTML_SEP, XTML_VALUED};
use super::matching::Match;
use super::stand_in::Written;
pub(super) use parser::XtmlParser;

const CALL: &str = "<|open|>call";
const ARGUMENT: &str = "<|open|>argument";

/// Matches a tag that begins so, and its attributes.
fn tag<'a>(text: &'a str, begin: &str) -> Match<(&'a str, usize)> {
    let Some(rest) = text.strip_prefix(begin) else {
        return if begin.starts_with(text) { Match::Partial } else { Match::No };
    };
    match rest.find(XTML_SEP) {
        Some(at) if at == 0 || rest.starts_with(' ') => Match::Yes((&rest[..at], begin.len() + at + XTML_SEP.len())),
        None if rest.is_empty() || rest.starts_with([' ', '<']) => Match::Partial,
        _ => Match::No,
    }
}

/// The value of an attribute such as ` tool="NAME"`.
fn attribute(attributes: &str, name: &str) -> Option<String> {
    let mut rest = attributes;
    loop {
        let (key, behind) = rest.split_once("=\"")?;
        let (value, behind) = behind.split_once('"')?;
        if key.trim() == name {
            return Some(value.replace("&quot;", "\"").replace("&amp;", "&"));
        }
        rest = behind;
    }
}

/// A text as the value of an attribute.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;")
}

/// What the type of a value is called.
fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Writes arguments, a JSON object. `None`: they are no object, or an empty one.
pub(super) fn written(arguments: &str) -> Option<Vec<Written>> {
    let mut parts = Vec::new();
    for (name, value, said) in dsml::said_values(arguments)? {
        parts.extend([
            Written::Markup(format!("{ARGUMENT} key=\"")),
            Written::Said(escaped(&name)),
            Written::Markup(format!("\" type=\"{}\"{XTML_SEP}", type_of(&value))),
            Written::Said(said),
            Written::Markup(XTML_VALUED.to_owned()),
        ]);
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_matched_when_they_are_complete() {
        let whole = "<|open|>call tool=\"a&quot;&amp;amp;\" index=\"1\"<|sep|>";
        for end in 0..whole.len() {
            assert!(matches!(tag(&whole[..end], CALL), Match::Partial), "{end}");
        }
        let Match::Yes((attributes, len)) = tag(whole, CALL) else { panic!("no match") };
        assert_eq!((attribute(attributes, "tool").unwrap().as_str(), len), ("a\"&amp;", whole.len()));
        assert_eq!(attribute(attributes, "index").unwrap(), "1");
        assert!(attribute(attributes, "key").is_none() && attribute(" tool=\"a", "tool").is_none());
        assert_eq!(escaped("a\"&amp;"), "a&quot;&amp;amp;");
        for wrong in ["<|open|>calls<|sep|>", "<|open|>response<|sep|>", "call"] {
            assert!(matches!(tag(wrong, CALL), Match::No), "{wrong}");
        }
    }

    #[test]
    fn arguments_are_written_with_their_types() {
        let text = |json: &str| -> String {
            let one = |part: Written| match part {
                Written::Markup(text) | Written::Said(text) => text,
            };
            written(json).unwrap().into_iter().map(one).collect()
        };
        let one = |kind: &str, value: &str| {
            format!("<|open|>argument key=\"a\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>")
        };
        for (json, kind, value) in [
            (r#"{"a": 1.50}"#, "number", "1.50"),
            (r#"{"a": "x\n\"<b>"}"#, "string", "x\n\"<b>"),
            (r#"{"a":[1,2]}"#, "array", "[1, 2]"),
            (r#"{"a": {"b":  1}}"#, "object", "{\"b\":  1}"),
            (r#"{"a": true}"#, "boolean", "true"),
        ] {
            assert_eq!(text(json), one(kind, value), "{json}");
        }
        assert_eq!(text(r#"{"a": null, "a": ""}"#), one("null", "null") + &one("string", ""));
        assert!(written("{}").is_none() && written("[1]").is_none() && written("{\"a").is_none());
    }
}
