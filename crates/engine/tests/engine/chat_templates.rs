//! Prompts equal to the ones that transformers makes.

use crate::support::prompts;

use serde_json::{Map, Value, json};
use sluice_engine::text::{ChatTemplate, Dialogue, Tokenizer};
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

/// The template of a checkpoint that has none, of this model type.
fn own(model_type: &str) -> Option<ChatTemplate> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), json!({"model_type": model_type}).to_string()).unwrap();
    ChatTemplate::load(folder.path()).unwrap()
}

/// DeepSeek's newest checkpoints have a program instead of a template: `tests/golden/text/make_deepseek.py` wrote what it makes.
#[test]
fn templates_of_ours_write_what_deepseeks_programs_write() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let golden: Value =
        serde_json::from_slice(&fs::read(root.join("tests/golden/text/deepseek.json")).unwrap()).unwrap();
    let tokenizer = Tokenizer::load(root.join("models/demo"), None).unwrap();
    let templates = ["deepseek_v32", "deepseek_v4"].map(|name| (name, own(name).unwrap()));
    for case in golden["cases"].as_array().unwrap() {
        let (name, template) = templates.iter().find(|(name, _)| case["model_type"] == **name).unwrap();
        let expected = case["prompt"].as_str().unwrap().replace("WORDS", golden["words"][name].as_str().unwrap());
        let mut extra = Map::new();
        if case["thinking"] == false {
            extra.insert("enable_thinking".into(), false.into());
        }
        if !case["effort"].is_null() {
            extra.insert("reasoning_effort".into(), case["effort"].clone());
        }
        let said = golden["chats"][case["chat"].as_str().unwrap()].as_array().unwrap();
        let mut read = said.clone();
        for call in read.iter_mut().filter_map(|m| m.get_mut("tool_calls")?.as_array_mut()).flatten() {
            let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
            call["function"]["arguments"] = arguments;
        }
        // Arguments as they were written, and as objects.
        for messages in [said, &read] {
            let tools = Some(&golden["tools"]).filter(|_| case["tools"] == true);
            let dialogue = Dialogue { template: Some(template), tokenizer: &tokenizer, messages, tools, extra: &extra };
            let found = dialogue.prompt().unwrap();
            assert_eq!(found.text(), expected, "{name} {case}");
        }
    }
    assert!(templates.iter().all(|(name, template)| template.notes()[0].contains(name)));
    assert!(own("deepseek_v3").is_none() && templates[1].1.has_efforts() && !templates[0].1.has_efforts());
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
