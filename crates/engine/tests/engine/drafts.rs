//! Drafts change no token, no probability and no count of cached tokens: whatever is drafted, and however much of it is wrong.

use std::path::Path;
use std::sync::Arc;

use fastrand::Rng;
use serde_json::json;
use sluice_engine::sampling::SamplingParams;
use sluice_engine::text::{ModelText, Opened};
use sluice_engine::{
    Constraint, ConstraintSpec, DraftOptions, DrafterChoice, Engine, Event, Finish, Generation, GrammarFormat, Isa,
    Options, Placement, PromptCacheOptions, SequenceId, ToolCallRules,
};

use super::support::folder;

/// Drafts of so many tokens in each step, whether they pay or not.
pub fn always(tokens: usize) -> DraftOptions {
    DraftOptions { drafter: DrafterChoice::Ngram, tokens, governed: false, ..DraftOptions::default() }
}

pub fn options() -> Options {
    Options {
        threads: 2,
        max_context: Some(200),
        max_sequences: 3,
        block_tokens: 8,
        chunk: Some(24),
        snapshots: 6,
        ..Options::for_this_machine().unwrap()
    }
}

/// All that a caller sees of an answer.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    /// Each token with the log-probability of it and of the likeliest ones, to the bit.
    tokens: Vec<(u32, Vec<u64>)>,
    finish: Option<Finish>,
    cached: usize,
    restored: usize,
}

/// Answers all of these together.
fn answers(engine: &mut Engine, asked: &[(Vec<u32>, Generation)]) -> Vec<Seen> {
    let mut ids: Vec<SequenceId> = Vec::new();
    for (prompt, generation) in asked {
        let id = engine.add_sequence();
        engine.start(id, prompt, generation.clone()).unwrap();
        ids.push(id);
    }
    let mut seen: Vec<Seen> = asked.iter().map(|_| Seen::default()).collect();
    while !engine.is_idle() {
        for event in engine.step().unwrap().to_vec() {
            let one = &mut seen[ids.iter().position(|id| *id == event.id()).unwrap()];
            match event {
                Event::Prefill { id, .. } => {
                    (one.cached, one.restored) =
                        (engine.reused_tokens(id).unwrap(), engine.restored_tokens(id).unwrap());
                }
                Event::Token { id, token } => {
                    let logprobs = engine.take_logprobs(id);
                    let bits = logprobs
                        .map(|l| [l.chosen].into_iter().chain(l.top.iter().map(|t| t.1)).map(f64::to_bits).collect());
                    one.tokens.push((token, bits.unwrap_or_default()));
                }
                Event::Finished { reason, .. } => one.finish = Some(reason),
            }
        }
    }
    ids.into_iter().for_each(|id| engine.remove_sequence(id));
    seen
}

/// A prompt that repeats itself, or not.
fn prompt(random: &mut Rng, vocabulary: u32, known: &[u32]) -> Vec<u32> {
    let length = random.usize(1..90);
    let few = [3, 30, vocabulary][random.usize(..3)].min(vocabulary);
    let mut prompt: Vec<u32> = (0..length).map(|_| random.u32(..few)).collect();
    // Some begin as another conversation does.
    if random.bool() {
        let n = random.usize(..=known.len().min(length - 1));
        prompt[..n].copy_from_slice(&known[..n]);
    }
    prompt
}

fn generation(random: &mut Rng, vocabulary: u32) -> Generation {
    let sampling = SamplingParams {
        temperature: [0.0, 0.0, 0.3, 1.0][random.usize(..4)],
        top_k: [0, 0, 5][random.usize(..3)],
        top_p: [1.0, 0.9][random.usize(..2)],
        repetition_penalty: [1.0, 1.0, 1.3, 0.7][random.usize(..4)],
        presence_penalty: [0.0, 0.5][random.usize(..2)],
        seed: random.u64(..),
        ..SamplingParams::default()
    };
    Generation {
        sampling,
        max_tokens: random.usize(1..60),
        stop_ids: if random.bool() { Vec::new() } else { (0..vocabulary / 40).collect() },
        logprobs: [None, Some(0), Some(3)][random.usize(..3)],
        snapshot_points: (0..random.usize(..3)).map(|_| random.usize(1..120)).collect(),
        ..Generation::default()
    }
}

/// The answer with some tokens changed, left out or put in.
fn nearly(random: &mut Rng, answer: &[(u32, Vec<u64>)], vocabulary: u32) -> Vec<u32> {
    let mistakes = [0, 5, 20, 60][random.usize(..4)];
    let mut tokens = Vec::new();
    for (token, _) in answer {
        match if random.u32(..100) < mistakes { random.u8(..3) } else { 3 } {
            0 => tokens.push(random.u32(..vocabulary)),
            1 => {}
            2 => tokens.extend([*token, random.u32(..vocabulary)]),
            _ => tokens.push(*token),
        }
    }
    tokens
}

/// How many random cases each model sees.
pub fn cases(usual: u64) -> u64 {
    std::env::var("SLUICE_DRAFT_CASES").map_or(usual, |n| n.parse().unwrap())
}

/// Options with drafts of these drafters.
fn with(drafter: DrafterChoice, small: Option<&str>, options: &Options) -> Options {
    Options { drafts: DraftOptions { drafter, ..always(4) }, draft_model: small.map(folder), ..options.clone() }
}

/// Tokens that came true, by drafter.
fn accepted(engine: &Engine, drafter: &str) -> u64 {
    engine.draft_stats().iter().filter(|d| d.drafter == drafter).map(|d| d.counts.accepted).sum()
}

/// Asks the same of an engine without drafts and of one with them, again and again, so that later prompts find what earlier ones left. Returns how many tokens of
/// the drafter came true.
pub fn compare(model: &Path, options: &Options, drafter: &str, seeds: std::ops::Range<u64>) -> u64 {
    let without = Options { drafts: DraftOptions::default(), draft_model: None, ..options.clone() };
    let mut plain = Engine::open(model, without.clone()).unwrap();
    let vocabulary = plain.model().vocabulary as u32;
    let mut came_true = 0;
    let mut drafting: Option<Engine> = None;
    let mut known = Vec::new();
    for seed in seeds {
        let mut random = Rng::with_seed(seed);
        if seed % 10 == 0 || drafting.is_none() {
            // Threads and instruction set may change nothing either.
            let (tokens, isas) = ([1, 2, 5, 8, 16][random.usize(..5)], Isa::supported());
            let drafts = DraftOptions { tokens, ..options.drafts };
            let (isa, threads) = (isas[random.usize(..isas.len())], random.usize(1..=3));
            drafting = Some(Engine::open(model, Options { drafts, isa, threads, ..options.clone() }).unwrap());
            plain = Engine::open(model, without.clone()).unwrap();
        }
        let drafting = drafting.as_mut().unwrap();
        let (prompt, mut generation) = (prompt(&mut random, vocabulary, &known), generation(&mut random, vocabulary));
        let wanted = answers(&mut plain, &[(prompt.clone(), generation.clone())]);
        if random.u8(..4) > 0 {
            generation.prediction = nearly(&mut random, &wanted[0].tokens, vocabulary);
        }
        let before = accepted(drafting, drafter);
        let found = answers(drafting, &[(prompt.clone(), generation.clone())]);
        assert_eq!(found, wanted, "{}, seed {seed}: {prompt:?} {generation:?}", model.display());
        came_true += accepted(drafting, drafter) - before;
        known = prompt;
        known.extend(wanted[0].tokens.iter().map(|t| t.0));
    }
    came_true
}

#[test]
fn drafts_change_nothing_that_a_caller_sees() {
    for model in [
        "qwen3",
        "qwen3_window",
        "qwen3_moe",
        "gpt_oss_mxfp4",
        "gemma3",
        "gemma4_per_layer",
        "qwen3_5",
        "qwen3_next",
        "qwen3_5_moe",
        "nemotron_h",
        "kimi_linear",
        "kimi_k3",
        "glm5_next",
        "deepseek_v4",
        "qwen4_exp",
        "deepseek_v32",
    ] {
        let options = with(DrafterChoice::Ngram, None, &options());
        let accepted = compare(&folder(model), &options, "ngram", 0..cases(12));
        assert!(accepted > 3 * cases(12), "{model}: only {accepted} tokens were drafted rightly");
    }
}

/// A model drafts for itself, so that nearly all comes true, or for another, so that little does. One has windows, one recurrent layers.
const SMALL: [(&str, &str); 6] = [
    ("qwen3", "qwen3"),
    ("qwen3", "gemma3"),
    ("gemma3", "gemma3"),
    ("qwen3_moe", "qwen3_window"),
    ("qwen3_5", "qwen3_5"),
    ("qwen3_next", "qwen3_moe"),
];

#[test]
fn a_small_model_changes_nothing_that_a_caller_sees() {
    for (model, small) in SMALL {
        for drafter in [DrafterChoice::Model, DrafterChoice::Auto] {
            let options = with(drafter, Some(small), &options());
            let accepted = compare(&folder(model), &options, "model", 0..cases(5));
            let least = if model == small && drafter == DrafterChoice::Model { 8 * cases(5) } else { 0 };
            assert!(accepted >= least, "{small} for {model}: only {accepted} tokens were drafted rightly");
        }
    }
}

#[test]
fn drafts_change_nothing_where_experts_are_streamed() {
    let options = Options { experts: Placement::Slots, expert_budget: Some(400_000), ..options() };
    let options = with(DrafterChoice::Ngram, None, &options);
    let accepted = compare(&folder("qwen3_moe"), &options, "ngram", 0..cases(16));
    assert!(accepted > 5 * cases(16), "only {accepted} tokens were drafted rightly");
}

#[test]
fn siblings_look_into_each_others_texts_and_those_of_another_salt_do_not() {
    let mut engine = Engine::open(&folder("qwen3"), Options { drafts: always(4), ..options() }).unwrap();
    let prompt: Vec<u32> = (0..40).collect();
    let sampling = SamplingParams { temperature: 1.0, seed: 7, ..SamplingParams::default() };
    let generation = Generation { max_tokens: 30, sampling, ..Generation::default() };
    // How many tokens were drafted rightly. The same seed gives the same answer each time.
    let mut accepted = |salt: &[u8]| {
        let before = engine.draft_stats()[0].counts.accepted;
        let id = engine.add_sequence_salted(salt);
        engine.start(id, &prompt, generation.clone()).unwrap();
        while !engine.is_idle() {
            engine.step().unwrap();
        }
        engine.draft_stats()[0].counts.accepted - before
    };
    let [alone, sibling, stranger] = [b"one", b"one", b"two"].map(|salt| accepted(salt));
    assert!(sibling > alone + 10, "{alone} alone, {sibling} beside a sibling");
    assert_eq!(stranger, alone);
}

/// Asks several things of an engine at once that has too little memory for them, and compares the text with that of each alone.
pub fn crowd(model: &Path, small: Option<&str>, drafter: DrafterChoice, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut random = Rng::with_seed(seed);
        let mut plain = Engine::open(model, options()).unwrap();
        let vocabulary = plain.model().vocabulary as u32;
        let mut asked: Vec<(Vec<u32>, Generation)> =
            (0..5).map(|_| (prompt(&mut random, vocabulary, &[]), generation(&mut random, vocabulary))).collect();
        let wanted: Vec<Seen> =
            asked.iter().map(|one| answers(&mut plain, std::slice::from_ref(one)).remove(0)).collect();
        for ((_, generation), wanted) in asked.iter_mut().zip(&wanted) {
            generation.prediction = nearly(&mut random, &wanted.tokens, vocabulary);
        }
        let drafts = DraftOptions { governed: random.bool(), drafter, ..always(6) };
        let crowded = Options { drafts, draft_model: small.map(folder), kv_tokens: Some(200), ..options() };
        let mut engine = Engine::open(model, crowded).unwrap();
        let found = answers(&mut engine, &asked);
        for (found, wanted) in found.iter().zip(&wanted) {
            assert_eq!((&found.tokens, found.finish), (&wanted.tokens, wanted.finish), "{drafter:?}, seed {seed}");
        }
    }
}

#[test]
fn nothing_is_computed_again_behind_a_draft_that_was_wrong() {
    for (model, small) in
        [("qwen3", None), ("qwen3_5", None), ("qwen3_next", None), ("nemotron_h", None), ("qwen3_5", Some("qwen3"))]
    {
        let drafter = if small.is_some() { DrafterChoice::Model } else { DrafterChoice::Ngram };
        let mut plain = Engine::open(&folder(model), options()).unwrap();
        let mut engine = Engine::open(&folder(model), with(drafter, small, &options())).unwrap();
        let vocabulary = plain.model().vocabulary as u32;
        let mut rejected = 0;
        for seed in 0..8 {
            let mut random = Rng::with_seed(seed);
            // Of different first tokens, so that no prompt shares anything.
            let prompt: Vec<u32> = (0..20).map(|i| (seed as u32 * 20 + i) % vocabulary).collect();
            let mut generation = Generation { max_tokens: 40, ..Generation::default() };
            let answer = answers(&mut plain, &[(prompt.clone(), generation.clone())]).remove(0);
            generation.prediction = nearly(&mut random, &answer.tokens, vocabulary);
            let (before, id) = (engine.computed_tokens(), engine.add_sequence());
            engine.start(id, &prompt, generation).unwrap();
            while !engine.is_idle() {
                engine.step().unwrap();
            }
            let (counts, computed) = (engine.drafted(id), engine.computed_tokens() - before);
            let (new, wrong) = (prompt.len() - engine.reused_tokens(id).unwrap(), counts.drafted - counts.accepted);
            assert_eq!(computed, (new + answer.tokens.len() - 1) as u64 + wrong, "{model}, seed {seed}: {counts:?}");
            rejected += wrong;
            engine.remove_sequence(id);
        }
        assert!(rejected > 20, "{model}: only {rejected} drafted tokens were wrong");
    }
}

#[test]
fn sequences_that_share_steps_and_too_little_memory_keep_their_text() {
    crowd(&folder("qwen3"), None, DrafterChoice::Ngram, 0..cases(6));
    crowd(&folder("qwen3"), Some("qwen3"), DrafterChoice::Auto, 0..cases(6));
    crowd(&folder("qwen3_5"), Some("qwen3_next"), DrafterChoice::Model, 0..cases(4));
}

#[test]
fn what_was_drafted_is_found_after_a_restart_like_anything_else() {
    let tokens = |engine: &Engine| (0..70).map(|i| i * 31 % engine.model().vocabulary as u32).collect::<Vec<u32>>();
    let mut runs = Vec::new();
    for drafts in [DraftOptions::default(), always(8)] {
        let stored = tempfile::tempdir().unwrap();
        let cache = PromptCacheOptions {
            folder: stored.path().join("cache"),
            quota: Some(256 << 20),
            daily_limit: None,
            min_tokens: 8,
            key_file: None,
            sums_file: None,
            sum_at_start: PromptCacheOptions::SUM_AT_START,
            store: None,
        };
        let open = || {
            let options = Options { drafts, prompt_cache: Some(cache.clone()), ..options() };
            Engine::open(&folder("qwen3"), options).unwrap()
        };
        let mut engine = open();
        let mut text = tokens(&engine);
        let generation = Generation { max_tokens: 50, logprobs: Some(2), ..Generation::default() };
        let first = answers(&mut engine, &[(text.clone(), generation.clone())]).remove(0);
        text.extend(first.tokens.iter().map(|t| t.0));
        engine.save().unwrap();
        drop(engine);
        let mut engine = open();
        let generation = Generation { prediction: text[70..].to_vec(), ..generation };
        let second = answers(&mut engine, &[(text, generation)]).remove(0);
        assert!(second.restored > 0, "nothing was on disk: {second:?}");
        runs.push((first, second));
    }
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn a_small_model_drafts_what_it_would_draw_at_any_temperature() {
    // The same model with the same draws: each draft comes true, but for what the larger one does not draw by its logits alone.
    for temperature in [0.0, 0.7, 1.3] {
        let drafts = DraftOptions { drafter: DrafterChoice::Model, ..always(5) };
        let options = Options { drafts, draft_model: Some(folder("qwen3")), ..options() };
        let mut engine = Engine::open(&folder("qwen3"), options).unwrap();
        let sampling = SamplingParams { temperature, seed: 3, ..SamplingParams::default() };
        let generation = Generation { sampling, max_tokens: 100, ..Generation::default() };
        let seen = answers(&mut engine, &[((1..40).collect(), generation)]);
        let counts = engine.draft_stats()[0].counts;
        assert!(seen[0].tokens.len() == 100 && counts.accepted == counts.drafted, "{temperature}: {counts:?}");
        assert!(counts.drafts * 5 >= counts.drafted && counts.drafts < 25, "{counts:?}");
    }
}

#[test]
fn a_small_model_that_drafted_more_than_steps_take_drafts_for_each_step() {
    // Steps of three tokens: of five drafted ones, which all come true, two are computed.
    let drafts = DraftOptions { drafter: DrafterChoice::Model, ..always(5) };
    let small = Options { drafts, draft_model: Some(folder("qwen3")), ..options() };
    let mut engine = Engine::open(&folder("qwen3"), Options { chunk: Some(3), max_sequences: 1, ..small }).unwrap();
    let generation = Generation { max_tokens: 100, ..Generation::default() };
    let seen = answers(&mut engine, &[((1..40).collect(), generation)]);
    let counts = engine.draft_stats()[0].counts;
    assert!(seen[0].tokens.len() == 100 && counts.accepted == counts.drafted, "{counts:?}");
    assert!(counts.drafts >= 32 && counts.drafted >= 64, "{counts:?}");
}

#[test]
fn a_model_that_cannot_draft_is_refused_by_name() {
    let small = |drafter, draft_model| {
        let drafts = DraftOptions { drafter, ..always(4) };
        Engine::open(&folder("qwen3"), Options { drafts, draft_model, ..options() }).map(|_| ())
    };
    let missing = small(DrafterChoice::Auto, Some("no/such/model".into())).unwrap_err();
    assert!(format!("{missing:#}").starts_with("--draft-model no/such/model: "), "{missing:#}");
    let unnamed = small(DrafterChoice::Model, None).unwrap_err();
    assert!(format!("{unnamed:#}").contains("--draft-model"), "{unnamed:#}");
    small(DrafterChoice::Off, Some("no/such/model".into())).unwrap();
}

/// The demo model, whose tokenizer grammars are made for.
fn demo() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

#[test]
fn grammars_tools_and_budgets_of_thoughts_see_only_what_is_accepted() {
    let text = ModelText::load(demo(), None).unwrap();
    let schema = json!({"type": "object", "required": ["name", "age", "tags"], "additionalProperties": false, "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}}});
    let tool = json!([{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "required": ["city"], "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": false}}}]);
    let formats = [
        ConstraintSpec { format: GrammarFormat::Schema(schema), ..ConstraintSpec::default() },
        ConstraintSpec { format: GrammarFormat::Regex("(ab|ba){3,9}c".into()), ..ConstraintSpec::default() },
        ConstraintSpec {
            called: Some(ToolCallRules { tools: tool, several: false, must: true, strict: vec!["weather".into()] }),
            ..ConstraintSpec::default()
        },
    ];
    let options = Options { max_context: Some(600), ..options() };
    let mut plain = Engine::open(&demo(), options.clone()).unwrap();
    let mut drafting = Engine::open(&demo(), Options { drafts: always(6), ..options }).unwrap();
    let question = "<|im_start|>user\nTell me about a fox.<|im_end|>\n<|im_start|>assistant\n";
    let prompt = text.tokenizer.encode(question, false).unwrap();
    let vocabulary = plain.model().vocabulary as u32;
    for (number, spec) in formats.iter().enumerate() {
        let constraint = Arc::new(Constraint::new(&text, spec, Opened::No).unwrap().unwrap());
        for seed in 0..4 {
            let mut random = Rng::with_seed(seed);
            let temperature = [0.0, 1.0][random.usize(..2)];
            let mut generation = Generation {
                sampling: SamplingParams { temperature, seed, ..SamplingParams::default() },
                max_tokens: 80,
                stop_ids: text.stop_ids.clone(),
                // With them no token is forced.
                logprobs: [None, Some(1)][random.usize(..2)],
                constraint: Some(Arc::clone(&constraint)),
                ..Generation::default()
            };
            let wanted = answers(&mut plain, &[(prompt.clone(), generation.clone())]);
            generation.prediction = nearly(&mut random, &wanted[0].tokens, vocabulary);
            let found = answers(&mut drafting, &[(prompt.clone(), generation)]);
            assert_eq!(found, wanted, "format {number}, seed {seed}");
        }
    }
    assert!(drafting.draft_stats()[0].counts.accepted > 50, "{:?}", drafting.draft_stats());
}
