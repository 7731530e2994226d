//! Python's `%` on strings: `'%05d' % x`.
//!
//! The template engine's operator only works on numbers. So after a string literal it is replaced by a filter before the template is compiled:
//! `'%05d'|percent_format(x)`. Templates that compute a format use `|format`.

use super::repr::{repr, to_str};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::collections::BTreeMap;

const FILTER: &str = "|percent_format(";
/// The largest width and precision.
const MOST: usize = 10_000;

/// How deeply operators may be nested in operands. Deeper ones are left to the engine, which refuses them.
const MOST_NESTED: usize = 32;

/// Replaces the operator by the filter in a template's source.
pub(super) fn with_filters(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while let Some(found) = source[at..].find('{').map(|n| at + n) {
        let rest = &source[found..];
        let end =
            |of: &str, behind: usize| rest[behind..].find(of).map_or(source.len(), |n| found + behind + n + of.len());
        let is_raw = |tag: &str, word: &str| {
            let sign = |c: char| c == '-' || c == '+';
            tag.strip_prefix("{%").is_some_and(|t| t.trim_start_matches(sign).trim_start().starts_with(word))
        };
        let (copied, closes) = match rest.as_bytes().get(1) {
            Some(b'#') => (end("#}", 2), None),
            Some(b'%') if is_raw(rest, "raw") => {
                let tags = rest.match_indices("{%").map(|(n, _)| n);
                let last = tags.into_iter().find(|n| is_raw(&rest[*n..], "endraw"));
                (last.map_or(source.len(), |n| found + n + 2), None)
            }
            Some(b'%') => (found + 2, Some("%}")),
            Some(b'{') => (found + 2, Some("}}")),
            _ => (found + 1, None),
        };
        out.push_str(&source[at..copied]);
        at = match closes {
            Some(closes) => copied + expression(&source[copied..], Some(closes), 0, &mut out),
            None => copied,
        };
    }
    out.push_str(&source[at..]);
    out
}

/// Copies an expression up to its end. Returns its length.
fn expression(code: &str, closes: Option<&str>, nested: usize, out: &mut String) -> usize {
    let bytes = code.as_bytes();
    let (mut at, mut copied, mut depth) = (0, 0, 0usize);
    while at < bytes.len() {
        match bytes[at] {
            _ if depth == 0 && closes.is_some_and(|closes| code[at..].starts_with(closes)) => break,
            b'\'' | b'"' => {
                at = text_end(bytes, at);
                // Several in a row: each makes a string.
                loop {
                    let percent = blanks(bytes, at);
                    let is_operator = bytes.get(percent) == Some(&b'%') && bytes.get(percent + 1) != Some(&b'}');
                    if !is_operator || nested > MOST_NESTED {
                        break;
                    }
                    let begin = blanks(bytes, percent + 1);
                    let end = operand_end(bytes, begin);
                    if end == begin {
                        break;
                    }
                    out.push_str(&code[copied..at]);
                    out.push_str(FILTER);
                    expression(&code[begin..end], None, nested + 1, out);
                    out.push(')');
                    // Keep line ends, so that line numbers stay the same.
                    out.extend(code[at..begin].chars().filter(|c| *c == '\n'));
                    (at, copied) = (end, end);
                }
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += code[at..].chars().next().map_or(1, char::len_utf8);
    }
    out.push_str(&code[copied..at]);
    at
}

fn blanks(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..].iter().take_while(|b| b.is_ascii_whitespace()).count()
}

fn word_end(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_' || !b.is_ascii()).count()
}

/// The end of the string literal that begins here.
fn text_end(bytes: &[u8], at: usize) -> usize {
    let quote = bytes[at];
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != quote {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    let end = (end + 1).min(bytes.len());
    // A backslash before the last character must not put the end inside it.
    (end..=bytes.len()).find(|n| bytes.get(*n).is_none_or(|b| b & 0xC0 != 0x80)).unwrap_or(bytes.len())
}

/// The end of the bracket that opens here.
fn bracket_end(bytes: &[u8], mut at: usize) -> usize {
    let mut depth = 0usize;
    while at < bytes.len() {
        match bytes[at] {
            b'\'' | b'"' => {
                at = text_end(bytes, at);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// The end of an operand of `%`: signs, a value, and its attributes, subscripts, calls and filters. The start if there is no operand.
fn operand_end(bytes: &[u8], at: usize) -> usize {
    let mut begin = at;
    let mut found = at;
    loop {
        while let Some(b'-' | b'+') = bytes.get(begin) {
            begin = blanks(bytes, begin + 1);
        }
        let is_of_number = |b: &&u8| b.is_ascii_alphanumeric() || **b == b'.' || **b == b'_';
        let mut end = match bytes.get(begin) {
            Some(b'\'' | b'"') => text_end(bytes, begin),
            Some(b'(' | b'[' | b'{') => bracket_end(bytes, begin),
            Some(b'0'..=b'9') => begin + bytes[begin..].iter().take_while(is_of_number).count(),
            Some(_) => word_end(bytes, begin),
            None => begin,
        };
        if end == begin {
            return found;
        }
        let next = loop {
            let next = blanks(bytes, end);
            end = match bytes.get(next) {
                Some(b'.' | b'|') => word_end(bytes, blanks(bytes, next + 1)),
                Some(b'(' | b'[') => bracket_end(bytes, next),
                _ => break next,
            };
        };
        found = end;
        if !bytes[next..].starts_with(b"**") {
            return found;
        }
        begin = blanks(bytes, next + 2);
    }
}

/// The filter that replaces the operator.
pub(super) fn percent_format(format: &str, value: &Value) -> Result<String, Error> {
    let values: Vec<Value> = if value.is_tuple() { value.try_iter()?.collect() } else { vec![value.clone()] };
    let names = (value.kind() == ValueKind::Map).then_some(value);
    printf(format, &values, names)
}

/// `|format`.
pub(super) fn format_filter(format: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let names: BTreeMap<String, Value> =
        kwargs.args().map(|name| Ok((name.to_owned(), kwargs.get(name)?))).collect::<Result<_, Error>>()?;
    if names.is_empty() {
        return printf(&to_str(format), &args, None);
    }
    let names = Value::from(names);
    printf(&to_str(format), std::slice::from_ref(&names), Some(&names))
}

fn wrong(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// One conversion of a format.
#[derive(Default)]
struct Spec {
    minus: bool,
    plus: bool,
    blank: bool,
    zero: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// Python's `format % values`. `names` are for `%(name)s`.
fn printf(format: &str, values: &[Value], names: Option<&Value>) -> Result<String, Error> {
    let mut out = String::new();
    let mut values = values.iter();
    let mut is_named = false;
    let mut rest = format;
    while let Some(found) = rest.find('%') {
        out.push_str(&rest[..found]);
        rest = &rest[found + 1..];
        // 1. its value
        let mut named = None;
        if let Some(inner) = rest.strip_prefix('(') {
            let (name, behind) = inner.split_once(')').ok_or_else(|| wrong("incomplete format key"))?;
            let names = names.ok_or_else(|| wrong("format requires a mapping"))?;
            named = Some(names.get_item(&Value::from(name))?);
            if named.as_ref().is_some_and(Value::is_undefined) {
                return Err(wrong(format!("format: no {name:?}")));
            }
            is_named = true;
            rest = behind;
        }
        // 2. flags, width and precision
        let mut spec = Spec::default();
        let flags = rest.len() - rest.trim_start_matches(['-', '+', ' ', '0', '#']).len();
        for flag in rest[..flags].bytes() {
            match flag {
                b'-' => spec.minus = true,
                b'+' => spec.plus = true,
                b' ' => spec.blank = true,
                b'0' => spec.zero = true,
                _ => spec.alternate = true,
            }
        }
        rest = &rest[flags..];
        let mut number = |rest: &mut &str| -> Result<Option<i64>, Error> {
            if let Some(behind) = rest.strip_prefix('*') {
                *rest = behind;
                let value = values.next().ok_or_else(|| wrong("not enough arguments for format string"))?;
                return Ok(Some(i64::try_from(value.clone())?));
            }
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let number = (digits > 0).then(|| rest[..digits].parse().unwrap_or(i64::MAX));
            *rest = &rest[digits..];
            Ok(number)
        };
        let fit = |n: u64| {
            usize::try_from(n)
                .ok()
                .filter(|n| *n <= MOST)
                .ok_or_else(|| wrong(format!("format: more than {MOST} characters")))
        };
        if let Some(width) = number(&mut rest)? {
            spec.minus |= width < 0;
            spec.width = fit(width.unsigned_abs())?;
        }
        if let Some(behind) = rest.strip_prefix('.') {
            rest = behind;
            spec.precision = Some(fit(number(&mut rest)?.unwrap_or(0).max(0).unsigned_abs())?);
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let kind = rest.chars().next().ok_or_else(|| wrong("incomplete format"))?;
        rest = &rest[kind.len_utf8()..];
        // 3. the text
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => values.next().cloned().ok_or_else(|| wrong("not enough arguments for format string"))?,
        };
        one(&mut out, &spec, kind, &value)?;
    }
    out.push_str(rest);
    if !is_named && names.is_none() && values.next().is_some() {
        return Err(wrong("not all arguments converted during string formatting"));
    }
    Ok(out)
}

fn one(out: &mut String, spec: &Spec, kind: char, value: &Value) -> Result<(), Error> {
    let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let needs_number = || wrong(format!("%{kind} format: a number is required, not {}", value.kind()));
    let float = || {
        if value.kind() == ValueKind::Bool {
            Ok(f64::from(u8::from(value.is_true())))
        } else {
            f64::try_from(value.clone())
        }
    };
    let (negative, prefix, body) = match kind {
        's' | 'r' | 'a' => {
            let text = if kind == 's' { to_str(value) } else { repr(value) };
            let text: String = text.chars().take(spec.precision.unwrap_or(usize::MAX)).collect();
            pad(out, spec, "", &text, false);
            return Ok(());
        }
        'c' => {
            let c = match value.as_str() {
                Some(text) if text.chars().count() == 1 => text.to_owned(),
                None => {
                    let code = u32::try_from(value.clone()).ok().and_then(char::from_u32);
                    code.ok_or_else(|| wrong("%c requires a character or its number"))?.to_string()
                }
                _ => return Err(wrong("%c requires a character or its number")),
            };
            pad(out, spec, "", &c, false);
            return Ok(());
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let number = match value.kind() {
                ValueKind::Bool => i128::from(value.is_true()),
                ValueKind::Number if value.is_integer() => i128::try_from(value.clone())?,
                ValueKind::Number if "diu".contains(kind) => {
                    let x = float()?;
                    if !x.is_finite() {
                        return Err(wrong("cannot convert an infinite number to an integer"));
                    }
                    x as i128
                }
                _ => return Err(needs_number()),
            };
            let size = number.unsigned_abs();
            let (prefix, digits) = match kind {
                'x' => ("0x", format!("{size:x}")),
                'X' => ("0X", format!("{size:X}")),
                'o' => ("0o", format!("{size:o}")),
                _ => ("", size.to_string()),
            };
            let zeros = spec.precision.unwrap_or(0).saturating_sub(digits.len());
            (number < 0, if spec.alternate { prefix } else { "" }, "0".repeat(zeros) + &digits)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            if !is_number {
                return Err(needs_number());
            }
            let x = float()?;
            let body = real(x.abs(), kind.to_ascii_lowercase(), spec.precision.unwrap_or(6), spec.alternate);
            (
                x.is_sign_negative() && !x.is_nan(),
                "",
                if kind.is_ascii_uppercase() { body.to_uppercase() } else { body },
            )
        }
        other => return Err(wrong(format!("unsupported format character {other:?}"))),
    };
    let sign = match negative {
        true => "-",
        false if spec.plus => "+",
        false if spec.blank => " ",
        false => "",
    };
    pad(out, spec, &format!("{sign}{prefix}"), &body, true);
    Ok(())
}

/// A non-negative number as C prints it.
fn real(x: f64, kind: char, precision: usize, alternate: bool) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return "inf".into();
    }
    let scientific = |digits: usize| {
        let text = format!("{x:.digits$e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        (digits.to_owned(), exponent.parse::<i32>().unwrap_or(0))
    };
    let with_exponent =
        |digits: &str, exponent: i32| format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs());
    match kind {
        'f' => format!("{x:.precision$}"),
        'e' => {
            let (digits, exponent) = scientific(precision);
            with_exponent(&digits, exponent)
        }
        _ => {
            let precision = precision.max(1);
            let (digits, exponent) = scientific(precision - 1);
            let short = |digits: &str| match digits.contains('.') && !alternate {
                true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
                false => digits.to_owned(),
            };
            if exponent < -4 || exponent >= precision as i32 {
                with_exponent(&short(&digits), exponent)
            } else {
                let digits = (precision as i32 - 1 - exponent).max(0) as usize;
                short(&format!("{x:.digits$}"))
            }
        }
    }
}

fn pad(out: &mut String, spec: &Spec, sign: &str, body: &str, is_number: bool) {
    let missing = spec.width.saturating_sub(sign.len() + body.chars().count());
    let fill = |out: &mut String, c: &str| out.push_str(&c.repeat(missing));
    let zeros = spec.zero && !spec.minus && is_number;
    if !spec.minus && !zeros {
        fill(out, " ");
    }
    out.push_str(sign);
    if zeros {
        fill(out, "0");
    }
    out.push_str(body);
    if spec.minus {
        fill(out, " ");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_operator_behind_a_text_becomes_a_filter() {
        for (source, expected) in [
            ("{{ '%05d' % x }}", "{{ '%05d'|percent_format(x) }}"),
            ("{{ \"%s\" % (a, '%}')|f(1).b[0] ~ c }}", "{{ \"%s\"|percent_format((a, '%}')|f(1).b[0]) ~ c }}"),
            (
                "{% if '%d' % -x.y == 'z' %}a % b{% endif %}",
                "{% if '%d'|percent_format(-x.y) == 'z' %}a % b{% endif %}",
            ),
            ("{{ '%s' % '%d' % 3 }}", "{{ '%s'|percent_format('%d')|percent_format(3) }}"),
            ("{{ f('%s' % ('%d' % 3)) }}", "{{ f('%s'|percent_format(('%d'|percent_format(3)))) }}"),
        ] {
            assert_eq!(with_filters(source), expected);
        }
        for same in [
            "{{ 7 % 2 }} '%d' % 3",
            "{% set x = 'a' %}",
            "{%- set x = 'a\\'' -%}",
            "{# {{ '%d' % 3 }} #}",
            "{% raw %}{{ '%d' % 3 }}{% endraw %}",
            "{{ {'a': {}}['a'] }}",
            "{{ '%d' %",
            "{{ 'é\\",
            "{{ '%d' % }}",
            "{",
            "{% raw",
        ] {
            assert_eq!(with_filters(same), same);
        }
        // However deep it goes, it ends.
        for part in ["'a' % (", "1 ** ", "-", "'a' % ", "a|", "{{", "{%"] {
            let deep = format!("{{{{ 'a' % {} }}}}", part.repeat(100_000));
            assert!(with_filters(&deep).len() >= deep.len());
        }
    }
}
