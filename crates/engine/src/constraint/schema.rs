//! JSON schemas in the words that llguidance has. What it has no word for is said by those it has, where they mean the very same; whatever else a schema asks for that cannot
//! be held is left in it, and refused by name when it is compiled.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

/// Values in a schema at most, alternatives in one place, and patterns of names: what compiling takes grows with their squares.
const MAX_VALUES: usize = 30_000;
const MAX_ALTERNATIVES: usize = 1_000;
const MAX_PATTERNS: usize = 32;

const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
/// Keywords with schemas by name in them, lists of schemas, and one schema.
const BY_NAME: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];
const LISTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
const SINGLE: [&str; 11] = [
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
/// What looks at the same value, so that what it has seen of it counts as looked at.
const IN_PLACE: [&str; 12] = [
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
/// What says nothing of a value.
const NOTES: [&str; 11] = [
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

/// The formats of texts that can be held; any other is a note.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

fn is_note(format: &Value) -> bool {
    format.as_str().is_some_and(|name| !FORMATS.contains(&name))
}

/// Names of formats in a schema that nothing is known of: texts of them are free. Each once.
pub fn unknown_formats(schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    look_for_formats(schema, &mut found);
    found
}

fn look_for_formats(schema: &Value, found: &mut Vec<String>) {
    let Some(fields) = schema.as_object() else { return };
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("format", Value::String(format)) if is_note(value) && !found.contains(format) => {
                found.push(format.clone());
            }
            (name, Value::Object(all)) if BY_NAME.contains(&name) => {
                all.values().for_each(|schema| look_for_formats(schema, found));
            }
            (name, Value::Array(all)) if LISTS.contains(&name) || name == "items" => {
                all.iter().for_each(|schema| look_for_formats(schema, found));
            }
            (name, value) if SINGLE.contains(&name) => look_for_formats(value, found),
            _ => {}
        }
    }
}

/// The same schema, as far as can be in llguidance's words.
///
/// # Errors
/// One that is too large, by what is too much in it.
pub fn reworded(schema: &Value) -> Result<Value> {
    let mut values = 0;
    measure(schema, &mut values)?;
    let mut anchors = Vec::new();
    dynamic_anchors(schema, &mut anchors);
    anchors.sort_unstable();
    let are_unique = anchors.windows(2).all(|two| two[0] != two[1]);
    let mut schema = schema.clone();
    Rewording { anchors_are_unique: are_unique, copies: MAX_VALUES }.reword(&mut schema);
    Ok(schema)
}

struct Rewording {
    /// No two places of the schema can be meant by one `$dynamicRef`.
    anchors_are_unique: bool,
    /// Values that may still come of saying something twice.
    copies: usize,
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

fn dynamic_anchors<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Array(all) => all.iter().for_each(|value| dynamic_anchors(value, found)),
        Value::Object(fields) => {
            found.extend(fields.get("$dynamicAnchor").and_then(Value::as_str));
            fields.values().for_each(|value| dynamic_anchors(value, found));
        }
        _ => {}
    }
}

fn size(value: &Value) -> usize {
    1 + match value {
        Value::Array(all) => all.iter().map(size).sum(),
        Value::Object(fields) => fields.values().map(size).sum(),
        _ => 0,
    }
}

impl Rewording {
    fn reword(&mut self, schema: &mut Value) {
        let Some(fields) = schema.as_object_mut() else { return };
        if fields.get("format").is_some_and(is_note) {
            fields.shift_remove("format");
        }
        // 1. What was not looked at, before anything here is said otherwise
        unevaluated_properties(fields);
        unevaluated_items(fields);
        // 2. What is within
        for (name, value) in fields.iter_mut() {
            let name = name.as_str();
            match value {
                Value::Object(all) if BY_NAME.contains(&name) => {
                    all.values_mut().for_each(|schema| self.reword(schema));
                }
                Value::Array(all) if LISTS.contains(&name) || name == "items" => {
                    all.iter_mut().for_each(|schema| self.reword(schema));
                }
                value if SINGLE.contains(&name) => self.reword(value),
                _ => {}
            }
        }
        let looks = fields.contains_key("unevaluatedProperties") || fields.contains_key("unevaluatedItems");
        // 3. Everything else becomes a part that must hold too
        let mut parts = Vec::new();
        if !looks {
            items(fields, &mut parts);
            self.conditions(fields, &mut parts);
            dependencies(fields, &mut parts);
            if let Some(negated) = fields.get("not").and_then(negated) {
                fields.shift_remove("not");
                parts.push(negated);
            }
        }
        self.names(fields);
        if self.anchors_are_unique
            && !fields.contains_key("$ref")
            && let Some(reference) = fields.shift_remove("$dynamicRef")
        {
            fields.insert("$ref".into(), reference);
        }
        if !parts.is_empty() {
            let mut all = fields.shift_remove("allOf").and_then(|all| all.as_array().cloned()).unwrap_or_default();
            all.extend(parts);
            // Last, so that names keep the order that the schema itself lists them in.
            fields.insert("allOf".into(), Value::Array(all));
        }
    }

    /// Whether so many values may be said so many times more.
    fn may_copy(&mut self, value: &Value, times: usize) -> bool {
        let wanted = size(value).saturating_mul(times);
        let may = wanted <= self.copies;
        self.copies -= if may { wanted } else { 0 };
        may
    }
    /// `if`, `then` and `else`: both hold, or neither, or the one of them that needs no condition.
    fn conditions(&mut self, fields: &mut Map<String, Value>, parts: &mut Vec<Value>) {
        let Some(condition) = fields.get("if").cloned() else {
            fields.shift_remove("then");
            fields.shift_remove("else");
            return;
        };
        let branch = |name: &str| fields.get(name).cloned().filter(|schema| !is_any(schema));
        let said = match (branch("then"), branch("else")) {
            (None, None) => Some(json!(true)),
            (None, Some(otherwise)) => Some(json!({"anyOf": [condition, otherwise]})),
            (Some(then), None) => negated(&condition).map(|without| json!({"anyOf": [without, then]})),
            (Some(_), Some(_)) if !self.may_copy(&condition, 1) => None,
            (Some(then), Some(otherwise)) => negated(&condition)
                .map(|without| json!({"anyOf": [{"allOf": [condition, then]}, {"allOf": [without, otherwise]}]})),
        };
        if let Some(said) = said {
            ["if", "then", "else"].iter().for_each(|name| _ = fields.shift_remove(*name));
            parts.push(said);
        }
    }

    /// `propertyNames`, where no names are listed beside it.
    fn names(&mut self, fields: &mut Map<String, Value>) {
        let Some(asked) = fields.get("propertyNames") else { return };
        let rest = fields.get("additionalProperties").cloned().unwrap_or(json!(true));
        let rest = || rest.clone();
        let listed = ["properties", "patternProperties", "unevaluatedProperties"];
        let lists = listed.iter().chain(&IN_PLACE).any(|name| fields.contains_key(*name));
        let said = match asked {
            asked if is_any(asked) => json!({}),
            Value::Bool(false) if !fields.contains_key("maxProperties") => json!({"maxProperties": 0}),
            Value::Object(asked) if !lists => {
                let words: Vec<(&str, &Value)> = asked
                    .iter()
                    .map(|(name, value)| (name.as_str(), value))
                    .filter(|(name, value)| !(NOTES.contains(name) || *name == "type" && **value == "string"))
                    .collect();
                match words[..] {
                    [("pattern", Value::String(pattern))] => {
                        json!({"patternProperties": {pattern.as_str(): rest()}, "additionalProperties": false})
                    }
                    [("const", Value::String(name))] => {
                        json!({"properties": {name.as_str(): rest()}, "additionalProperties": false})
                    }
                    [("enum", Value::Array(all))] if self.may_copy(&rest(), all.len()) => {
                        let all = all.iter().filter_map(Value::as_str);
                        let properties: Map<String, Value> = all.map(|name| (name.to_owned(), rest())).collect();
                        json!({"properties": properties, "additionalProperties": false})
                    }
                    [("maxLength" | "minLength", _)]
                    | [("maxLength" | "minLength", _), ("maxLength" | "minLength", _)] => {
                        let count = |name: &str| asked.get(name).and_then(Value::as_u64);
                        let (least, most) = (count("minLength").unwrap_or(0), count("maxLength"));
                        let most = most.map_or(String::new(), |most| most.to_string());
                        let pattern = format!("^[\\s\\S]{{{least},{most}}}$");
                        json!({"patternProperties": {pattern: rest()}, "additionalProperties": false})
                    }
                    _ => return,
                }
            }
            _ => return,
        };
        fields.shift_remove("propertyNames");
        if let Value::Object(said) = said {
            fields.extend(said);
        }
    }
}

/// Where it is certain which properties all that looks at the same object has looked at, the others are additional ones.
fn unevaluated_properties(fields: &mut Map<String, Value>) {
    let Some(asked) = fields.get("unevaluatedProperties").cloned() else { return };
    let mut seen = Seen::default();
    if !is_any(&asked) && seen.properties(fields).is_none() {
        return;
    }
    fields.shift_remove("unevaluatedProperties");
    if seen.all || is_any(&asked) {
        return;
    }
    for (keyword, names) in [("properties", seen.names), ("patternProperties", seen.patterns)] {
        if names.is_empty() {
            continue;
        }
        if let Value::Object(listed) = fields.entry(keyword).or_insert_with(|| json!({})) {
            names.into_iter().for_each(|name| _ = listed.entry(name).or_insert(true.into()));
        }
    }
    fields.insert("additionalProperties".into(), asked);
}

/// The same for the items of an array, of which the first ones were looked at.
fn unevaluated_items(fields: &mut Map<String, Value>) {
    let Some(asked) = fields.get("unevaluatedItems").cloned() else { return };
    let mut seen = Seen::default();
    if !is_any(&asked) && seen.items(fields).is_none() {
        return;
    }
    fields.shift_remove("unevaluatedItems");
    if seen.all || is_any(&asked) {
        return;
    }
    if seen.first > 0
        && let Value::Array(listed) = fields.entry("prefixItems").or_insert_with(|| json!([]))
    {
        listed.resize(seen.first.max(listed.len()), true.into());
    }
    fields.insert("items".into(), asked);
}

/// What of an object or array is looked at, whatever is in it.
#[derive(Default)]
struct Seen {
    all: bool,
    names: Vec<String>,
    patterns: Vec<String>,
    /// So many items.
    first: usize,
}

impl Seen {
    /// `None` where that depends on the value.
    fn properties(&mut self, fields: &Map<String, Value>) -> Option<()> {
        for (keyword, value) in fields {
            match (keyword.as_str(), value) {
                ("properties", Value::Object(all)) => self.names.extend(all.keys().cloned()),
                ("patternProperties", Value::Object(all)) => self.patterns.extend(all.keys().cloned()),
                ("additionalProperties", _) => self.all = true,
                _ => self.in_place(keyword, value, "unevaluatedProperties", Seen::properties)?,
            }
        }
        Some(())
    }

    fn items(&mut self, fields: &Map<String, Value>) -> Option<()> {
        for (keyword, value) in fields {
            match (keyword.as_str(), value) {
                ("prefixItems", Value::Array(all)) => self.first = self.first.max(all.len()),
                ("items", Value::Array(_)) | ("contains", _) => return None,
                ("items" | "additionalItems", _) => self.all = true,
                _ => self.in_place(keyword, value, "unevaluatedItems", Seen::items)?,
            }
        }
        Some(())
    }

    /// What other schemas for the same value look at; `own` is the keyword that asks, which looks at all that is left where it is not the first.
    fn in_place(
        &mut self,
        keyword: &str,
        value: &Value,
        own: &str,
        look: fn(&mut Seen, &Map<String, Value>) -> Option<()>,
    ) -> Option<()> {
        match (keyword, value) {
            ("allOf", Value::Array(all)) => all.iter().try_for_each(|schema| match schema {
                Value::Object(fields) => {
                    self.all |= fields.contains_key(own);
                    look(self, fields)
                }
                _ => Some(()),
            }),
            // What is not so has looked at nothing.
            ("not", _) => Some(()),
            _ if IN_PLACE.contains(&keyword) => None,
            _ => Some(()),
        }
    }
}

fn is_any(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(fields) => fields.keys().all(|name| NOTES.contains(&name.as_str())),
        _ => false,
    }
}

/// `uniqueItems` and `contains` where they ask for nothing, or for what can be said otherwise.
fn items(fields: &mut Map<String, Value>, parts: &mut Vec<Value>) {
    let at_most_one = fields.get("maxItems").and_then(Value::as_f64).is_some_and(|most| most <= 1.0);
    if fields.get("uniqueItems").is_some_and(|unique| *unique == false || at_most_one) {
        fields.shift_remove("uniqueItems");
    }
    let count = |name: &str, fields: &Map<String, Value>| fields.get(name).map(|n| n.as_f64().unwrap_or(f64::NAN));
    let Some(contained) = fields.get("contains") else {
        fields.shift_remove("minContains");
        fields.shift_remove("maxContains");
        return;
    };
    let (least, most) = (count("minContains", fields).unwrap_or(1.0), count("maxContains", fields));
    let number = |n: f64| (n.fract() == 0.0 && (0.0..1e9).contains(&n)).then_some(n as u64);
    let said = if is_any(contained) {
        match (number(least), most.map(number)) {
            (Some(least), None) => Some(json!({"minItems": least})),
            (Some(least), Some(Some(most))) => Some(json!({"minItems": least, "maxItems": most})),
            _ => None,
        }
    } else if least == 0.0 && most.is_none() {
        Some(json!(true))
    } else if *contained == false && least > 0.0 {
        Some(json!({"type": TYPES.iter().filter(|name| **name != "array").collect::<Vec<_>>()}))
    } else {
        None
    };
    if let Some(said) = said {
        ["contains", "minContains", "maxContains"].iter().for_each(|name| _ = fields.shift_remove(*name));
        parts.push(said);
    }
}

/// What a name asks for where it is there: it is not, or that holds.
fn dependencies(fields: &mut Map<String, Value>, parts: &mut Vec<Value>) {
    for keyword in ["dependentRequired", "dependentSchemas", "dependencies"] {
        let Some(Value::Object(all)) = fields.get(keyword) else { continue };
        let one = |(name, asked): (&String, &Value)| {
            let asked = if asked.is_array() { json!({"required": asked}) } else { asked.clone() };
            json!({"anyOf": [without(name), asked]})
        };
        parts.extend(all.iter().map(one));
        fields.shift_remove(keyword);
    }
}

fn without(name: &str) -> Value {
    json!({"properties": {name: false}})
}

/// What a schema does not allow, as a schema; `None` where words are missing for it.
fn negated(schema: &Value) -> Option<Value> {
    let fields = match schema {
        Value::Bool(any) => return Some(json!(!any)),
        other => other.as_object()?,
    };
    let said: Vec<(&str, &Value)> =
        fields.iter().map(|(name, value)| (name.as_str(), value)).filter(|(name, _)| !NOTES.contains(name)).collect();
    // It does not hold where one of its words does not.
    let mut either =
        said.into_iter().map(|(name, value)| negated_word(name, value, fields)).collect::<Option<Vec<_>>>()?;
    Some(match either.len() {
        0 => json!(false),
        1 => either.remove(0),
        _ => json!({"anyOf": either}),
    })
}

fn negated_word(name: &str, value: &Value, all: &Map<String, Value>) -> Option<Value> {
    let of_type = |kind: &str, word: &str, value: Value| Some(json!({"type": kind, word: value}));
    // A count less or more; below none there is nothing.
    let fewer = |kind: &str, word: &str| match value.as_u64()? {
        0 => Some(json!(false)),
        least => of_type(kind, word, json!(least - 1)),
    };
    let more = |kind: &str, word: &str| of_type(kind, word, json!(value.as_u64()?.checked_add(1)?));
    match name {
        "not" => Some(value.clone()),
        "anyOf" => Some(json!({"allOf": value.as_array()?.iter().map(negated).collect::<Option<Vec<_>>>()?})),
        "allOf" => Some(json!({"anyOf": value.as_array()?.iter().map(negated).collect::<Option<Vec<_>>>()?})),
        "type" => {
            let named: Vec<&str> = match value {
                Value::String(one) => vec![one],
                Value::Array(all) => all.iter().map(Value::as_str).collect::<Option<_>>()?,
                _ => return None,
            };
            // Numbers that are not whole have no type of their own.
            let has_integers_alone = named.contains(&"integer") && !named.contains(&"number");
            let others: Vec<&str> = TYPES.into_iter().filter(|name| !named.contains(name)).collect();
            match (has_integers_alone, others.is_empty()) {
                (true, _) => None,
                (false, true) => Some(json!(false)),
                (false, false) => Some(json!({"type": others})),
            }
        }
        "const" => negated_values(std::slice::from_ref(value)),
        "enum" => negated_values(value.as_array()?),
        "required" => {
            let missing = value.as_array()?.iter().map(|name| Some(without(name.as_str()?)));
            let missing = missing.collect::<Option<Vec<_>>>()?;
            if missing.is_empty() { Some(json!(false)) } else { of_type("object", "anyOf", missing.into()) }
        }
        "properties" => {
            let one = |(name, schema): (&String, &Value)| {
                Some(json!({"type": "object", "properties": {name: negated(schema)?}, "required": [name]}))
            };
            let wrong = value.as_object()?.iter().map(one).collect::<Option<Vec<_>>>()?;
            Some(if wrong.is_empty() { json!(false) } else { json!({"anyOf": wrong}) })
        }
        "minimum" => of_type("number", "exclusiveMaximum", value.clone()),
        "maximum" => of_type("number", "exclusiveMinimum", value.clone()),
        "exclusiveMinimum" if value.is_number() => of_type("number", "maximum", value.clone()),
        "exclusiveMaximum" if value.is_number() => of_type("number", "minimum", value.clone()),
        "minLength" => fewer("string", "maxLength"),
        "maxLength" => more("string", "minLength"),
        "minItems" => fewer("array", "maxItems"),
        "maxItems" => more("array", "minItems"),
        "minProperties" => fewer("object", "maxProperties"),
        "maxProperties" => more("object", "minProperties"),
        "then" | "else" if !all.contains_key("if") => Some(json!(false)),
        _ => None,
    }
}

/// All values but these, of which only those without a text or a number in them can be left out.
fn negated_values(values: &[Value]) -> Option<Value> {
    let mut others = TYPES.to_vec();
    let mut booleans = vec![true, false];
    for value in values {
        match value {
            Value::Null => others.retain(|name| *name != "null"),
            Value::Bool(value) => booleans.retain(|other| other != value),
            _ => return None,
        }
    }
    if booleans.len() == 2 {
        return Some(json!({"type": others}));
    }
    others.retain(|name| *name != "boolean");
    Some(json!({"anyOf": [{"type": others}, {"enum": booleans}]}))
}
