//! Parsing of requests, with errors that name the field. Clients differ in how they write things: an optional field may be null, and an integer may have a decimal
//! point (`5.0`).

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::http::error::ApiError;

/// Parses a request. All fields of `T` must be optional; handlers check for the ones that they need.
///
/// # Errors
/// Invalid JSON; a field with an invalid value, by name.
pub fn parse_request<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let parsed = || {
        let value = serde_json::from_slice(body);
        value.map_err(|e| ApiError::invalid("", format!("the request is not valid JSON: {e}")))
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

/// The first field with an invalid value, and what is wrong with it.
fn wrong_field<T: DeserializeOwned>(fields: Map<String, Value>) -> Option<(String, String)> {
    fields.into_iter().find_map(|(name, value)| {
        let alone = Value::Object(Map::from_iter([(name.clone(), value)]));
        let why = serde_json::from_value::<T>(alone).err()?.to_string();
        Some((name, if why.starts_with("unknown field") { "is an unknown field".into() } else { why }))
    })
}

/// Converts a value with `take`; null becomes `None`.
fn optional<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    take: impl FnOnce(Value) -> Result<T, String>,
) -> Result<Option<T>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(None),
        value => take(value).map(Some).map_err(D::Error::custom),
    }
}

/// `true` or `false`.
pub fn boolean<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    optional(deserializer, |value| value.as_bool().ok_or_else(|| "must be true or false".into()))
}

/// `true` or `false`; null means false.
pub fn boolean_or_false<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(boolean(deserializer)?.unwrap_or(false))
}

/// A finite number.
pub fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f32>, D::Error> {
    optional(deserializer, |value| {
        let number = value.as_f64().ok_or("must be a number")? as f32;
        if number.is_finite() { Ok(number) } else { Err("is too large".into()) }
    })
}

fn integer_value(value: &Value) -> Option<i128> {
    let float = || value.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 1e30).map(|f| f as i128);
    value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from)).or_else(float)
}

fn integer_of<T: TryFrom<i128>>(value: &Value) -> Result<T, String> {
    let number = integer_value(value).ok_or("must be an integer")?;
    T::try_from(number).map_err(|_| if number < 0 { "must not be below 0" } else { "is too large" }.into())
}

/// An integer in the range of `T`.
pub fn integer<'de, D: Deserializer<'de>, T: TryFrom<i128>>(deserializer: D) -> Result<Option<T>, D::Error> {
    optional(deserializer, |value| integer_of(&value))
}

/// A maximum; below 0 means no limit.
pub fn limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    let limit: Option<i128> = integer(deserializer)?;
    Ok(limit.map(|most| if most < 0 { usize::MAX } else { usize::try_from(most).unwrap_or(usize::MAX) }))
}

/// Any 64 bits, signed or unsigned.
pub fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    optional(deserializer, |value| {
        integer_of(&value).or_else(|why| integer_of::<u64>(&value).map_or(Err(why), |s| Ok(s as i64)))
    })
}

/// A string.
pub fn string<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    optional(deserializer, |value| string_of(value).ok_or_else(|| "must be a string".into()))
}

fn string_of(value: Value) -> Option<String> {
    if let Value::String(text) = value { Some(text) } else { None }
}

fn object_of(value: Value) -> Option<Map<String, Value>> {
    if let Value::Object(fields) = value { Some(fields) } else { None }
}

/// A list of entries of one kind.
fn all_of<T>(value: Value, kind: &str, one: impl Fn(Value) -> Option<T>) -> Result<Vec<T>, String> {
    let Value::Array(all) = value else { return Err(format!("must be a list of {kind}")) };
    let checked = |(i, value)| one(value).ok_or_else(|| format!("must be a list of {kind}; entry {i} is not one"));
    all.into_iter().enumerate().map(checked).collect()
}

/// A list of strings.
pub fn strings<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    optional(deserializer, |value| all_of(value, "strings", string_of))
}

/// A list of objects.
pub fn objects<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Map<String, Value>>>, D::Error> {
    optional(deserializer, |value| all_of(value, "objects", object_of))
}

/// A list of anything.
pub fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Value>>, D::Error> {
    optional(deserializer, |value| all_of(value, "values", Some))
}

/// A list of token ids.
pub fn token_ids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u32>>, D::Error> {
    optional(deserializer, |value| all_of(value, "token ids", |id| integer_of(&id).ok()))
}

/// An object; null means an empty one.
pub fn object<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    let found = optional(deserializer, |value| object_of(value).ok_or_else(|| "must be an object".into()))?;
    Ok(found.unwrap_or_default())
}

/// An object with typed fields. Like [`parse_request`], it names the field that is wrong.
pub fn nested<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Option<T>, D::Error> {
    optional(deserializer, |value| {
        let fields = object_of(value).ok_or("must be an object")?;
        serde_json::from_value(Value::Object(fields.clone())).map_err(|e| {
            let (name, why) = wrong_field::<T>(fields).unwrap_or_else(|| ("a field".into(), e.to_string()));
            format!("is invalid: {name} {why}")
        })
    })
}

/// One or more texts, as strings or as token ids.
pub enum TextsOrTokens {
    /// A string.
    One(String),
    /// A list of strings, not empty.
    Many(Vec<String>),
    /// A list of token ids.
    Tokens(Vec<u32>),
    /// A list of lists of token ids, not empty.
    TokenLists(Vec<Vec<u32>>),
}

impl TextsOrTokens {
    /// `None` for anything else.
    pub fn from_value(value: Value) -> Option<TextsOrTokens> {
        let tokens =
            |value: &Value| value.as_array()?.iter().map(|id| integer_of(id).ok()).collect::<Option<Vec<u32>>>();
        match value {
            Value::String(text) => Some(TextsOrTokens::One(text)),
            Value::Array(all) if all.iter().all(Value::is_string) && !all.is_empty() => {
                Some(TextsOrTokens::Many(all.into_iter().filter_map(string_of).collect()))
            }
            Value::Array(all) if all.iter().all(Value::is_array) && !all.is_empty() => {
                all.iter().map(tokens).collect::<Option<_>>().map(TextsOrTokens::TokenLists)
            }
            all @ Value::Array(_) => tokens(&all).map(TextsOrTokens::Tokens),
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
    struct TestRequest {
        #[serde(default, deserialize_with = "limit")]
        most: Option<usize>,
        #[serde(default, deserialize_with = "nested")]
        inner: Option<Inner>,
        #[serde(flatten)]
        flat: Inner,
    }

    fn asked(value: &Value) -> Result<TestRequest, ApiError> {
        parse_request(value.to_string().as_bytes())
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
            (json!({"most": "x", "more": {}}), Some("most"), "most must be an integer"),
            (json!({"inner": {"share": []}}), Some("inner"), "inner is invalid: share must be a number"),
            (json!([1]), None, "the request must be a JSON object"),
        ] {
            let error = asked(&request).unwrap_err();
            assert_eq!((error.param.as_deref(), error.message.as_str()), (param, message));
        }
        assert!(parse_request::<TestRequest>(b"{").unwrap_err().message.starts_with("the request is not valid JSON: "));
    }
}
