//! Changed weights are another model, also when they are summed in the background.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use sluice_engine::{Checkpoint, Engine, Options, PromptCacheOptions};

use super::{cached, cold};
use crate::support::{ask, folder, generation, tokens};

/// A copy of the demo model: one file of 30 MB.
fn copy_of_demo(home: &Path) -> PathBuf {
    let copy = home.join("model");
    fs::create_dir_all(&copy).unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(folder("../../models/demo").join(name), copy.join(name)).unwrap();
    }
    copy
}

/// Gives a tensor of a model other bytes, in place.
fn change(model: &Path, name: &str) {
    let checkpoint = Checkpoint::open(model).unwrap();
    let (file, offset) = checkpoint.place(name).unwrap();
    let mut bytes = checkpoint.tensor(name).unwrap().bytes.to_vec();
    // Of brain floats, little-endian, the sign and the mantissa; of packed weights half of the bits.
    bytes.iter_mut().step_by(2).for_each(|b| *b ^= 0x0f);
    let file = File::options().write(true).open(model.join(file)).unwrap();
    file.write_all_at(&bytes, offset).unwrap();
}

/// Options with which weights are summed in the background; or not.
fn summing(home: &Path, at_once: u64) -> Options {
    let mut options = cached(home);
    options.prompt_cache.as_mut().unwrap().sum_at_start = at_once;
    options
}

/// Until all is summed.
fn summed(engine: &Engine) {
    while engine.prompt_cache().unwrap().summing.is_some() {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn weights_that_were_changed_in_place_find_nothing_of_what_was() {
    for at_once in [PromptCacheOptions::SUM_AT_START, 0] {
        let home = tempfile::tempdir().unwrap();
        let model = copy_of_demo(home.path());
        let open = || {
            let engine = Engine::open(&model, summing(home.path(), at_once)).unwrap();
            summed(&engine);
            engine
        };
        let mut engine = open();
        let prompt = tokens(&engine, 300, 1);
        ask(&mut engine, &prompt[..200], generation(1));
        engine.save().unwrap();
        let (first, ..) = ask(&mut engine, &prompt, generation(8));
        engine.save().unwrap();
        drop(engine);
        // 1. What is not the model's changes nothing
        fs::write(model.join("other.safetensors"), "of no use").unwrap();
        let (again, _, restored) = ask(&mut open(), &prompt, generation(8));
        assert_eq!((again, restored), (first, 200));
        // 2. What is does, however small it is
        let mut before = ask(&mut Engine::open(&model, cold()).unwrap(), &prompt, generation(8)).0;
        for tensor in ["v_proj.weight", "k_proj.scales", "q_norm.weight"] {
            change(&model, &format!("language_model.model.layers.3.self_attn.{tensor}"));
            let mut engine = open();
            let (answer, adopted, restored) = ask(&mut engine, &prompt, generation(8));
            assert_eq!((adopted, restored), (0, 0), "{tensor}");
            drop(engine);
            let cold = ask(&mut Engine::open(&model, cold()).unwrap(), &prompt, generation(8)).0;
            assert!(answer == cold && cold != before, "{tensor}");
            before = cold;
        }
    }
}

#[test]
fn a_file_that_changes_while_it_is_summed_has_no_entries_and_no_sum() {
    for is_renamed in [true, false] {
        let home = tempfile::tempdir().unwrap();
        let model = copy_of_demo(home.path());
        let path = model.join("model.safetensors");
        // Summing waits a few seconds for a file that was changed just now: the change below comes in time.
        File::options().write(true).open(&path).unwrap().set_modified(SystemTime::now()).unwrap();
        let mut engine = Engine::open(&model, summing(home.path(), 0)).unwrap();
        let tensor = "language_model.model.layers.3.self_attn.v_proj.weight";
        let prompt = tokens(&engine, 300, 1);
        if is_renamed {
            let other = copy_of_demo(&home.path().join("other"));
            change(&other, tensor);
            fs::rename(other.join("model.safetensors"), &path).unwrap();
        } else {
            change(&model, tensor);
        }
        assert!(engine.prompt_cache().unwrap().summing.is_some());
        // 1. The engine goes on with the file that it opened, and stores nothing of it
        if is_renamed {
            ask(&mut engine, &prompt, generation(1));
        }
        summed(&engine);
        engine.save().unwrap();
        let status = engine.prompt_cache().unwrap();
        assert!(status.broken.as_ref().is_some_and(|why| why.contains("changed or replaced")), "{status:?}");
        assert_eq!((status.stored, status.entries), (0, 0), "{status:?}");
        drop(engine);
        // 2. No sum was remembered, neither for the old file nor for the new one
        let mut engine = Engine::open(&model, summing(home.path(), 0)).unwrap();
        assert_eq!(engine.prompt_cache().unwrap().summing, Some((0, fs::metadata(&path).unwrap().len())));
        summed(&engine);
        let (answer, adopted, restored) = ask(&mut engine, &prompt, generation(8));
        assert_eq!((adopted, restored), (0, 0));
        drop(engine);
        assert_eq!(answer, ask(&mut Engine::open(&model, cold()).unwrap(), &prompt, generation(8)).0);
    }
}

#[test]
fn an_engine_serves_while_its_weights_are_summed_and_keeps_what_it_computed_then() {
    let home = tempfile::tempdir().unwrap();
    let model = copy_of_demo(home.path());
    let mut engine = Engine::open(&model, summing(home.path(), 0)).unwrap();
    let notes = engine.take_prompt_cache_notes();
    assert!(notes.len() == 1 && notes[0].contains("30.0 MB of the model are summed in the background"), "{notes:?}");
    // 1. Whether it has ended or not by now, nothing waits for it
    let prompt = tokens(&engine, 300, 1);
    ask(&mut engine, &prompt[..200], generation(1));
    summed(&engine);
    engine.save().unwrap();
    let (first, ..) = ask(&mut engine, &prompt, generation(8));
    engine.save().unwrap();
    let status = engine.prompt_cache().unwrap();
    assert!(status.stored > 5 && status.broken.is_none(), "{status:?}");
    drop(engine);
    // 2. It is not done twice
    let mut engine = Engine::open(&model, summing(home.path(), 0)).unwrap();
    assert_eq!(engine.take_prompt_cache_notes(), Vec::<String>::new());
    assert_eq!(engine.prompt_cache().unwrap().summing, None);
    let (again, _, restored) = ask(&mut engine, &prompt, generation(8));
    assert_eq!((again, restored), (first, 200));
}
