//! The JSON Schema Test Suite (<https://github.com/json-schema-org/JSON-Schema-Test-Suite>): `SLUICE_JSON_SCHEMA_SUITE` names a folder of its tests
//! (`tests/draft2020-12`); without it this test says that it was skipped. It counts how many schemas can be compiled, and holds that nothing is generated from them that they do not
//! allow. What they allow may be written in one way only: names in the schema's order, a space behind commas and colons.

use std::fs;
use std::path::Path;

use serde_json::Value;
use sluice_engine::text::{Opened, TextSide};
use sluice_engine::{Constraint, Demand, Form};

/// As models write it.
fn written(value: &Value) -> String {
    match value {
        Value::Array(all) => format!("[{}]", all.iter().map(written).collect::<Vec<_>>().join(", ")),
        Value::Object(all) => {
            let fields = all.iter().map(|(name, value)| format!("{}: {}", Value::from(name.as_str()), written(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

#[test]
fn what_a_schema_does_not_allow_is_not_generated() {
    let Some(suite) = std::env::var_os("SLUICE_JSON_SCHEMA_SUITE") else {
        println!("skipped: SLUICE_JSON_SCHEMA_SUITE is not set");
        return;
    };
    let text = TextSide::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"), None).unwrap();
    let mut files: Vec<_> = fs::read_dir(suite).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "json"));
    files.sort();
    let (mut schemas, mut compiled, mut valid, mut accepted, mut invalid, mut refused) = (0, 0, 0, 0, 0, 0);
    let mut wrong = Vec::new();
    for file in files {
        let groups: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        for group in groups.as_array().unwrap() {
            schemas += 1;
            let demand = Demand { form: Form::Schema(group["schema"].clone()), ..Demand::default() };
            let Ok(Some(constraint)) = Constraint::new(&text, &demand, Opened::No) else { continue };
            compiled += 1;
            for test in group["tests"].as_array().unwrap() {
                let found = constraint.allows(&text, &written(&test["data"])).unwrap_or(false);
                if test["valid"] == true {
                    (valid, accepted) = (valid + 1, accepted + usize::from(found));
                } else {
                    (invalid, refused) = (invalid + 1, refused + usize::from(!found));
                    if found {
                        let name = file.file_name().unwrap().to_string_lossy().into_owned();
                        wrong.push(format!("{name}: {}: {}", group["description"], test["description"]));
                    }
                }
            }
        }
    }
    println!(
        "{compiled} of {schemas} schemas compiled; {refused} of {invalid} invalid values refused, {accepted} of {valid} valid ones accepted as they are written"
    );
    wrong.iter().for_each(|wrong| println!("accepted: {wrong}"));
    // What few are left need what a grammar cannot say.
    assert!(wrong.len() * 50 <= invalid, "{} of {invalid} invalid values are accepted", wrong.len());
}
