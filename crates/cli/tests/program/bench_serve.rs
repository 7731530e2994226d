//! `sluice bench serve` against a real `sluice serve` with the demo model: checks counts, not times.

use crate::support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::thread;

use serde_json::Value;
use support::{assert_refused, demo, json, output, sluice, success};

/// A running server and its address.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// `None`, with a note, without a demo model.
    fn start(flags: &[&str]) -> Option<Server> {
        let mut command = sluice(&["serve", &demo()?]);
        let mut child = command.args(flags).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut line =
            |part: &str| lines.by_ref().map(Result::unwrap).find(|l| l.contains(part)).expect("it has ended");
        let address = line("listening on").split("listening on ").nth(1).unwrap().to_owned();
        line("ready");
        // Later output must be read by somebody.
        thread::spawn(move || lines.for_each(drop));
        Some(Server { child, address })
    }

    fn words<'a>(&'a self, flags: &[&'a str]) -> Vec<&'a str> {
        [&["bench", "serve", "--base-url", &self.address], flags].concat()
    }

    fn bench(&self, flags: &[&str]) -> Value {
        json(output(&self.words(&[flags, &["--json"]].concat())))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SMALL: [&str; 8] = ["--input", "40", "--output", "6", "--requests", "7", "--rate", "0"];

#[test]
fn a_workload_is_counted_to_the_token() {
    let Some(server) = Server::start(&["--port", "0", "--model-name", "mine", "--snapshots", "100"]) else { return };
    let report = server.bench(&SMALL);
    assert_eq!((report["model"].as_str(), report["prompts"].as_str()), (Some("mine"), Some("ids")));
    assert_eq!((&report["requests"]["ok"], &report["requests"]["failed"]), (&7.into(), &0.into()));
    assert_eq!((&report["prompt_tokens"], &report["output_tokens"]), (&(7 * 40).into(), &(7 * 6).into()));
    assert_eq!(report["cached_tokens"], 0);
    for figure in ["seconds", "output_tokens_per_second", "total_tokens_per_second", "requests_per_second"] {
        assert!(report[figure].as_f64().unwrap() > 0.0, "{figure}: {report}");
    }
    for times in ["ttft_ms", "tpot_ms", "itl_ms"] {
        for figure in ["mean", "median", "p99", "highest"] {
            assert!(report[times][figure].as_f64().unwrap() > 0.0, "{times}.{figure}: {report}");
        }
    }
    // Another seed gives another workload; the same seed gives the same.
    let cached = |seed| server.bench(&[&SMALL[..], &["--seed", seed]].concat())["cached_tokens"].as_u64().unwrap();
    assert_eq!((cached("1"), cached("0")), (0, 7 * 39));
    // As words, prompts are about as long, and the report is the same.
    let text = success(output(&server.words(&[&SMALL[..], &["--prompts", "text", "--seed", "2"]].concat())));
    for part in ["sent as text", "7 ok, 0 failed", "output tokens         42", "TTFT", "TPOT", "ITL", "P99"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_prompts_share_is_found_cached() {
    let Some(server) = Server::start(&["--port", "0", "--snapshots", "100"]) else { return };
    // The demo model has recurrent layers: the second prompt finds the first one's keys and values, and leaves a state for all others.
    let shared = ["--workload", "shared-prefix", "--shared", "32", "--warmups", "2", "--concurrency", "1"];
    let report = server.bench(&[&SMALL[..], &shared].concat());
    assert_eq!((&report["shared"], &report["cached_tokens"]), (&32.into(), &(7 * 32).into()));
    let report = server.bench(&[&SMALL[..], &["--workload", "lengths", "--warmups", "0"]].concat());
    let prompts = report["prompt_tokens"].as_u64().unwrap();
    assert!((70..=490).contains(&prompts) && prompts != 280, "{prompts}");
    assert_eq!(report["requests"]["ok"], 7);
}

#[test]
fn a_conversation_says_what_each_turn_computes_again() {
    let Some(server) = Server::start(&["--port", "0"]) else { return };
    for thinking in ["kept", "stripped"] {
        let flags = ["--workload", "conversation", "--turns", "10", "--output", "4", "--thinking", thinking];
        let report = server.bench(&flags);
        let turns = report["turns"].as_array().unwrap();
        let number = |turn: &Value, name: &str| turn[name].as_u64().unwrap();
        assert_eq!(turns.len(), 10);
        for kind in ["question", "tool result", "regeneration", "edit"] {
            assert!(turns.iter().any(|t| t["kind"] == kind), "{kind}: {report}");
        }
        // Nothing was cached before, except the start of the second conversation.
        assert_eq!(number(&turns[0], "last_turn_tokens"), number(&turns[0], "prompt_tokens"));
        assert_eq!(report["turns_beyond_the_last"], 0, "{report}");
        let again = turns.iter().find(|t| t["kind"] == "regeneration").unwrap();
        assert_eq!(number(again, "recomputed_tokens"), 1);
        let sum: u64 = turns.iter().map(|t| number(t, "recomputed_tokens")).sum();
        assert_eq!(report["recomputed_tokens"], sum);
    }
}

#[test]
fn a_prompt_among_streams_is_measured_over_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.sock");
    let Some(server) = Server::start(&["--unix-socket", path.to_str().unwrap()]) else { return };
    let flags = ["--workload", "arrival", "--streams", "2", "--long", "300", "--input", "16"];
    let report = server.bench(&flags);
    assert_eq!((&report["streams"], &report["long_tokens"]), (&2.into(), &300.into()));
    assert_eq!(report["a_stream_ended_early"], false);
    for figure in ["alone_ms", "among_ms", "usual_gap_ms", "largest_gap_ms", "largest_gap_over_usual"] {
        assert!(report[figure].as_f64().unwrap() > 0.0, "{figure}: {report}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused_in_a_line() {
    let refused = |flags: &[&str], parts: &[&str]| {
        assert_refused(&output(&[&["bench", "serve"], flags].concat()), parts);
    };
    refused(&["--base-url", "ftp://x"], &["ftp://x", "http://HOST:PORT"]);
    refused(&["--base-url", "unix:/nowhere/at/all"], &["/nowhere/at/all"]);
    refused(&["--rate=-1"], &["--rate"]);
    refused(&["--workload", "shared-prefix", "--shared", "1024"], &["--shared 1024"]);
    let Some(server) = Server::start(&["--port", "0", "--max-context", "64"]) else { return };
    let words = server.words(&["--input", "100", "--requests", "2"]);
    assert_refused(&output(&words), &["maximum context length is 64 tokens"]);
    let words = server.words(&["--prompts", "ids", "--vocabulary", "4000000000"]);
    assert_refused(&output(&words), &["not in the vocabulary"]);
}
