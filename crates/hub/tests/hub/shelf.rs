//! What is listed, checked and removed.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use sluice_hub::{Finding, list, remove, verify};
use sluice_test_hub::Content;

use crate::support::*;

fn place() -> Place {
    let place = Place::new();
    place.add_safetensors("org/name");
    let files = [("m-Q4_K_M.gguf", Content::random(6, 3 << 20)), ("m-Q8_0.gguf", Content::random(7, 4 << 20))];
    place.hub.commit("org/m-GGUF", &files);
    for name in ["org/name", "org/m-GGUF", "org/m-GGUF:Q8_0"] {
        place.pull(name).unwrap();
    }
    place
}

fn names(place: &Place) -> Vec<String> {
    list(&place.cache()).unwrap().into_iter().map(|listed| listed.name).collect()
}

#[test]
fn models_are_listed_with_what_they_take() {
    let place = place();
    let all = list(&place.cache()).unwrap();
    assert_eq!(names(&place), ["org/m-GGUF:Q4_K_M", "org/m-GGUF:Q8_0", "org/name"]);
    let sizes: Vec<_> = all.iter().map(|l| (l.format, l.bytes, l.references.clone())).collect();
    assert_eq!(sizes[0], ("gguf", 3 << 20, vec!["main".to_owned()]));
    assert_eq!((sizes[2].0, all[2].path.clone().unwrap()), ("safetensors", place.find("org/name").unwrap().path));
    // One that was interrupted is listed as such.
    place.add_gguf("org/half");
    place.hub.faults(|f| f.slow = Some(Duration::from_millis(2)));
    place.pull_with("org/half", &Heard { stop_at: Some(2 << 20), ..Heard::default() }).unwrap_err();
    let half = list(&place.cache()).unwrap().into_iter().find(|l| l.name == "org/half").unwrap();
    assert!(
        half.path.is_none() && half.bytes >= 2 << 20 && half.bytes + half.missing.unwrap() == LARGE as u64,
        "{half:?}"
    );
    assert!(list(&place.dir.path().join("nowhere")).unwrap().is_empty());
}

#[test]
fn what_is_removed_is_what_was_named() {
    let place = place();
    assert_eq!(remove(&place.cache(), &place.name("org/m-GGUF:q8_0")).unwrap(), 4 << 20);
    assert_eq!(names(&place), ["org/m-GGUF:Q4_K_M", "org/name"]);
    assert!(place.find("org/m-GGUF").is_some());
    let error = remove(&place.cache(), &place.name("org/m-GGUF:q8_0")).unwrap_err().to_string();
    assert!(error.contains("not in ") && error.contains("sluice list"), "{error}");
    remove(&place.cache(), &place.name("org/name")).unwrap();
    assert_eq!(names(&place), ["org/m-GGUF:Q4_K_M"]);
    assert!(!place.cache().join("models--org--name").exists());
    remove(&place.cache(), &place.name("org/m-GGUF:Q4_K_M")).unwrap();
    assert!(names(&place).is_empty());
    assert!(remove(&place.cache(), &place.name("org/never")).unwrap_err().to_string().contains("not in "));
}

#[test]
fn what_is_removed_of_one_revision_stays_for_another() {
    let place = place();
    let old = place.find("org/name").unwrap();
    place.hub.commit("org/name", &[("model-00002-of-00002.safetensors", Content::random(33, 2 << 20))]);
    let new = place.pull("org/name").unwrap();
    let freed = remove(&place.cache(), &place.name(&format!("org/name@{}", old.commit))).unwrap();
    assert_eq!(freed, 2 << 20);
    assert_eq!(place.find("org/name").unwrap().path, new.path);
    assert!(verify(&place.cache(), &place.name("org/name"), &()).unwrap().iter().all(|(_, f)| *f == Finding::Right));
}

#[test]
fn damage_is_found_and_mended_by_the_next_pull() {
    let place = place();
    let name = place.name("org/name");
    let right = verify(&place.cache(), &name, &()).unwrap();
    assert_eq!((right.len(), right.iter().all(|(_, finding)| *finding == Finding::Right)), (5, true));
    let model = place.find("org/name").unwrap();
    let file = "model-00002-of-00002.safetensors";
    let blob = fs::canonicalize(model.path.join(file)).unwrap();
    OpenOptions::new().write(true).open(&blob).unwrap().write_all_at(b"x", 1000).unwrap();
    let found = verify(&place.cache(), &name, &()).unwrap();
    let wrong: Vec<&str> = found.iter().filter(|(_, f)| *f == Finding::Wrong).map(|(file, _)| &**file).collect();
    assert_eq!(wrong, [file]);
    assert!(!blob.exists() && place.find("org/name").is_none());
    assert_eq!(place.pull("org/name").unwrap().fetched, 2 << 20);
    assert!(verify(&place.cache(), &name, &()).unwrap().iter().all(|(_, f)| *f == Finding::Right));
}
