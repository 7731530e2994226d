//! Kimi-K3's form: what prompts say, how arguments come back, and which calls are allowed.

use serde_json::{Map, Value, json};
use sluice_engine::text::{ChatTemplate, Dialogue, ModelText, Opened};
use sluice_engine::{Constraint, ConstraintSpec, GrammarFormat, ToolCallRules};

use super::forms::FORMS;

const END: &str = "<|close|>message<|sep|><|end_of_msg|>";

fn text() -> ModelText {
    FORMS.iter().find(|form| form.name == "kimi_k3").unwrap().text()
}

fn prompt(text: &ModelText, template: Option<&ChatTemplate>, messages: &[Value], extra: Value) -> String {
    let template = template.or(text.template.as_ref());
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "é"}}]);
    let tools = extra["tools"].is_null().then_some(&tools);
    let extra: Map<String, Value> =
        extra.as_object().unwrap().clone().into_iter().filter(|(name, _)| name != "tools").collect();
    let dialogue = Dialogue { template, tokenizer: &text.tokenizer, messages, tools, extra: &extra };
    dialogue.prompt().unwrap().text().to_owned()
}

fn system(kind: &str, words: &str) -> String {
    format!("<|open|>message role=\"system\" type=\"{kind}\"<|sep|>{words}{END}")
}

fn message(head: &str, inner: &str) -> String {
    format!("<|open|>message role={head}<|sep|>{inner}{END}")
}

#[test]
fn prompts_have_tools_effort_and_results_in_the_order_of_calls() {
    let text = text();
    let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": format!("f{id}"), "arguments": arguments}});
    let messages = [
        json!({"role": "developer", "content": "Be kind."}),
        json!({"role": "user", "content": "Hi <|sep|>", "name": "a\"&"}),
        json!({"role": "assistant", "content": "", "reasoning_content": " Hm.\n", "tool_calls": [call("a", json!({"x": true, "y": null})), call("b", json!("{\"x"))]}),
        json!({"role": "tool", "tool_call_id": "b", "content": "B"}),
        json!({"role": "tool", "tool_call_id": "a", "content": "A"}),
        json!({"role": "assistant", "content": "So.\n"}),
    ];
    let effort = |effort: &str| {
        system(
            "thinking-effort",
            &format!(
                "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={effort}`."
            ),
        )
    };
    let tools = system(
        "tool-declare",
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n[{\"function\":{\"description\":\"é\",\"name\":\"f\"},\"type\":\"function\"}]\n```",
    );
    let asked = message("\"system\"", "Be kind.") + &message("\"user\" name=\"a&quot;&amp;\"", "Hi <|sep|>");
    let argument = |name: &str, kind: &str, value: &str| {
        format!("<|open|>argument key=\"{name}\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>")
    };
    let calls = format!(
        "<|open|>tools<|sep|><|open|>call tool=\"fa\" index=\"1\"<|sep|>{}{}<|close|>call<|sep|><|open|>call tool=\"fb\" index=\"2\"<|sep|><|open|>json type=\"object\"<|sep|>{{\"x<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        argument("x", "boolean", "true"),
        argument("y", "null", "null"),
    );
    let results = message("\"tool\" tool=\"fa\" index=\"1\"", "A") + &message("\"tool\" tool=\"fb\" index=\"2\"", "B");
    let begin = "<|open|>message role=\"assistant\"<|sep|>";
    let thought = |thought: &str| format!("<|open|>think<|sep|>{thought}<|close|>think<|sep|>");
    let said = |text: &str| format!("<|open|>response<|sep|>{text}<|close|>response<|sep|>");
    let called = message("\"assistant\"", &(thought(" Hm.\n") + &said("") + &calls));
    let answered = message("\"assistant\"", &(thought("") + &said("So.\n")));
    let wanted = format!("{tools}{}{asked}{called}{results}{answered}{begin}<|open|>think<|sep|>", effort("max"));
    assert_eq!(prompt(&text, None, &messages, json!({})), wanted);
    for (said, meant) in [("minimal", "low"), ("medium", "high"), ("high", "high"), ("xhigh", "max")] {
        let extra = json!({"tools": false, "reasoning_effort": said});
        let wanted = format!("{}{asked}{begin}<|open|>think<|sep|>", effort(meant));
        assert_eq!(prompt(&text, None, &messages[..2], extra), wanted);
    }
    for extra in [json!({"enable_thinking": false}), json!({"thinking": false}), json!({"reasoning_effort": "none"})] {
        let called = message("\"assistant\"", &(said("") + &calls));
        let wanted = format!("{tools}{asked}{called}{begin}<|open|>response<|sep|>");
        assert_eq!(prompt(&text, None, &messages[..3], extra), wanted);
    }
}

/// Also where a template writes a text as the whole of the arguments.
#[test]
fn arguments_come_back_as_they_were_written() {
    let text = text();
    let other = ChatTemplate::parse(
        "{% for m in messages %}{% for c in m.tool_calls %}<|open|>call<|sep|>{% if c.function.arguments is string %}<|open|>json type=\"object\"<|sep|>{{ c.function.arguments }}<|close|>json<|sep|>{% endif %}<|close|>call<|sep|>{% endfor %}{% endfor %}",
    )
    .unwrap();
    for (json, kind, value) in [
        (r#"{"a\"": 1.50}"#, "number", "1.50"),
        (r#"{"a\"": [1,  2]}"#, "array", "[1,  2]"),
        (r#"{"a\"":{"b":[1,2]}}"#, "object", "{\"b\": [1, 2]}"),
        (r#"{"a\"": "é\n<|sep|>"}"#, "string", "é\n<|sep|>"),
    ] {
        let call = json!({"id": "x", "type": "function", "function": {"name": "f", "arguments": json}});
        let messages = [
            json!({"role": "user", "content": "a"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        ];
        let argument = format!(
            "<|open|>argument key=\"a&quot;\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|><|close|>call<|sep|>"
        );
        for template in [None, Some(&other)] {
            let found = prompt(&text, template, &messages, json!({}));
            assert!(found.contains(&format!("<|sep|>{argument}")), "{found}");
        }
    }
}

#[test]
fn only_what_the_schemas_allow_may_be_called() {
    let text = text();
    let tools = json!([
        {"type": "function", "function": {"name": "feed", "parameters": {
            "type": "object", "required": ["who", "n"], "properties": {
                "who": {"type": "string"}, "n": {"type": "integer"}, "how": {"enum": ["well", "badly"]},
                "why": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "all": {"type": "array", "items": {"type": "boolean"}},
            },
        }}},
        {"type": "function", "function": {"name": "wait"}},
    ]);
    let check = |must: bool, several: bool, strict: bool, format: GrammarFormat, said: &[(&str, bool)]| {
        let strict = if strict { vec!["feed".to_owned()] } else { Vec::new() };
        let called = ToolCallRules { tools: tools.clone(), several, must, strict };
        let spec = ConstraintSpec { called: Some(called), format, ..ConstraintSpec::default() };
        let constraint = Constraint::new(&text, &spec, Opened::Closed).unwrap().unwrap();
        for (answer, wanted) in said {
            assert_eq!(constraint.allows(&text, answer).unwrap(), *wanted, "must {must}, several {several}: {answer}");
        }
    };
    let argument = |name: &str, kind: &str, value: &str| {
        format!("<|open|>argument key=\"{name}\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>")
    };
    let call = |name: &str, index: usize, inner: &str| {
        format!("<|open|>call tool=\"{name}\" index=\"{index}\"<|sep|>{inner}<|close|>call<|sep|>")
    };
    let end = "<|close|>message<|sep|>";
    let of = |calls: &str| format!("<|close|>response<|sep|><|open|>tools<|sep|>{calls}<|close|>tools<|sep|>{end}");
    let plain = argument("who", "string", "a \"<b>\"\n") + &argument("n", "number", "-3");
    let all = plain.clone()
        + &argument("how", "string", "well")
        + &argument("why", "null", "null")
        + &argument("all", "array", "[true, false]");
    let (one, more) = (of(&call("feed", 1, &plain)), of(&call("feed", 1, &all)));
    let two =
        of(&(call("feed", 1, &all.replace("\"null\"<|sep|>null", "\"string\"<|sep|>null")) + &call("wait", 2, "")));
    let so = more.replace("well", "so");
    let (text_n, kind) = (one.replace(">-3<", ">x<"), one.replace("\"number\"", "\"string\""));
    let refused =
        [(so.as_str(), false), (&text_n, false), (&kind, false), ("", false), ("So.", false), (&one[..40], false)];
    check(true, true, false, GrammarFormat::Text, &[(&one, true), (&more, true), (&two, true)]);
    check(true, true, false, GrammarFormat::Text, &refused);
    check(true, false, false, GrammarFormat::Text, &[(&one, true), (&two, false)]);
    // Within text
    let spoken = format!("I look. {two}");
    let plainly = format!("So.<|close|>response<|sep|>{end}");
    let free = [(spoken.as_str(), true), (&one, true), (&plainly, true), ("So.", true), (&so, true)];
    check(false, true, false, GrammarFormat::Text, &free);
    check(false, false, true, GrammarFormat::Text, &[(&one, true), (&so, false), (&two, false), (&plainly, true)]);
    // Or JSON
    let json = format!("{{}}<|close|>response<|sep|>{end}");
    check(false, true, false, GrammarFormat::Object, &[(&json, true), ("{}", true), (&one, true), (&plainly, false)]);
}
