//! Prompts equal to the ones that transformers makes.

use crate::support::prompts;

use serde_json::{Map, Value, json};
use sluice_engine::text::ChatTemplate;
use std::fs;
use std::path::Path;

#[test]
fn prompts_are_those_of_transformers() {
    prompts::assert_prompts_are_those_of_transformers();
}

#[test]
fn the_demo_model_has_a_template() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let template = ChatTemplate::load(&folder).unwrap().unwrap();
    let messages = json!([{"role": "user", "content": "Tell me a story."}]);
    let prompt = template.render(&messages, None, true, &Map::new()).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n");
}

/// Filters, methods and operators of Jinja2 and of Python: `tests/golden/text/make_jinja.py` wrote what transformers makes of them.
#[test]
fn expressions_have_the_values_of_jinja() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text/jinja.json");
    let golden: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let context = golden["context"].as_object().unwrap();
    let messages = json!([{"role": "user", "content": "x"}]);
    let mut wrong = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let expression = case["expression"].as_str().unwrap();
        let source = format!("{{{{ {expression} }}}}");
        let found = ChatTemplate::parse(&source).and_then(|template| template.render(&messages, None, false, context));
        let expected = case["text"].as_str();
        if found.as_ref().ok().map(String::as_str) != expected {
            wrong.push(format!("{expression}: found {found:?}, expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} expressions differ\n{}", wrong.len(), wrong.join("\n"));
}
