//! The prompt cache on disk: what an engine has computed is taken up by one that begins anew, and whatever is taken up, the answers and logits are those of one
//! that computes all of it.

use crate::support;

mod prefetch;
mod shared;
mod weights;

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use sluice_engine::{Activations, AttentionMode, Engine, Event, KvType, Options, PromptCacheOptions};
use support::{Answer, KINDS, MODELS, ask, folder, generation, tokens};

fn cached(cache: &Path) -> Options {
    Options {
        threads: 2,
        max_context: Some(2048),
        max_sequences: 2,
        snapshots: 16,
        prompt_cache: Some(PromptCacheOptions {
            folder: cache.join("cache"),
            quota: Some(256 << 20),
            daily_limit: None,
            min_tokens: 16,
            key_file: None,
            sums_file: Some(cache.join("sums.json")),
            sum_at_start: PromptCacheOptions::SUM_AT_START,
            store: None,
        }),
        ..Options::for_this_machine().unwrap()
    }
}

/// Until there is nothing to do.
fn idle(engine: &mut Engine) {
    while engine.flush_idle().unwrap() || engine.prefetch().unwrap() {}
}

fn cold() -> Options {
    Options { prompt_cache: None, prefix_cache: false, snapshots: 0, ..cached(Path::new("")) }
}

#[test]
fn an_engine_that_begins_anew_goes_on_where_another_ended() {
    let home = tempfile::tempdir().unwrap();
    let model = folder("qwen3");
    let mut engine = Engine::open(&model, cached(home.path())).unwrap();
    assert_eq!(engine.take_prompt_cache_notes(), Vec::<String>::new());
    let prompt = tokens(&engine, 300, 1);
    let (first, adopted, restored) = ask(&mut engine, &prompt, generation(8));
    assert_eq!((adopted, restored), (0, 0));
    engine.save().unwrap();
    assert!(engine.prompt_cache().unwrap().stored >= 9);
    drop(engine);
    let mut engine = Engine::open(&model, cached(home.path())).unwrap();
    let (again, adopted, restored) = ask(&mut engine, &prompt, generation(8));
    assert_eq!((adopted, restored), (299, 299));
    assert_eq!(again, first);
    let (third, adopted, restored) = ask(&mut engine, &prompt, generation(8));
    assert_eq!((third, adopted, restored), (first, 299, 0));
}

/// A first engine computes prompts that begin alike and is thrown away at some point; a second one is asked for others that part from them somewhere.
fn parts_anywhere(
    model: &str,
    kind: (KvType, AttentionMode),
    length: usize,
    cut: usize,
    mark: usize,
    block_tokens: usize,
) {
    let home = tempfile::tempdir().unwrap();
    let (kv_type, attention) = (Some(kind.0), kind.1);
    let options = Options { kv_type, attention, block_tokens, ..cached(home.path()) };
    let mut first = Engine::open(&folder(model), options.clone()).unwrap();
    let mut prompt = tokens(&first, length, 3);
    // The newest states are kept: of this one, that at its end.
    ask(&mut first, &prompt[..mark], generation(1));
    first.save().unwrap();
    ask(&mut first, &prompt, generation(3));
    first.save().unwrap();
    drop(first);
    let mut second = Engine::open(&folder(model), options.clone()).unwrap();
    let words = second.model().vocabulary as u32;
    prompt[cut..].iter_mut().for_each(|t| *t = (*t + 1) % words);
    let (answer, adopted, restored) = ask(&mut second, &prompt, generation(3));
    let what = format!("{model}, {kind:?}, {length} tokens, cut at {cut}, state at {mark}, blocks of {block_tokens}");
    let known = match second.model().state_len() {
        0 => cut,
        _ if mark <= cut => mark,
        _ => 0,
    };
    // Less than that is not looked for.
    let expected = if length > 16 && known >= 16 { known } else { 0 };
    assert_eq!((adopted, restored), (expected, expected), "{what}");
    let mut cold = Engine::open(&folder(model), Options { kv_type, attention, block_tokens, ..cold() }).unwrap();
    assert_eq!(answer, ask(&mut cold, &prompt, generation(3)).0, "{what}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_restored_prefix_gives_the_bits_of_a_cold_run(
        model in 0..MODELS.len(), kind in 0..KINDS.len(), length in 2usize..300, cut in 0.0..1.0, mark in 0.0..1.0, small in any::<bool>()
    ) {
        let (cut, mark) = ((cut * (length - 1) as f64) as usize, 1 + (mark * (length - 1) as f64) as usize);
        parts_anywhere(MODELS[model], KINDS[kind], length, cut, mark, if small { 8 } else { 32 });
    }
}

/// All slabs of a cache.
fn slabs(home: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(home.join("cache")).unwrap().map(|e| e.unwrap().path());
    all.filter(|p| p.extension().is_some_and(|e| e == "slab")).collect()
}

/// Models of each kind of cache: with windows, recurrent states, latent rows, keys of indexers, layers that share keys.
const CACHED: [&str; 12] = [
    "qwen3",
    "qwen3_window",
    "qwen3_5",
    "deepseek_v3",
    "deepseek_v32",
    "granitemoehybrid_mamba",
    "kimi_linear",
    "kimi_k3",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp",
    "gemma4_per_layer",
];

#[test]
fn a_flipped_bit_on_disk_is_computed_instead() {
    for model in CACHED {
        let home = tempfile::tempdir().unwrap();
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        let prompt = tokens(&engine, 200, 2);
        ask(&mut engine, &prompt[..180], generation(1));
        let (first, ..) = ask(&mut engine, &prompt, generation(4));
        engine.save().unwrap();
        drop(engine);
        // One bit of each slot, wherever it is: slots are of whole pages, and what lies behind the last one is nobody's.
        let mut random = fastrand::Rng::with_seed(5);
        for slab in slabs(home.path()) {
            let mut bytes = fs::read(&slab).unwrap();
            let page = 4096;
            (0..bytes.len() / page).for_each(|i| bytes[i * page + random.usize(..page)] ^= 1 << random.u32(..8));
            fs::write(&slab, bytes).unwrap();
        }
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        let (again, adopted, restored) = ask(&mut engine, &prompt, generation(4));
        assert_eq!((&again, adopted, restored), (&first, 0, 0), "{model}");
        let status = engine.prompt_cache().unwrap();
        assert!(status.wrong > 0 && status.broken.is_none(), "{status:?}");
        engine.save().unwrap();
        let notes = engine.take_prompt_cache_notes();
        assert!(notes.iter().any(|n| n.contains("lost an entry")), "{notes:?}");
        drop(engine);
        // What was looked at was written anew, the rest when it is: in the end the conversation goes on from disk again.
        let (mut whole, mut answer, mut restored) = (prompt, first, 0);
        for _ in 0..4 {
            whole.extend(answer.tokens.iter().chain(&[1, 2, 3]));
            let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
            (answer, _, restored) = ask(&mut engine, &whole, generation(4));
            engine.save().unwrap();
        }
        assert!(restored > 150, "{model}: {restored}");
    }
}

#[test]
fn what_memory_has_no_room_for_is_found_on_disk() {
    for model in CACHED {
        let home = tempfile::tempdir().unwrap();
        // Two prompts of five fit.
        let options = Options { kv_tokens: Some(700), snapshots: 2, ..cached(home.path()) };
        let mut engine = Engine::open(&folder(model), options).unwrap();
        let prompts: Vec<Vec<u32>> = (0..5).map(|i| tokens(&engine, 256, 10 + i)).collect();
        let first = prompts.iter().map(|p| {
            // States are on disk of where conversations ended.
            ask(&mut engine, &p[..p.len() - 20], generation(1));
            engine.save().unwrap();
            ask(&mut engine, p, generation(4)).0
        });
        let first: Vec<Answer> = first.collect();
        let (mut there, mut on_disk) = (0, 0);
        for _ in 0..3 {
            for (prompt, first) in prompts.iter().zip(&first) {
                // Somebody is idle long enough for all to be written.
                engine.save().unwrap();
                let (again, adopted, restored) = ask(&mut engine, prompt, generation(4));
                assert_eq!(again, *first, "{model}");
                there += usize::from(adopted > 200);
                on_disk += restored;
            }
        }
        assert!(there == 15 && on_disk > 1000, "{model}: {there}, {on_disk} tokens");
    }
}

#[test]
fn others_go_on_while_a_prefix_is_read() {
    let home = tempfile::tempdir().unwrap();
    let mut engine = Engine::open(&folder("qwen3"), cached(home.path())).unwrap();
    let (prompt, other) = (tokens(&engine, 1500, 1), tokens(&engine, 10, 2));
    let (first, ..) = ask(&mut engine, &prompt, generation(4));
    engine.save().unwrap();
    drop(engine);
    let mut engine = Engine::open(&folder("qwen3"), cached(home.path())).unwrap();
    let (long, short) = (engine.add_sequence(), engine.add_sequence());
    engine.start(long, &prompt, generation(4)).unwrap();
    engine.start(short, &other, generation(4)).unwrap();
    // The one that came later, for which nothing is looked for, is not held up by what the first waits for.
    let events = engine.step().unwrap().to_vec();
    assert!(events.iter().any(|e| e.id() == short), "{events:?}");
    let mut answer = Vec::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            if let Event::Token { id, token } = event
                && *id == long
            {
                answer.push(*token);
            }
        }
    }
    assert_eq!((answer, engine.restored_tokens(long).unwrap()), (first.tokens, 1499));
}

#[test]
fn a_session_is_there_whatever_happens_after_it_was_said_to_be_saved() {
    for model in ["qwen3", "qwen3_5"] {
        let home = tempfile::tempdir().unwrap();
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        let prompt = tokens(&engine, 300, 1);
        let save = |engine: &mut Engine, name: &str, prompt: &[u32]| {
            ask(engine, prompt, generation(1));
            let (tell, told) = std::sync::mpsc::channel();
            engine.save_session(name.into(), b"", prompt, Box::new(move |saved| tell.send(saved).unwrap()));
            while engine.flush_sessions().unwrap() {
                std::thread::yield_now();
            }
            told.recv().unwrap()
        };
        let session = save(&mut engine, "fox", &prompt).unwrap();
        assert_eq!((session.name.as_str(), session.tokens), ("fox", 300), "{model}");
        for (name, length, part) in
            [("a/b", 300, "name"), ("", 300, "name"), ("short", 10, "--prompt-cache-min-tokens")]
        {
            let refused = save(&mut engine, name, &prompt[..length]).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
        // 1. What lies on the disk now, as a crash would leave it
        let after = tempfile::tempdir().unwrap();
        fs::create_dir(after.path().join("cache")).unwrap();
        for file in fs::read_dir(home.path().join("cache")).unwrap().map(Result::unwrap) {
            fs::copy(file.path(), after.path().join("cache").join(file.file_name())).unwrap();
        }
        let mut again = Engine::open(&folder(model), cached(after.path())).unwrap();
        let sessions = again.sessions().unwrap();
        assert_eq!(sessions.list(b"").unwrap(), [session]);
        let loaded = sessions.load(b"", "fox").unwrap().unwrap();
        assert_eq!(loaded.tokens, prompt);
        assert!(sessions.load(b"", "no fox").unwrap().is_none());
        // With another salt it is nobody's
        assert!(sessions.list(b"other").unwrap().is_empty());
        assert!(sessions.load(b"other", "fox").unwrap().is_none() && !sessions.delete(b"other", "fox").unwrap());
        again.read_ahead(loaded.ahead);
        idle(&mut again);
        let mut whole = prompt.clone();
        whole.extend([1, 2, 3]);
        let (answer, adopted, restored) = ask(&mut again, &whole, generation(3));
        assert_eq!((adopted, restored), (300, 0), "{model}");
        assert_eq!(answer, ask(&mut engine, &whole, generation(3)).0, "{model}");
        // 2. Without its name it is no session any more
        assert!(sessions.delete(b"", "fox").unwrap() && !sessions.delete(b"", "fox").unwrap());
        assert!(sessions.list(b"").unwrap().is_empty());
        drop(again);
        assert!(sessions.list(b"").is_err() && sessions.delete(b"", "fox").is_err());
    }
}

#[test]
fn a_cache_in_use_or_gone_is_said_once_and_done_without() {
    let home = tempfile::tempdir().unwrap();
    let mut owner = Engine::open(&folder("qwen3"), cached(home.path())).unwrap();
    let mut other = Engine::open(&folder("qwen3"), cached(home.path())).unwrap();
    let notes = other.take_prompt_cache_notes();
    assert!(notes.len() == 1 && notes[0].contains("in use by another process"), "{notes:?}");
    assert_eq!((other.prompt_cache(), other.take_prompt_cache_notes()), (None, vec![]));
    let prompt = tokens(&owner, 300, 1);
    let (first, ..) = ask(&mut other, &prompt, generation(4));
    // Somebody removes it all.
    fs::remove_dir_all(home.path().join("cache")).unwrap();
    assert_eq!(ask(&mut owner, &prompt, generation(4)).0, first);
    owner.save().unwrap();
    let (again, ..) = ask(&mut owner, &prompt, generation(4));
    assert_eq!(again, first);
    owner.save().unwrap();
    assert!(owner.take_prompt_cache_notes().len() <= 1);
}

#[test]
fn another_salt_or_another_choice_finds_nothing() {
    let home = tempfile::tempdir().unwrap();
    let mut engine = Engine::open(&folder("qwen3"), cached(home.path())).unwrap();
    let prompt = tokens(&engine, 300, 1);
    ask(&mut engine, &prompt, generation(4));
    engine.save().unwrap();
    drop(engine);
    let mut salted = Engine::open(&folder("qwen3"), cached(home.path())).unwrap();
    let id = salted.add_sequence_salted(b"somebody else");
    salted.start(id, &prompt, generation(1)).unwrap();
    while !salted.is_idle() {
        salted.step().unwrap();
    }
    assert_eq!((salted.reused_tokens(id).unwrap(), salted.restored_tokens(id).unwrap()), (0, 0));
    drop(salted);
    for options in [
        Options { kv_type: Some(KvType::Int8), ..cached(home.path()) },
        Options { kv_type: Some(KvType::Int16), ..cached(home.path()) },
        Options { activations: Activations::Bf16, ..cached(home.path()) },
        Options { block_tokens: 16, ..cached(home.path()) },
    ] {
        let mut engine = Engine::open(&folder("qwen3"), options).unwrap();
        assert_eq!(ask(&mut engine, &prompt, generation(1)).1, 0);
    }
    // What changes no bit changes nothing here.
    let mut engine = Engine::open(&folder("qwen3"), Options { threads: 1, ..cached(home.path()) }).unwrap();
    assert_eq!(ask(&mut engine, &prompt, generation(1)).2, 299);
}
