//! The cache is one with huggingface_hub's: each finds what the other has fetched. Needs a Python that has it: `SLUICE_PYTHON` names one, else `python3`.

use crate::support;

use std::env;
use std::process::{Command, Output};

use support::hub::Place;
use support::*;

/// Runs Python with the place's hub and cache. `None`, with a note, if there is none with huggingface_hub.
fn python(place: &Place, script: &str) -> Option<Output> {
    let python = env::var("SLUICE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has_it = Command::new(&python).args(["-c", "import huggingface_hub"]).output();
    if !has_it.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: {python} has no huggingface_hub");
        return None;
    }
    let mut command = Command::new(python);
    for name in hub::VARIABLES {
        command.env_remove(name);
    }
    command
        .env("HF_ENDPOINT", place.hub.endpoint())
        .env("HF_HOME", place.home.path())
        .env("HF_HUB_DISABLE_PROGRESS_BARS", "1");
    Some(command.args(["-c", script]).output().unwrap())
}

#[test]
fn huggingface_hub_finds_what_was_pulled() {
    let place = Place::new();
    place.add_tiny();
    place.add_two(2 << 20);
    success(place.output(&["pull", "--quiet", "org/tiny", "org/two-GGUF:Q8_0"]));
    let script = "
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
print(snapshot_download('org/tiny', local_files_only=True))
print(hf_hub_download('org/two-GGUF', 'm-Q8_0.gguf', local_files_only=True))
for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
    print(repo.repo_id, repo.size_on_disk)
print(hf_hub_download('org/tiny', 'config.json'))
";
    let Some(found) = python(&place, script) else { return };
    let found = success(found);
    let listed = json(place.output(&["list", "--json"]));
    let path = |i: usize| listed["models"][i]["path"].as_str().unwrap().to_owned();
    let lines: Vec<&str> = found.lines().collect();
    assert_eq!(lines[..2], [path(0), path(1)]);
    assert_eq!(lines[2], format!("org/tiny {}", listed["models"][0]["bytes"]));
    assert_eq!(lines[3], format!("org/two-GGUF {}", 2 << 20));
    assert_eq!(lines[4], format!("{}/config.json", path(0)));
}

#[test]
fn what_huggingface_hub_fetched_starts_offline() {
    let place = Place::new();
    let folder = place.add_tiny();
    let script = "
from huggingface_hub import hf_hub_download
for name in ['config.json', 'model.safetensors.index.json', 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']:
    print(hf_hub_download('org/tiny', name))
";
    let Some(fetched) = python(&place, script) else { return };
    let fetched = success(fetched);
    place.hub.requests();
    let logits = |model: &str| {
        let args = ["eval", "logits", model, "--tokens", "1,2,3", "--json"];
        json(place.sluice(&args).env("HF_HUB_OFFLINE", "1").output().unwrap())["logits"].clone()
    };
    assert_eq!(logits("org/tiny"), logits(&folder));
    assert!(place.hub.requests().is_empty());
    let listed = json(place.output(&["list", "--json"]));
    let path = listed["models"][0]["path"].as_str().unwrap();
    assert_eq!(fetched.lines().last().unwrap(), format!("{path}/model-00002-of-00002.safetensors"));
    success(place.output(&["verify", "org/tiny"]));
}
