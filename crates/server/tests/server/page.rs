//! The page at `/` and its files: their headers, and that they need no other server.

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, mpsc};
use std::thread;

use sluice_server::{Access, Bound, Limits, ModelFacts, Offer, Server, Settings};

struct Answer {
    status: u16,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

fn ask(address: &str, path: &str, more: &str) -> Answer {
    let mut stream = TcpStream::connect(address.strip_prefix("http://").unwrap()).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{more}\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(answer[..end].to_vec()).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let header = |line: &str| line.split_once(": ").map(|(n, v)| (n.to_lowercase(), v.to_owned())).unwrap();
    Answer { status, headers: lines.map(header).collect(), body: answer[end + 4..].to_vec() }
}

/// Requests from a server whose model is not loaded: the page can say so meanwhile.
fn with_server(test: impl FnOnce(&str)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let bound = runtime.block_on(Bound::tcp("127.0.0.1", 0)).unwrap();
    let address = bound.address().unwrap();
    let (go_on, wait) = mpsc::channel::<()>();
    let settings = Settings {
        limits: Limits::default(),
        access: Access::default(),
        request_timeout: None,
        idle_unload: None,
        log_requests: false,
    };
    let server = thread::spawn(move || {
        let wait = Mutex::new(wait);
        let load = move || {
            wait.lock().unwrap().recv().unwrap();
            anyhow::bail!("no model here")
        };
        let offer = Offer {
            name: "model".into(),
            context: 10,
            style: None,
            facts: ModelFacts::default(),
            load: Box::new(load),
        };
        runtime.block_on(Server::new(bound, settings, vec![offer], |_| ()).run(std::future::pending()))
    });
    test(&address);
    go_on.send(()).unwrap();
    server.join().unwrap().unwrap_err();
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("page")
}

/// Names of the page's files, without tests and the script that fetches libraries.
fn files() -> Vec<String> {
    let here = fs::read_dir(folder()).unwrap();
    let vendored = fs::read_dir(folder().join("vendor")).unwrap();
    let paths = here.chain(vendored).map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let name = |path: PathBuf| path.strip_prefix(folder()).unwrap().to_str().unwrap().to_owned();
    let mut names: Vec<String> = paths.map(name).filter(|name| name != "vendor/SHA256SUMS").collect();
    names.sort();
    assert!(names.len() > 20, "{names:?}");
    names
}

fn address_of(name: &str) -> String {
    if name == "index.html" { "/".to_owned() } else { format!("/page/{name}") }
}

#[test]
fn every_file_of_the_page_is_served_as_what_it_is_under_a_strict_policy() {
    let kinds = [
        ("html", "text/html; charset=utf-8"),
        ("css", "text/css; charset=utf-8"),
        ("js", "text/javascript; charset=utf-8"),
        ("svg", "image/svg+xml"),
        ("txt", "text/plain; charset=utf-8"),
    ];
    with_server(|address| {
        for name in files() {
            let answer = ask(address, &address_of(&name), "");
            assert_eq!(answer.status, 200, "{name}");
            assert_eq!(answer.body, fs::read(folder().join(&name)).unwrap(), "{name}");
            let kind = kinds.iter().find(|(end, _)| name.ends_with(end)).unwrap().1;
            assert_eq!(answer.headers["content-type"], kind, "{name}");
            assert_eq!(answer.headers["x-content-type-options"], "nosniff", "{name}");
            assert_eq!(answer.headers["referrer-policy"], "no-referrer", "{name}");
            let policy: Vec<&str> = answer.headers["content-security-policy"].split("; ").collect();
            for directive in [
                "default-src 'none'",
                "script-src 'self'",
                "style-src 'self'",
                "connect-src 'self'",
                "img-src 'self' data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ] {
                assert!(policy.contains(&directive), "{name}: {policy:?} without {directive}");
            }
            assert!(!answer.headers["content-security-policy"].contains("unsafe"), "{name}");
        }
        assert_eq!(ask(address, "/page/nothing.js", "").status, 404);
        assert_eq!(ask(address, "/page/../Cargo.toml", "").status, 404);
        assert_eq!(ask(address, "/page/tests/page.test.mjs", "").status, 404);
    });
}

#[test]
fn a_file_that_the_browser_has_is_not_sent_again() {
    with_server(|address| {
        let mut tags = Vec::new();
        for name in files() {
            let first = ask(address, &address_of(&name), "");
            let tag = first.headers["etag"].clone();
            assert_eq!(first.headers["cache-control"], "no-cache", "{name}");
            for known in [tag.clone(), format!("\"other\", W/{tag}"), "*".to_owned()] {
                let again = ask(address, &address_of(&name), &format!("if-none-match: {known}\r\n"));
                assert_eq!((again.status, again.body.len()), (304, 0), "{name}");
                assert_eq!(again.headers["etag"], tag);
                assert!(again.headers.contains_key("content-security-policy"));
            }
            assert_eq!(ask(address, &address_of(&name), "if-none-match: \"other\"\r\n").status, 200);
            tags.push(tag);
        }
        tags.sort();
        tags.dedup();
        assert_eq!(tags.len(), files().len(), "files with the same tag");
    });
}

#[test]
fn the_page_refers_to_nothing_elsewhere_and_has_no_script_or_style_in_its_html() {
    let read = |name: &str| fs::read_to_string(folder().join(name)).unwrap();
    for name in files().iter().filter(|name| !name.ends_with(".txt")) {
        let text = read(name);
        if name.starts_with("vendor/") {
            // Addresses in their comments are never requested.
            for way_out in ["fetch(", "XMLHttpRequest", "import(", "importScripts", "sourceMappingURL"] {
                assert!(!text.contains(way_out), "{name}: {way_out}");
            }
        } else {
            // An XML namespace is not an address.
            assert!(!text.replace("http://www.w3.org/2000/svg", "").contains("://"), "{name}");
        }
    }
    let html = read("index.html");
    assert!(!html.contains("<style") && !html.contains("style=") && !html.contains("javascript:"));
    assert!(html.match_indices("<script").all(|(at, _)| html[at..].split('>').next().unwrap().contains("src=\"page/")));
    assert!(
        !html.split(['<', ' ', '\n']).any(|word| word.starts_with("on") && word.contains('=')),
        "a handler in the HTML"
    );
    // Every module that is imported is one of the files.
    for name in files().iter().filter(|name| name.ends_with(".js")) {
        let text = read(name);
        for after in text.split("from").skip(1).filter_map(|after| after.trim_start().strip_prefix('"')) {
            let import = after.split('"').next().unwrap().strip_prefix("./");
            let target = import
                .map(|import| name.rsplit_once('/').map_or(String::new(), |(base, _)| format!("{base}/")) + import);
            assert!(target.as_ref().is_some_and(|target| files().contains(target)), "{name} imports {target:?}");
        }
    }
}
