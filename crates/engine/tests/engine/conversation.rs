//! A conversation with tools, as an agent sends it: the whole of it again with every request, thoughts kept or dropped as templates do it. All that was there before
//! is taken up again, in models with recurrent layers too, whose states cannot be rolled back; and the answers are those of an engine that keeps nothing.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::text::{ChatTemplate, Dialogue, Tokenizer};
use sluice_engine::{Engine, Event, Generation, Options, PromptCacheOptions};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// Thoughts behind the user's last message stay; of older ones, those are dropped (`drop`) as Qwen3's template does it.
fn template(drop: bool) -> ChatTemplate {
    let first = if drop { "{%- set ns.first = loop.index0 %}" } else { "" };
    let source = "{%- set ns = namespace(first=-1) %}\
        {%- for m in messages %}{%- if m.role == 'user' %}FIRST{%- endif %}{%- endfor %}\
        {%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{%- endif %}\
        {%- for m in messages %}<|im_start|>{{ m.role }}\n\
        {%- if m.thought and loop.index0 > ns.first %}<think>{{ m.thought }}</think>{%- endif %}\
        {{- m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}\
        {%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    ChatTemplate::parse(&source.replace("FIRST", first)).unwrap()
}

/// Turns of a conversation: enough for dozens of blocks and for more states than are kept. The time of a test grows with their square.
const TURNS: usize = 20;
/// The turn in which the user edits the question.
const EDITED: usize = 11;
/// The turn in which the client asks for the same answer again.
const AGAIN: usize = 15;
/// Two renderings may differ this many tokens before a message ends, since the beginning of the next message is part of it.
const BEGINNING: usize = 8;

/// What of a conversation must be there when it is sent again, as far as it is the same.
enum Known {
    /// All of the prompt before.
    Prompt,
    /// All up to the user's question in it.
    Question,
    /// All up to the question before that one.
    Turn,
}

struct Client<'a> {
    engine: Engine,
    /// Opens an engine on the same prompt cache, after each request: what it goes on from was on disk.
    restart: Option<&'a dyn Fn() -> Engine>,
    /// It keeps nothing between requests.
    forgetful: Engine,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    tools: Value,
    messages: Vec<Value>,
    /// The prompt before.
    before: Vec<u32>,
    /// Tokens of it up to the end of the user's last message, and the beginning of an answer.
    question_end: usize,
    /// The same of the question before that one.
    earlier: usize,
    requests: usize,
}

impl Client<'_> {
    /// Sends the conversation as it stands.
    fn ask(&mut self, known: Known, what: &str) {
        let extra = Map::new();
        let dialogue = Dialogue {
            template: Some(self.template),
            tokenizer: self.tokenizer,
            messages: &self.messages,
            tools: Some(&self.tools),
            extra: &extra,
        };
        let tokens = dialogue.tokens().unwrap();
        let marks = dialogue.snapshot_points(&tokens);
        // Models with few words have those of the tokenizer several times.
        let words = self.engine.model().vocabulary as u32;
        let prompt: Vec<u32> = tokens.iter().map(|t| t % words).collect();
        let sampling = SamplingParams { temperature: 0.8, seed: self.requests as u64, ..SamplingParams::default() };
        let generation = Generation { sampling, max_tokens: 6, snapshot_points: marks, ..Generation::default() };
        let (answer, adopted) = answer(&mut self.engine, &prompt, generation.clone());
        if let Some(restart) = self.restart {
            self.engine.save().unwrap();
            // The folder is one engine's at a time.
            let nothing = Engine::open(&folder("qwen3"), forgetful(16)).unwrap();
            drop(std::mem::replace(&mut self.engine, nothing));
            self.engine = restart();
            assert_eq!(self.engine.take_prompt_cache_notes(), Vec::<String>::new());
        }
        let common = prompt.iter().zip(&self.before).take_while(|(a, b)| a == b).count();
        let kept = match known {
            Known::Prompt => self.before.len(),
            Known::Question => self.question_end,
            Known::Turn => self.earlier,
        };
        // On disk are whole blocks, but for those in which a state was kept.
        let whole = if self.restart.is_some() { 32 } else { 0 };
        let known = kept.min(common).saturating_sub(BEGINNING + whole);
        assert!(
            adopted >= known,
            "{what}: {adopted} of {} tokens were there, {common} in common with {}",
            prompt.len(),
            self.before.len()
        );
        // Now and then, since it computes everything.
        if self.requests.is_multiple_of(13) {
            assert_eq!(self::answer(&mut self.forgetful, &prompt, generation), (answer, 0), "{what}");
        }
        let question = self.messages.iter().rposition(|m| m["role"] == "user").unwrap();
        let question_end = Dialogue { messages: &self.messages[..=question], ..dialogue }.tokens().unwrap().len();
        if question_end != self.question_end {
            self.earlier = std::mem::replace(&mut self.question_end, question_end);
        }
        self.before = prompt;
        self.requests += 1;
    }

    fn say(&mut self, message: Value) {
        self.messages.push(message);
    }
}

fn answer(engine: &mut Engine, prompt: &[u32], generation: Generation) -> (Vec<u32>, usize) {
    let id = engine.add_sequence();
    engine.start(id, prompt, generation).unwrap();
    let mut tokens = Vec::new();
    while !engine.is_idle() {
        let new = engine
            .step()
            .unwrap()
            .iter()
            .filter_map(|e| if let Event::Token { token, .. } = e { Some(*token) } else { None });
        tokens.extend(new);
    }
    let adopted = engine.reused_tokens(id).unwrap();
    engine.remove_sequence(id);
    (tokens, adopted)
}

fn forgetful(context: usize) -> Options {
    Options {
        max_context: Some(context),
        max_sequences: 2,
        prefix_cache: false,
        snapshots: 0,
        ..Options::for_this_machine().unwrap()
    }
}

fn converse(model: &Path, drop_thoughts: bool, restarts: bool) {
    let tokenizer = Tokenizer::load(demo(), None).unwrap();
    let template = template(drop_thoughts);
    let home = tempfile::tempdir().unwrap();
    let prompt_cache = restarts.then(|| PromptCacheOptions {
        folder: home.path().join("cache"),
        quota: Some(1 << 30),
        daily_limit: None,
        min_tokens: 8,
        key_file: None,
        sums_file: Some(home.path().join("sums.json")),
        sum_at_start: PromptCacheOptions::SUM_AT_START,
        store: None,
    });
    let keeps = Options { prefix_cache: true, snapshots: 16, prompt_cache, ..forgetful(8192) };
    let open = || Engine::open(model, keeps.clone()).unwrap();
    let mut c = Client {
        engine: open(),
        restart: if restarts { Some(&open) } else { None },
        forgetful: Engine::open(model, forgetful(8192)).unwrap(),
        tokenizer: &tokenizer,
        template: &template,
        tools: json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]),
        messages: vec![json!({"role": "system", "content": "You are a careful helper who looks before answering."})],
        before: Vec::new(),
        question_end: 0,
        earlier: 0,
        requests: 0,
    };
    for turn in 0..TURNS {
        // 1. The user asks. Where thoughts are dropped, all since the last question is read again without them: that turn, and no more.
        let asked = format!("Question {turn}: what is behind the door of room {}?", turn * 37 % 11);
        c.say(json!({"role": "user", "content": asked}));
        c.ask(if drop_thoughts { Known::Question } else { Known::Prompt }, "a question");
        if turn == EDITED {
            c.messages.pop();
            c.say(json!({"role": "user", "content": format!("Never mind, what is in room {turn}?")}));
            // Of the states in the last turn, the newest two are on disk: one before them is that of the turn before.
            c.ask(if restarts { Known::Turn } else { Known::Prompt }, "an edited question");
        }
        if turn == AGAIN {
            c.ask(Known::Prompt, "the same question");
        }
        // 2. The model calls a tool, and reads what came of it
        c.say(json!({"role": "assistant", "content": "", "thought": format!("I should look, {turn}."),
            "tool_calls": [{"function": {"name": "look", "arguments": {"room": turn}}}]}));
        c.say(json!({"role": "tool", "content": format!("A lamp, {} chairs and a cat.", turn % 5)}));
        c.ask(Known::Prompt, "a tool's result");
        // 3. It answers
        c.say(json!({"role": "assistant", "content": format!("There are {} chairs.", turn % 5), "thought": "Easy."}));
    }
    assert_eq!(c.requests, 2 * TURNS + 2);
}

#[test]
fn a_dense_model_recomputes_at_most_the_last_turn() {
    converse(&folder("qwen3"), false, false);
    converse(&folder("qwen3"), true, false);
}

#[test]
fn a_hybrid_model_recomputes_at_most_the_last_turn() {
    converse(&folder("qwen3_5"), false, false);
    for model in [folder("qwen3_5"), folder("qwen3_next"), folder("nemotron_h"), demo()] {
        converse(&model, true, false);
    }
}

#[test]
fn a_dense_model_recomputes_at_most_the_last_turn_across_restarts() {
    converse(&folder("qwen3"), false, true);
    converse(&folder("qwen3"), true, true);
}

#[test]
fn a_hybrid_model_recomputes_at_most_the_last_turn_across_restarts() {
    converse(&folder("qwen3_5"), false, true);
    converse(&folder("qwen3_next"), true, true);
}

#[test]
fn a_long_prompt_leaves_states_on_its_way_for_those_that_part_from_it() {
    let options = Options {
        max_context: Some(4096),
        max_sequences: 1,
        chunk: Some(64),
        snapshots: 16,
        ..Options::for_this_machine().unwrap()
    };
    let mut engine = Engine::open(&folder("qwen3_5"), options).unwrap();
    let (mut random, words) = (fastrand::Rng::with_seed(1), engine.model().vocabulary as u32);
    let mut prompt: Vec<u32> = (0..4000).map(|_| random.u32(..words)).collect();
    let generation = || Generation { max_tokens: 1, ..Generation::default() };
    answer(&mut engine, &prompt, generation());
    // Nobody said that prompts would part here.
    let parts = 3100;
    prompt[parts] = (prompt[parts] + 1) % words;
    let (_, adopted) = answer(&mut engine, &prompt, generation());
    assert!(adopted > parts / 2 && adopted <= parts, "{adopted}");
    // The next to come this way finds a state at the very place.
    prompt[parts + 20] = (prompt[parts + 20] + 1) % words;
    let (_, adopted) = answer(&mut engine, &prompt, generation());
    assert!(adopted >= parts, "{adopted}");
}
