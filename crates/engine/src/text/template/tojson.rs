//! `tojson` as transformers gives it to templates: Python's `json.dumps`, with its arguments.

use super::repr::float;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// Values may be nested this deeply. Templates can nest them at will, and writing them is recursive.
const MAX_DEPTH: usize = 200;

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`. A template may set all of these arguments.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    // Positional arguments are in transformers' order.
    let argument = |i: usize, name: &str| -> Result<Option<Value>, Error> {
        let given = match args.get(i) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(given.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match argument(1, "indent")? {
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            // `True` is 1 in Python.
            None => " ".repeat(usize::try_from(i64::try_from(indent)?.clamp(0, 64)).unwrap_or(0)),
        }),
        None => None,
    };
    let (item, key) = match argument(2, "separators")? {
        Some(pair) => {
            let part = |i: usize| {
                pair.get_item_by_index(i)?.as_str().map(str::to_owned).ok_or_else(|| unsupported("separators"))
            };
            (part(0)?, part(1)?)
        }
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;

    let mut json = Json { out: String::new(), ensure_ascii, indent, item, key, sort_keys };
    json.value(value, 0)?;
    Ok(Value::from(json.out))
}

/// `json.dumps(value, ensure_ascii=False)`.
pub(in crate::text) fn dumps(value: &serde_json::Value) -> String {
    let mut json = Json {
        out: String::new(),
        ensure_ascii: false,
        indent: None,
        item: ", ".to_owned(),
        key: ": ".to_owned(),
        sort_keys: false,
    };
    // Too deeply nested values are written without spaces.
    match json.value(&Value::from(minijinja::value::Serde(value)), 0) {
        Ok(()) => json.out,
        Err(_) => value.to_string(),
    }
}

fn unsupported(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {what} cannot be written as JSON"))
}

struct Json {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Json {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(unsupported("a value nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => write!(self.out, "{value}").unwrap_or(()),
            ValueKind::Number => {
                let number = f64::try_from(value.clone())?;
                self.out.push_str(&match number {
                    x if x.is_nan() => "NaN".into(),
                    x if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
                    x => float(x),
                });
            }
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', &items, depth, |json, item| json.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    let entry = value.get_item(&key)?;
                    pairs.push((key, entry));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list('{', '}', &pairs, depth, |json, (key, entry)| {
                    match key.kind() {
                        ValueKind::String => json.string(key.as_str().unwrap_or_default()),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            json.out.push('"');
                            json.value(key, depth + 1)?;
                            json.out.push('"');
                        }
                        _ => return Err(unsupported("a key that is no string")),
                    }
                    let separator = json.key.clone();
                    json.out.push_str(&separator);
                    json.value(entry, depth + 1)
                })?;
            }
            other => return Err(unsupported(&other.to_string())),
        }
        Ok(())
    }

    fn list<T>(
        &mut self,
        open: char,
        close: char,
        items: &[T],
        depth: usize,
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").unwrap_or(());
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}
