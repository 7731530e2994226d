//! Thirty turns of an agent with tools, in each family's own form. The model's answers are taken apart as the server does it, a client sends them back, and the
//! template renders them: what was computed is found again to the token, but for what a template drops of the last turn.

mod forms;
mod xtml;

use std::sync::Arc;

use forms::{Answer, FORMS, Form, GEMMA};
use serde_json::{Map, Value, json};
use sluice_engine::sampling::{LogitsProcessor, ProcessorFailed};
use sluice_engine::text::{Calls, Dialogue, ModelText, Piece, Reading};
use sluice_engine::{Constraint, ConstraintSpec, Engine, Event, Generation, Options, ToolCallRules};

use crate::support::folder;

const TURNS: usize = 30;
/// Two renderings may differ this many tokens before a message ends, since the beginning of the next message is part of it.
const BEGINNING: usize = 8;

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}});
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "description": "", "parameters": parameters}});
    json!([tool("read", parameters), tool("wait", json!({"type": "object", "properties": {}}))])
}

/// Plays the model: each token is the next of these.
#[derive(Debug)]
struct Script {
    prompt: usize,
    tokens: Vec<u32>,
}

impl LogitsProcessor for Script {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<(), ProcessorFailed> {
        let next = self.tokens[tokens.len() - self.prompt] as usize;
        logits.iter_mut().enumerate().filter(|(at, _)| *at != next).for_each(|(_, x)| *x = f32::NEG_INFINITY);
        Ok(())
    }
}

struct Agent<'a> {
    form: &'a Form,
    text: ModelText,
    engine: Option<Engine>,
    has_states: bool,
    messages: Vec<Value>,
    calls: usize,
    /// The prompt before and what the model wrote, and how much of it is the prompt.
    computed: Vec<u32>,
    before: usize,
}

impl Agent<'_> {
    /// The prompt, and where a model keeps its states, if it has any.
    fn prompt(&self) -> (Vec<u32>, Vec<usize>) {
        let (tools, extra) = (tools(), Map::new());
        let (template, tokenizer) = (self.text.template.as_ref(), &self.text.tokenizer);
        let dialogue = Dialogue { template, tokenizer, messages: &self.messages, tools: Some(&tools), extra: &extra };
        let tokens = dialogue.tokens().unwrap();
        let marks = if self.has_states { dialogue.snapshot_points(&tokens) } else { Vec::new() };
        (tokens, marks)
    }

    fn shown(&self, tokens: &[u32]) -> String {
        self.text.tokenizer.decode(tokens, false).unwrap()
    }

    /// The model answers the prompt so, of which `known` tokens must have been computed before. Returns how long the prompt was.
    fn ask(&mut self, answer: &Answer, known: usize, client: usize) -> usize {
        let (form, name) = (self.form, self.form.name);
        let (prompt, marks) = self.prompt();
        // 1. What was computed is found again
        let computed = &self.computed;
        let common = prompt.iter().zip(computed).take_while(|(a, b)| a == b).count();
        if common < known {
            let from = common.saturating_sub(12);
            panic!(
                "{name}: {common} of {known} tokens are the same; then\n{:?}\n--- computed was\n{:?}",
                self.shown(&prompt[from..(common + 30).min(prompt.len())]),
                self.shown(&computed[from..(common + 30).min(computed.len())]),
            );
        }
        // 2. The model answers
        let written = form.write(answer) + form.end(!answer.calls.is_empty());
        let written = self.text.tokenizer.encode(&written, false).unwrap();
        if let Some(engine) = &mut self.engine {
            let adopted = play(engine, &prompt, &written, marks);
            // States are kept on the way through a prompt, not of what the model writes.
            let known = if self.has_states { known.min(self.before) } else { known }.saturating_sub(BEGINNING);
            assert!(adopted >= known, "{name}: {adopted} of {} tokens were there, of {known}", prompt.len());
        }
        // 3. The client gets it in pieces, and sends it back
        let reading = Reading::new(&self.text, Some(&tools()), &prompt);
        let (mut parser, mut text) = (reading.parser(), reading.detokenizer(&self.text.tokenizer));
        let mut pieces = Vec::new();
        for token in &written[..written.len() - 1] {
            pieces.extend(parser.push(&text.push(*token).unwrap()));
        }
        pieces.extend(parser.push(&text.flush().unwrap()));
        pieces.extend(parser.finish());
        let message = message(pieces, client, &mut self.calls);
        let said = (message["reasoning_content"].as_str().unwrap_or_default(), message["content"].as_str());
        assert_eq!(said, (if form.thinks() { answer.thought } else { "" }, Some(answer.content)), "{name}");
        let called = message["tool_calls"].as_array().map_or(0, Vec::len);
        assert_eq!(called, answer.calls.len(), "{name}: {message}");
        for (i, (tool, arguments)) in answer.calls.iter().enumerate() {
            let function = &message["tool_calls"][i]["function"];
            let found = match &function["arguments"] {
                Value::String(json) => serde_json::from_str(json).unwrap(),
                object => object.clone(),
            };
            assert_eq!((&function["name"], &found), (&json!(tool), arguments), "{name}");
        }
        self.messages.push(message);
        self.before = prompt.len();
        self.computed = [prompt, written].concat();
        self.before
    }
}

/// The message that a client makes of an answer: with arguments as they came, written anew, or as objects.
fn message(pieces: Vec<Piece>, client: usize, calls: &mut usize) -> Value {
    let mut message = json!({"role": "assistant", "content": ""});
    let append =
        |field: &mut Value, more: &str| *field = Value::from(field.as_str().unwrap_or_default().to_owned() + more);
    for piece in pieces {
        match piece {
            Piece::Thought(more) => append(&mut message["reasoning_content"], &more),
            Piece::Text(more) => append(&mut message["content"], &more),
            Piece::Call { name, .. } => {
                let call = json!({"id": format!("call_{calls}"), "type": "function", "function": {"name": name, "arguments": ""}});
                *calls += 1;
                match message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                    Some(all) => all.push(call),
                    None => message["tool_calls"] = json!([call]),
                }
            }
            Piece::Arguments { index, json } => {
                append(&mut message["tool_calls"][index]["function"]["arguments"], &json)
            }
        }
    }
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let arguments = &mut call["function"]["arguments"];
        let read: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
        *arguments = match client % 3 {
            0 => continue,
            1 => read.to_string().into(),
            _ => read,
        };
    }
    message
}

/// Answers a prompt with these tokens, and returns how many of the prompt were there.
fn play(engine: &mut Engine, prompt: &[u32], written: &[u32], marks: Vec<usize>) -> usize {
    // Models with few words have those of the tokenizer several times.
    let words = engine.model().vocabulary as u32;
    let [prompt, tokens] = [prompt, written].map(|all| all.iter().map(|t| t % words).collect::<Vec<u32>>());
    let script = Script { prompt: prompt.len(), tokens: tokens.clone() };
    let generation = Generation {
        max_tokens: tokens.len(),
        snapshot_points: marks,
        processor: Some(Arc::new(script)),
        ..Generation::default()
    };
    let id = engine.add_sequence();
    engine.start(id, &prompt, generation).unwrap();
    let mut said = Vec::new();
    while !engine.is_idle() {
        let new = engine.step().unwrap().iter();
        said.extend(new.filter_map(|e| if let Event::Token { token, .. } = e { Some(*token) } else { None }));
    }
    assert_eq!(said, tokens);
    let adopted = engine.reused_tokens(id).unwrap();
    engine.remove_sequence(id);
    adopted
}

/// A conversation of so many turns in this form, and with an engine's prefix cache.
fn converse(form: &Form, model: Option<&str>, turns: usize) {
    let text = form.text();
    assert_eq!(text.template.as_ref().unwrap().style().calls, Some(form.calls), "{}", form.name);
    let engine = model.map(|model| {
        let options = Options {
            max_context: Some(16384),
            max_sequences: 1,
            prefix_cache: true,
            snapshots: 16,
            ..Options::for_this_machine().unwrap()
        };
        Engine::open(&folder(model), options).unwrap()
    });
    let messages = vec![json!({"role": "system", "content": "You look before you answer."})];
    let has_states = model.is_some_and(|model| model != "qwen3");
    let mut agent = Agent { form, text, engine, has_states, messages, calls: 0, computed: Vec::new(), before: 0 };
    // Tokens up to the last question.
    let mut question: usize = 0;
    for turn in 0..turns {
        agent.messages.push(json!({"role": "user", "content": format!("Question {turn}?")}));
        // A new question may drop what was thought since the last one.
        let mut known = if form.keeps { agent.computed.len() } else { question.saturating_sub(BEGINNING) };
        let mut asked = None;
        for round in 0..turn % 3 {
            let path = ["a b.txt", "<é>\n\"c\"", ""][(turn + round) % 3];
            let read = ("read", json!({"path": path, "n": turn}));
            let several = (turn + round) % 4 == 3 && form.calls != Calls::Harmony;
            let calls = if several { vec![read, ("wait", json!({}))] } else { vec![read] };
            let content = if round == 1 && form.says { "I look again." } else { "" };
            let thought = format!("I should look, {turn}.");
            let answer = Answer { thought: &thought, content, calls, before: agent.calls };
            let length = agent.ask(&answer, known, turn + round);
            asked.get_or_insert(length);
            for i in answer.before..agent.calls {
                let result = format!("Line {turn} of {i}.");
                agent.messages.push(json!({"role": "tool", "tool_call_id": format!("call_{i}"), "content": result}));
            }
            known = agent.computed.len();
        }
        let content = format!("It says {turn}.");
        let length = agent.ask(&Answer { thought: "Easy.", content: &content, calls: Vec::new(), before: 0 }, known, 0);
        question = asked.unwrap_or(length);
    }
    assert!(agent.calls >= turns);
}

#[test]
fn what_any_family_wrote_is_found_again_over_thirty_turns() {
    for form in FORMS.iter().chain([&GEMMA]) {
        converse(form, None, TURNS);
    }
}

#[test]
fn engines_compute_at_most_the_last_turn_again() {
    for (name, model) in [("Qwen3", "qwen3"), ("Qwen3.5", "qwen3_5")] {
        converse(FORMS.iter().find(|form| form.name == name).unwrap(), Some(model), TURNS);
    }
}

/// Where a call must be made, what the family writes may be written.
#[test]
fn calls_that_must_be_made_have_the_familys_form() {
    for form in FORMS.iter().chain([&GEMMA]) {
        let text = form.text();
        for several in [false, true] {
            let called = ToolCallRules { tools: tools(), several, must: true, strict: Vec::new() };
            let spec = ConstraintSpec { called: Some(called), ..ConstraintSpec::default() };
            let opened = sluice_engine::text::Opened::Closed;
            let constraint = Constraint::new(&text, &spec, opened).unwrap().unwrap();
            let mut calls = vec![("read", json!({"path": "a b <c>\n", "n": 3}))];
            if several && form.calls != Calls::Harmony {
                calls.push(("wait", json!({})));
            }
            let written = form.calls(&Answer { thought: "", content: "", calls, before: 0 });
            assert!(constraint.allows(&text, &written).unwrap(), "{}: {written}", form.name);
        }
    }
}
