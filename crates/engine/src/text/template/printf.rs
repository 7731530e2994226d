//! Python's `format % values`, and `|format`.

use super::repr::{repr, to_str};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::collections::BTreeMap;

/// The largest width and precision.
const MOST: usize = 10_000;

/// The filter that replaces the operator `%`: the remainder of numbers, or a format with its values.
pub(super) fn percent(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        let values: Vec<Value> = if right.is_tuple() { right.try_iter()?.collect() } else { vec![right.clone()] };
        let names = (right.kind() == ValueKind::Map).then_some(right);
        return printf(format, &values, names).map(Value::from);
    }
    let integer = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    };
    let float = |value: &Value| integer(value).map(|n| n as f64).or_else(|| f64::try_from(value.clone()).ok());
    let by_zero = || wrong("modulo by zero");
    // The sign is that of the divisor, as in Python.
    if let (Some(a), Some(b)) = (integer(left), integer(right)) {
        let rest = a.checked_rem(b).ok_or_else(by_zero)?;
        return Ok(Value::from(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }));
    }
    let (Some(a), Some(b)) = (float(left), float(right)) else {
        return Err(wrong(format!(
            "tried to use % operator on unsupported types {} and {}",
            left.kind(),
            right.kind()
        )));
    };
    if b == 0.0 {
        return Err(by_zero());
    }
    let rest = a % b;
    Ok(Value::from(if rest == 0.0 {
        0f64.copysign(b)
    } else if (rest < 0.0) != (b < 0.0) {
        rest + b
    } else {
        rest
    }))
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
