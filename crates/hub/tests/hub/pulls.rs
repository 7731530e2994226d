//! What is fetched, and what the cache looks like afterwards.

use std::fs;
use std::sync::Arc;
use std::thread;

use sluice_hub::{Client, Error, Extent, Url, find, pull};
use sluice_test_hub::{Content, sha256};

use crate::support::*;

#[test]
fn a_model_is_what_its_index_names_and_lies_as_in_hugging_faces_cache() {
    let place = Place::new();
    let files = place.add_safetensors("org/name");
    assert!(place.find("org/name").is_none());
    let heard = Heard::default();
    let model = place.pull_with("org/name", &heard).unwrap();
    assert_files(&model, &model.path, &files);
    assert_eq!(
        (model.bytes(), model.fetched),
        (files.iter().map(|(_, c)| c.size()).sum(), heard.planned.borrow().unwrap().0)
    );
    let folder = place.cache().join("models--org--name");
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), model.commit);
    assert_eq!(model.path, folder.join("snapshots").join(&model.commit));
    let link = fs::read_link(model.path.join("model-00001-of-00002.safetensors")).unwrap();
    assert_eq!(link.to_str().unwrap(), format!("../../blobs/{}", sha256(&files[3].1)));
    assert!(place.cache().join(format!(".locks/models--org--name/{}.lock", sha256(&files[3].1))).is_file());
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
    // Pickles and cards are not fetched.
    assert_eq!(fs::read_dir(&model.path).unwrap().count(), files.len());
    // It is there now, without a request.
    place.hub.requests();
    assert_eq!(place.find("org/name").unwrap().path, model.path);
    assert!(place.hub.requests().is_empty());
    // Asking again costs one request, and finds nothing to fetch.
    assert_eq!(place.pull("org/name").unwrap().fetched, 0);
    assert_eq!(place.hub.requests().len(), 1);
}

#[test]
fn one_quantisation_is_fetched_and_another_later_beside_it() {
    let place = Place::new();
    let [q4, q8] = [6, 7].map(|seed| Content::random(seed, 3 << 20));
    let parts = [8, 9].map(|seed| Content::random(seed, 2 << 20));
    place.hub.commit(
        "org/m-GGUF",
        &[
            ("m-Q4_K_M.gguf", q4.clone()),
            ("m-Q8_0.gguf", q8.clone()),
            ("mmproj-F16.gguf", Content::random(10, 1 << 20)),
            ("UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf", parts[0].clone()),
            ("UD-Q2_K_XL/m-UD-Q2_K_XL-00002-of-00002.gguf", parts[1].clone()),
        ],
    );
    let usual = place.pull("org/m-GGUF").unwrap();
    assert_eq!((&*usual.name, fs::read(&usual.path).unwrap() == q4.bytes()), ("org/m-GGUF:Q4_K_M", true));
    assert!(place.find("org/m-GGUF:q8_0").is_none());
    let other = place.pull("org/m-GGUF:q8_0").unwrap();
    assert_eq!((&*other.name, fs::read(&other.path).unwrap() == q8.bytes()), ("org/m-GGUF:Q8_0", true));
    let split = place.pull("org/m-GGUF:ud-q2_k_xl").unwrap();
    assert!(split.path.ends_with("UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf"));
    let link = fs::read_link(&split.path).unwrap();
    assert_eq!(link.to_str().unwrap(), format!("../../../blobs/{}", sha256(&parts[0])));
    assert_eq!(place.find("org/m-GGUF").unwrap().name, "org/m-GGUF:Q4_K_M");
    let miss = place.refused("org/m-GGUF:Q3_K_S");
    assert!(miss.contains("org/m-GGUF: there is no Q3_K_S; quantisations: Q4_K_M, Q8_0, UD-Q2_K_XL"), "{miss}");
}

#[test]
fn a_new_commit_shares_what_did_not_change() {
    let place = Place::new();
    let files = place.add_safetensors("org/name");
    let old = place.pull("org/name").unwrap();
    let new_config: Content = r#"{"model_type": "qwen3"}"#.into();
    let commit = place.hub.commit("org/name", &[("config.json", new_config.clone())]);
    // The cache answers until somebody asks for what is new.
    assert_eq!(place.find("org/name").unwrap().commit, old.commit);
    let new = place.pull("org/name").unwrap();
    assert_eq!((&new.commit, new.fetched), (&commit, new_config.size()));
    let expected: Vec<_> =
        files.iter().map(|(n, c)| (*n, if *n == "config.json" { new_config.clone() } else { c.clone() })).collect();
    assert_files(&new, &new.path, &expected);
    // The old one can still be named by its commit.
    let named = place.find(&format!("org/name@{}", old.commit)).unwrap();
    assert_files(&named, &named.path, &files);
    assert!(place.pull(&format!("org/name@{}", old.commit)).unwrap().path == old.path);
    assert!(place.refused("org/name@v9").contains("no such revision (v9)"));
}

#[test]
fn an_unfinished_new_commit_does_not_hide_the_old_one() {
    let place = Place::new();
    place.add_safetensors("org/name");
    let old = place.pull("org/name").unwrap();
    place.hub.commit("org/name", &[("model-00001-of-00002.safetensors", Content::random(77, LARGE))]);
    place.hub.faults(|f| f.bytes_status = Some((404, u32::MAX, None)));
    place.pull("org/name").unwrap_err();
    assert_eq!(place.find("org/name").unwrap().commit, old.commit);
}

#[test]
fn sizes_and_sums_may_come_from_the_files_themselves() {
    let place = Place::new();
    let files = place.add_safetensors("org/name");
    place.hub.faults(|f| f.bare_list = true);
    let model = place.pull("org/name").unwrap();
    assert_files(&model, &model.path, &files);
    assert!(place.hub.requests().iter().any(|r| r.method == "HEAD"));
}

#[test]
fn a_renamed_repository_is_found_under_its_old_name() {
    let place = Place::new();
    let files = place.add_safetensors("org/new-name");
    place.hub.faults(|f| f.renamed = Some(("org/old-name".into(), "org/new-name".into())));
    let model = place.pull("org/old-name").unwrap();
    assert_files(&model, &model.path, &files);
    place.hub.faults(|f| f.bare_list = true);
    place.add_gguf("org/new-name2");
    place.hub.faults(|f| f.renamed = Some(("org/old-name2".into(), "org/new-name2".into())));
    place.pull("org/old-name2").unwrap();
}

#[test]
fn what_lies_there_is_taken_whatever_the_hub_answers() {
    let place = Place::new();
    place.add_safetensors("org/name");
    let model = place.pull("org/name").unwrap();
    for status in [429, 500, 503] {
        place.hub.faults(|f| f.list_status = Some((status, u32::MAX, Some(0))));
        let heard = Heard::default();
        assert_eq!(place.pull_with("org/name", &heard).unwrap().path, model.path);
        assert!(heard.notes.borrow().iter().any(|note| note.contains("taking what is in the cache")));
    }
    // Nobody there at all.
    let Place { hub, dir, .. } = &place;
    let settings = sluice_hub::Settings { tries: 2, ..place.settings() };
    let nobody = Url::parse("http://127.0.0.1:1").unwrap();
    let client = Arc::new(Client::new(sluice_hub::Settings { endpoint: nobody, ..settings }));
    hub.requests();
    assert_eq!(pull(&client, &place.name("org/name"), Extent::Whole, &()).unwrap().path, model.path);
    let error = pull(&client, &place.name("org/other"), Extent::Whole, &()).unwrap_err().to_string();
    assert!(error.starts_with("127.0.0.1:1 cannot be reached: ") && error.contains("try again"), "{error}");
    assert!(hub.requests().is_empty() && dir.path().exists());
}

#[test]
fn offline_nobody_is_asked() {
    let place = Place::new();
    place.add_gguf("org/m");
    let settings = sluice_hub::Settings { offline: true, ..place.settings() };
    let client = Arc::new(Client::new(settings));
    let error = pull(&client, &place.name("org/m:Q4_K_M"), Extent::Whole, &()).unwrap_err();
    assert!(matches!(error, Error::Offline { .. }) && error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    assert!(place.hub.requests().is_empty());
    let model = place.pull("org/m").unwrap();
    assert_eq!(pull(&client, &place.name("org/m"), Extent::Whole, &()).unwrap().path, model.path);
}

#[test]
fn a_config_alone_can_be_fetched_and_the_rest_later() {
    let place = Place::new();
    let files = place.add_safetensors("org/name");
    let client = Arc::new(Client::new(place.settings()));
    let config = pull(&client, &place.name("org/name"), Extent::Config, &()).unwrap();
    assert!(
        config.path.join("config.json").is_file() && !config.path.join("model-00001-of-00002.safetensors").exists()
    );
    assert!(place.find("org/name").is_none());
    // Another estimate asks nobody.
    place.hub.requests();
    let again = find(&place.settings(), &place.name("org/name"), Extent::Config).unwrap();
    assert_eq!((again.path, place.hub.requests().len()), (config.path, 0));
    let model = place.pull("org/name").unwrap();
    assert_files(&model, &model.path, &files);
}

#[test]
fn two_at_once_fetch_every_byte_once() {
    let place = Place::new();
    let files = place.add_safetensors("org/name");
    place.hub.faults(|f| f.slow = Some(std::time::Duration::from_millis(1)));
    let models: Vec<_> = thread::scope(|scope| {
        let pulls: Vec<_> = (0..2).map(|_| scope.spawn(|| place.pull("org/name").unwrap())).collect();
        pulls.into_iter().map(|pull| pull.join().unwrap()).collect()
    });
    for model in &models {
        assert_files(model, &model.path, &files);
    }
    let large: u64 = files
        .iter()
        .filter(|(name, _)| name.contains("safetensors") && !name.ends_with("json"))
        .map(|(_, c)| c.size())
        .sum();
    assert_eq!(place.asked_bytes(), large + files[1].1.size());
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}
