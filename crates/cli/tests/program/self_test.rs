//! `sluice self-test` has a line for each instruction set, and repeats a case by its seed.

use crate::support;

use serde_json::Value;
use support::*;

#[test]
fn each_instruction_set_of_this_machine_computes_the_right_bits() {
    let found: Value = json(output(&["self-test", "--seconds", "0", "--gpu", "no", "--json"]));
    let results = found["results"].as_array().unwrap();
    let doctor: Value = json(output(&["doctor", "--no-measure", "--json"]));
    let sets = doctor["processor"]["instruction_sets"].as_array().unwrap();
    let supported = sets.iter().filter(|set| set["is_supported"] == true).map(|set| &set["name"]);
    let names: Vec<&Value> = results.iter().map(|row| &row["name"]).collect();
    assert_eq!(names, [&Value::from("generic")].into_iter().chain(supported).collect::<Vec<_>>());
    let kinds = found["cases"].as_object().unwrap();
    assert!(kinds.len() > 20, "{kinds:?}");
    let cases: u64 = kinds.values().map(|n| n.as_u64().unwrap()).sum();
    for row in results {
        assert_eq!(row["right"].as_u64().unwrap() + row["refused"].as_u64().unwrap(), cases, "{row}");
        assert_eq!(row["wrong"], Value::Array(vec![]), "{row}");
    }
    assert_eq!(found["no_gpu"], "it was not asked for");
}

#[test]
fn a_gpu_that_was_asked_for_must_be_there() {
    let refused = output(&["self-test", "--seconds", "0", "--gpu", "yes"]);
    if refused.status.success() {
        assert!(stdout(&refused).contains("cuda:0"), "{}", stdout(&refused));
    } else {
        assert_refused(&refused, &["--gpu yes: "]);
    }
}
