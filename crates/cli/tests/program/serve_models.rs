//! Several models behind one server, with one in memory at a time.

use crate::support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread;

use serde_json::{Value, json};
use support::server::Server;
use support::{assert_refused, demo, root, sluice, stderr};
use tempfile::TempDir;

/// A folder of models: `long`; `short`, which has another context and another epsilon, so that it answers differently; `broken`, without weights; and something that is not
/// a model.
fn models() -> Option<TempDir> {
    let demo = demo()?;
    let folder = tempfile::tempdir().unwrap();
    for name in ["long", "short", "zz-broken"] {
        let own = folder.path().join(name);
        fs::create_dir(&own).unwrap();
        for entry in fs::read_dir(&demo).unwrap() {
            let entry = entry.unwrap();
            let file = entry.file_name();
            let is_weights = file.to_string_lossy().contains("safetensors");
            if !(file == "config.json" || is_weights && name == "zz-broken") {
                symlink(entry.path(), own.join(file)).unwrap();
            }
        }
        let mut config: Value =
            serde_json::from_slice(&fs::read(Path::new(&demo).join("config.json")).unwrap()).unwrap();
        if name == "short" {
            let text = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
            text["max_position_embeddings"] = 256.into();
            text["rms_norm_eps"] = 0.1.into();
        }
        fs::write(own.join("config.json"), config.to_string()).unwrap();
    }
    fs::create_dir(folder.path().join("notes")).unwrap();
    fs::write(folder.path().join("readme.txt"), "none").unwrap();
    Some(folder)
}

fn serve(folder: &Path, flags: &[&str]) -> Server {
    let mut command = sluice(&["serve", "--models", folder.to_str().unwrap(), "--port", "0"]);
    command.args(flags);
    Server::of(command)
}

fn asking(model: &str) -> Value {
    json!({"model": model, "prompt": "One day a crow", "max_tokens": 20, "temperature": 0, "ignore_eos": true})
}

/// The model that answered, and its text.
fn said(answer: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
    (text(&answer["model"]), text(&answer["choices"][0]["text"]))
}

/// Name, status and context of each model.
fn listed(server: &Server) -> Vec<(String, String, u64)> {
    let list: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let one = |m: &Value| (text(&m["id"]), text(&m["status"]), m["max_model_len"].as_u64().unwrap());
    list["data"].as_array().unwrap().iter().map(one).collect()
}

#[test]
fn the_model_that_a_request_names_is_loaded_in_place_of_the_other() {
    let Some(folder) = models() else { return };
    let server = serve(folder.path(), &[]);
    let entry = |name: &str, status: &str, context| (name.to_owned(), status.to_owned(), context);
    let broken = || entry("zz-broken", "unloaded", 4096);
    assert_eq!(listed(&server), [entry("long", "loaded", 4096), entry("short", "unloaded", 256), broken()]);
    let (name, long) = said(&server.complete(asking("long")));
    assert_eq!(name, "long");
    // An unknown name means the model in memory.
    assert_eq!(said(&server.complete(asking("gpt-5"))), ("long".to_owned(), long.clone()));
    let (name, short) = said(&server.complete(asking("someone/Short")));
    assert_eq!((name.as_str(), short != long), ("short", true), "{short}");
    assert_eq!(listed(&server), [entry("short", "loaded", 256), entry("long", "unloaded", 4096), broken()]);
    assert_eq!(server.metric("sluice:model_loaded{model_name=\"short\"}"), 1.0);
    assert_eq!(server.metric("sluice:model_loads_total"), 2.0);
    // It has its own context, in each dialect.
    let long_prompt = json!([{"role": "user", "content": "crow ".repeat(400)}]);
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let body = |model: &str| json!({"model": model, "messages": long_prompt, "max_tokens": 4});
        assert_eq!(server.post(path, &body("short")).0, 400, "{path}");
        assert_eq!(server.post(path, &body("long")).0, 200, "{path}");
    }
    // A model that cannot be loaded is an error for those who request it.
    let (status, error) = server.post("/v1/completions", &asking("zz-broken"));
    assert_eq!((status, error.to_string().contains("zz-broken cannot be loaded")), (500, true), "{error}");
    assert_eq!(server.get("/health").0, 200);
    assert_eq!(said(&server.complete(asking("anything"))), ("long".to_owned(), long));
}

/// The layout of the hub's own programs: files are links to blobs, `refs/main` names the snapshot, and there may be half of a download.
#[test]
fn the_models_of_a_hubs_cache_are_offered_by_their_own_names() {
    let Some(models) = models() else { return };
    let cache = tempfile::tempdir().unwrap();
    let snapshot = |model: &str, commit: &str| cache.path().join(model).join("snapshots").join(commit);
    for (name, model) in [("long", "models--org--big"), ("short", "models--org--small--it")] {
        let folder = cache.path().join(model);
        for made in ["blobs", "refs", "snapshots/0123abcd", "snapshots/ffff"] {
            fs::create_dir_all(folder.join(made)).unwrap();
        }
        for (number, entry) in fs::read_dir(models.path().join(name)).unwrap().enumerate() {
            let path = entry.unwrap().path();
            symlink(path.canonicalize().unwrap(), folder.join(format!("blobs/{number}"))).unwrap();
            let link = snapshot(model, "0123abcd").join(path.file_name().unwrap());
            symlink(format!("../../blobs/{number}"), link).unwrap();
        }
        fs::write(folder.join("refs/main"), "0123abcd").unwrap();
    }
    fs::create_dir_all(cache.path().join("models--org--unfinished/blobs")).unwrap();
    fs::create_dir_all(snapshot("models--org--gone", "0123abcd")).unwrap();
    fs::create_dir(cache.path().join("datasets--org--texts")).unwrap();
    fs::write(cache.path().join("version.txt"), "1").unwrap();
    let server = serve(cache.path(), &[]);
    let names: Vec<String> = listed(&server).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["org/big", "org/small--it"]);
    let plain = serve(models.path(), &[]);
    for (asked, name, own) in [("org/small--it", "org/small--it", "short"), ("org/big", "org/big", "long")] {
        assert_eq!(said(&server.complete(asking(asked))), (name.to_owned(), said(&plain.complete(asking(own))).1));
    }
    assert_eq!(said(&server.complete(asking("big"))).0, "org/big");
}

#[test]
fn requests_for_several_models_at_once_are_all_answered_by_the_one_they_name() {
    let Some(folder) = models() else { return };
    let server = serve(folder.path(), &[]);
    let alone = ["long", "short"].map(|name| said(&server.complete(asking(name))));
    let answers: Vec<_> = thread::scope(|scope| {
        let ask = |i: usize| {
            let (server, alone) = (&server, &alone);
            let mut body = asking(&alone[i % 2].0);
            let is_streamed = i < 8;
            body["stream"] = is_streamed.into();
            scope.spawn(move || {
                if !is_streamed {
                    return (i, said(&server.complete(body)));
                }
                let events = server.stream("/v1/completions", &body);
                let text = events.iter().map(|e| said(e).1).collect::<String>();
                (i, (said(&events[0]).0, text))
            })
        };
        let running: Vec<_> = (0..24).map(ask).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    });
    for (i, answer) in answers {
        assert_eq!(answer, alone[i % 2]);
    }
}

#[test]
fn an_idle_model_gives_its_memory_back_until_it_is_asked_for() {
    let Some(folder) = models() else { return };
    let server = serve(folder.path(), &["--idle-unload", "1"]);
    let is_loaded = |server: &Server| listed(server)[0].1 == "loaded";
    let before = said(&server.complete(asking("long")));
    let resident = || {
        let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let loaded = resident();
    server.wait_until("unloaded", |server| !is_loaded(server));
    server.wait_until("memory given back", |_| resident() < loaded - 20_000);
    // Listing models does not load one.
    assert_eq!(server.get("/health").0, 200);
    assert_eq!(server.get("/metrics").0, 200);
    assert!(!is_loaded(&server));
    assert_eq!(said(&server.complete(asking("long"))), before);
    // A model is not idle during a request that takes longer.
    let mut body = asking("long");
    body["max_tokens"] = 3000.into();
    assert_eq!(server.complete(body)["usage"]["completion_tokens"], 3000);
}

#[test]
fn the_dashboard_asks_for_figures_that_there_are() {
    let Some(server) = Server::start(&[]) else { return };
    server.complete(asking("any"));
    let figures = server.get("/metrics").1;
    let dashboard: Value =
        serde_json::from_str(&fs::read_to_string(root().join("docs/grafana.json")).unwrap()).unwrap();
    let mut asked = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            for name in expression.split(|c: char| !(c.is_ascii_alphanumeric() || "_:".contains(c))) {
                if name.starts_with("vllm:") || name.starts_with("sluice:") {
                    let is_there =
                        |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
                    assert!(figures.lines().any(is_there), "{name} of {:?}", panel["title"]);
                    asked += 1;
                }
            }
        }
    }
    assert!(asked > 20);
}

#[test]
fn what_cannot_be_offered_is_refused_at_the_start() {
    let Some(folder) = models() else { return };
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let refused = |flags: &[&str], parts: &[&str]| {
        let mut command = sluice(&["serve", "--port", "0"]);
        assert_refused(&command.args(flags).output().unwrap(), parts);
    };
    refused(&["--models", &path("notes")], &["notes", "config.json"]);
    refused(&["--models", &path("nowhere")], &["nowhere"]);
    refused(&[&path("long"), &path("notes")], &["notes", "config.json"]);
    refused(&[&path("long"), &path("short"), "--model-name", "x"], &["--model-name"]);
    refused(&[&path("long"), &(path("short") + "/../long")], &["long"]);
    // The first one is loaded at the start.
    let output = sluice(&["serve", "--port", "0", &path("zz-broken"), &path("long")]).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).contains("zz-broken: no model.safetensors")), (Some(2), true));
}
