//! The same prompts where templates run in a process of their own, and what becomes of those that want too much of it.

#[path = "engine/support/prompts.rs"]
mod prompts;

use std::fs;
use std::process::{Command, ExitCode};
use std::time::Duration;

use serde_json::{Map, json};
use sluice_engine::text::{ChatTemplate, Patience, serve_templates};

fn main() -> ExitCode {
    if let Some(done) = serve_templates() {
        return done;
    }
    prompts::assert_prompts_are_those_of_transformers();
    // The address sanitizer alone takes more memory than a template may.
    if std::env::var_os("ASAN_OPTIONS").is_none() {
        a_template_that_ends_its_process_is_an_error_and_the_next_prompt_is_not();
        a_template_that_goes_beyond_a_limit_is_a_short_error_and_the_next_prompt_is_not();
    }
    a_renderer_that_stands_still_is_ended();
    ExitCode::SUCCESS
}

fn rendered(template: &ChatTemplate, text: &str) -> anyhow::Result<String> {
    template.render(&json!([{"role": "user", "content": text}]), None, true, &Map::new())
}

fn a_template_that_goes_beyond_a_limit_is_a_short_error_and_the_next_prompt_is_not() {
    for (source, words) in [
        // 65 MiB where 64 are taken, as an error and as a prompt.
        ("{{ raise_exception('y' * 65 * 1048576) }}", "chat_template.jinja: chat template (line 1): yyyy"),
        ("{{ ('y' * 65 * 1048576).nothing() }}", "chat_template.jinja: chat template (line 1): "),
        (
            "{% for i in range(65) %}{{ 'y' * 1048576 }}{% endfor %}",
            "chat_template.jinja: chat template: the prompt grows beyond 64 MiB",
        ),
        (
            "{% set s = 'y' * 60 * 1048576 %}{{ (s ~ s ~ s ~ s ~ s ~ s ~ s ~ s) | length }}",
            "chat_template.jinja: chat template: takes more than 256 MB of memory",
        ),
        (
            "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}\
             {% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
            "chat_template.jinja: chat template: takes more than 1 s of processor time",
        ),
    ] {
        let template = format!("{{% if messages[0].content == 'x' %}}{source}{{% endif %}}sound");
        let template = ChatTemplate::parse(&template).unwrap();
        template.set_patience(Patience { processor_seconds: 1, ..Patience::default() });
        for _ in 0..2 {
            let error = rendered(&template, "x").unwrap_err().to_string();
            assert!(error.starts_with(words) && error.len() < 5000, "{source}: {}", &error[..error.len().min(200)]);
            assert_eq!(rendered(&template, "y").unwrap(), "sound", "{source}");
        }
    }
}

fn a_renderer_that_stands_still_is_ended() {
    let template = ChatTemplate::parse("{{ messages[0].content }}").unwrap();
    assert_eq!(rendered(&template, "x").unwrap(), "x");
    // Stopped, and then sent more than its pipe takes, and less.
    for text in ["y".repeat(4 << 20), "y".to_owned()] {
        template.set_patience(Patience { clock: Duration::from_millis(300), ..Patience::default() });
        let children = children();
        assert_eq!(children.len(), 1);
        let stopped = Command::new("kill").args(["-STOP", &children[0]]).status().unwrap();
        assert!(stopped.success());
        let error = rendered(&template, &text).unwrap_err().to_string();
        assert_eq!(error, "chat_template.jinja: chat template: takes more than 0.3 s");
        template.set_patience(Patience::default());
        assert!(rendered(&template, &text).unwrap() == text);
    }
}

/// Processes that this one has started and that have not been waited for.
fn children() -> Vec<String> {
    let parent = format!("PPid:\t{}\n", std::process::id());
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let is_child = |pid: &String| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains(&parent)
    };
    processes.filter(|name| name.bytes().all(|b| b.is_ascii_digit())).filter(is_child).collect()
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
