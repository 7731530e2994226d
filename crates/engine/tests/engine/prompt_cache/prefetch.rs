//! Reading recently used prefixes ahead.

use sluice_engine::{Engine, Event, Options};

use super::{cached, idle};
use crate::support::{ask, folder, generation, tokens};

#[test]
fn what_was_used_last_is_in_memory_after_an_idle_moment() {
    for model in ["qwen3", "qwen3_window", "qwen3_5"] {
        let home = tempfile::tempdir().unwrap();
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| tokens(&engine, 200, 20 + i)).collect();
        let mut first = Vec::new();
        for prompt in &prompts {
            // A state is kept of where it ends.
            ask(&mut engine, &prompt[..180], generation(1));
            engine.save().unwrap();
            first.push(ask(&mut engine, prompt, generation(4)).0);
        }
        engine.save().unwrap();
        drop(engine);
        // 1. Without an idle moment all comes from disk
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        let mut there = Vec::new();
        for (prompt, first) in prompts.iter().zip(&first) {
            let (again, adopted, restored) = ask(&mut engine, prompt, generation(4));
            assert_eq!((&again, restored), (first, adopted), "{model}");
            assert!(adopted > 150, "{model}: {adopted}");
            there.push(adopted);
        }
        drop(engine);
        // 2. After one all is in memory, and the answers are the same
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        idle(&mut engine);
        let read = engine.prompt_cache().unwrap();
        assert!(read.prefetched as usize >= there.iter().sum(), "{model}: {read:?}");
        assert_eq!((engine.evicted().blocks, engine.evicted().snapshots), (0, 0), "{model}");
        for ((prompt, first), there) in prompts.iter().zip(&first).zip(there) {
            let (again, adopted, restored) = ask(&mut engine, prompt, generation(4));
            assert_eq!((&again, restored), (first, 0), "{model}");
            assert!(adopted >= there, "{model}: {adopted} of {there}");
        }
        let status = engine.prompt_cache().unwrap();
        assert_eq!((status.read_bytes, status.wrong), (read.read_bytes, 0), "{model}");
        // 3. What was read is not written again
        engine.save().unwrap();
        let stored = engine.prompt_cache().unwrap().stored;
        assert!(stored <= 3 * 4, "{model}: {stored}");
    }
}

#[test]
fn what_is_read_ahead_leaves_half_of_what_is_free() {
    for model in ["qwen3", "qwen3_5"] {
        let home = tempfile::tempdir().unwrap();
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        let mut block = 0;
        for i in 0..5 {
            let prompt = tokens(&engine, 256, 30 + i);
            ask(&mut engine, &prompt, generation(1));
            // What is written together counts as used together.
            engine.save().unwrap();
            block = engine.kv_cached() / 8 / (i as usize + 1);
        }
        drop(engine);
        // 21 blocks, of which each prompt takes eight.
        let options = Options { kv_tokens: Some(21 * 32), ..cached(home.path()) };
        let mut engine = Engine::open(&folder(model), options).unwrap();
        idle(&mut engine);
        let (kept, snapshots) = (engine.kv_cached() / block, engine.snapshots());
        assert!((8..=10).contains(&kept), "{model}: {kept} blocks");
        assert!(snapshots <= 9, "{model}: {snapshots} states");
        assert_eq!(engine.evicted().blocks, 0);
        // It is the prompt that was used last.
        let prompt = tokens(&engine, 256, 34);
        let (_, adopted, restored) = ask(&mut engine, &prompt, generation(1));
        assert!(adopted > 200 && restored == 0 || model == "qwen3_5", "{model}: {adopted}, {restored}");
    }
}

#[test]
fn a_request_comes_before_what_is_read_ahead() {
    for model in ["qwen3", "qwen3_window", "qwen3_5"] {
        let home = tempfile::tempdir().unwrap();
        let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
        let (prompt, other) = (tokens(&engine, 600, 1), tokens(&engine, 10, 2));
        ask(&mut engine, &prompt[..590], generation(1));
        engine.save().unwrap();
        let (first, ..) = ask(&mut engine, &prompt, generation(4));
        let (second, ..) = ask(&mut engine, &other, generation(4));
        engine.save().unwrap();
        drop(engine);
        // However far reading ahead has come.
        for portions in 0..12 {
            let mut engine = Engine::open(&folder(model), cached(home.path())).unwrap();
            (0..portions).for_each(|_| _ = engine.prefetch().unwrap());
            let id = engine.add_sequence();
            engine.start(id, &other, generation(4)).unwrap();
            let events = engine.step().unwrap().to_vec();
            assert!(events.iter().any(|e| matches!(e, Event::Token { .. })), "{model}, {portions}: {events:?}");
            while !engine.is_idle() {
                assert!(!engine.prefetch().unwrap(), "somebody generates");
                engine.step().unwrap();
            }
            assert_eq!(engine.tokens(id).unwrap()[other.len()..], second.tokens);
            engine.remove_sequence(id);
            // Who asks for just what is being read has all of it, too, from wherever it comes.
            (0..portions).for_each(|_| _ = engine.prefetch().unwrap());
            let (again, adopted, _) = ask(&mut engine, &prompt, generation(4));
            assert_eq!(again, first, "{model}, {portions}");
            assert!(adopted >= 576, "{model}, {portions}: {adopted}");
            // The rest is read when there is nothing else to do.
            idle(&mut engine);
            let (again, _, restored) = ask(&mut engine, &prompt, generation(4));
            assert_eq!((&again, restored), (&first, 0), "{model}, {portions}");
            assert_eq!(engine.prompt_cache().unwrap().wrong, 0);
        }
    }
}
