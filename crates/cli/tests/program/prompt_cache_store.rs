//! The prompt cache that replicas share, in the shipped program: a server that never saw a prompt restores it, replicas are killed, and nothing secret is printed.

use crate::support;

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::server::Server;
use support::{json as parsed, output, sluice, stderr, text};

const STORY: &str = "There was once a king who had three sons, and when he was old he called them and said: whoever of you brings me the water of life shall have my \
    kingdom. So the eldest saddled his horse and rode away, and he came to a dwarf who asked him where he was going so fast, but he was proud and gave no answer.";

fn flags(home: &Path, replica: &str) -> Vec<String> {
    vec![
        format!("--prompt-cache={}", text(&home.join(replica))),
        format!("--prompt-cache-store=file://{}", text(&home.join("store"))),
        "--prompt-cache-bytes=200M".into(),
        "--prompt-cache-min-tokens=16".into(),
    ]
}

fn serve(home: &Path, replica: &str) -> Option<Server> {
    let flags = flags(home, replica);
    Server::start(&flags.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The text, and how many tokens of the prompt were cached.
fn ask(server: &Server, prompt: &str) -> (String, u64) {
    let answer = server.complete(json!({"prompt": prompt, "max_tokens": 12, "temperature": 0}));
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), cached.as_u64().unwrap())
}

fn store(server: &Server, name: &str) -> f64 {
    server.metric(&format!("sluice:prompt_cache_store_{name}"))
}

/// Waits until what was computed is stored.
fn until_stored(server: &Server) {
    let started = Instant::now();
    while store(server, "stored_bytes") == 0.0 || store(server, "queued") > 0.0 {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing is stored");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_server_restores_what_another_has_computed_and_kills_change_no_answer() {
    let home = tempfile::tempdir().unwrap();
    let Some(first) = serve(home.path(), "first") else { return };
    let (answer, cached) = ask(&first, STORY);
    assert_eq!(cached, 0);
    until_stored(&first);
    // 1. Another server, which has nothing
    let second = serve(home.path(), "second").unwrap();
    let (again, cached) = ask(&second, STORY);
    assert!(again == answer && cached >= 32, "{cached}");
    assert_eq!((store(&second, "hits"), store(&second, "errors"), store(&second, "wrong")), (1.0, 0.0, 0.0));
    assert!(store(&second, "read_bytes") > 0.0);
    drop(second);
    // 2. What is there
    let url = format!("file://{}", text(&home.path().join("store")));
    let stat = parsed(output(&["cache", "stat", "--store", &url, "--json"]));
    assert!(stat["entries"].as_u64().unwrap() >= 1 && stat["is_begun"] == Value::Bool(true), "{stat}");
    let models = parsed(output(&["cache", "ls", "--store", &url, "--json"]));
    assert_eq!(models["models"][0]["name"], "demo");
    // 3. Replicas that are killed while they compute and store
    drop(first);
    let kills = std::env::var("SLUICE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    let mut random = fastrand::Rng::with_seed(1);
    for number in 0..kills {
        let mut server = serve(home.path(), &format!("killed-{}", number % 4)).unwrap();
        assert_eq!(ask(&server, STORY).0, answer, "kill {number}");
        let body = json!({"prompt": format!("{number} {STORY}"), "max_tokens": 1, "temperature": 0});
        server.complete(body);
        thread::sleep(Duration::from_millis(random.u64(0..150)));
        server.child.kill().unwrap();
        server.child.wait().unwrap();
    }
    let last = serve(home.path(), "last").unwrap();
    for number in 0..kills {
        ask(&last, &format!("{number} {STORY}"));
    }
    assert_eq!((ask(&last, STORY).0, store(&last, "wrong")), (answer, 0.0));
}

#[test]
fn stores_that_are_none_are_refused_by_the_flag_and_no_credential_is_printed() {
    let Some(demo) = support::demo() else { return };
    let with_secrets = |mut command: Command| {
        command.env("AWS_ACCESS_KEY_ID", "AKIDSECRET").env("AWS_SECRET_ACCESS_KEY", "hunter2");
        command.env("AWS_ENDPOINT_URL", "http://127.0.0.1:9").env("AWS_REGION", "us-east-1").output().unwrap()
    };
    let run = |url: &str| with_secrets(sluice(&["run", &demo, "Hello", "-n", "1", "--prompt-cache-store", url]));
    for (url, why) in [
        ("ftp://x/y", "no such kind of store"),
        ("s3://user:hunter2@bucket", "credentials belong into environment variables"),
        ("/var/cache", "not the URL of a store"),
    ] {
        let out = run(url);
        let said = stderr(&out);
        assert!(!out.status.success() && said.contains("--prompt-cache-store") && said.contains(why), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
    // A store that does not answer ends nothing.
    let home = tempfile::tempdir().unwrap();
    let own = format!("--prompt-cache={}", text(&home.path().join("own")));
    let flags = ["-n", "2", "--prompt-cache-min-tokens=16", "--prompt-cache-bytes=200M", &own];
    let store = ["--prompt-cache-store", "s3://bucket/x"];
    let started = Instant::now();
    let out = with_secrets(sluice(&[&["run", &demo, STORY][..], &flags, &store].concat()));
    let said = stderr(&out);
    assert!(out.status.success(), "{said}");
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    assert!(!said.contains("hunter2") && !said.contains("AKIDSECRET"), "{said}");
    assert!(home.path().join("own/secret").is_file());
}
