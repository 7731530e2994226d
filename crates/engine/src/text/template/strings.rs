//! Methods of Python's strings and lists.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// The widest text that padding may make.
const MAX_WIDTH: i64 = 1 << 20;

/// Whether Python takes a character for white space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1C'..='\x1F').contains(&c)
}

pub(super) fn wrong(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// Calls a method that minijinja does not know.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return other_method(state, value, name, args) };
    let whole = |text: String| Ok(Value::from(text));
    match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            if separator.is_empty() {
                return Err(wrong("empty separator"));
            }
            let parts = match name {
                "partition" => text.split_once(separator).map_or([text, "", ""], |(a, b)| [a, separator, b]),
                _ => text.rsplit_once(separator).map_or(["", "", text], |(a, b)| [a, separator, b]),
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "split" | "rsplit" => {
            let (separator, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = match separator {
                Some(separator) => Some(separator),
                None => named.get::<Option<Value>>("sep")?,
            };
            let most = match most {
                Some(most) => most,
                None => named.get::<Option<i64>>("maxsplit")?.unwrap_or(-1),
            };
            named.assert_all_used()?;
            let separator = separator.filter(|s| !s.is_none() && !s.is_undefined());
            let separator = match &separator {
                Some(value) => Some(value.as_str().ok_or_else(|| wrong("a separator is a text"))?),
                None => None,
            };
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            Ok(split(text, separator, most, name == "rsplit")?.into_iter().map(Value::from).collect())
        }
        "splitlines" => {
            let (keeps, named): (Option<bool>, Kwargs) = from_args(args)?;
            let keeps = keeps.or(named.get("keepends")?).unwrap_or(false);
            named.assert_all_used()?;
            Ok(lines(text, keeps).into_iter().map(Value::from).collect())
        }
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
            let text = if name == "rstrip" { text } else { text.trim_start_matches(goes) };
            Ok(Value::from(if name == "lstrip" { text } else { text.trim_end_matches(goes) }))
        }
        "center" | "ljust" | "rjust" => {
            let (width, fill): (i64, Option<&str>) = from_args(args)?;
            let mut fill = fill.unwrap_or(" ").chars();
            let (Some(fill), None) = (fill.next(), fill.next()) else {
                return Err(wrong("a text is filled up with one character"));
            };
            whole(padded(text, width, fill, name)?)
        }
        "zfill" => {
            let (width,): (i64,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            whole(format!("{sign}{}", padded(digits, width - sign.len() as i64, '0', "rjust")?))
        }
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            let size = size.unwrap_or(8).min(MAX_WIDTH as usize);
            let (mut out, mut column) = (String::new(), 0);
            for c in text.chars() {
                match c {
                    '\t' if size > 0 => {
                        let blanks = size - column % size;
                        out.push_str(&" ".repeat(blanks));
                        column += blanks;
                    }
                    '\t' => {}
                    _ => {
                        out.push(c);
                        column = if c == '\n' || c == '\r' { 0 } else { column + 1 };
                    }
                }
            }
            whole(out)
        }
        "swapcase" => whole(text.chars().fold(String::new(), |mut out, c| {
            if c.is_uppercase() {
                out.extend(c.to_lowercase())
            } else {
                out.extend(c.to_uppercase())
            }
            out
        })),
        "casefold" => whole(text.to_lowercase().replace('ß', "ss")),
        "title" => {
            let () = from_args(args)?;
            let mut inside = false;
            let mut out = String::with_capacity(text.len());
            for c in text.chars() {
                if inside {
                    out.extend(c.to_lowercase())
                } else {
                    out.extend(c.to_uppercase())
                }
                inside = c.is_alphabetic();
            }
            whole(out)
        }
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" => {
            let (what, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
            within(text, name, what, start, end)
        }
        "isdecimal" => {
            let () = from_args(args)?;
            Ok(Value::from(!text.is_empty() && text.chars().all(is_decimal)))
        }
        "isdigit" => {
            let () = from_args(args)?;
            Ok(Value::from(!text.is_empty() && text.chars().all(|c| is_decimal(c) || is_other_digit(c))))
        }
        "isidentifier" => {
            let () = from_args(args)?;
            let begins = text.starts_with(|c: char| c == '_' || c.is_alphabetic());
            Ok(Value::from(begins && text.chars().all(|c| c == '_' || c.is_alphanumeric())))
        }
        "isprintable" => {
            let () = from_args(args)?;
            Ok(Value::from(!text.chars().any(super::repr::is_escaped)))
        }
        "istitle" => {
            let () = from_args(args)?;
            let (mut inside, mut any, mut holds) = (false, false, true);
            for c in text.chars() {
                holds &= !(c.is_uppercase() && inside || c.is_lowercase() && !inside);
                inside = c.is_uppercase() || c.is_lowercase();
                any |= inside;
            }
            Ok(Value::from(any && holds))
        }
        "isspace" => {
            let () = from_args(args)?;
            Ok(Value::from(!text.is_empty() && text.chars().all(is_space)))
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

fn other_method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let is_list = matches!(value.kind(), ValueKind::Seq);
    match name {
        "index" if is_list => {
            let (what,): (&Value,) = from_args(args)?;
            let place = value.try_iter()?.position(|item| item == *what);
            place.map(Value::from).ok_or_else(|| wrong("the value is not in the list"))
        }
        "copy" if is_list || value.kind() == ValueKind::Map => {
            let () = from_args(args)?;
            Ok(value.clone())
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

fn split<'a>(text: &'a str, separator: Option<&str>, most: usize, from_end: bool) -> Result<Vec<&'a str>, Error> {
    let Some(separator) = separator else {
        let mut parts = Vec::new();
        let mut rest = text.trim_matches(is_space);
        while !rest.is_empty() && parts.len() < most {
            let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
            let Some(at) = cut else { break };
            let behind = at + rest[at..].chars().next().map_or(1, char::len_utf8);
            let (first, second) = (&rest[..at], &rest[behind..]);
            parts.push(if from_end { second } else { first });
            rest = if from_end { first.trim_end_matches(is_space) } else { second.trim_start_matches(is_space) };
        }
        // White space at the other end belongs to the last part.
        if !rest.is_empty() {
            let whole = if parts.len() < most {
                rest
            } else if from_end {
                &text[..rest.as_ptr() as usize - text.as_ptr() as usize + rest.len()]
            } else {
                &text[rest.as_ptr() as usize - text.as_ptr() as usize..]
            };
            parts.push(whole);
        }
        if from_end {
            parts.reverse();
        }
        return Ok(parts);
    };
    if separator.is_empty() {
        return Err(wrong("empty separator"));
    }
    let parts = most.saturating_add(1);
    Ok(if from_end {
        let mut found: Vec<&str> = text.rsplitn(parts, separator).collect();
        found.reverse();
        found
    } else {
        text.splitn(parts, separator).collect()
    })
}

/// Splits lines as Python does. `keeps`: with their ends.
pub(super) fn lines(text: &str, keeps: bool) -> Vec<&str> {
    let ends =
        |c: char| matches!(c, '\n' | '\r' | '\x0B' | '\x0C' | '\x1C'..='\x1E' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let tail = &rest[at..];
        let end = if tail.starts_with("\r\n") { 2 } else { tail.chars().next().map_or(1, char::len_utf8) };
        found.push(&rest[..at + if keeps { end } else { 0 }]);
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        found.push(rest);
    }
    found
}

pub(super) fn padded(text: &str, width: i64, fill: char, how: &str) -> Result<String, Error> {
    if width > MAX_WIDTH {
        return Err(wrong(format!("a text is filled up to {MAX_WIDTH} characters at most")));
    }
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(text.chars().count());
    // As in Python: with an even width, the odd space is on the right.
    let left = match how {
        "ljust" => 0,
        "rjust" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    let fill = |n: usize| fill.to_string().repeat(n);
    Ok(format!("{}{text}{}", fill(left), fill(missing - left)))
}

/// Methods that search a part of a string. `start` and `end` count characters.
fn within(text: &str, name: &str, what: &Value, start: Option<i64>, end: Option<i64>) -> Result<Value, Error> {
    let length = text.chars().count() as i64;
    let place = |at: i64| (if at < 0 { at + length } else { at }).max(0);
    let (start, end) = (place(start.unwrap_or(0)), place(end.unwrap_or(length)).min(length));
    let byte = |at: i64| text.char_indices().nth(at as usize).map_or(text.len(), |(byte, _)| byte);
    let part = (start <= end).then(|| &text[byte(start)..byte(end)]);
    let one = |value: &Value| {
        value.as_str().map(str::to_owned).ok_or_else(|| wrong(format!("{name} looks for a text, not {}", value.kind())))
    };
    if name == "startswith" || name == "endswith" {
        let wanted = match what.kind() {
            ValueKind::Seq | ValueKind::Iterable => what.try_iter()?.map(|v| one(&v)).collect::<Result<Vec<_>, _>>()?,
            _ => vec![one(what)?],
        };
        let is = |wanted: &String| {
            part.is_some_and(|p| {
                if name == "startswith" { p.starts_with(wanted.as_str()) } else { p.ends_with(wanted.as_str()) }
            })
        };
        return Ok(Value::from(wanted.iter().any(is)));
    }
    let what = one(what)?;
    let found = match name {
        "count" => return Ok(Value::from(part.map_or(0, |part| part.matches(&what).count()))),
        "find" | "index" => part.and_then(|part| part.find(&what).map(|at| part[..at].chars().count())),
        _ => part.and_then(|part| part.rfind(&what).map(|at| part[..at].chars().count())),
    };
    match found {
        Some(at) => Ok(Value::from(start + at as i64)),
        None if name.ends_with("index") => Err(wrong("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

/// The zeros of all decimal digits. Nine more digits follow each.
const ZEROS: [u32; 66] = [
    0x30, 0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xDE6, 0xE50, 0xED0,
    0xF20, 0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90, 0x1B50, 0x1BB0, 0x1C40, 0x1C50, 0xA620,
    0xA8D0, 0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0, 0xFF10, 0x104A0, 0x10D30, 0x11066, 0x110F0, 0x11136, 0x111D0,
    0x112F0, 0x11450, 0x114D0, 0x11650, 0x116C0, 0x11730, 0x118E0, 0x11950, 0x11C50, 0x11D50, 0x11DA0, 0x16A60,
    0x16AC0, 0x16B50, 0x1D7CE, 0x1D7D8, 0x1D7E2, 0x1D7EC, 0x1D7F6, 0x1E140, 0x1E2F0, 0x1E950, 0x1FBF0,
];

pub(super) fn is_decimal(c: char) -> bool {
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&u32::from(c)))
}

/// Whether a character is a superscript, subscript, circled or similar digit.
fn is_other_digit(c: char) -> bool {
    matches!(u32::from(c), 0xB2 | 0xB3 | 0xB9 | 0x1369..=0x1371 | 0x19DA | 0x2070 | 0x2074..=0x2079 | 0x2080..=0x2089
        | 0x2460..=0x2468 | 0x2474..=0x247C | 0x2488..=0x2490 | 0x24EA | 0x24F5..=0x24FD | 0x24FF | 0x2776..=0x277E
        | 0x2780..=0x2788 | 0x278A..=0x2792 | 0x10A40..=0x10A43 | 0x10E60..=0x10E68 | 0x11052..=0x1105A | 0x1F100..=0x1F10A)
}
