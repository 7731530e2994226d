//! Where a chat template expects Python: how values print, Jinja2's tests and `strftime`. Methods and filters are in `strings.rs`.

use super::{percent, strings};
use jiff::civil::DateTime;
use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::{filters, globals};
use std::fmt::Write;

/// Makes `env` speak Python, with transformers' own additions that need no clock.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_formatter(print);
    env.set_unknown_method_callback(strings::method);
    env.add_filter("percent_format", percent::percent_format);
    env.add_filter("format", percent::format_filter);
    env.add_filter("int", strings::int);
    env.add_filter("float", strings::float);
    env.add_filter("center", strings::center);
    env.add_filter("truncate", strings::truncate);
    env.add_filter("wordcount", strings::wordcount);
    env.add_filter("trim", strings::trim);
    env.add_filter("indent", strings::indent);
    env.add_filter("sort", strings::sort);
    env.add_filter("dictsort", strings::dictsort);
    for name in ["default", "d"] {
        env.add_filter(name, strings::default);
    }
    for name in ["length", "count"] {
        env.add_filter(name, strings::length);
    }
    env.add_filter("striptags", filters::striptags);
    env.add_filter("filesizeformat", filters::filesizeformat);
    env.add_function("cycler", |items: Rest<Value>| globals::cycler(items.0));
    env.add_function("joiner", globals::joiner);
    env.add_filter(
        "string",
        |value: &Value| {
            if value.as_str().is_some() { value.clone() } else { Value::from(to_str(value)) }
        },
    );
    env.add_filter("replace", |text: String, old: &str, new: &str, args: Rest<Value>| -> Result<String, Error> {
        Ok(match args.first().filter(|count| !count.is_none()) {
            Some(count) => {
                text.replacen(old, new, usize::try_from(i64::try_from(count.clone())?).unwrap_or(usize::MAX))
            }
            None => text.replace(old, new),
        })
    });
    env.add_test("sequence", |v: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(v.kind(), Seq | Iterable | String | Map | Undefined)
    });
    env.add_test("number", |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_test("callable", |v: &Value| v.kind() == ValueKind::Plain);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, super::jinja::brief(message)))
    });
}

/// `datetime.strftime`.
pub(super) fn strftime(format: &str, now: DateTime) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}

/// `{{ value }}`.
fn print(out: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None => out.write_str(&to_str(value))?,
    }
    Ok(())
}

/// Python's `str(value)`.
pub(super) fn to_str(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        return text.to_owned();
    }
    let mut out = String::new();
    repr(&mut out, value, 0);
    out
}

/// Python's `repr(value)`.
pub(super) fn repr_of(value: &Value) -> String {
    let mut out = String::new();
    repr(&mut out, value, 0);
    out
}

/// Python's `repr(value)`; what has none of its own is left to minijinja.
fn repr(out: &mut String, value: &Value, depth: usize) {
    let list = |out: &mut String, items: Vec<Value>| {
        for (i, item) in items.iter().enumerate() {
            out.push_str(if i > 0 { ", " } else { "" });
            repr(out, item, depth + 1);
        }
        items.len()
    };
    match value.kind() {
        // As Python marks a list inside itself; here it is one that a template nested without end.
        _ if depth > 200 => out.push_str("..."),
        ValueKind::String => quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(x) => out.push_str(&float(x)),
            Err(_) => _ = write!(out, "{value}"),
        },
        ValueKind::Seq | ValueKind::Iterable if value.is_tuple() => {
            out.push('(');
            let n = list(out, value.try_iter().into_iter().flatten().collect());
            out.push_str(if n == 1 { ",)" } else { ")" });
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            list(out, value.try_iter().into_iter().flatten().collect());
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &key, depth + 1);
                out.push_str(": ");
                repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        _ => _ = write!(out, "{value}"),
    }
}

/// What Python escapes in a string that it shows.
pub(super) fn is_unseen(c: char) -> bool {
    c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(c, '\u{AD}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{206F}')
        || matches!(c, '\u{FEFF}' | '\u{E000}'..='\u{F8FF}')
}

/// A string as Python writes it in a list: in single quotes if it can, what cannot be seen escaped.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let unseen = is_unseen(c);
        match (c, u32::from(c)) {
            ('\\', _) => out.push_str("\\\\"),
            ('\n', _) => out.push_str("\\n"),
            ('\r', _) => out.push_str("\\r"),
            ('\t', _) => out.push_str("\\t"),
            (c, _) if c == quote => out.extend(['\\', c]),
            (_, code @ ..=0xFF) if unseen => _ = write!(out, "\\x{code:02x}"),
            (_, code) if unseen => _ = write!(out, "\\u{code:04x}"),
            (c, _) => out.push(c),
        }
    }
    out.push(quote);
}

/// `float.__repr__`.
pub(super) fn float(x: f64) -> String {
    if !x.is_finite() {
        return format!("{x}").to_lowercase();
    }
    // Both languages print the shortest digits that read back; Python changes to an exponent elsewhere.
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}
