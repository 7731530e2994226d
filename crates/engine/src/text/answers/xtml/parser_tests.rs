use proptest::prelude::*;

use super::*;
use crate::text::answers::test_pieces::{call, cut_everywhere, join, text, thought};

const THOUGHT: Opened = Opened::Yes { line: false };

fn parse(calls: bool, opened: Opened, parts: &[&str], is_cut: bool) -> Vec<Piece> {
    let mut parser = XtmlParser::new(calls, opened);
    let mut all: Vec<Piece> = parts.iter().flat_map(|part| parser.push(part, None)).collect();
    all.extend(parser.push("", Some(is_cut)));
    join(all)
}

/// Parsed at once, and cut everywhere.
fn pieces(opened: Opened, text: &str) -> Vec<Piece> {
    cut_everywhere(text, |parts| parse(true, opened, parts, false))
}

fn argument(name: &str, kind: &str, value: &str) -> String {
    format!("<|open|>argument key=\"{name}\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>")
}

/// Calls of a tool with these arguments, in their channel.
fn calls(all: &[&str]) -> String {
    let one = |(i, inner): (usize, &&str)| {
        format!("<|open|>call tool=\"read\" index=\"{}\"<|sep|>{inner}<|close|>call<|sep|>", i + 1)
    };
    let all: String = all.iter().enumerate().map(one).collect();
    format!("<|open|>tools<|sep|>{all}<|close|>tools<|sep|>")
}

const END: &str = "<|close|>message<|sep|>";

#[test]
fn channels_are_thoughts_text_and_calls() {
    let said = format!("\n Hm.\n<|close|>think<|sep|><|open|>response<|sep|> So.\n\n<|close|>response<|sep|>{END}");
    assert_eq!(pieces(THOUGHT, &said), [thought("\n Hm.\n"), text(" So.\n\n")]);
    assert_eq!(pieces(Opened::Closed, "So.<|close|>response<|sep|>"), [text("So.")]);
    let begun = "<|open|>think<|sep|>Hm.<|close|>think<|sep|>\n<|open|>response<|sep|>So.";
    assert_eq!(pieces(Opened::No, begun), [thought("Hm."), text("So.")]);
    assert_eq!(pieces(Opened::No, " Plain <|open|>text"), [text(" Plain <|open|>text")]);
    // The end of a thought may be missing, and its text.
    for next in ["<|open|>response<|sep|>", "<|close|>response<|sep|>So.", "<|close|>think<|sep|>So."] {
        let next = format!("Hm.{next}");
        assert_eq!(pieces(THOUGHT, &next)[0], thought("Hm."), "{next}");
    }
}

#[test]
fn arguments_have_the_types_that_the_model_says() {
    let given = [
        argument("path", "string", "a \"b\"\n<|close|>"),
        argument("n", "number", "1.50"),
        argument("list", "array", "[1,  {\"a\": null}]"),
        argument("on", "boolean", "true"),
        argument("a&amp;&quot;", "string", "1"),
        argument("odd", "number", "many"),
    ]
    .concat();
    let json = "{\"path\": \"a \\\"b\\\"\\n<|close|>\", \"n\": 1.50, \"list\": [1,  {\"a\": null}], \"on\": true, \"a&\\\"\": \"1\", \"odd\": \"many\"}";
    let object = "<|open|>json type=\"object\"<|sep|>{\"n\" : 1}<|close|>json<|sep|>";
    let all = calls(&[&given, "", object, &argument("path", "string", "")]);
    let answer = format!("Hm.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>{all}{END}");
    let mut wanted = vec![thought("Hm.")];
    for (i, json) in [json, "{}", "{\"n\" : 1}", "{\"path\": \"\"}"].iter().enumerate() {
        wanted.extend(call(i, "read", json));
    }
    assert_eq!(pieces(THOUGHT, &answer), wanted);
    // Straight behind a thought; and where no tool may be called.
    let short = format!("Hm.{}", calls(&[""]));
    assert_eq!(pieces(THOUGHT, &short), [vec![thought("Hm.")], call(0, "read", "{}").to_vec()].concat());
    assert_eq!(parse(false, THOUGHT, &[&short], false), [thought("Hm."), text(&short[3..])]);
    // What is no call is text.
    let broken = "So.<|open|>tools<|sep|>none<|close|>response<|sep|>";
    assert_eq!(pieces(Opened::Closed, broken), [text("So.<|open|>tools<|sep|>none")]);
}

#[test]
fn an_answer_that_is_cut_anywhere_has_no_markup_in_what_it_says() {
    let all = calls(&[&argument("path", "string", "ab"), &argument("n", "number", "1")]);
    let answer = format!("Hm.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|>{all}{END}");
    for cut in 0..=answer.len() {
        for piece in parse(true, THOUGHT, &[&answer[..cut]], true) {
            match piece {
                Piece::Thought(said) => assert!("Hm.".starts_with(&said), "{said:?}"),
                Piece::Text(said) => assert!("So.".starts_with(&said), "{said:?}"),
                Piece::Arguments { json, .. } => assert!(!json.contains(['<', '|']), "{json}"),
                Piece::Call { name, .. } => assert_eq!(name, "read"),
            }
        }
    }
}

proptest! {
    #[test]
    fn pieces_may_be_cut_in_any_way(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<|open|>", "<|close|>", "<|sep|>", "think", "response", "tools", "message", "call", " tool=\"f\"", "argument",
            " key=\"a\"", " type=\"string\"", " type=\"number\"", "json", " type=\"object\"", "{\"a\": 1}", "1", " ", "\n", "é\"",
            "<|open|>call tool=\"f\"<|sep|>", "<|open|>tools<|sep|>", "<|open|>argument key=\"a\"<|sep|>", "<|close|>argument<|sep|>",
        ]), 0..24),
        opened in prop::sample::select(vec![Opened::No, THOUGHT, Opened::Closed]),
        has_calls: bool,
    ) {
        let whole = parse(has_calls, opened, &[&parts.concat()], false);
        let again = parse(has_calls, opened, &parts, false);
        prop_assert_eq!(again, whole);
    }
}
