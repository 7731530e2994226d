//! JSON while it streams, and the text that it was written in.

use serde::de::IgnoredAny;
use serde_json::Deserializer;

/// Values may be nested this deeply, about as in `serde_json`.
const DEPTH: usize = 120;

/// Reads a JSON object byte by byte, and finds its end or its first error.
pub struct Scanner {
    /// The open objects (true) and arrays (false).
    open: Vec<bool>,
    at: At,
}

#[derive(Clone, Copy)]
enum At {
    /// Before a value. `end`: or the end of an empty array.
    Value {
        end: bool,
    },
    /// Before a name. `end`: or the end of an empty object.
    Name {
        end: bool,
    },
    Colon,
    /// Before `,` or an end.
    Next,
    Text {
        name: bool,
    },
    Escape {
        name: bool,
    },
    /// In `\u....`, with this many digits left.
    Digits {
        name: bool,
        left: u8,
    },
    Number(Number),
    /// In `true`, `false` or `null`, with these letters left.
    Word(&'static [u8]),
}

#[derive(Clone, Copy)]
enum Number {
    Sign,
    Zero,
    Whole,
    Point,
    Part,
    E,
    ESign,
    Exponent,
}

/// How much of a text belongs to the object.
#[derive(Debug, PartialEq, Eq)]
pub enum Scan {
    All,
    /// It ends before this byte.
    Ends(usize),
    /// This byte is an error.
    Bad(usize),
}

impl Scanner {
    /// Before the object's first byte.
    pub fn new() -> Scanner {
        Scanner { open: Vec::new(), at: At::Value { end: false } }
    }

    /// Reads the next part of the text.
    pub fn scan(&mut self, text: &str) -> Scan {
        for (i, byte) in text.bytes().enumerate() {
            if self.take(byte).is_none() {
                return Scan::Bad(i);
            }
            if self.open.is_empty() {
                return Scan::Ends(i + 1);
            }
        }
        Scan::All
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        let space = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        self.at = match self.at {
            At::Value { .. } | At::Name { .. } | At::Colon | At::Next if space && !self.open.is_empty() => self.at,
            At::Value { end } => match byte {
                b']' if end => return self.close(false),
                b'{' if self.open.len() < DEPTH => {
                    self.open.push(true);
                    At::Name { end: true }
                }
                _ if self.open.is_empty() => return None,
                b'[' if self.open.len() < DEPTH => {
                    self.open.push(false);
                    At::Value { end: true }
                }
                b'"' => At::Text { name: false },
                b'-' => At::Number(Number::Sign),
                b'0' => At::Number(Number::Zero),
                b'1'..=b'9' => At::Number(Number::Whole),
                b't' => At::Word(b"rue"),
                b'f' => At::Word(b"alse"),
                b'n' => At::Word(b"ull"),
                _ => return None,
            },
            At::Name { end } => match byte {
                b'}' if end => return self.close(true),
                b'"' => At::Text { name: true },
                _ => return None,
            },
            At::Colon if byte == b':' => At::Value { end: false },
            At::Colon => return None,
            At::Next => match (byte, self.open.last()) {
                (b',', Some(true)) => At::Name { end: false },
                (b',', Some(false)) => At::Value { end: false },
                (b'}', Some(true)) => return self.close(true),
                (b']', Some(false)) => return self.close(false),
                _ => return None,
            },
            At::Text { name } => match byte {
                b'"' if name => At::Colon,
                b'"' => At::Next,
                b'\\' => At::Escape { name },
                0..0x20 => return None,
                _ => self.at,
            },
            At::Escape { name } => match byte {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => At::Text { name },
                b'u' => At::Digits { name, left: 4 },
                _ => return None,
            },
            At::Digits { name, left } if byte.is_ascii_hexdigit() => match left {
                1 => At::Text { name },
                _ => At::Digits { name, left: left - 1 },
            },
            At::Digits { .. } => return None,
            At::Word([first, rest @ ..]) if *first == byte => {
                if rest.is_empty() {
                    At::Next
                } else {
                    At::Word(rest)
                }
            }
            At::Word(_) => return None,
            At::Number(number) => match number.then(byte) {
                Some(number) => At::Number(number),
                None if number.may_end() => {
                    self.at = At::Next;
                    return self.take(byte);
                }
                None => return None,
            },
        };
        Some(())
    }

    fn close(&mut self, object: bool) -> Option<()> {
        let closed = self.open.pop()?;
        self.at = At::Next;
        (closed == object).then_some(())
    }
}

impl Number {
    fn then(self, byte: u8) -> Option<Number> {
        Some(match (self, byte) {
            (Number::Sign, b'0') => Number::Zero,
            (Number::Sign, b'1'..=b'9') | (Number::Whole, b'0'..=b'9') => Number::Whole,
            (Number::Zero | Number::Whole, b'.') => Number::Point,
            (Number::Point | Number::Part, b'0'..=b'9') => Number::Part,
            (Number::Zero | Number::Whole | Number::Part, b'e' | b'E') => Number::E,
            (Number::E, b'+' | b'-') => Number::ESign,
            (Number::E | Number::ESign | Number::Exponent, b'0'..=b'9') => Number::Exponent,
            _ => return None,
        })
    }

    fn may_end(self) -> bool {
        matches!(self, Number::Zero | Number::Whole | Number::Part | Number::Exponent)
    }
}

/// The fields of an object, in order, with the text of their values as it was written; `None` if it is no JSON object.
pub fn fields(text: &str) -> Option<Vec<(String, &str)>> {
    let mut rest = text.trim().strip_prefix('{')?;
    let mut fields = Vec::new();
    loop {
        rest = rest.trim_start();
        if fields.is_empty()
            && let Some(end) = rest.strip_prefix('}')
        {
            return end.is_empty().then_some(fields);
        }
        let mut names = Deserializer::from_str(rest).into_iter::<String>();
        let name = names.next()?.ok()?;
        rest = rest[names.byte_offset()..].trim_start().strip_prefix(':')?.trim_start();
        let mut values = Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        values.next()?.ok()?;
        let (value, behind) = rest.split_at(values.byte_offset());
        fields.push((name, value.trim()));
        let behind = behind.trim_start();
        match behind.strip_prefix(',') {
            Some(more) => rest = more,
            None => return behind.strip_prefix('}')?.is_empty().then_some(fields),
        }
    }
}

/// The values of an array as they were written; `None` if the text is no array.
pub fn items(json: &str) -> Option<Vec<&str>> {
    let mut rest = json.trim().strip_prefix('[')?.trim_start();
    let mut items = Vec::new();
    if let Some(end) = rest.strip_prefix(']') {
        return end.is_empty().then_some(items);
    }
    loop {
        let mut values = Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        values.next()?.ok()?;
        let (value, behind) = rest.split_at(values.byte_offset());
        items.push(value.trim());
        let behind = behind.trim_start();
        match behind.strip_prefix(',') {
            Some(more) => rest = more.trim_start(),
            None => return behind.strip_prefix(']')?.is_empty().then_some(items),
        }
    }
}

/// Whether a JSON text has white space between its parts.
pub fn is_spaced(json: &str) -> bool {
    let (mut inside, mut escaped) = (false, false);
    for c in json.trim().bytes() {
        match c {
            _ if escaped => escaped = false,
            b'\\' if inside => escaped = true,
            b'"' => inside = !inside,
            _ if !inside && c.is_ascii_whitespace() => return true,
            _ => {}
        }
    }
    false
}

/// A string as JSON, without the quotes.
pub fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Whether a text is one JSON value.
pub fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn objects_end_where_they_end() {
        for (text, end) in [
            ("{}x", 2),
            (r#"{"a": "}\"{", "b": [1, -2.5e+3, {}, []], "c": null} }"#, 51),
            ("{\"\\u00e9\": true}\n", 16),
        ] {
            assert_eq!(Scanner::new().scan(text), Scan::Ends(end), "{text}");
            assert!(is_json(&text[..end]), "{text}");
        }
        assert_eq!(Scanner::new().scan(r#"{"a": [1, 2"#), Scan::All);
        for (text, bad) in [
            ("[]", 0),
            ("{a", 1),
            ("{\"a\" 1", 5),
            ("{\"a\": 01", 7),
            ("{\"a\": \"\n", 7),
            ("{\"a\": 1,}", 8),
            ("{\"a\": [1}", 8),
            ("{\"a\": nul}", 9),
            ("{\"a\": \"\\x", 8),
        ] {
            assert_eq!(Scanner::new().scan(text), Scan::Bad(bad), "{text}");
        }
        assert!(matches!(Scanner::new().scan(&"{\"a\":".repeat(1000)), Scan::Bad(_)));
    }

    #[test]
    fn values_are_given_as_they_were_written() {
        let found = fields(r#" {"a": 1.50, "b" :{"c":  [1, 2]},"c": "x, \"}", "d":[]} "#).unwrap();
        let found: Vec<(&str, &str)> = found.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(found, [("a", "1.50"), ("b", r#"{"c":  [1, 2]}"#), ("c", r#""x, \"}""#), ("d", "[]")]);
        assert_eq!(fields("{ }"), Some(vec![]));
        for wrong in ["", "[]", "{", "{\"a\"}", "{\"a\": 1,}", "{} x", "{\"a\": 1 2}", "{,}"] {
            assert_eq!(fields(wrong), None, "{wrong}");
        }
        assert_eq!(items(r#"[1.50, [2,3] ,"a,]"]"#).unwrap(), ["1.50", "[2,3]", r#""a,]""#]);
        for wrong in ["", "{}", "[", "[1", "[1,]", "[] x", "[,]"] {
            assert_eq!(items(wrong), None, "{wrong}");
        }
        assert!(is_spaced(r#"{"a": 1}"#) && !is_spaced(r#"{"a b":"c \" d"}"#));
    }

    proptest! {
        #[test]
        fn what_ends_is_json(text in "[{}\\[\\],:\"0-2.eE+\\-trufalsn \\\\u]{0,40}") {
            let text = format!("{{{text}");
            if let Scan::Ends(end) = Scanner::new().scan(&text) {
                // Lone surrogates and numbers beyond f64 are left to the reader of the arguments.
                let odd = text.contains("\\u") || text.contains(['e', 'E']);
                prop_assert!(odd || is_json(&text[..end]), "{}", &text[..end]);
            }
            if let Some(found) = fields(&text) {
                prop_assert_eq!(Scanner::new().scan(&text), Scan::Ends(text.trim_end().len()));
                prop_assert!(found.iter().all(|(_, value)| is_json(value)));
            }
        }
    }
}
