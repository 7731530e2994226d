//! Models by name: `pull`, `list`, `rm`, `verify`, and the commands that take a model.

use crate::support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use sluice_test_hub::Content;
use support::hub::Place;
use support::server::Server;
use support::*;

const LOGITS: [&str; 5] = ["eval", "logits", "--tokens=1,2,3", "--activations=f32", "--json"];

fn logits(output: std::process::Output) -> Value {
    json(output)["logits"].clone()
}

#[test]
fn a_model_is_fetched_by_name_once_and_answers_as_its_folder() {
    let place = Place::new();
    let folder = place.add_tiny();
    let of_folder = output(&[&LOGITS[..], &[&folder]].concat());
    let (own_said, own) = (stderr(&of_folder), logits(of_folder));
    assert!(own.is_array());
    let asking = |name: &str| place.sluice(&[&LOGITS[..], &[name]].concat());
    let first = asking("org/tiny").output().unwrap();
    let said = stderr(&first);
    assert!(said.contains("org/tiny: fetching") && said.contains("free)") && said.contains("5 files"), "{said}");
    assert_eq!(logits(first), own);
    // Now it is there: nobody is asked, and nothing said.
    place.hub.requests();
    for name in ["org/tiny", "hf:org/tiny", "hf.co/org/tiny", "https://huggingface.co/org/tiny", "org/tiny@main"] {
        let again = asking(name).output().unwrap();
        assert_eq!((stderr(&again), logits(again)), (own_said.clone(), own.clone()), "{name}");
    }
    let offline = asking("org/tiny").env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_eq!(logits(offline), own);
    assert!(place.hub.requests().is_empty());
    assert!(success(place.output(&["inspect", "org/tiny"])).contains("llama"));
}

#[test]
fn names_stand_where_models_do() {
    let place = Place::new();
    place.add_tiny();
    let out = tempfile::tempdir().unwrap();
    success(place.output(&["pack", "org/tiny", &text(out.path()), "--bits", "none"]));
    assert!(out.path().join("config.json").is_file());
    assert_refused(&place.output(&["run", "org/tiny:Q4_K_M", "hi"]), &["org/tiny", "only safetensors", "leave it out"]);
    assert_refused(&place.output(&["run", "Qwen/Qwen3-0.6B"]), &["there is no prompt"]);
    assert_refused(&place.output(&["run", "qwen3:8b", "hi"]), &["qwen3:8b", "unsloth/Qwen3-8B-GGUF"]);
    assert_refused(&place.output(&["chat", "nothing"]), &["nothing: no such folder", "ORG/NAME"]);
    assert_refused(&place.output(&["inspect", "src/nothing"]), &["src/nothing"]);
    assert_refused(&place.output(&["inspect", "org/no-such"]), &["org/no-such: no such model", "HF_TOKEN"]);
    assert_refused(&output(&["inspect", "org/never"]), &["org/never: not in ", "HF_HUB_OFFLINE"]);
}

#[test]
fn what_speed_to_expect_is_said_before_the_first_byte_of_weights() {
    let place = Place::new();
    let weights = Content::random(5, 20 << 20);
    let config = fs::read(Path::new(&golden("qwen3")).join("config.json")).unwrap();
    place.hub.commit("org/plain", &[("config.json", config.into()), ("model.safetensors", weights.clone())]);
    place.hub.commit("org/m-30B-A3B-GGUF", &[("m-Q4_K_M.gguf", weights)]);
    // From the config; these weights are no model.
    let refused = place.output(&["run", "org/plain", "hi"]);
    let said = stderr(&refused);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("org/plain: fetching 21.0 MB") && lines[0].contains("free)"), "{said}");
    assert!(lines[1].contains("org/plain: about ") && lines[1].contains("tokens/s are expected here"), "{said}");
    assert_eq!(refused.status.code(), Some(2), "{said}");
    // From size and name alone.
    let events = success(place.output(&["pull", "org/m-30B-A3B-GGUF", "--json"]));
    let planned: Value = serde_json::from_str(events.lines().next().unwrap()).unwrap();
    assert_eq!(planned["event"], "planned");
    assert!(planned["expected_tokens_per_second"].as_f64().unwrap() > 0.0, "{planned}");
}

#[test]
fn a_folder_of_several_quantisations_is_answered_with_their_names() {
    let place = Place::new();
    let of_parts = ["UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf", "UD-Q2_K_XL/m-UD-Q2_K_XL-00002-of-00002.gguf"];
    let [one, two, three] = [1, 2, 3].map(|seed| Content::random(seed, 1000));
    place.hub.commit("org/m-GGUF", &[("m-Q8_0.gguf", one), (of_parts[0], two), (of_parts[1], three)]);
    success(place.output(&["pull", "org/m-GGUF:Q8_0", "org/m-GGUF:UD-Q2_K_XL", "--quiet"]));
    let folder = text(&place.cache().join("models--org--m-GGUF"));
    for command in [&["run", &folder, "hi"][..], &["inspect", &folder], &["plan", &folder]] {
        assert_refused(&place.output(command), &["several GGUF models", "org/m-GGUF:UD-Q2_K_XL, org/m-GGUF:Q8_0"]);
    }
}

#[test]
fn a_plan_needs_no_weights() {
    let place = Place::new();
    place.add_tiny();
    for disk in [&["--disk-bandwidth", "1GB"][..], &[]] {
        let plan = ["plan", "org/tiny", "--memory", "1GB", "--json"];
        assert!(json(place.output(&[&plan[..], disk].concat()))["parameters"].as_u64().unwrap() > 0);
    }
    assert!(!place.hub.requests().iter().any(|r| r.is_for_bytes));
    assert!(place.cache().join("models--org--tiny/refs/main").is_file());
}

#[test]
fn a_server_offers_models_by_their_names() {
    let Some(demo) = demo() else { return };
    let place = Place::new();
    place.add_folder("org/demo", Path::new(&demo));
    let server = Server::of(place.sluice(&["serve", "org/demo", "--port", "0"]));
    let models: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    assert_eq!(models["data"][0]["id"], "org/demo");
    drop(server);
    place.add_two(2 << 20);
    success(place.output(&["pull", "--quiet", "org/two-GGUF", "org/two-GGUF:Q8_0"]));
    let refused = place.output(&["serve", "--models", &text(&place.cache()), "--port", "0"]);
    // What it finds there are no models, but it looks at each of them.
    assert_refused(&refused, &["m-Q4_K_M.gguf"]);
}

#[test]
fn pulling_listing_checking_removing() {
    let place = Place::new();
    let [q4, q8] = place.add_two(3 << 20);
    let pulled = place.output(&["pull", "org/two-GGUF"]);
    assert_eq!(success(pulled.clone()), "");
    assert!(stderr(&pulled).contains("org/two-GGUF:Q4_K_M: fetched 3.1 MB in"), "{}", stderr(&pulled));
    assert!(stderr(&place.output(&["pull", "org/two-GGUF"])).contains("all 3.1 MB are there"));
    assert_eq!(stderr(&place.output(&["pull", "--quiet", "org/two-GGUF:q8_0"])), "");
    let events = success(place.output(&["pull", "--json", "org/two-GGUF:q8_0"]));
    let done: Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
    assert_eq!((done["event"].as_str(), done["name"].as_str()), (Some("done"), Some("org/two-GGUF:Q8_0")));
    for (name, content) in [("Q4_K_M", &q4), ("Q8_0", &q8)] {
        let path = place.cache().join("models--org--two-GGUF/snapshots").join(done["commit"].as_str().unwrap());
        assert!(fs::read(path.join(format!("m-{name}.gguf"))).unwrap() == content.bytes());
    }
    let listed = success(place.output(&["list"]));
    assert!(
        listed.contains("org/two-GGUF:Q4_K_M") && listed.contains("org/two-GGUF:Q8_0") && listed.contains("3.1 MB"),
        "{listed}"
    );
    let listed = json(place.output(&["list", "--json"]));
    assert_eq!(listed["models"].as_array().unwrap().len(), 2);
    assert!(stderr(&place.output(&["verify", "org/two-GGUF"])).contains("2 files are as the hub announced them"));
    let path = listed["models"][0]["path"].as_str().unwrap();
    fs::write(fs::canonicalize(path).unwrap(), vec![0; 3 << 20]).unwrap();
    assert_refused_after(
        &place.output(&["verify", "org/two-GGUF"]),
        "m-Q4_K_M.gguf: other bytes than the hub announced",
    );
    success(place.output(&["pull", "org/two-GGUF"]));
    success(place.output(&["verify", "org/two-GGUF", "--json"]));
    assert!(stderr(&place.output(&["rm", "org/two-GGUF:Q8_0"])).contains("3.1 MB are free again"));
    assert_refused(&place.output(&["rm", "org/two-GGUF:Q8_0"]), &["not in", "sluice list"]);
    success(place.output(&["rm", "org/two-GGUF"]));
    assert!(stderr(&place.output(&["list"])).contains("no models"));
}

/// The same as [`assert_refused`], after other lines.
#[track_caller]
fn assert_refused_after(output: &std::process::Output, part: &str) {
    assert_eq!(output.status.code(), Some(2), "{}", stderr(output));
    assert!(stderr(output).lines().last().unwrap().contains(part), "{}", stderr(output));
}

#[test]
fn a_revision_is_named_by_a_flag_or_after_an_at_sign() {
    let place = Place::new();
    place.add_tiny();
    let old = place.hub.commit("org/tiny", &[("notes.json", "1".into())]);
    place.hub.commit("org/tiny", &[("notes.json", "2".into())]);
    let commit = |args: &[&str]| {
        let lines = success(place.output(&[&["pull", "--json"], args].concat()));
        serde_json::from_str::<Value>(lines.lines().last().unwrap()).unwrap()["commit"].as_str().unwrap().to_owned()
    };
    assert_eq!(commit(&["org/tiny", "--revision", &old]), old);
    assert_eq!(commit(&[&format!("org/tiny@{old}")]), old);
    assert_ne!(commit(&["org/tiny"]), old);
    assert_refused(&place.output(&["pull", "org/tiny@v1", "--revision", "v2"]), &["names a revision itself"]);
    assert_refused(&place.output(&["pull", "org/tiny", "--revision", "../x"]), &["../x"]);
}

#[test]
fn the_token_comes_from_its_file_too() {
    let place = Place::new();
    place.add_tiny();
    place.hub.faults(|f| (f.token, f.gated) = (Some("hf_secret".into()), true));
    assert_refused(&place.output(&["pull", "org/tiny"]), &["gated", "accept its terms", "HF_TOKEN"]);
    fs::write(place.home.path().join("token"), "hf_secret\n").unwrap();
    success(place.output(&["pull", "org/tiny"]));
    assert!(place.hub.requests().iter().filter(|r| r.is_for_bytes).all(|r| r.authorization.is_none()));
}

/// The hub stands for a proxy here.
#[test]
fn a_proxy_is_asked_unless_the_host_is_excluded() {
    let place = Place::new();
    place.add_tiny();
    let mut command = place.sluice(&["pull", "org/tiny"]);
    // Nobody has this name: only the proxy knows where it is.
    command.env("HF_ENDPOINT", "http://hub.invalid").env("HTTP_PROXY", place.hub.endpoint());
    success(command.output().unwrap());
    let requests = place.hub.requests();
    assert!(requests.iter().any(|r| r.method == "CONNECT" && r.path == "hub.invalid:80"), "{requests:?}");
    success(place.output(&["rm", "org/tiny"]));
    let mut command = place.sluice(&["pull", "org/tiny"]);
    command.env("HTTP_PROXY", "http://127.0.0.1:1").env("NO_PROXY", "127.0.0.1");
    success(command.output().unwrap());
}

#[test]
fn ctrl_c_says_how_to_go_on_and_two_at_once_share_the_work() {
    let place = Place::new();
    place.hub.commit("org/big", &[("m-Q8_0.gguf", Content::random(3, 40 << 20))]);
    place.hub.faults(|f| f.slow = Some(Duration::from_millis(20)));
    let mut pull = place.sluice(&["pull", "--json", "org/big"]);
    let mut child = pull.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut progress = lines.filter(|line| line.contains("progress") && !line.contains("\"done\":0,"));
    progress.next().unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130));
    assert!(
        stderr(&ended).contains("org/big: stopped with") && stderr(&ended).contains("the same command goes on"),
        "{}",
        stderr(&ended)
    );
    let kept = json(place.output(&["list", "--json"]))["models"][0]["bytes"].as_u64().unwrap();
    assert!(kept > 0);
    place.hub.faults(|f| f.slow = Some(Duration::from_millis(3)));
    place.hub.requests();
    let both = [1, 2].map(|_| place.sluice(&["pull", "org/big"]).stderr(Stdio::piped()).spawn().unwrap());
    for one in both {
        assert!(one.wait_with_output().unwrap().status.success());
    }
    let asked: u64 = place
        .hub
        .requests()
        .iter()
        .filter(|r| r.is_for_bytes)
        .filter_map(|r| r.range)
        .map(|(first, last)| last + 1 - first)
        .sum();
    assert_eq!(asked, (40 << 20) - kept);
}
