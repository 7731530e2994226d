//! A request's JSON, read such that what is wrong with it is said of the field that it is in. Clients write the same in several ways: a field that may be left out may be null, and a
//! whole number may be written with a point (`5.0`).

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::error::ApiError;

/// A request of a type none of whose fields is required here: those that must be there are missed by whoever uses them.
///
/// # Errors
/// What is no JSON, and a field that cannot be what it is, by name.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let parsed = || {
        let value = serde_json::from_slice(body);
        value.map_err(|e| ApiError::invalid("", format!("the request is no JSON: {e}")))
    };
    let whole: Value = parsed()?;
    if !whole.is_object() {
        return Err(ApiError::invalid("", "the request must be a JSON object"));
    }
    serde_json::from_value(whole).map_err(|e| match parsed() {
        Ok(Value::Object(fields)) => {
            let (name, why) = wrong_field::<T>(fields).unwrap_or_else(|| (String::new(), e.to_string()));
            ApiError::invalid(&name, format!("{name} {why}").trim_start())
        }
        _ => ApiError::invalid("", e.to_string()),
    })
}

/// The first field that cannot be what it is, and why.
fn wrong_field<T: DeserializeOwned>(fields: Map<String, Value>) -> Option<(String, String)> {
    fields.into_iter().find_map(|(name, value)| {
        let alone = Value::Object(Map::from_iter([(name.clone(), value)]));
        let why = serde_json::from_value::<T>(alone).err()?.to_string();
        Some((name, if why.starts_with("unknown field") { "is an unknown field".into() } else { why }))
    })
}

/// What `take` makes of a value; nothing of null.
fn given<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    take: impl FnOnce(Value) -> Result<T, String>,
) -> Result<Option<T>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        value => take(value).map(Some).map_err(D::Error::custom),
    }
}

pub fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    given(deserializer, |value| value.as_bool().ok_or_else(|| "must be true or false".into()))
}

pub fn flag_or_false<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(flag(deserializer)?.unwrap_or(false))
}

pub fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f32>, D::Error> {
    given(deserializer, |value| {
        let number = value.as_f64().ok_or("must be a number")? as f32;
        if number.is_finite() { Ok(number) } else { Err("is too large".into()) }
    })
}

fn integer(value: &Value) -> Option<i128> {
    let float = || value.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 1e30).map(|f| f as i128);
    value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from)).or_else(float)
}

fn whole_of<T: TryFrom<i128>>(value: &Value) -> Result<T, String> {
    let number = integer(value).ok_or("must be a whole number")?;
    T::try_from(number).map_err(|_| if number < 0 { "must not be below 0" } else { "is too large" }.into())
}

pub fn whole<'de, D: Deserializer<'de>, T: TryFrom<i128>>(deserializer: D) -> Result<Option<T>, D::Error> {
    given(deserializer, |value| whole_of(&value))
}

/// A number of tokens at most; one below 0 means as many as there is room for.
pub fn limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    let limit: Option<i128> = whole(deserializer)?;
    Ok(limit.map(|most| if most < 0 { usize::MAX } else { usize::try_from(most).unwrap_or(usize::MAX) }))
}

/// Any 64 bits, with a sign or without one.
pub fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    given(deserializer, |value| {
        whole_of(&value).or_else(|why| whole_of::<u64>(&value).map_or(Err(why), |s| Ok(s as i64)))
    })
}

pub fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    given(deserializer, |value| text_of(value).ok_or_else(|| "must be a text".into()))
}

fn text_of(value: Value) -> Option<String> {
    if let Value::String(text) = value { Some(text) } else { None }
}

fn object_of(value: Value) -> Option<Map<String, Value>> {
    if let Value::Object(fields) = value { Some(fields) } else { None }
}

/// A list whose entries are all of one kind.
fn all_of<T>(value: Value, kind: &str, one: impl Fn(Value) -> Option<T>) -> Result<Vec<T>, String> {
    let Value::Array(all) = value else { return Err(format!("must be a list of {kind}")) };
    let checked = |(i, value)| one(value).ok_or_else(|| format!("must be a list of {kind}; its entry {i} is none"));
    all.into_iter().enumerate().map(checked).collect()
}

pub fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    given(deserializer, |value| all_of(value, "texts", text_of))
}

pub fn objects<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Map<String, Value>>>, D::Error> {
    given(deserializer, |value| all_of(value, "objects", object_of))
}

pub fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Value>>, D::Error> {
    given(deserializer, |value| all_of(value, "values", Some))
}

pub fn token_ids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u32>>, D::Error> {
    given(deserializer, |value| all_of(value, "token ids", |id| whole_of(&id).ok()))
}

/// Null is an object without fields.
pub fn object<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    let found = given(deserializer, |value| object_of(value).ok_or_else(|| "must be an object".into()))?;
    Ok(found.unwrap_or_default())
}

/// An object with fields of its own, as [`read`] reads them.
pub fn part<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Option<T>, D::Error> {
    given(deserializer, |value| {
        let fields = object_of(value).ok_or("must be an object")?;
        serde_json::from_value(Value::Object(fields.clone())).map_err(|e| {
            let (name, why) = wrong_field::<T>(fields).unwrap_or_else(|| ("its fields".into(), e.to_string()));
            format!("cannot be so: {name} {why}")
        })
    })
}

/// A text, or a list of texts, or of token ids, or of lists of those.
pub enum Texts {
    One(String),
    Many(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl Texts {
    pub fn of(value: Value) -> Option<Texts> {
        let tokens = |value: &Value| value.as_array()?.iter().map(|id| whole_of(id).ok()).collect::<Option<Vec<u32>>>();
        match value {
            Value::String(text) => Some(Texts::One(text)),
            Value::Array(all) if all.iter().all(Value::is_string) && !all.is_empty() => {
                Some(Texts::Many(all.into_iter().filter_map(text_of).collect()))
            }
            Value::Array(all) if all.iter().all(Value::is_array) && !all.is_empty() => {
                all.iter().map(tokens).collect::<Option<_>>().map(Texts::TokenLists)
            }
            all @ Value::Array(_) => tokens(&all).map(Texts::Tokens),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default, Deserialize)]
    struct Inner {
        #[serde(default, deserialize_with = "number")]
        share: Option<f32>,
        #[serde(flatten)]
        others: Map<String, Value>,
    }

    #[derive(Debug, Deserialize)]
    struct Asked {
        #[serde(default, deserialize_with = "limit")]
        most: Option<usize>,
        #[serde(default, deserialize_with = "part")]
        inner: Option<Inner>,
        #[serde(flatten)]
        flat: Inner,
    }

    fn asked(value: &Value) -> Result<Asked, ApiError> {
        read(value.to_string().as_bytes())
    }

    #[test]
    fn null_is_left_out_and_whole_numbers_may_have_a_point() {
        let nothing = asked(&json!({"most": null, "inner": null, "share": null})).unwrap();
        assert!(nothing.most.is_none() && nothing.inner.is_none() && nothing.flat.share.is_none());
        let most = |value: Value| asked(&json!({"most": value})).map(|a| a.most.unwrap());
        assert_eq!(most(json!(5.0)).unwrap(), 5);
        assert_eq!((most(json!(-1)).unwrap(), most(json!(-1.0)).unwrap()), (usize::MAX, usize::MAX));
        assert_eq!(most(json!(1e20)).unwrap(), usize::MAX);
        assert!(most(json!(5.5)).is_err());
        let share = asked(&json!({"share": 1, "more": [1.0], "inner": {"share": 0.5}})).unwrap();
        assert_eq!((share.flat.share, share.inner.unwrap().share), (Some(1.0), Some(0.5)));
        assert_eq!(share.flat.others["more"], json!([1.0]));
    }

    #[test]
    fn what_is_wrong_is_said_of_its_field() {
        for (request, param, message) in [
            (json!({"more": 1, "share": "warm"}), Some("share"), "share must be a number"),
            (json!({"share": 1e60}), Some("share"), "share is too large"),
            (json!({"most": "x", "more": {}}), Some("most"), "most must be a whole number"),
            (json!({"inner": {"share": []}}), Some("inner"), "inner cannot be so: share must be a number"),
            (json!([1]), None, "the request must be a JSON object"),
        ] {
            let error = asked(&request).unwrap_err();
            assert_eq!((error.param.as_deref(), error.message.as_str()), (param, message));
        }
        assert!(read::<Asked>(b"{").unwrap_err().message.starts_with("the request is no JSON: "));
    }
}
