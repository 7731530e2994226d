//! Values as Python prints them.

use minijinja::Value;
use minijinja::value::ValueKind;
use std::fmt::Write;

/// Python's `str(value)`.
pub(super) fn to_str(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        return text.to_owned();
    }
    let mut out = String::new();
    write_repr(&mut out, value, 0);
    out
}

/// Python's `repr(value)`.
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value, 0);
    out
}

/// Appends Python's `repr(value)`. Other values are printed by minijinja.
fn write_repr(out: &mut String, value: &Value, depth: usize) {
    let list = |out: &mut String, items: Vec<Value>| {
        for (i, item) in items.iter().enumerate() {
            out.push_str(if i > 0 { ", " } else { "" });
            write_repr(out, item, depth + 1);
        }
        items.len()
    };
    match value.kind() {
        // Python prints this for a list inside itself. Here a template nested it without end.
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
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        _ => _ = write!(out, "{value}"),
    }
}

/// Whether Python escapes a character when it prints a string.
pub(super) fn is_escaped(c: char) -> bool {
    c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(c, '\u{AD}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{206F}')
        || matches!(c, '\u{FEFF}' | '\u{E000}'..='\u{F8FF}')
}

/// Appends a string in quotes, single ones if possible.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let escaped = is_escaped(c);
        match (c, u32::from(c)) {
            ('\\', _) => out.push_str("\\\\"),
            ('\n', _) => out.push_str("\\n"),
            ('\r', _) => out.push_str("\\r"),
            ('\t', _) => out.push_str("\\t"),
            (c, _) if c == quote => out.extend(['\\', c]),
            (_, code @ ..=0xFF) if escaped => _ = write!(out, "\\x{code:02x}"),
            (_, code) if escaped => _ = write!(out, "\\u{code:04x}"),
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
    // Both languages print the shortest digits that read back, but Python switches to an exponent elsewhere.
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
