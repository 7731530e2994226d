//! Who may see what, and who hears the token.

use sluice_test_hub::Content;

use crate::support::*;

#[test]
fn the_token_reaches_the_hub_and_nobody_else() {
    let mut place = Place::new();
    let files = place.add_safetensors("org/name");
    place.hub.faults(|f| f.token = Some("hf_secret".into()));
    place.token = Some("hf_secret".into());
    let model = place.pull("org/name").unwrap();
    assert_files(&model, &model.path, &files);
    let requests = place.hub.requests();
    let (bytes, hub): (Vec<_>, Vec<_>) = requests.into_iter().partition(|r| r.is_for_bytes);
    assert!(!bytes.is_empty() && bytes.iter().all(|r| r.authorization.is_none()));
    assert!(!hub.is_empty() && hub.iter().all(|r| r.authorization.as_deref() == Some("Bearer hf_secret")));
}

#[test]
fn what_is_closed_says_how_it_opens() {
    let mut place = Place::new();
    place.add_gguf("org/m");
    place.hub.faults(|f| f.token = Some("hf_right".into()));
    let private = place.refused("org/m");
    assert!(private.contains("no such model") && private.contains("HF_TOKEN"), "{private}");
    place.hub.faults(|f| f.gated = true);
    let gated = place.refused("org/m");
    assert!(
        gated.contains("accept its terms at http://") && gated.contains("/org/m") && gated.contains("HF_TOKEN"),
        "{gated}"
    );
    place.token = Some("hf_wrong".into());
    let gated = place.refused("org/m");
    assert!(gated.contains("ask for access") && !gated.contains("hf_wrong"), "{gated}");
    place.token = Some("hf_right".into());
    place.pull("org/m").unwrap();
}

#[test]
fn what_is_not_there_is_named() {
    let place = Place::new();
    assert!(place.refused("org/nothing").contains("org/nothing: no such model"));
    assert!(place.refused("qwen/qwen3-8b").contains("do you mean unsloth/Qwen3-8B-GGUF?"));
    place.hub.commit("org/pickles", &[("config.json", "{}".into()), ("pytorch_model.bin", Content::random(1, 100))]);
    assert!(place.refused("org/pickles").contains("org/pickles: there are only PyTorch's pickles"));
    assert!(place.leftovers().is_empty());
}

#[test]
fn names_that_lead_elsewhere_are_no_files() {
    let place = Place::new();
    place.hub.commit("org/m", &[("config.json", "{}".into()), ("model.safetensors", Content::random(1, 2 << 20))]);
    place.hub.faults(|f| {
        f.extra_names = ["../../evil.json", "/etc/evil.json", "a\\b.json", "x\n.json"].map(str::to_owned).into()
    });
    let model = place.pull("org/m").unwrap();
    assert_eq!(model.files.len(), 2);
    assert!(below(place.dir.path()).iter().all(|path| !path.to_string_lossy().contains("evil")));
}

#[test]
fn files_without_checksums_are_refused() {
    let place = Place::new();
    place.add_gguf("org/m");
    place.hub.faults(|f| (f.bare_list, f.odd_etags) = (true, true));
    let error = place.refused("org/m");
    assert!(error.contains("no size and checksum"), "{error}");
}
