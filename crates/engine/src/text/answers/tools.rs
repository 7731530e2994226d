//! The tools that a request offers, for parsing calls: which parameters are strings, and which are JSON.

use std::collections::HashMap;

use serde_json::Value;

/// The types that a parameter, which is written without quotes, may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterType {
    /// A string, or a type that the schema does not state.
    pub text: bool,
    /// A boolean.
    pub boolean: bool,
    /// Null.
    pub null: bool,
    /// A number, an object or an array.
    pub other: bool,
    /// JSON of any type, as the model says.
    pub json: bool,
}

impl ParameterType {
    /// Whether it can only be a string.
    pub fn is_text(self) -> bool {
        self == ParameterType { text: true, ..ParameterType::default() }
    }

    /// Any type.
    pub fn any() -> ParameterType {
        ParameterType { text: true, boolean: true, null: true, other: true, json: false }
    }

    fn or(self, other: ParameterType) -> ParameterType {
        ParameterType {
            text: self.text || other.text,
            boolean: self.boolean || other.boolean,
            null: self.null || other.null,
            other: self.other || other.other,
            json: self.json || other.json,
        }
    }

    /// The types that a JSON schema allows.
    pub fn from_schema(schema: &Value) -> ParameterType {
        let none = ParameterType::default();
        let value = |value: &Value| match value {
            Value::Null => ParameterType { null: true, ..none },
            Value::Bool(_) => ParameterType { boolean: true, ..none },
            Value::String(_) => ParameterType { text: true, ..none },
            _ => ParameterType { other: true, ..none },
        };
        let named = |name: &Value| match name.as_str() {
            Some("string") => ParameterType { text: true, ..none },
            Some("boolean") => ParameterType { boolean: true, ..none },
            Some("null") => ParameterType { null: true, ..none },
            Some("integer" | "number" | "object" | "array") => ParameterType { other: true, ..none },
            _ => ParameterType::any(),
        };
        let all =
            |list: &[Value], one: &dyn Fn(&Value) -> ParameterType| list.iter().map(one).fold(none, ParameterType::or);
        let found = match (&schema["const"], &schema["enum"], &schema["type"]) {
            (Value::Null, Value::Null, Value::Null) => {
                let either = ["anyOf", "oneOf"].iter().find_map(|name| schema[*name].as_array());
                either.map_or(ParameterType::any(), |list| all(list, &ParameterType::from_schema))
            }
            (Value::Null, Value::Null, Value::Array(names)) => all(names, &named),
            (Value::Null, Value::Null, name) => named(name),
            (Value::Null, Value::Array(values), _) => all(values, &value),
            (one, _, _) => value(one),
        };
        if found == none { ParameterType::any() } else { found }
    }
}

/// Tools by name.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// tool -> parameter -> type.
    kinds: HashMap<String, HashMap<String, ParameterType>>,
}

impl Tools {
    /// From a list as templates use it: `{"type": "function", "function": {"name": .., "parameters": SCHEMA}}`.
    pub fn new(list: &Value) -> Tools {
        let tool = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let properties = function["parameters"]["properties"].as_object();
            let kinds = properties
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), ParameterType::from_schema(schema)));
            Some((function["name"].as_str()?.to_owned(), kinds.collect()))
        };
        Tools { kinds: list.as_array().into_iter().flatten().filter_map(tool).collect() }
    }

    /// The type of a tool's parameter.
    pub fn kind(&self, tool: &str, parameter: &str) -> ParameterType {
        self.kinds.get(tool).and_then(|kinds| kinds.get(parameter)).copied().unwrap_or(ParameterType::any())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_say_what_is_a_text() {
        for text in [json!({"type": "string"}), json!({"enum": ["a", "b"]}), json!({"const": "1"})] {
            assert!(ParameterType::from_schema(&text).is_text(), "{text}");
        }
        for other in [json!({}), json!({"type": ["string", "null"]}), json!({"$ref": "#/x"}), json!({"anyOf": []})] {
            assert!(
                !ParameterType::from_schema(&other).is_text() && ParameterType::from_schema(&other).text,
                "{other}"
            );
        }
        let either = json!({"anyOf": [{"type": "integer"}, {"type": "null"}]});
        assert_eq!(
            ParameterType::from_schema(&either),
            ParameterType { null: true, other: true, ..ParameterType::default() }
        );
    }
}
