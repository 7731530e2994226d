//! Limits of a schema's size.

use anyhow::{Result, ensure};
use serde_json::Value;

/// Values in a schema, at most. The time to compile grows with the squares of these limits.
pub(super) const MAX_VALUES: usize = 30_000;
/// Alternatives of one keyword, at most.
const MAX_ALTERNATIVES: usize = 1_000;
/// Patterns of property names, at most.
const MAX_PATTERNS: usize = 32;

/// Checks a schema's size.
///
/// # Errors
/// What is too large.
pub(super) fn check_size(schema: &Value) -> Result<()> {
    measure(schema, &mut 0)
}

fn measure(value: &Value, values: &mut usize) -> Result<()> {
    *values += 1;
    ensure!(*values <= MAX_VALUES, "the schema has more than {MAX_VALUES} values");
    match value {
        Value::Array(all) => all.iter().try_for_each(|value| measure(value, values)),
        Value::Object(fields) => fields.iter().try_for_each(|(name, value)| {
            let (most, found) = match (name.as_str(), value) {
                ("anyOf" | "oneOf" | "allOf" | "enum", Value::Array(all)) => (MAX_ALTERNATIVES, all.len()),
                ("patternProperties", Value::Object(all)) => (MAX_PATTERNS, all.len()),
                _ => (usize::MAX, 0),
            };
            ensure!(found <= most, "{name} has {found} entries; {most} are accepted");
            measure(value, values)
        }),
        _ => Ok(()),
    }
}
