use proptest::prelude::*;

use super::*;
use crate::text::answers::test_pieces::{call, cut_everywhere, join, text, thought};

fn parse(calls: bool, parts: &[&str], is_cut: bool) -> Vec<Piece> {
    let mut parser = HarmonyParser::new(calls);
    let mut all: Vec<Piece> = parts.iter().flat_map(|part| parser.push(part, None)).collect();
    all.extend(parser.push("", Some(is_cut)));
    join(all)
}

/// Parsed at once, and cut everywhere.
fn pieces(text: &str) -> Vec<Piece> {
    cut_everywhere(text, |parts| parse(true, parts, false))
}

const THINKS: &str = "<|channel|>analysis<|message|>\n Hm.\n<|end|><|start|>assistant";

#[test]
fn channels_are_thoughts_text_and_calls() {
    let said = format!("{THINKS}<|channel|>final<|message|> So.\n\n<|return|>");
    assert_eq!(pieces(&said), [thought("\n Hm.\n"), text(" So.\n\n")]);
    let called = format!(
        "{THINKS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>{{\"path\":  \"a<|\"}}"
    );
    let mut wanted = vec![thought("\n Hm.\n"), text("I look.")];
    wanted.extend(call(0, "read", "{\"path\":  \"a<|\"}"));
    assert_eq!(pieces(&called), wanted);
    // The mark that ends the call stops the answer, and is not in its text; some programs leave it there.
    assert_eq!(pieces(&(called + "<|call|>")), wanted);
}

#[test]
fn headers_say_who_is_called_in_each_of_their_forms() {
    for header in [
        "<|channel|>commentary to=functions.read <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.read <|constrain|> json<|message|>",
        "<|channel|>commentary to=functions.read json<|message|>",
        "<|channel|>commentary to=functions.read<|message|>",
        " to=functions.read<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.read<|channel|>commentary json<|message|>",
        "<|start|>assistant to=functions.read<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.read code<|message|>",
        "<|channel|>commentary to=read<|message|>",
    ] {
        assert_eq!(pieces(&format!("{header}{{\"n\": 1}}")), call(0, "read", "{\"n\": 1}"), "{header}");
    }
    assert_eq!(pieces("<|channel|>commentary to=functions.now<|message|>"), call(0, "now", "{}"));
    assert_eq!(pieces("<|channel|>commentary to=functions.now<|message|> <|call|>"), call(0, "now", "{}"));
    let two = "<|channel|>commentary to=functions.a<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.b<|message|>{\"x\":1}<|call|>";
    assert_eq!(pieces(two), [call(0, "a", "{}"), call(1, "b", "{\"x\":1}")].concat());
    // Nobody offered tools: there are none, and no markup either.
    assert_eq!(
        parse(false, &["<|channel|>commentary to=functions.read <|constrain|>json<|message|>{}"], false),
        [text("{}")]
    );
}

#[test]
fn what_has_no_header_is_text() {
    for plain in ["Hello.", "a <|end", " too", "to=x", "\nx <| y"] {
        assert_eq!(pieces(plain), [text(plain)], "{plain:?}");
    }
    assert_eq!(pieces("<|channel|>final<|message|>a<|end|>b"), [text("a\n\nb")]);
    assert_eq!(pieces("<|message|>a"), [text("a")]);
    assert_eq!(pieces("<|channel|>commentary to=functions.read<|message|>ls -l"), [text("ls -l")]);
    // Ends that are missing.
    assert_eq!(pieces("<|channel|>analysis<|message|>a<|channel|>final<|message|>b"), [thought("a"), text("b")]);
    assert_eq!(
        pieces("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b"),
        [thought("a"), text("b")]
    );
    let long = format!("<|channel|>{}<|message|>b", "n".repeat(MAX_HEAD));
    assert_eq!(pieces(&long), [text(&long)]);
}

#[test]
fn arguments_that_go_wrong_end_where_they_do() {
    let mut wanted = call(0, "read", "{\"path\": ").to_vec();
    wanted.push(text("oops}"));
    assert_eq!(pieces("<|channel|>commentary to=functions.read<|message|>{\"path\": oops}<|call|>"), wanted);
}

#[test]
fn an_answer_that_is_cut_anywhere_has_no_markup_in_what_it_says() {
    let answer = format!(
        "{THINKS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>{{\"n\": 1}}<|call|>"
    );
    for cut in 0..=answer.len() {
        for piece in parse(true, &[&answer[..cut]], true) {
            match piece {
                Piece::Text(said) => assert!("I look.".starts_with(&said), "{said:?} of {:?}", &answer[..cut]),
                Piece::Thought(said) => assert!("\n Hm.\n".starts_with(&said), "{said:?} of {:?}", &answer[..cut]),
                Piece::Arguments { json, .. } => assert!("{\"n\": 1}".starts_with(&json), "{json}"),
                Piece::Call { name, .. } => assert_eq!(name, "read"),
            }
        }
    }
}

#[test]
fn text_comes_while_it_is_written() {
    let mut parser = HarmonyParser::new(true);
    assert_eq!(parser.push("<|channel|>final<|message|>a <", None), [text("a ")]);
    assert_eq!(parser.push("b", None), [text("<b")]);
    assert_eq!(
        parser.push("<|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"a", None),
        call(0, "f", "{\"a")
    );
    assert_eq!(parser.push("\": 1}", None), [Piece::Arguments { index: 0, json: "\": 1}".into() }]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn no_text_breaks_a_parser_and_no_cut_changes_it(
        parts in prop::collection::vec(
            prop_oneof![
                Just("<|start|>"), Just("<|end|>"), Just("<|message|>"), Just("<|channel|>"), Just("<|constrain|>"), Just("<|return|>"),
                Just("<|call|>"), Just("assistant"), Just("analysis"), Just("commentary"), Just("final"), Just(" to=functions.f "), Just("json"),
                Just("{}"), Just("{\"a\": 1}"), Just("}"), Just("<"), Just("<|"), Just("é"), Just(" "), Just("\n"), Just("x"),
            ],
            0..24,
        ),
        calls in any::<bool>(),
        is_cut in any::<bool>(),
    ) {
        let whole = parts.concat();
        let found = parse(calls, &[&whole], is_cut);
        prop_assert_eq!(&parse(calls, &parts, is_cut), &found);
        let characters: Vec<String> = whole.chars().map(String::from).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        prop_assert_eq!(&parse(calls, &characters, is_cut), &found);
    }
}
