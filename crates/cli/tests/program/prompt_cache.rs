//! The prompt cache on disk in the shipped program: each start continues from what an earlier one has computed, however that one ended.

use crate::support;

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use support::server::Server;
use support::{demo, json, output, piped, sluice, stderr, success, text};

const STORY: &str = "Once upon a time there was an old fisherman who lived with his wife in a small hut by the sea. Every day he went out with \
    his boat and his net, and every evening he came home with a few fish, and they were content. One day the net was very heavy, and when he had pulled it \
    into the boat there was a single fish in it, which was made of gold and which spoke to him with the voice of a man.";

fn flags(folder: &Path) -> Vec<String> {
    vec![
        format!("--prompt-cache={}", text(folder)),
        "--prompt-cache-bytes=200M".into(),
        "--prompt-cache-min-tokens=16".into(),
    ]
}

fn serve(folder: &Path) -> Option<Server> {
    let flags = flags(folder);
    Server::start(&flags.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The text, the number of prompt tokens, and how many of them were cached.
fn ask(server: &Server) -> (String, u64, u64) {
    let answer = server.complete(json!({"prompt": STORY, "max_tokens": 12, "temperature": 0}));
    let usage = &answer["usage"];
    let number = |value: &Value| value.as_u64().unwrap();
    let text = answer["choices"][0]["text"].as_str().unwrap().to_owned();
    (text, number(&usage["prompt_tokens"]), number(&usage["prompt_tokens_details"]["cached_tokens"]))
}

fn end(mut server: Server, signal: &str) {
    let killed = Command::new("kill").args([signal, &server.child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    server.child.wait().unwrap();
}

#[test]
fn a_server_goes_on_where_one_was_stopped_or_killed() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("cache");
    let Some(server) = serve(&folder) else { return };
    let (first, tokens, cached) = ask(&server);
    assert_eq!(cached, 0);
    end(server, "-TERM");
    // 1. After a clean stop, only the last token of the prompt is computed
    let server = serve(&folder).unwrap();
    assert_eq!(ask(&server), (first.clone(), tokens, tokens - 1));
    // From disk, or read ahead of the request.
    let there = |name: &str| server.metric(&format!("sluice:prompt_tokens_{name}_total"));
    assert_eq!((there("disk") + there("memory"), there("computed")), ((tokens - 1) as f64, 1.0));
    assert_eq!(ask(&server), (first.clone(), tokens, tokens - 1));
    assert!(there("memory") >= (tokens - 1) as f64);
    end(server, "-KILL");
    // 2. After a kill, what was written before is correct, whatever else is lost
    let server = serve(&folder).unwrap();
    assert_eq!(ask(&server), (first.clone(), tokens, tokens - 1));
    end(server, "-KILL");
    // 3. Killed while it computes and writes something new
    for i in 0..5 {
        let server = serve(&folder).unwrap();
        let body = json!({"prompt": format!("{i} {STORY} {STORY}"), "max_tokens": 1, "temperature": 0});
        server.complete(body);
        std::thread::sleep(std::time::Duration::from_millis(10 * i));
        end(server, "-KILL");
    }
    let server = serve(&folder).unwrap();
    assert_eq!(ask(&server).0, first);
    assert_eq!(server.metric("sluice:prompt_cache_wrong"), 0.0);
}

#[test]
fn a_lone_request_is_written_while_the_server_idles() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("cache");
    let Some(server) = serve(&folder) else { return };
    let (first, tokens, _) = ask(&server);
    server.wait_until("it is written", |s| s.metric("sluice:prompt_cache_blocks") > 4.0);
    end(server, "-KILL");
    let server = serve(&folder).unwrap();
    let (again, _, cached) = ask(&server);
    assert!(again == first && cached > tokens / 2, "{cached} of {tokens}");
}

#[test]
fn the_second_of_two_servers_does_without() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("cache");
    let Some(owner) = serve(&folder) else { return };
    let other = serve(&folder).unwrap();
    assert_eq!(ask(&owner).0, ask(&other).0);
    let run =
        [&["run".to_owned(), demo().unwrap(), "Hello".to_owned(), "-n1".to_owned()][..], &flags(&folder)].concat();
    let output = output(&run.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(stderr(&output).contains("in use by another process"), "{}", stderr(&output));
    success(output);
}

#[test]
fn after_a_restart_an_idle_server_has_read_what_was_used_last() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("cache");
    let Some(server) = serve(&folder) else { return };
    let (first, tokens, _) = ask(&server);
    end(server, "-TERM");
    let server = serve(&folder).unwrap();
    server.wait_until("it is in memory", |s| s.metric("sluice:prompt_cache_prefetched") >= (tokens - 1) as f64);
    assert_eq!(ask(&server), (first, tokens, tokens - 1));
    assert_eq!(server.metric("sluice:prompt_tokens_memory_total"), (tokens - 1) as f64);
    assert_eq!(server.metric("sluice:prompt_tokens_disk_total"), 0.0);
}

/// The answer to `DELETE`.
fn delete(server: &Server, path: &str) -> u16 {
    support::server::agent().delete(server.url(path)).call().unwrap().status().as_u16()
}

#[test]
fn a_session_of_a_server_goes_on_after_it_was_killed() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("cache");
    let Some(server) = serve(&folder) else { return };
    let names = |server: &Server| {
        let list: Value = serde_json::from_str(&server.get("/v1/sessions").1).unwrap();
        let all = list["data"].as_array().unwrap().iter();
        all.map(|s| s["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(names(&server).is_empty());
    let said = json!([{"role": "user", "content": STORY}]);
    let goes_on = |server: &Server| {
        let mut messages = said.as_array().unwrap().clone();
        messages.push(json!({"role": "assistant", "content": "What a story."}));
        messages.push(json!({"role": "user", "content": "What did the fish say?"}));
        let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned(), cached)
    };
    // 1. Once it is reported as saved, it is
    let (status, saved) = server.post("/v1/sessions", &json!({"name": "fish", "messages": said}));
    assert_eq!(status, 200, "{saved}");
    let tokens = saved["tokens"].as_u64().unwrap();
    assert!(tokens > 80, "{saved}");
    end(server, "-KILL");
    let server = serve(&folder).unwrap();
    assert_eq!(names(&server), ["fish"]);
    let (status, loaded) = server.post("/v1/sessions/fish/load", &json!({}));
    assert_eq!((status, loaded["prompt"].as_array().unwrap().len()), (200, tokens as usize), "{loaded}");
    // Another salt does not see it.
    assert!(server.get("/v1/sessions?cache_salt=other").1.contains("\"data\":[]"));
    assert_eq!(server.post("/v1/sessions/fish/load?cache_salt=other", &json!({})).0, 404);
    assert_eq!(delete(&server, "/v1/sessions/fish?cache_salt=other"), 404);
    let (answer, cached) = goes_on(&server);
    assert!(cached + 16 >= tokens, "{cached} of {tokens}");
    // 2. Its tokens also work as a prompt
    let body = json!({"prompt": loaded["prompt"], "max_tokens": 1});
    assert!(server.complete(body)["usage"]["prompt_tokens"] == tokens);
    // 3. Without its name it is a prompt like all others
    assert_eq!((delete(&server, "/v1/sessions/fish"), delete(&server, "/v1/sessions/fish")), (200, 404));
    assert_eq!(server.post("/v1/sessions/fish/load", &json!({})).0, 404);
    end(server, "-TERM");
    let server = serve(&folder).unwrap();
    assert!(names(&server).is_empty());
    assert_eq!(goes_on(&server).0, answer);
    // 4. Errors are reported
    for (body, part) in [
        (json!({"name": "a/b", "prompt": STORY}), "a session's name has"),
        (json!({"name": "", "prompt": STORY}), "a session's name has"),
        (json!({"name": "short", "prompt": "Hello"}), "--prompt-cache-min-tokens"),
        (json!({"name": "none"}), "either messages or a prompt"),
        (json!({"name": "both", "prompt": STORY, "messages": said}), "either messages or a prompt"),
        (json!({"name": "other", "prompt": STORY, "temperature": 1}), "unknown field"),
    ] {
        let (status, error) = server.post("/v1/sessions", &body);
        assert!(status == 400 && error["error"]["message"].as_str().unwrap().contains(part), "{body}: {error}");
    }
    assert!(names(&server).is_empty());
    drop(server);
    let without = Server::start(&[]).unwrap();
    assert!(without.get("/v1/sessions").1.contains("start the server with --prompt-cache"));
}

#[test]
fn a_session_of_chat_goes_on_where_it_ended() {
    let home = tempfile::tempdir().unwrap();
    let Some(model) = demo() else { return };
    let flags = flags(&home.path().join("cache"));
    let (file, copy) = (home.path().join("session.json"), home.path().join("copy.json"));
    let chat = |args: &[&str], lines: &str| {
        let command = sluice(&[&["chat", &model, "--stats", "--temperature", "0", "-n", "8"], args].concat());
        let output = piped(command, lines);
        (support::stdout(&output), stderr(&output))
    };
    let name = text(&file);
    let cached: Vec<&str> = flags.iter().map(String::as_str).chain(["--session", &name]).collect();
    let (first, _) = chat(&cached, &format!("{STORY}\n"));
    assert!(!first.is_empty());
    std::fs::copy(&file, &copy).unwrap();
    // The next start continues the conversation and computes little of it.
    let (second, figures) = chat(&cached, "What did the fish say to the fisherman?\n");
    let prompt = figures.lines().find(|l| l.starts_with("prompt  ")).unwrap();
    let computed: u64 = prompt.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(computed < 60 && prompt.contains("on disk"), "{prompt}");
    let load = format!("/load {}\nWhat did the fish say to the fisherman?\n", text(&copy));
    assert_eq!(chat(&[], &load).0, second);
    let said: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(said.as_array().unwrap().len(), 4, "{said}");
    // A file of something else is not overwritten.
    std::fs::write(&file, "notes").unwrap();
    support::assert_refused(&output(&["chat", &model, "--session", &name]), &["--session", "session.json"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "notes");
}

#[test]
fn chat_and_run_go_on_from_what_was_said_before() {
    let home = tempfile::tempdir().unwrap();
    let Some(model) = demo() else { return };
    let flags = flags(&home.path().join("cache"));
    // 1. The same conversation, twice
    let chat = || {
        let mut command = sluice(&["chat", &model, "--stats", "--temperature", "0", "-n", "8"]);
        command.args(&flags);
        let output = piped(command, &format!("{STORY}\nWhat did it say?\n"));
        (support::stdout(&output), stderr(&output))
    };
    let ((first, figures), (again, later)) = (chat(), chat());
    assert_eq!(first, again);
    assert!(!figures.contains("on disk"), "{figures}");
    assert!(later.contains("on disk"), "{later}");
    assert!(later.contains("prompt cache: ") && later.contains("of at most 200"), "{later}");
    // 2. A prompt
    let run = || {
        let mut command = sluice(&["run", &model, STORY, "--raw", "--json", "-n", "4", "--temperature", "0"]);
        json(command.args(&flags).output().unwrap())
    };
    let (first, again) = (run(), run());
    assert_eq!(first["text"], again["text"]);
    assert_eq!(first["stats"]["prompt"]["cached_on_disk"], 0);
    let tokens = first["prompt_tokens"].as_u64().unwrap();
    assert!(again["stats"]["prompt"]["cached_on_disk"].as_u64().unwrap() > tokens / 2, "{again}");
}

#[test]
fn nothing_is_written_unless_it_is_asked_for() {
    let Some(model) = demo() else { return };
    let home = tempfile::tempdir().unwrap();
    let prompts = home.path().join(".cache/sluice/prompt-cache");
    let run = |settings: &[(&str, &str)], flags: &[&str]| {
        let mut command = sluice(&[&["run", &model, "Hello", "-n", "1"][..], flags].concat());
        success(command.env("HOME", home.path()).envs(settings.iter().copied()).output().unwrap());
        prompts.exists()
    };
    assert!(!run(&[], &[]));
    assert!(!run(&[("SLUICE_PROMPT_CACHE", "no")], &[]));
    assert!(run(&[("SLUICE_PROMPT_CACHE", "1")], &["--prompt-cache-bytes", "100M"]));
    // The default folder of `sluice cache`.
    let found = sluice(&["cache", "stat", "--json"]).env("HOME", home.path()).output().unwrap();
    assert_eq!(json(found)["folder"], text(&prompts));
    // A quota too small for anything is refused.
    let refused = sluice(&["run", &model, "Hello", "--prompt-cache", "--prompt-cache-bytes", "1M"])
        .env("HOME", home.path())
        .output()
        .unwrap();
    support::assert_refused(&refused, &["too little for a prompt cache"]);
}
