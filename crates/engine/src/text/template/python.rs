//! Makes a template engine behave like Jinja2 on Python: its filters, tests, methods, output and `strftime`.

use super::errors::shortened;
use super::repr::to_str;
use super::{filters, printf, strings, wordwrap};
use jiff::civil::DateTime;
use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::{filters as contrib, globals};

/// Installs what templates expect of Python, and transformers' additions that need no clock.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_formatter(print);
    env.set_unknown_method_callback(strings::method);
    env.add_filter("percent", printf::percent);
    env.add_filter("format", printf::format_filter);
    env.add_filter("int", filters::int);
    env.add_filter("float", filters::float);
    env.add_filter("center", filters::center);
    env.add_filter("truncate", filters::truncate);
    env.add_filter("wordcount", filters::wordcount);
    env.add_filter("wordwrap", wordwrap::wordwrap);
    env.add_filter("urlencode", filters::urlencode);
    env.add_filter("trim", filters::trim);
    env.add_filter("indent", filters::indent);
    env.add_filter("sort", filters::sort);
    env.add_filter("dictsort", filters::dictsort);
    for name in ["default", "d"] {
        env.add_filter(name, filters::default);
    }
    for name in ["length", "count"] {
        env.add_filter(name, filters::length);
    }
    env.add_filter("striptags", contrib::striptags);
    env.add_filter("filesizeformat", contrib::filesizeformat);
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
        Err(Error::new(ErrorKind::InvalidOperation, shortened(message)))
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
