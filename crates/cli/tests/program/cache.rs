//! `sluice cache`: what it reports about a prompt cache, and what it changes in one.

use crate::support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use sluice_cache::disk::{DiskCache, FileKey, NewEntry, Settings};
use support::*;
use tempfile::TempDir;

const MODELS: [u64; 2] = [0xabc, 0xdef];

/// Two models: ten blocks of the first, found twice, and two of the second, about which nothing is known.
fn fill(folder: &Path, key: Option<FileKey>) {
    let settings = Settings { quota: Some(32 << 20), key, ..Settings::default() };
    let mut cache = DiskCache::open_folder(folder, settings).unwrap();
    for (model, blocks) in MODELS.into_iter().zip([10u8, 2]) {
        for i in 0..blocks {
            let (hash, before) = ([i + 1; 16], [i; 16]);
            let part = vec![i; 50_000];
            let parts: &[(u32, &[u8])] = &[(0, &part)];
            let new = NewEntry { hash, before, position: 32 * u32::from(i), tokens: &[7; 32], parts };
            assert_eq!(cache.store(model, &[new]).unwrap().new, 1);
        }
    }
    cache.note_model(MODELS[0], "qwen\u{1b}[31m", "/models/qwen").unwrap();
    let path: Vec<_> = (1..=10).map(|i| (MODELS[0], [i; 16])).collect();
    cache.touch(&path).unwrap();
    cache.touch(&path[..5]).unwrap();
}

#[test]
fn models_are_listed_with_their_sizes_and_hits() {
    let dir = TempDir::new().unwrap();
    fill(dir.path(), None);
    let folder = text(dir.path());
    let found = json(output(&["cache", "ls", &folder, "--json"]));
    let models = found["models"].as_array().unwrap();
    assert_eq!(models.len(), 2);
    let first = &models[0];
    assert_eq!(
        (first["fingerprint"].as_str(), first["path"].as_str()),
        (Some("0000000000000abc"), Some("/models/qwen"))
    );
    assert_eq!((first["entries"].as_u64(), first["tokens"].as_u64()), (Some(10), Some(320)));
    assert_eq!((first["hits"].as_u64(), first["bytes"].as_u64()), (Some(2), Some(10 * 57_344)));
    assert!(first["last_hit"].as_u64().unwrap() > 1_600_000_000 && models[1]["last_hit"].is_null());
    let listed = success(output(&["cache", "ls", &folder]));
    assert!(
        listed.contains(r"qwen\u{1b}[31m") && listed.contains("(unknown)") && !listed.contains('\u{1b}'),
        "{listed}"
    );
    let stat = json(output(&["cache", "stat", &folder, "--json"]));
    assert_eq!((stat["entries"].as_u64(), stat["quota"].as_u64()), (Some(12), Some(32 << 20)));
    assert_eq!((stat["encrypted"].as_bool(), stat["written_today"].as_u64()), (Some(false), Some(12 * 57_344)));
    let on_disk: u64 = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(stat["bytes"].as_u64().unwrap().abs_diff(on_disk) < 100_000, "{stat} {on_disk}");
    assert!(success(output(&["cache", "stat", &folder])).contains("of 33.6 MB"));
}

#[test]
fn what_is_not_right_is_said_and_removed() {
    let dir = TempDir::new().unwrap();
    fill(dir.path(), None);
    let folder = text(dir.path());
    assert!(success(output(&["cache", "verify", &folder])).starts_with("12 entries, "));
    let slab = dir.path().join("00000000.slab");
    let mut bytes = fs::read(&slab).unwrap();
    // The slot of the fifth block; the blocks after it become unreachable.
    bytes[4 * 57_344 + 5] ^= 1;
    fs::write(&slab, bytes).unwrap();
    assert_refused(&output(&["cache", "verify", &folder]), &[&folder, "1 of 12 entries were not right"]);
    let found = json(output(&["cache", "verify", &folder, "--json"]));
    assert_eq!((found["entries"].as_u64(), found["wrong"].as_u64()), (Some(6), Some(0)));
    let gone = json(output(&["cache", "gc", &folder, "--json"]));
    assert_eq!((gone["removed"].as_u64(), gone["bytes"].is_u64()), (Some(0), true));
    assert_eq!(json(output(&["cache", "stat", &folder, "--json"]))["entries"], 6);
}

#[test]
fn a_damaged_index_is_an_error_of_the_file_and_no_mistake_of_the_program() {
    let dir = TempDir::new().unwrap();
    fill(dir.path(), None);
    let [index, clean] = ["index.redb", "clean"].map(|name| dir.path().join(name));
    let whole = fs::read(&index).unwrap();
    let used: Vec<usize> = (0..whole.len()).step_by(4096).filter(|at| whole[*at..][..4096] != [0; 4096]).collect();
    for seed in 0..24 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = whole.clone();
        let from = used[random.usize(..used.len())];
        (0..1 << random.u8(..10)).for_each(|_| bytes[from + random.usize(..4096)] = random.u8(..));
        fs::write(&index, bytes).unwrap();
        // Otherwise its checksums alone would reveal it.
        let _ = fs::remove_file(&clean);
        let found = output(&["cache", "stat", &text(dir.path())]);
        assert!(!stderr(&found).contains("mistake"), "seed {seed}: {}", stderr(&found));
        assert!(matches!(found.status.code(), Some(0 | 2)), "seed {seed}: {found:?}");
    }
}

#[test]
fn an_encrypted_cache_wants_its_key_but_not_to_be_cleared() {
    let dir = TempDir::new().unwrap();
    let (cache, key, other) = (dir.path().join("c"), dir.path().join("key"), dir.path().join("other"));
    for (path, text) in [(&key, "0123456789abcdef".repeat(4)), (&other, "f".repeat(64))] {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }
    fill(&cache, Some(FileKey::read(&key).unwrap()));
    let [folder, key, other] = [&cache, &key, &other].map(|p| text(p));
    assert_refused(&output(&["cache", "ls", &folder]), &[&folder, "is encrypted"]);
    assert_refused(&output(&["cache", "verify", &folder, "--key-file", &other]), &["another key"]);
    let found = json(output(&["cache", "verify", &folder, "--key-file", &key, "--json"]));
    assert_eq!((found["entries"].as_u64(), found["wrong"].as_u64()), (Some(12), Some(0)));
    fs::set_permissions(&other, fs::Permissions::from_mode(0o644)).unwrap();
    assert_refused(&output(&["cache", "ls", &folder, "--key-file", &other]), &[&other, "chmod 600"]);
    assert!(success(output(&["cache", "clear", &folder])).contains("cleared"));
    let left: Vec<_> = fs::read_dir(&cache).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"]);
}

#[test]
fn a_folder_that_is_none_or_in_use_is_refused_but_to_those_who_look() {
    let dir = TempDir::new().unwrap();
    for command in ["ls", "stat", "verify", "gc", "clear"] {
        assert_refused(&output(&["cache", command, &text(dir.path())]), &["no prompt cache"]);
        assert_refused(&output(&["cache", command, "/nowhere"]), &["/nowhere: no prompt cache"]);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let cache = DiskCache::open_folder(dir.path(), Settings::default()).unwrap();
    assert_refused(&output(&["cache", "clear", &text(dir.path())]), &["in use by another process"]);
    let looked = output(&["cache", "ls", &text(dir.path())]);
    assert!(stderr(&looked).contains("in use by another process"), "{}", stderr(&looked));
    assert!(success(looked).contains("the cache is empty"));
    drop(cache);
    let filled = dir.path().join("filled");
    fill(&filled, None);
    let alone = json(output(&["cache", "stat", &text(&filled), "--json"]));
    let cache = DiskCache::open_existing(&filled, None).unwrap();
    let mut beside = json(output(&["cache", "stat", &text(&filled), "--json"]));
    assert_eq!((alone["in_use"].as_bool(), beside["in_use"].as_bool()), (Some(false), Some(true)));
    for key in ["in_use", "bytes"] {
        beside[key] = alone[key].clone();
    }
    assert_eq!(alone, beside);
    drop(cache);
    assert!(success(output(&["cache", "ls", &text(dir.path())])).contains("the cache is empty"));
}

#[test]
fn help_has_examples_and_the_default_folder_is_the_users() {
    let help = success(output(&["cache", "--help"]));
    assert!(help.contains("sluice cache verify") && help.contains("Examples"), "{help}");
    let home = TempDir::new().unwrap();
    fill(&home.path().join("sluice/prompt-cache"), None);
    let found = sluice(&["cache", "stat", "--json"]).env("XDG_CACHE_HOME", home.path()).output().unwrap();
    assert_eq!(json(found)["entries"], 12);
}
