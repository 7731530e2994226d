//! The JSON Schema Test Suite (<https://github.com/json-schema-org/JSON-Schema-Test-Suite>): `SLUICE_JSON_SCHEMA_SUITE` names a folder of its tests
//! (`tests/draft2020-12`); without it this test says that it was skipped. It counts how many schemas can be compiled, and holds that nothing is generated from them that they do not
//! allow. What they allow may be written in one way only: names in the schema's order, a space behind commas and colons. With `--nocapture` it prints the table of
//! `docs/results/serving-conformance.md`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;
use sluice_engine::text::{ModelText, Opened};
use sluice_engine::{Constraint, ConstraintSpec, GrammarFormat};

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
    let text = ModelText::load(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"), None).unwrap();
    let mut files: Vec<_> = fs::read_dir(suite).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "json"));
    files.sort();
    let mut all = Counts::default();
    let (mut rows, mut wrong, mut reasons) = (Vec::new(), Vec::new(), BTreeMap::<String, usize>::new());
    for file in files {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let groups: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let mut counts = Counts::default();
        for group in groups.as_array().unwrap() {
            counts.schemas += 1;
            let spec =
                ConstraintSpec { format: GrammarFormat::Schema(group["schema"].clone()), ..ConstraintSpec::default() };
            let constraint = match Constraint::new(&text, &spec, Opened::No) {
                Ok(constraint) => constraint.unwrap(),
                Err(e) => {
                    *reasons.entry(e.to_string()).or_default() += 1;
                    continue;
                }
            };
            counts.compiled += 1;
            for test in group["tests"].as_array().unwrap() {
                let found = constraint.allows(&text, &written(&test["data"])).unwrap_or(false);
                if test["valid"] == true {
                    (counts.valid, counts.accepted) = (counts.valid + 1, counts.accepted + usize::from(found));
                } else {
                    (counts.invalid, counts.refused) = (counts.invalid + 1, counts.refused + usize::from(!found));
                    if found {
                        wrong.push(format!("{name}: {}: {}", group["description"], test["description"]));
                    }
                }
            }
        }
        rows.push(counts.row(&name));
        all.add(&counts);
    }
    println!(
        "| file | schemas | compiled | invalid values refused | valid ones accepted as they are written |\n|---|---|---|---|---|"
    );
    rows.iter().for_each(|row| println!("{row}"));
    println!("{}", all.row("all"));
    reasons.iter().for_each(|(reason, count)| println!("not compiled: {count} x {reason}"));
    wrong.iter().for_each(|wrong| println!("accepted: {wrong}"));
    // What few are left need what a grammar cannot say.
    assert!(wrong.len() * 50 <= all.invalid, "{} of {} invalid values are accepted", wrong.len(), all.invalid);
    assert!(all.compiled * 2 >= all.schemas, "{} of {} schemas are compiled", all.compiled, all.schemas);
}

#[derive(Default)]
struct Counts {
    schemas: usize,
    compiled: usize,
    invalid: usize,
    refused: usize,
    valid: usize,
    accepted: usize,
}

impl Counts {
    fn add(&mut self, more: &Counts) {
        let Counts { schemas, compiled, invalid, refused, valid, accepted } = more;
        (self.schemas, self.compiled) = (self.schemas + schemas, self.compiled + compiled);
        (self.invalid, self.refused) = (self.invalid + invalid, self.refused + refused);
        (self.valid, self.accepted) = (self.valid + valid, self.accepted + accepted);
    }

    fn row(&self, name: &str) -> String {
        let Counts { schemas, compiled, invalid, refused, valid, accepted } = self;
        format!("| {name} | {schemas} | {compiled} | {refused} of {invalid} | {accepted} of {valid} |")
    }
}
