//! A server on a GPU answers concurrent clients as one on the CPU does, and either continues from the other's prompt cache. Without a GPU the test passes and prints that it
//! was skipped. `SLUICE_GPU=N` requires a device, and `SLUICE_GPU_MODEL=FOLDER` takes another model than the demo.

use crate::support;

use std::path::Path;
use std::process::Command;
use std::thread;

use serde_json::{Value, json};
use support::server::Server;
use support::{demo, sluice, text};

const STORY: &str = "Once upon a time there was an old fisherman who lived with his wife in a small hut by the sea. Every day he went out with \
    his boat and his net, and every evening he came home with a few fish, and they were content.";
const CLIENTS: usize = 6;

/// The `--device` argument and the model, if there is such a device.
fn on_device() -> Option<(String, String)> {
    let asked: Option<u32> = std::env::var("SLUICE_GPU").ok().map(|n| n.parse().expect("SLUICE_GPU: a number"));
    let number = asked.unwrap_or(0);
    match sluice_cuda::describe(number) {
        Ok(_) => {}
        Err(why) if asked.is_none() => {
            eprintln!("left out: {why:#}");
            return None;
        }
        Err(why) => panic!("SLUICE_GPU: {why:#}"),
    }
    let model = std::env::var("SLUICE_GPU_MODEL").ok().or_else(demo)?;
    Some((format!("cuda:{number}"), model))
}

fn start(model: &str, device: &str, cache: &Path) -> Server {
    let mut command = sluice(&["serve", model, "--port", "0", "--device", device, "--parallel", "4"]);
    let folder = format!("--prompt-cache={}", text(cache));
    command.args([&folder, "--prompt-cache-bytes=200M", "--prompt-cache-min-tokens=16"]);
    Server::of(command)
}

fn stop(mut server: Server) {
    assert!(Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().unwrap().success());
    assert!(server.child.wait().unwrap().success());
}

fn ask(server: &Server, prompt: &str) -> (String, u64, u64) {
    let answer = server.complete(json!({"prompt": prompt, "max_tokens": 24, "temperature": 0}));
    let number = |value: &Value| value.as_u64().unwrap();
    let usage = &answer["usage"];
    let cached = number(&usage["prompt_tokens_details"]["cached_tokens"]);
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), number(&usage["prompt_tokens"]), cached)
}

/// Answers to concurrent clients, of which there are more than sequences. Their prompts have a common prefix.
fn concurrent_answers(server: &Server) -> Vec<String> {
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|i| {
                let prompt = format!("{STORY} On day {i}, when the net was very heavy,");
                scope.spawn(move || ask(server, &prompt).0)
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

#[test]
fn a_server_on_a_gpu_answers_as_one_on_the_cpu_and_shares_its_prompt_cache() {
    let Some((device, model)) = on_device() else { return };
    let home = tempfile::tempdir().unwrap();
    let [of_cpu, of_gpu] = ["cpu", "gpu"].map(|name| home.path().join(name));
    let (cpu, gpu) = (start(&model, "cpu", &of_cpu), start(&model, &device, &of_gpu));
    let (said, tokens, cached) = ask(&cpu, STORY);
    assert_eq!(cached, 0);
    assert_eq!(ask(&gpu, STORY), (said.clone(), tokens, 0));
    assert_eq!(concurrent_answers(&gpu), concurrent_answers(&cpu));
    stop(cpu);
    stop(gpu);
    // Each continues from the other's cache.
    for (device, folder) in [(device.as_str(), &of_cpu), ("cpu", &of_gpu)] {
        let server = start(&model, device, folder);
        assert_eq!(ask(&server, STORY), (said.clone(), tokens, tokens - 1), "{device}");
        stop(server);
    }
}
