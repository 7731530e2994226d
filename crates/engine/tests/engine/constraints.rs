//! Answers that keep to a form: whatever the model would say, what it says is of that form, and the same however sequences share steps.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::text::{ModelText, Opened, Piece, Reading};
use sluice_engine::{
    Constraint, ConstraintSpec, Engine, Event, Finish, Generation, GrammarFormat, Options, SequenceId, ToolCallRules,
    unknown_formats,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

fn text() -> &'static ModelText {
    static TEXT: OnceLock<ModelText> = OnceLock::new();
    TEXT.get_or_init(|| ModelText::load(folder(), None).unwrap())
}

fn engine(sequences: usize, kv_tokens: Option<usize>) -> Engine {
    let options = Options {
        max_context: Some(1024),
        max_sequences: sequences,
        kv_tokens,
        threads: 2,
        ..Options::for_this_machine().unwrap()
    };
    Engine::open(&folder(), options).unwrap()
}

fn constraint(spec: &ConstraintSpec) -> anyhow::Result<Arc<Constraint>> {
    Ok(Arc::new(Constraint::new(text(), spec, Opened::No)?.unwrap()))
}

fn form(form: GrammarFormat) -> ConstraintSpec {
    ConstraintSpec { format: form, ..ConstraintSpec::default() }
}

fn generation(constraint: &Arc<Constraint>, seed: u64) -> Generation {
    Generation {
        sampling: SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() },
        max_tokens: 200,
        stop_ids: text().stop_ids.clone(),
        constraint: Some(Arc::clone(constraint)),
        ..Generation::default()
    }
}

fn prompt(question: &str) -> Vec<u32> {
    let prompt = format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n");
    text().tokenizer.encode(&prompt, false).unwrap()
}

/// Runs all that was started; the answers of these, and how they ended.
fn answers(engine: &mut Engine, ids: &[SequenceId]) -> Vec<(Vec<u32>, Finish)> {
    let mut found: Vec<(Vec<u32>, Option<Finish>)> = vec![Default::default(); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            let at = ids.iter().position(|id| *id == event.id()).unwrap();
            match event {
                Event::Token { token, .. } => found[at].0.push(*token),
                Event::Finished { reason, .. } => found[at].1 = Some(*reason),
                Event::Prefill { .. } => {}
            }
        }
    }
    found.into_iter().map(|(tokens, finish)| (tokens, finish.unwrap())).collect()
}

fn answer(engine: &mut Engine, generation: Generation) -> (String, Finish) {
    let id = engine.add_sequence();
    engine.start(id, &prompt("Tell me about a fox."), generation).unwrap();
    let (tokens, finish) = answers(engine, &[id]).remove(0);
    if let Some(why) = engine.take_failure(id) {
        panic!("{why:#}");
    }
    engine.remove_sequence(id);
    (text().tokenizer.decode(&tokens, true).unwrap(), finish)
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "colour": {"enum": ["red", "gré\"en\n"]},
            "legs": {"type": "integer", "minimum": 0, "maximum": 9},
            "wild": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        },
        "required": ["name", "colour", "legs", "wild", "tags"],
        "additionalProperties": false,
    })
}

#[test]
fn json_is_of_its_schema() {
    let mut engine = engine(1, None);
    let constraint = constraint(&form(GrammarFormat::Schema(person()))).unwrap();
    for seed in 0..6 {
        let (text, finish) = answer(&mut engine, generation(&constraint, seed));
        assert_eq!(finish, Finish::Stop, "{text}");
        let found: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let names: Vec<&String> = found.as_object().unwrap().keys().collect();
        assert_eq!(names, ["name", "colour", "legs", "wild", "tags"], "{text}");
        assert!(found["name"].as_str().unwrap().chars().count() <= 12 && found["wild"].is_boolean(), "{text}");
        assert!(["red", "gré\"en\n"].contains(&found["colour"].as_str().unwrap()), "{text}");
        assert!((0..=9).contains(&found["legs"].as_i64().unwrap()), "{text}");
        assert!(found["tags"].as_array().unwrap().len() <= 2, "{text}");
    }
}

#[test]
fn expressions_and_grammars_are_kept_to() {
    let mut engine = engine(1, None);
    let regex = constraint(&form(GrammarFormat::Regex("[A-C]{3}-[0-9]{2,4}".into()))).unwrap();
    let lark =
        constraint(&form(GrammarFormat::Lark("start: \"I \" (\"like\" | \"hate\") \" \" /[a-z]{1,8}/ \".\"".into())))
            .unwrap();
    for seed in 0..4 {
        let (text, finish) = answer(&mut engine, generation(&regex, seed));
        let (letters, digits) = text.split_once('-').unwrap();
        assert!(letters.len() == 3 && letters.bytes().all(|b| (b'A'..=b'C').contains(&b)), "{text}");
        assert!((2..=4).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit()), "{text}");
        assert_eq!(finish, Finish::Stop);
        let (text, _) = answer(&mut engine, generation(&lark, seed));
        assert!(text.starts_with("I like ") || text.starts_with("I hate "), "{text}");
        assert!(text.ends_with('.'), "{text}");
    }
}

#[test]
fn a_call_that_is_demanded_is_made_and_read() {
    let tools = json!([
        {"type": "function", "function": {"name": "feed", "parameters": person()}},
        {"type": "function", "function": {"name": "wait"}},
    ]);
    let mut engine = engine(1, None);
    for (several, tools) in [(false, json!([tools[0]])), (true, tools.clone())] {
        let called = ToolCallRules { tools: tools.clone(), several, must: true, strict: Vec::new() };
        let constraint = constraint(&ConstraintSpec { called: Some(called), ..ConstraintSpec::default() }).unwrap();
        for seed in 0..4 {
            let generation = Generation { max_tokens: 600, ..generation(&constraint, seed) };
            let (written, finish) = answer(&mut engine, generation);
            let mut parser = Reading::new(text(), Some(&tools), &prompt("x")).parser();
            let mut pieces = parser.push(&written);
            pieces.extend(parser.finish());
            let calls = pieces.iter().filter(|p| matches!(p, Piece::Call { .. })).count();
            assert!(if several { calls >= 1 } else { calls == 1 }, "{written}");
            for piece in &pieces {
                match piece {
                    Piece::Arguments { json, .. } if finish == Finish::Stop => {
                        serde_json::from_str::<Value>(json).unwrap_or_else(|e| panic!("{e}: {written}"));
                    }
                    Piece::Text(text) if finish == Finish::Stop => panic!("{text:?} in {written}"),
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn calls_within_text_keep_to_the_schemas_of_strict_tools() {
    let tools = json!([
        {"type": "function", "function": {"name": "feed", "parameters": {
            "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false,
        }}},
        {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "required": ["never"]}}},
    ]);
    let demanded = |several| {
        let called = ToolCallRules { tools: tools.clone(), several, must: false, strict: vec!["feed".into()] };
        constraint(&ConstraintSpec { called: Some(called), ..ConstraintSpec::default() }).unwrap()
    };
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let good = call("feed", "{\"n\": 5}");
    for (answer, alone, several) in [
        (String::new(), true, true),
        ("A fox < a crow, <tool, and\n\nmore.".into(), true, true),
        (good.clone(), true, true),
        (format!("I feed it.\n{good}"), true, true),
        (format!("I feed it.\n{good}\nDone <b>."), true, true),
        (format!("{good}\n{good}"), false, true),
        (format!("{good} and {}", call("wait", "{\"any\": [1]}")), false, true),
        (call("feed", "{\"n\": \"5\"}"), false, false),
        (call("feed", "{}"), false, false),
        (format!("So: {}", call("none", "{}")), false, false),
        ("<tool_call>feed".into(), false, false),
    ] {
        assert_eq!(demanded(false).allows(text(), &answer).unwrap(), alone, "{answer}");
        assert_eq!(demanded(true).allows(text(), &answer).unwrap(), several, "{answer}");
    }
    // A model that is free to say anything says what it would have said.
    let mut engine = engine(1, None);
    for seed in 0..3 {
        let free = Generation { constraint: None, ..generation(&demanded(true), seed) };
        assert_eq!(answer(&mut engine, generation(&demanded(true), seed)), answer(&mut engine, free));
    }
}

#[test]
fn forced_tokens_change_nothing_but_the_time() {
    let mut engine = engine(1, None);
    let constraint = constraint(&form(GrammarFormat::Schema(person()))).unwrap();
    for seed in 0..3 {
        let taken = answer(&mut engine, generation(&constraint, seed));
        // Each token's likelihood is asked for: all are sampled, most of them with one that is allowed.
        let sampled = answer(&mut engine, Generation { logprobs: Some(0), ..generation(&constraint, seed) });
        assert_eq!(taken, sampled);
    }
}

#[test]
fn sequences_keep_to_their_own_forms_whatever_they_share() {
    let specs = [
        form(GrammarFormat::Schema(person())),
        form(GrammarFormat::Regex("(fox|crow)( and (fox|crow)){0,9}".into())),
        form(GrammarFormat::Object),
    ];
    let constraints: Vec<_> = specs.iter().map(|spec| constraint(spec).unwrap()).collect();
    let asked = |i: usize| {
        let mut generation = generation(&constraints[i % 3], i as u64);
        generation.max_tokens = 60;
        if i == 5 {
            generation.constraint = None;
        }
        (prompt(["What is a fox?", "Who are you?"][i % 2]), generation)
    };
    let alone: Vec<_> = (0..6)
        .map(|i| {
            let mut engine = engine(1, None);
            let id = engine.add_sequence();
            let (prompt, generation) = asked(i);
            engine.start(id, &prompt, generation).unwrap();
            answers(&mut engine, &[id]).remove(0)
        })
        .collect();
    // So little memory that some are preempted, and computed again.
    for kv_tokens in [None, Some(192)] {
        let mut engine = engine(4, kv_tokens);
        let ids: Vec<SequenceId> = (0..6).map(|_| engine.add_sequence()).collect();
        for (i, id) in ids.iter().enumerate() {
            let (prompt, generation) = asked(i);
            engine.start(*id, &prompt, generation).unwrap();
        }
        assert_eq!(answers(&mut engine, &ids), alone, "{kv_tokens:?}");
    }
}

#[test]
fn what_cannot_be_compiled_says_why() {
    let refused = |spec: ConstraintSpec, part: &str| {
        let error = format!("{:#}", constraint(&spec).unwrap_err());
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    };
    refused(form(GrammarFormat::Schema(json!({"type": "nothing"}))), "nothing");
    refused(form(GrammarFormat::Schema(json!({"type": "string", "pattern": "("}))), "");
    refused(form(GrammarFormat::Schema(json!({"type": "object", "description": "x".repeat(300 << 10)}))), "bytes");
    refused(form(GrammarFormat::Regex("(".into())), "");
    refused(form(GrammarFormat::Lark("start: nowhere".into())), "nowhere");
    refused(form(GrammarFormat::Lark("(".repeat(32 << 10))), "");
    refused(form(GrammarFormat::Lark(format!("start: {}", "(".repeat(30 << 10)))), "");
    let one_of = json!({"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]});
    refused(form(GrammarFormat::Schema(one_of.clone())), "anyOf");
    let error = constraint(&form(GrammarFormat::Schema(one_of.clone()))).unwrap_err().to_string();
    assert!(!error.contains("coerce_one_of"), "{error}");
    let tool =
        |name: &str, schema: Value| json!({"type": "function", "function": {"name": name, "parameters": schema}});
    let tools = json!([tool("good", person()), tool("bad", one_of)]);
    refused(
        ConstraintSpec {
            called: Some(ToolCallRules { tools, several: true, must: true, strict: Vec::new() }),
            ..ConstraintSpec::default()
        },
        "\"bad\"",
    );
    let called = ToolCallRules { tools: json!([]), several: true, must: true, strict: Vec::new() };
    refused(ConstraintSpec { called: Some(called), ..ConstraintSpec::default() }, "no tools");
    refused(
        ConstraintSpec {
            thinking_budget: Some(5),
            format: GrammarFormat::Lark("start: \"".into()),
            ..ConstraintSpec::default()
        },
        "",
    );
    // Nothing is asked for.
    assert!(Constraint::new(text(), &ConstraintSpec::default(), Opened::No).unwrap().is_none());
}

/// What `schema` allows and refuses.
fn holds(schema: Value, allowed: &[&str], refused: &[&str]) {
    let constraint =
        constraint(&form(GrammarFormat::Schema(schema.clone()))).unwrap_or_else(|e| panic!("{schema}: {e}"));
    for (answers, is_allowed) in [(allowed, true), (refused, false)] {
        for answer in answers {
            assert_eq!(constraint.allows(text(), answer).unwrap(), is_allowed, "{answer} by {schema}");
        }
    }
}

#[test]
fn a_format_that_nothing_is_known_of_is_a_note() {
    let formats = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
    for format in formats {
        let schema = json!({"type": "string", "format": format});
        assert!(unknown_formats(&schema).is_empty());
        holds(schema, &[], &["\"?? ?\""]);
    }
    let schema = json!({
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "phone", "maxLength": 3},
            "all": {"type": "array", "items": {"format": "color"}, "default": {"format": "none"}},
            "more": {"anyOf": [{"type": "string", "format": "phone"}, {"type": "null"}]},
        },
        "required": ["format"], "additionalProperties": false,
    });
    assert_eq!(unknown_formats(&schema), ["phone", "color"]);
    holds(schema, &["{\"format\": \"?\", \"more\": \"x y\"}"], &["{\"format\": \"????\"}"]);
}

#[test]
fn what_grammars_have_no_word_for_is_said_in_words_that_they_have() {
    let three = json!({"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}});
    let object = |more: Value| {
        let mut schema = json!({"type": "object", "properties": three, "additionalProperties": false});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    let (a, ab, abc, b, c, none) =
        ("{\"a\": 1}", "{\"a\": 1, \"b\": 2}", "{\"a\": 1, \"b\": 2, \"c\": 3}", "{\"b\": 2}", "{\"c\": 3}", "{}");
    holds(object(json!({"dependentRequired": {"a": ["b"]}})), &[none, ab, abc, b, c], &[a]);
    holds(object(json!({"dependentSchemas": {"a": {"required": ["c"]}}})), &[none, abc, b], &[a, ab]);
    holds(object(json!({"not": {"required": ["a", "b"]}})), &[none, a, b, c], &[ab, abc]);
    holds(object(json!({"not": {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]}})), &[none, b], &[a, c, ab]);
    let when = json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}});
    holds(object(when), &[ab, abc, c], &[none, a, b]);
    let when = json!({"if": {"properties": {"a": {"const": null}}, "required": ["a"]}, "then": {"required": ["b"]}});
    let mut schema = object(when);
    schema["properties"]["a"] = json!({"type": ["integer", "null"]});
    holds(schema, &[none, a, b, "{\"a\": null, \"b\": 2}"], &["{\"a\": null}"]);
    holds(object(json!({"maxProperties": 1, "unevaluatedProperties": false})), &[none, a, b], &[ab]);
    let names =
        |names: Value| json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}});
    holds(names(json!({"pattern": "^[ab]$"})), &[none, a, ab], &[c]);
    holds(names(json!({"enum": ["a"]})), &[none, a], &[c, ab]);
    holds(names(json!({"maxLength": 1})), &[none, a, c], &["{\"ab\": 1}"]);
    holds(names(json!(false)), &[none], &[a]);
    let list = |more: Value| {
        let mut schema = json!({"type": "array", "items": {"type": "integer"}});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    holds(list(json!({"uniqueItems": false, "contains": {}})), &["[1]", "[1, 1]"], &["[]"]);
    holds(list(json!({"uniqueItems": true, "maxItems": 1})), &["[]", "[1]"], &["[1, 1]"]);
    holds(list(json!({"contains": {"const": 5}, "minContains": 0})), &["[]", "[1]"], &["[null]"]);
    holds(json!({"type": ["integer", "string", "null"], "not": {"type": "null"}}), &["1", "\"a\""], &["null"]);
    holds(json!({"type": "integer", "not": {"minimum": 3}}), &["1", "2"], &["3", "4"]);
    // Parts are found by their names.
    let named = json!({"$id": "https://example.org/x", "type": "array", "items": {"$ref": "#part"}, "$defs": {"p": {"$anchor": "part", "type": "boolean"}}});
    holds(named, &["[true]"], &["[1]"]);
}

#[test]
fn what_cannot_be_held_is_refused_by_its_name() {
    let refused = |schema: Value| match Constraint::new(text(), &form(GrammarFormat::Schema(schema)), Opened::No) {
        Ok(_) => panic!("it is taken"),
        Err(e) => e.to_string(),
    };
    for (schema, name) in [
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"type": "array", "contains": {"type": "integer"}}), "contains"),
        (json!({"type": "string", "not": {"pattern": "a"}}), "not"),
        (json!({"if": {"pattern": "a"}, "then": {"minLength": 3}}), "if"),
        (json!({"anyOf": [{"properties": {"a": {}}}, {}], "unevaluatedProperties": false}), "unevaluatedProperties"),
        (json!({"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 3}}), "propertyNames"),
        (json!({"$ref": "https://example.org/other"}), "https://example.org/other"),
    ] {
        let why = refused(schema);
        assert!(why.contains(name), "{why}");
    }
}

#[test]
fn a_schema_that_is_too_large_is_refused_before_it_is_compiled() {
    let refused = |schema: Value, part: &str| {
        let why = Constraint::new(text(), &form(GrammarFormat::Schema(schema)), Opened::No).expect_err("it is refused");
        assert!(why.to_string().contains(part), "{why}");
    };
    let many = |n: usize| (0..n).map(|i| json!({"const": i})).collect::<Vec<_>>();
    refused(json!({"oneOf": many(2000)}), "oneOf has 2000 entries; 1000 are accepted");
    let patterns: serde_json::Map<String, Value> = (0..100).map(|i| (format!("^{i}x"), json!({}))).collect();
    refused(json!({"patternProperties": patterns}), "patternProperties has 100 entries");
    refused(json!({"prefixItems": vec![true; 31_000]}), "the schema has more than 30000 values");
    // Conditions within conditions would double at each level.
    let mut nested = json!({"required": ["a"]});
    for _ in 0..40 {
        nested = json!({"if": nested, "then": {"required": ["b"]}, "else": {"required": ["c"]}});
    }
    refused(nested, "");
}
