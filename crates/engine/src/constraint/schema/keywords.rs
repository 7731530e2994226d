//! Keywords of JSON Schema, by what they contain.

use serde_json::Value;

/// The types of values.
pub(super) const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
/// Keywords that contain schemas by name.
pub(super) const BY_NAME: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];
/// Keywords that contain lists of schemas.
pub(super) const LISTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords that contain one schema.
pub(super) const SINGLE: [&str; 11] = [
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
];
/// Keywords whose schemas apply to the same value, so that what they evaluate counts as evaluated.
pub(super) const IN_PLACE: [&str; 12] = [
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "dependentSchemas",
    "dependencies",
];
/// Keywords that restrict nothing.
pub(super) const NOTES: [&str; 11] = [
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "readOnly",
    "deprecated",
];

/// Formats of strings that llguidance supports. All others restrict nothing.
pub(super) const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Whether a schema allows every value.
pub(super) fn is_any(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(fields) => fields.keys().all(|name| NOTES.contains(&name.as_str())),
        _ => false,
    }
}
