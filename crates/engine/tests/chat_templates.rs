//! Prompts equal to the ones that transformers makes.

#[path = "support/prompts.rs"]
mod prompts;

use serde_json::{Map, json};
use sluice_engine::text::ChatTemplate;
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
