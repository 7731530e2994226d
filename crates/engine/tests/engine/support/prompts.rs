//! Prompts that transformers' `apply_chat_template` made: `tests/golden/text/make_templates.py` wrote them.

use serde_json::Value;
use sluice_engine::text::ChatTemplate;
use std::fs;
use std::path::Path;

/// Renders every golden conversation with every golden template, and compares.
pub fn assert_prompts_are_those_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text/templates.json");
    let golden: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for (name, source) in golden["templates"].as_object().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = golden["special_tokens"].clone();
        config["chat_template"] = source.clone();
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let template = ChatTemplate::load(folder.path()).unwrap().unwrap();
        template.set_time(golden["clock"].as_str().unwrap()).unwrap();

        for case in golden["cases"].as_array().unwrap().iter().filter(|case| case["template"] == *name) {
            let messages = &golden["chats"][case["chat"].as_str().unwrap()];
            let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
            let prompt = case["add_generation_prompt"].as_bool().unwrap();
            let found = template.render(messages, tools, prompt, case["extra"].as_object().unwrap());
            let same = match (&found, case["prompt"].as_str()) {
                (Ok(found), Some(expected)) => found == expected,
                (Err(_), None) => true,
                _ => false,
            };
            if !same {
                wrong.push(format!("{name} / {}: {}", case["chat"], difference(found, &case["prompt"])));
            }
        }
    }
    assert!(wrong.is_empty(), "{} prompts differ\n{}", wrong.len(), wrong.join("\n"));
}

/// What stands on both sides where they first part.
fn difference(found: anyhow::Result<String>, expected: &Value) -> String {
    let found = found.unwrap_or_else(|e| format!("error: {e:#}"));
    let expected = expected.as_str().unwrap_or("an error");
    let same = found.chars().zip(expected.chars()).take_while(|(a, b)| a == b).count();
    let from_there = |text: &str| text.chars().skip(same.saturating_sub(20)).take(60).collect::<String>();
    format!("found {:?}, expected {:?}", from_there(&found), from_there(expected))
}
