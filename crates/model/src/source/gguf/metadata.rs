//! Metadata: typed values by key, in the order of the file.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};

use super::cursor::Cursor;

/// Arrays of arrays are skipped to this depth; deeper ones are refused.
const MAX_DEPTH: usize = 4;

/// Bytes of a key, as the specification limits it.
const MAX_KEY: u64 = 65_535;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number of an unsigned type.
    Unsigned(u64),
    /// A whole number of a signed type.
    Signed(i64),
    /// A number of a floating-point type. What was an f32 converts back to the same.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// Text. Files may hold any bytes.
    String(Box<[u8]>),
    /// Several values of one type.
    Array(Array),
}

/// The elements of an array, in their stored type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Strings),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
    /// Arrays, which no model uses: so many, and what is in them is not kept.
    Nested(usize),
}

/// Strings of any bytes, one after the other in one piece of memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Strings {
    bytes: Vec<u8>,
    /// Where each ends in `bytes`.
    ends: Vec<u32>,
}

impl Strings {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `number`.
    pub fn get(&self, number: usize) -> Option<&[u8]> {
        let end = *self.ends.get(number)? as usize;
        let start = number.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        Some(&self.bytes[start..end])
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|number| self.get(number).expect("below the length"))
    }
}

impl<'a> FromIterator<&'a [u8]> for Strings {
    /// # Panics
    /// Above 4 GiB in all, more than a header may have.
    fn from_iter<T: IntoIterator<Item = &'a [u8]>>(all: T) -> Strings {
        let mut strings = Strings::default();
        for one in all {
            strings.bytes.extend_from_slice(one);
            strings.ends.push(u32::try_from(strings.bytes.len()).expect("a header is shorter"));
        }
        strings
    }
}

impl Array {
    /// How many elements there are.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Nested(count) => *count,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whole numbers of any width, or booleans as 0 and 1. `None`: something else, or a number above `i64::MAX`.
    pub fn integers(&self) -> Option<Vec<i64>> {
        match self {
            Array::U8(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::I8(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::U16(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::I16(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::U32(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::I32(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::Bool(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Array::U64(v) => v.iter().map(|&x| i64::try_from(x).ok()).collect(),
            Array::I64(v) => Some(v.clone()),
            Array::F32(_) | Array::F64(_) | Array::String(_) | Array::Nested(_) => None,
        }
    }
}

/// The metadata of a file. Accessors are in terms of what a reader wants; their errors name the file and the key.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl Metadata {
    /// No keys. `path`: the file, for messages.
    pub fn new(path: &Path) -> Metadata {
        Metadata { path: path.to_owned(), ..Metadata::default() }
    }

    /// Adds a key.
    ///
    /// # Errors
    /// A key that is there already.
    pub fn insert(&mut self, key: &str, value: Value) -> Result<()> {
        if self.by_key.insert(key.to_owned(), self.entries.len()).is_some() {
            return Err(self.wrong(key, "is there twice"));
        }
        self.entries.push((key.to_owned(), value));
        Ok(())
    }

    /// The file it was read from, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keys and values in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.entries[i].1)
    }

    /// An error about a key: `PATH: key "KEY" WHAT`.
    pub fn wrong(&self, key: &str, what: &str) -> anyhow::Error {
        anyhow!("{}: key {key:?} {what}", self.path.display())
    }

    fn of<'a, T>(&'a self, key: &str, wanted: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, &format!("is not {wanted}"))),
        }
    }

    /// Text, if the key is there.
    ///
    /// # Errors
    /// A value that is no string, or no UTF-8.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        self.of(key, "a string of UTF-8", |value| match value {
            Value::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        })
    }

    /// A whole number from 0, of any type, if the key is there.
    ///
    /// # Errors
    /// Another value.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        self.of(key, "a whole number from 0", |value| match *value {
            Value::Unsigned(n) => Some(n),
            Value::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        })
    }

    /// A number, if the key is there.
    ///
    /// # Errors
    /// Another value.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.of(key, "a number", |value| match *value {
            Value::Float(x) => Some(x),
            Value::Unsigned(n) => Some(n as f64),
            Value::Signed(n) => Some(n as f64),
            _ => None,
        })
    }

    /// True or false, if the key is there.
    ///
    /// # Errors
    /// Another value.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.of(key, "true or false", |value| match *value {
            Value::Bool(flag) => Some(flag),
            _ => None,
        })
    }

    /// An array of strings, if the key is there.
    ///
    /// # Errors
    /// Another value.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>> {
        self.of(key, "an array of strings", |value| match value {
            Value::Array(Array::String(strings)) => Some(strings),
            _ => None,
        })
    }

    /// An array of numbers, if the key is there.
    ///
    /// # Errors
    /// Another value.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.of(key, "an array of numbers", |value| match value {
            Value::Array(Array::F32(numbers)) => Some(numbers.clone()),
            Value::Array(Array::F64(numbers)) => Some(numbers.iter().map(|&x| x as f32).collect()),
            Value::Array(other) => Some(other.integers()?.into_iter().map(|n| n as f32).collect()),
            _ => None,
        })
    }

    /// An array of whole numbers, or of booleans as 0 and 1, if the key is there.
    ///
    /// # Errors
    /// Another value.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.of(key, "an array of whole numbers", |value| match value {
            Value::Array(array) => array.integers(),
            _ => None,
        })
    }
}

/// A length and so many bytes.
pub(super) fn read_string<R: Read>(cursor: &mut Cursor<R>) -> Result<Vec<u8>, String> {
    let len = cursor.u64()?;
    cursor.bytes(len)
}

/// A key: printable text that is not too long.
pub(super) fn read_key<R: Read>(cursor: &mut Cursor<R>) -> Result<String, String> {
    let len = cursor.u64()?;
    if len > MAX_KEY {
        return Err(format!("a key of {len} bytes; they have at most {MAX_KEY}"));
    }
    String::from_utf8(cursor.bytes(len)?).map_err(|e| format!("a key that is no UTF-8: {e}"))
}

/// A value of the type that its number says.
pub(super) fn read_value<R: Read>(cursor: &mut Cursor<R>) -> Result<Value, String> {
    Ok(match cursor.u32()? {
        0 => Value::Unsigned(cursor.array::<1>()?[0].into()),
        1 => Value::Signed(i8::from_le_bytes(cursor.array()?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(cursor.array()?).into()),
        3 => Value::Signed(i16::from_le_bytes(cursor.array()?).into()),
        4 => Value::Unsigned(cursor.u32()?.into()),
        5 => Value::Signed(i32::from_le_bytes(cursor.array()?).into()),
        6 => Value::Float(f32::from_le_bytes(cursor.array()?).into()),
        7 => match cursor.array::<1>()?[0] {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => return Err(format!("a boolean of value {other}")),
        },
        8 => Value::String(read_string(cursor)?.into()),
        9 => Value::Array(read_array(cursor, MAX_DEPTH)?),
        10 => Value::Unsigned(cursor.u64()?),
        11 => Value::Signed(i64::from_le_bytes(cursor.array()?)),
        12 => Value::Float(f64::from_le_bytes(cursor.array()?)),
        other => return Err(format!("unknown type {other}")),
    })
}

fn read_array<R: Read>(cursor: &mut Cursor<R>, depth: usize) -> Result<Array, String> {
    let (kind, count) = (cursor.u32()?, cursor.u64()?);
    /// Elements of one type, whose bytes are checked against the file and read in one piece.
    macro_rules! numbers {
        ($kind:ident, $type:ty) => {{
            const SIZE: usize = size_of::<$type>();
            cursor.expect(count, SIZE as u64, "numbers")?;
            let bytes = cursor.bytes(count * SIZE as u64)?;
            let element = |b: &[u8]| <$type>::from_le_bytes(b.try_into().expect("of this size"));
            Array::$kind(bytes.chunks_exact(SIZE).map(element).collect())
        }};
    }
    Ok(match kind {
        0 => numbers!(U8, u8),
        1 => numbers!(I8, i8),
        2 => numbers!(U16, u16),
        3 => numbers!(I16, i16),
        4 => numbers!(U32, u32),
        5 => numbers!(I32, i32),
        6 => numbers!(F32, f32),
        7 => {
            let bytes = cursor.bytes(count)?;
            match bytes.iter().find(|&&b| b > 1) {
                Some(other) => return Err(format!("a boolean of value {other}")),
                None => Array::Bool(bytes.into_iter().map(|b| b == 1).collect()),
            }
        }
        8 => {
            // Each has a length of eight bytes.
            cursor.expect(count, 8, "strings")?;
            let mut strings = Strings::default();
            for _ in 0..count {
                let len = cursor.u64()?;
                cursor.append(len, &mut strings.bytes)?;
                // A header is shorter than 4 GiB.
                strings.ends.push(strings.bytes.len() as u32);
            }
            Array::String(strings)
        }
        9 if depth == 0 => return Err(format!("arrays within arrays, deeper than {MAX_DEPTH}")),
        9 => {
            cursor.expect(count, 12, "arrays")?;
            for _ in 0..count {
                read_array(cursor, depth - 1)?;
            }
            Array::Nested(count as usize)
        }
        10 => numbers!(U64, u64),
        11 => numbers!(I64, i64),
        12 => numbers!(F64, f64),
        other => return Err(format!("an array of unknown type {other}")),
    })
}
