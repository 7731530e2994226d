//! Filters that Jinja2 defines differently than the template engine.

use super::repr::to_str;
use super::strings::{is_space, lines, padded, wrong};
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, State, Value};

/// An argument that is given by position, or by name.
pub(super) fn given<'a, T: minijinja::value::ArgType<'a, Output = T>>(
    place: Option<T>,
    named: &'a Kwargs,
    name: &'a str,
) -> Result<Option<T>, Error>
where
    Option<T>: minijinja::value::ArgType<'a, Output = Option<T>>,
{
    match place {
        Some(value) => Ok(Some(value)),
        None => named.get(name),
    }
}

/// `|int`. The default if the value is no number.
pub(super) fn int(value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    let default = given(default, &named, "default")?.unwrap_or_else(|| Value::from(0));
    let base = given(base, &named, "base")?.unwrap_or(10);
    named.assert_all_used()?;
    let whole = |x: f64| x.is_finite().then(|| Value::from(x.trunc() as i128));
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Number => whole(f64::try_from(value.clone())?).unwrap_or(default),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            parse_int(text, base).map(Value::from).or_else(|| whole(parse_float(text)?)).unwrap_or(default)
        }
        _ => default,
    })
}

/// `|float`.
pub(super) fn float(value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = given(default, &named, "default")?.unwrap_or_else(|| Value::from(0.0));
    named.assert_all_used()?;
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => Value::from(f64::try_from(value.clone())?),
        ValueKind::String => parse_float(value.as_str().unwrap_or_default()).map_or(default, Value::from),
        _ => default,
    })
}

/// Removes underscores between digits; `None` if there is one elsewhere.
fn without_underscores(digits: &str) -> Option<String> {
    let is_wrong = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    (!is_wrong).then(|| digits.replace('_', ""))
}

/// `int(text, base)`.
fn parse_int(text: &str, base: u32) -> Option<i128> {
    let text = text.trim_matches(is_space);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = |of: &str| digits.get(..2).filter(|p| p.eq_ignore_ascii_case(of)).map(|_| &digits[2..]);
    let (base, digits) = match base {
        0 => match [("0x", 16), ("0o", 8), ("0b", 2)].iter().find_map(|(of, base)| Some((*base, prefix(of)?))) {
            Some(found) => found,
            // Only 0 may begin with a 0.
            None if digits.starts_with('0') && digits.bytes().any(|b| b != b'0' && b != b'_') => return None,
            None => (10, digits),
        },
        2 => (2, prefix("0b").unwrap_or(digits)),
        8 => (8, prefix("0o").unwrap_or(digits)),
        16 => (16, prefix("0x").unwrap_or(digits)),
        3..=36 => (base, digits),
        _ => return None,
    };
    let digits = without_underscores(digits)?;
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let size = i128::from_str_radix(&digits, base).ok()?;
    Some(if negative { -size } else { size })
}

/// `float(text)`.
fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_space);
    // Rust accepts the same as Python, except for underscores.
    without_underscores(text)?.parse().ok()
}

/// `|center`.
pub(super) fn center(value: &Value, width: Option<i64>, named: Kwargs) -> Result<String, Error> {
    let width = given(width, &named, "width")?.unwrap_or(80);
    named.assert_all_used()?;
    padded(&to_str(value), width, ' ', "center")
}

/// `|truncate`.
pub(super) fn truncate(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let (length, cuts_words, end, leeway): (Option<usize>, Option<bool>, Option<String>, Option<usize>) =
        from_args(&args)?;
    let length = given(length, &named, "length")?.unwrap_or(255);
    let cuts_words = given(cuts_words, &named, "killwords")?.unwrap_or(false);
    let end = given(end, &named, "end")?.unwrap_or_else(|| "...".to_owned());
    let leeway = given(leeway, &named, "leeway")?.unwrap_or(5);
    named.assert_all_used()?;
    let text = to_str(value);
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(wrong(format!("truncate: expected a length of {} at least, got {length}", end.chars().count())));
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let cut: String = text.chars().take(kept).collect();
    let cut = if cuts_words { &cut[..] } else { cut.rsplit_once(' ').map_or(&cut[..], |(words, _)| words) };
    Ok(format!("{cut}{end}"))
}

/// `|wordcount`.
pub(super) fn wordcount(value: &Value) -> usize {
    to_str(value).split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty()).count()
}

/// `|urlencode`: a text, or the names and values of a query.
pub(super) fn urlencode(value: &Value) -> Result<String, Error> {
    let pairs: Vec<(Value, Value)> = match value.kind() {
        ValueKind::Map => {
            value.try_iter()?.map(|key| Ok((key.clone(), value.get_item(&key)?))).collect::<Result<_, Error>>()?
        }
        ValueKind::Seq | ValueKind::Iterable => value
            .try_iter()?
            .map(|pair| match &pair.try_iter()?.collect::<Vec<_>>()[..] {
                [name, value] => Ok((name.clone(), value.clone())),
                _ => Err(wrong("urlencode: a query is a list of pairs")),
            })
            .collect::<Result<_, Error>>()?,
        _ => return Ok(quoted(&to_str(value), "/")),
    };
    let one = |text: &Value| quoted(&to_str(text), " ").replace(' ', "+");
    Ok(pairs.iter().map(|(name, value)| format!("{}={}", one(name), one(value))).collect::<Vec<_>>().join("&"))
}

/// Percent-encodes all bytes but letters, digits, `_.-~` and those of `safe`.
fn quoted(text: &str, safe: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match char::from(byte) {
            c if c.is_ascii_alphanumeric() || "_.-~".contains(c) || safe.contains(c) => out.push(c),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// `|trim`.
pub(super) fn trim(value: &Value, chars: Option<String>) -> String {
    let goes = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(c));
    to_str(value).trim_matches(goes).to_owned()
}

/// `|default`.
pub(super) fn default(value: &Value, other: Option<Value>, falsy: Option<bool>, named: Kwargs) -> Result<Value, Error> {
    let other = given(other, &named, "default_value")?.unwrap_or_else(|| Value::from(""));
    let falsy = given(falsy, &named, "boolean")?.unwrap_or(false);
    named.assert_all_used()?;
    Ok(if value.is_undefined() || (falsy && !value.is_true()) { other } else { value.clone() })
}

/// `|length`. An undefined value has none.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

/// Turns positional arguments, which Jinja2 accepts, into named ones.
fn by_name(args: &[Value], named: &Kwargs, names: &[&str]) -> Result<Kwargs, Error> {
    let mut all: Vec<(String, Value)> = Vec::new();
    for name in named.args() {
        all.push((name.to_owned(), named.get(name)?));
    }
    if args.len() > names.len() {
        return Err(wrong(format!("{} arguments at most", names.len())));
    }
    all.extend(names.iter().zip(args).map(|(name, value)| ((*name).to_owned(), value.clone())));
    Ok(all.into_iter().collect())
}

/// `|sort`.
pub(super) fn sort(state: &State, value: Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    minijinja::filters::sort(state, value, by_name(&args, &named, &["reverse", "case_sensitive", "attribute"])?)
}

/// `|dictsort`.
pub(super) fn dictsort(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    minijinja::filters::dictsort(value, by_name(&args, &named, &["case_sensitive", "by", "reverse"])?)
}

/// `|indent`.
pub(super) fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    named: Kwargs,
) -> Result<String, Error> {
    let width = given(width, &named, "width")?;
    let first = given(first, &named, "first")?.unwrap_or(false);
    let blank = given(blank, &named, "blank")?.unwrap_or(false);
    named.assert_all_used()?;
    let indention = match width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => padded("", i64::try_from(width)?, ' ', "ljust")?,
        },
    };
    let text = to_str(value) + "\n";
    let mut out = String::with_capacity(text.len());
    for (i, line) in lines(&text, false).into_iter().enumerate() {
        out.push_str(if i > 0 { "\n" } else { "" });
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(out)
}
