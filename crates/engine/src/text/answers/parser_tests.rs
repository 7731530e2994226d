use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::text::DsmlBlock;
use crate::text::answers::test_pieces::{call, cut_everywhere, join, text, thought};

const XML: Style = Style { thoughts: true, calls: Some(Calls::Xml), native: true, preserves: false };
const JSON: Style = Style { calls: Some(Calls::Json), ..XML };

fn tools() -> Option<Arc<Tools>> {
    let parameters = json!({"properties": {
        "path": {"type": "string"}, "n": {"type": "integer"}, "on": {"type": "boolean"}, "list": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
    }});
    Some(Arc::new(Tools::new(&json!([{"type": "function", "function": {"name": "read", "parameters": parameters}}]))))
}

fn parse(style: Style, opened: Opened, parts: &[&str]) -> Vec<Piece> {
    let mut parser = AnswerParser::new(style, tools(), opened);
    let mut all: Vec<Piece> = parts.iter().flat_map(|part| parser.push(part)).collect();
    all.extend(parser.finish());
    join(all)
}

/// Parsed at once, and cut everywhere.
fn pieces(style: Style, text: &str) -> Vec<Piece> {
    cut_everywhere(text, |parts| parse(style, Opened::No, parts))
}

#[test]
fn an_answer_that_is_cut_anywhere_has_no_markup_in_what_it_says() {
    let hermes = "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"a\"}}\n</tool_call>\n<tool_call>\n\
        {\"arguments\": {\"n\": 1}, \"name\": \"read\"}\n</tool_call>";
    let xml = "<think>\nHm.\n</think>\n\nI look.\n\n<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>";
    for (style, answer) in [(JSON, hermes), (XML, xml)] {
        for cut in 0..=answer.len() {
            let mut parser = AnswerParser::new(style, tools(), Opened::No);
            let mut all = parser.push(&answer[..cut]);
            all.extend(parser.cut());
            for piece in join(all) {
                match piece {
                    Piece::Text(said) => assert!("I look.\n\n".starts_with(&said), "{said:?} of {:?}", &answer[..cut]),
                    Piece::Thought(said) => assert!("Hm.\n".starts_with(&said), "{said:?} of {:?}", &answer[..cut]),
                    Piece::Arguments { json, .. } => assert!(!json.contains('<'), "{json} of {:?}", &answer[..cut]),
                    Piece::Call { name, .. } => assert_eq!(name, "read"),
                }
            }
        }
    }
    // What only looks like a mark is told where the answer has an end.
    assert_eq!(parse(JSON, Opened::No, &["1 < 2 <tool"]), [text("1 < 2 <tool")]);
}

#[test]
fn calls_of_other_families_are_told() {
    let of = |calls| Style { calls: Some(calls), ..XML };
    // GLM, with and without line ends.
    let mut expected = vec![thought("Hm."), text("I look.")];
    expected.extend(call(0, "read", r#"{"path": " a\n", "n": 1.50}"#));
    expected.extend(call(1, "none", "{}"));
    let glm = "<think>Hm.</think>\nI look.\n<tool_call>read\n<arg_key>path</arg_key>\n<arg_value> a\n</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1.50</arg_value>\n\
        </tool_call>\n<tool_call>none\n</tool_call>";
    assert_eq!(pieces(of(Calls::Keys), glm), expected);
    let glm_47 = "<think>Hm.</think>\nI look.\n<tool_call>read<arg_key>path</arg_key><arg_value> a\n</arg_value><arg_key>n</arg_key><arg_value>1.50</arg_value></tool_call>\n\
        <tool_call>none</tool_call>";
    assert_eq!(pieces(of(Calls::Keys), glm_47), expected);
    // MiniMax: several in one pair of marks.
    let minimax = "<think>Hm.</think>\n\nI look.\n<minimax:tool_call>\n<invoke name=\"read\">\n<parameter name=\"path\"> a\n</parameter>\n\
        <parameter name=\"n\">1.50</parameter>\n</invoke>\n<invoke name=\"none\">\n</invoke>\n</minimax:tool_call>";
    assert_eq!(pieces(of(Calls::Invokes), minimax), expected);
    // Lists, with fields in any order and others beside them.
    let mut expected = vec![thought("Hm."), text("I look.")];
    expected.extend(call(0, "read", r#"{"path":  "a]"}"#));
    expected.extend(call(1, "none", "{}"));
    let list = r#"[{"name": "read", "arguments": {"path":  "a]"}, "id": "ab]}c"}, {"arguments": {}, "name": "none"}]"#;
    let mistral = format!("[THINK]Hm.[/THINK]I look.[TOOL_CALLS]{list}");
    assert_eq!(pieces(of(Calls::Mistral), &mistral), expected);
    let phi = format!("<think>Hm.</think>I look.<|tool_call|>{list}");
    assert_eq!(pieces(of(Calls::List), &phi), expected);
    assert_eq!(pieces(of(Calls::List), &format!("{phi}<|/tool_call|>")), expected);
    // Mistral's newer way.
    let named =
        "[THINK]Hm.[/THINK]I look.[TOOL_CALLS]read[CALL_ID]123[ARGS]{\"path\":  \"a]\"}[TOOL_CALLS]none[ARGS]{}";
    assert_eq!(pieces(of(Calls::Mistral), named), expected);
}

#[test]
fn dsml_says_what_is_a_text() {
    for (block, name) in [(DsmlBlock::Functions, "function_calls"), (DsmlBlock::Tools, "tool_calls")] {
        let style = Style { calls: Some(Calls::Dsml(block)), ..XML };
        let parameter = |name: &str, is_text: bool, value: &str| {
            format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
        };
        // The mark counts, not the schema.
        let given = parameter("path", false, "[1]")
            + &parameter("n", true, " 1\n")
            + &parameter("list", false, "\n{\"a\": \"<b>\"}")
            + &parameter("maybe", false, "\"x\"")
            + &parameter("on", false, "yes");
        let of =
            |calls: &str| format!("<think>\nHm.\n</think>\nI look.\n\n\n<｜DSML｜{name}>\n{calls}\n</｜DSML｜{name}>");
        let invoke = |inner: &str| format!("<｜DSML｜invoke name=\"read\">\n{inner}</｜DSML｜invoke>");
        // Nothing is lost of what is around them: thoughts and text are on no lines of their own.
        let mut expected = vec![thought("\nHm.\n"), text("\nI look.\n")];
        expected.extend(call(
            0,
            "read",
            r#"{"path": [1], "n": " 1\n", "list": {"a": "<b>"}, "maybe": "x", "on": "yes"}"#,
        ));
        expected.extend(call(1, "read", "{}"));
        expected.extend(call(2, "read", "{}"));
        expected.extend(call(3, "read", "{\"n\": 1}"));
        let calls = [invoke(&given), invoke(""), "<｜DSML｜invoke name=\"read\"/>".to_owned(), invoke("{\"n\": 1}\n")];
        assert_eq!(pieces(style, &of(&calls.join("\n"))), expected);
        let broken = format!("a <｜DSML｜{name}>\n<｜DSML｜invoke>");
        assert_eq!(pieces(style, &broken), [text(&broken)]);
    }
}

#[test]
fn what_is_no_call_of_other_families_is_text() {
    for (calls, answer) in [
        (Calls::Keys, "<tool_call>{\"a\""),
        (Calls::Invokes, "a <minimax:tool_call>\nno"),
        (Calls::Mistral, "a [TOOL_CALLS]{no}[ARGS]{}"),
        (Calls::Mistral, "a [TOOL_CALLS][1]"),
        (Calls::List, "<|tool_call|>[{\"id\": 1}]"),
    ] {
        let style = Style { calls: Some(calls), ..XML };
        let said = parse(style, Opened::No, &[answer]);
        assert_eq!(said, [text(answer)], "{calls:?}");
        for cut in 0..answer.len() {
            assert_eq!(parse(style, Opened::No, &[&answer[..cut], &answer[cut..]]), said, "{calls:?} {cut}");
        }
    }
}

#[test]
fn hermes_calls_are_told_with_their_arguments_as_written() {
    let answer = "<think>\nHm.\n\nYes\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\":  \"a\\\"}\", \"n\": 1.50}}\n</tool_call>\n\
        <tool_call>\n{\"name\": \"re\\u0061d\", \"arguments\": {}}\n</tool_call>";
    let mut expected = vec![thought("Hm.\n\nYes"), text("I look.")];
    expected.extend(call(0, "read", r#"{"path":  "a\"}", "n": 1.50}"#));
    expected.extend(call(1, "read", "{}"));
    assert_eq!(pieces(JSON, answer), expected);
}

#[test]
fn calls_in_xml_become_one_object_typed_by_the_schema() {
    let answer = "Go.\n\n<tool_call>\n<function=read>\n<parameter=path>\na\n \"b\"\n</parameter>\n<parameter=n>\n1.50\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n\
        <parameter=list>\n[1, {\"a\": null}]\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n<parameter=else>\nfree \\ text\n</parameter>\n</function>\n</tool_call>\n\
        <tool_call>\n<function=none>\n</function>\n</tool_call>";
    let mut expected = vec![text("Go.")];
    let json = r#"{"path": "a\n \"b\"", "n": 1.50, "on": true, "list": [1, {"a": null}], "maybe": null, "else": "free \\ text"}"#;
    expected.extend(call(0, "read", json));
    expected.extend(call(1, "none", "{}"));
    assert_eq!(pieces(XML, answer), expected);
    assert!(serde_json::from_str::<Value>(json).is_ok());
    // A text stays a text, whatever it looks like.
    let answer = "<tool_call>\n<function=read>\n<parameter=path>\n12\n</parameter>\n<parameter=n>\nmany\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(pieces(XML, answer), call(0, "read", r#"{"path": "12", "n": "many"}"#));
}

#[test]
fn arguments_come_while_they_are_written() {
    let mut parser = AnswerParser::new(JSON, tools(), Opened::No);
    assert_eq!(
        parser.push("<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"a"),
        call(0, "read", "{\"path\": \"a")
    );
    assert_eq!(parser.push("b"), [Piece::Arguments { index: 0, json: "b".into() }]);
    let mut parser = AnswerParser::new(XML, tools(), Opened::No);
    parser.push("<tool_call>\n<function=read>\n<parameter=path>\n");
    assert_eq!(parser.push("a\nb\n"), [Piece::Arguments { index: 0, json: "a\\nb".into() }]);
    assert_eq!(parser.push("</para"), []);
    assert_eq!(parser.push("graph"), [Piece::Arguments { index: 0, json: "\\n</paragraph".into() }]);
    // Text waits only where it may be a mark.
    let mut parser = AnswerParser::new(JSON, tools(), Opened::No);
    assert_eq!(parser.push("a <tool"), [text("a ")]);
    assert_eq!(parser.push("box>"), [text("<toolbox>")]);
}

#[test]
fn a_thought_that_the_prompt_began_is_one() {
    let answer = "Hm.\n</think>\n\nSo.";
    assert_eq!(parse(XML, Opened::Yes { line: true }, &[answer]), [thought("Hm."), text("So.")]);
    assert_eq!(parse(XML, Opened::Yes { line: false }, &["\nHm.\n</think>\n\nSo."]), [thought("Hm."), text("So.")]);
    assert_eq!(parse(XML, Opened::Yes { line: true }, &["\n</think>\n\nSo."]), [text("So.")]);
    assert_eq!(parse(XML, Opened::Closed, &["<think>a"]), [text("<think>a")]);
    // Thoughts that are cut off are thoughts.
    assert_eq!(parse(XML, Opened::No, &["<think>\na</thi"]), [thought("a</thi")]);
}

#[test]
fn what_is_no_call_is_the_text_that_it_is() {
    for style in [JSON, XML] {
        for answer in [
            "a\n<tool_call>\nread the file",
            "<tool_call>\n{\"name\": 5, \"arguments\": {}}\n</tool_call>\n",
            "\n\n<tool_call>{]}</tool_call> and so on",
            "a\n\n\n<tool_call>\n{\"name\": \"read\", \"arguments\": [1]}\n</tool_call>b",
            "<tool_call>",
            "a <tool_call>\n<function=>",
            "<tool_call>\n<function=a b\n>",
            "<tool_call>{\"name\": \"",
        ] {
            let found = pieces(style, answer);
            assert_eq!(found, [text(answer)], "{style:?}");
        }
    }
    // Nobody offered tools: there are none.
    let answer = "<tool_call>\n{\"name\": \"read\", \"arguments\": {}}\n</tool_call>";
    let mut parser = AnswerParser::new(JSON, None, Opened::No);
    assert_eq!(parser.push(answer), [text(answer)]);
}

#[test]
fn a_call_that_goes_wrong_ends_where_it_does() {
    let answer = "<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": oops}}\n</tool_call>";
    let mut expected = call(0, "read", "{\"path\": ").to_vec();
    expected.push(text("oops}}\n</tool_call>"));
    assert_eq!(pieces(JSON, answer), expected);
    let answer = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\noops</function>";
    let mut expected = call(0, "read", "{\"path\": \"a\"").to_vec();
    expected.push(text("\noops</function>"));
    assert_eq!(pieces(XML, answer), expected);
}

#[test]
fn fields_may_come_in_any_order_and_the_end_may_be_missing() {
    for answer in [
        "<tool_call>\n{\"arguments\": {\"n\": 1}, \"name\": \"read\"}\n</tool_call>",
        "<tool_call>{\"name\":\"read\",\"arguments\":\"{\\\"n\\\": 1}\"}</tool_call>",
        "<tool_call>{\"id\": 7, \"name\": \"read\", \"parameters\": {\"n\": 1}}",
        "<tool_call>\n{\"name\": \"read\", \"arguments\": {\"n\": 1}",
        "<tool_call>\n{\"name\": \"read\", \"arguments\": {\"n\": 1}}\n</tool",
    ] {
        assert_eq!(pieces(JSON, answer), call(0, "read", "{\"n\": 1}"), "{answer}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn no_text_breaks_a_parser_and_no_cut_changes_it(
        parts in prop::collection::vec(
            prop_oneof![
                Just("<think>"), Just("</think>"), Just("<tool_call>"), Just("</tool_call>"), Just("<function=read>"), Just("</function>"),
                Just("<parameter=path>"), Just("<parameter=n>"), Just("</parameter>"), Just("\n"), Just("{\"name\": \"read\", \"arguments\": "),
                Just("{}"), Just("{\"a\": 1}"), Just("}"), Just("\""), Just("<"), Just("é"), Just(" "), Just("x"), Just("\\"),
            ],
            0..24,
        ),
        xml in any::<bool>(),
        opened in prop_oneof![Just(Opened::No), Just(Opened::Closed), Just(Opened::Yes { line: true }), Just(Opened::Yes { line: false })],
    ) {
        let style = if xml { XML } else { JSON };
        let whole = parts.concat();
        let found = parse(style, opened, &[&whole]);
        prop_assert_eq!(&parse(style, opened, &parts), &found);
        let characters: Vec<String> = whole.chars().map(String::from).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        prop_assert_eq!(&parse(style, opened, &characters), &found);
    }

    #[test]
    fn garbage_never_panics(text in "\\PC{0,80}|[<>/a-z_={}\":\\[\\]\\\\ \n]{0,120}", xml in any::<bool>()) {
        parse(if xml { XML } else { JSON }, Opened::No, &[&text]);
    }
}

#[test]
fn a_name_that_is_too_long_is_none_however_the_text_is_cut() {
    let name = "n".repeat(MAX_HEAD);
    let tagged = format!("<tool_call>\n<function={name}>\n</function>\n</tool_call>");
    let broken = format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"a\": x}}}}\n</tool_call>");
    for (style, answer) in [(XML, &tagged), (JSON, &broken)] {
        let whole = parse(style, Opened::No, &[answer]);
        assert_eq!(whole, [text(answer)]);
        let parts: Vec<String> = answer.chars().map(String::from).collect();
        assert_eq!(parse(style, Opened::No, &parts.iter().map(String::as_str).collect::<Vec<_>>()), whole);
    }
}

#[test]
fn calls_in_sections_of_their_own() {
    let style = |calls| Style { calls: Some(calls), ..JSON };
    let of = |calls, text: &str| pieces(style(calls), text);
    let deepseek = |inside: &str| format!("a<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>");
    let one = |inside: &str| format!("<｜tool▁call▁begin｜>{inside}<｜tool▁call▁end｜>");
    let two = one("read<｜tool▁sep｜>{\"n\": 1}") + &one("b<｜tool▁sep｜>{}");
    let wanted = [vec![text("a")], call(0, "read", "{\"n\": 1}").to_vec(), call(1, "b", "{}").to_vec()].concat();
    assert_eq!(of(Calls::DeepSeek, &deepseek(&two)), wanted);
    // V3 and R1 write a type, and a fence around arguments.
    let fenced = one("function<｜tool▁sep｜>read\n```json\n{\"n\": 1}\n```")
        + "\n"
        + &one("function<｜tool▁sep｜>b\n```json\n{}\n```");
    assert_eq!(of(Calls::DeepSeek, &deepseek(&fenced)), wanted);
    let kimi = "a<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{\"n\": 1}<|tool_call_end|>\
        <|tool_call_begin|>functions.b:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    assert_eq!(of(Calls::Kimi, kimi), wanted);
    // What only begins like a call is text.
    let none = deepseek("read");
    assert_eq!(of(Calls::DeepSeek, &none), [text(&none)]);
}
