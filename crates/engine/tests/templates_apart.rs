//! The same prompts where templates run in a process of their own, and what becomes of those that want too much of it.

#[path = "support/prompts.rs"]
mod prompts;

use std::process::ExitCode;

use serde_json::{Map, json};
use sluice_engine::text::{ChatTemplate, serve_templates};

fn main() -> ExitCode {
    if let Some(done) = serve_templates() {
        return done;
    }
    prompts::assert_prompts_are_those_of_transformers();
    a_template_that_ends_its_process_is_an_error_and_the_next_prompt_is_not();
    ExitCode::SUCCESS
}

fn a_template_that_ends_its_process_is_an_error_and_the_next_prompt_is_not() {
    let source = "{% set ns = namespace(s=messages[0].content) %}{% if ns.s == 'x' %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{% endif %}{{ ns.s }}";
    let template = ChatTemplate::parse(source).unwrap();
    let render = |text: &str| template.render(&json!([{"role": "user", "content": text}]), None, true, &Map::new());
    for _ in 0..3 {
        assert_eq!(render("sound").unwrap(), "sound");
        let error = render("x").unwrap_err().to_string();
        assert!(error.starts_with("chat_template.jinja: chat template: takes more than 256 MB"), "{error}");
    }
    // A long conversation may take more.
    let long = "y".repeat(20 << 20);
    assert!(render(&long).unwrap() == long);
    let error = ChatTemplate::parse("a\n{% if %}").err().unwrap().to_string();
    assert!(error.contains("chat_template.jinja") && error.contains(":2)"), "{error}");
}
