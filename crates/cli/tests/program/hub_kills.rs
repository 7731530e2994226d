//! Kills `pull` at random instants. No file under a final name may ever be wrong, and what had arrived is never fetched again. `SLUICE_HUB_KILLS` sets how many
//! kills, `SLUICE_HUB_SEED` which.

use crate::support;

use std::env;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use sluice_test_hub::{Content, git_sha1, sha256};
use support::hub::Place;
use support::*;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Bytes under final names and bytes of what is still arriving. Every file under a final name is compared with the sum that is its name.
fn checked(place: &Place) -> u64 {
    let blobs = place.cache().join("models--org--m/blobs");
    let mut there = 0;
    for entry in fs::read_dir(&blobs).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.contains("sluice") {
            continue;
        }
        let content = Content::Disk(path.clone());
        let sum = if name.len() == 64 { sha256(&content) } else { git_sha1(&content) };
        assert_eq!(sum, name, "a wrong file has a final name");
        there += content.size();
    }
    let listed = json(place.output(&["list", "--json"]));
    let partial = listed["models"].as_array().unwrap().iter().find(|model| model["format"] == "partial");
    there + partial.map_or(0, |model| model["bytes"].as_u64().unwrap())
}

/// Every name in a snapshot leads to a file.
fn assert_links_lead_somewhere(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => assert_links_lead_somewhere(&path),
            false => {
                assert!(path.exists() || path.to_string_lossy().contains("sluice"), "{} leads nowhere", path.display())
            }
        }
    }
}

#[test]
fn kills_at_random_instants_cost_no_byte_and_make_no_file_wrong() {
    let kills = number("SLUICE_HUB_KILLS").unwrap_or(20);
    let seed = number("SLUICE_HUB_SEED").unwrap_or(1);
    let mut random = fastrand::Rng::with_seed(seed);
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let files: Vec<(&str, Content)> = vec![
        ("config.json", "{}".into()),
        ("model.safetensors.index.json", index.into()),
        ("tokenizer.json", Content::random(seed, 2 << 20)),
        ("model-00001-of-00002.safetensors", Content::random(seed + 1, 20 << 20)),
        ("model-00002-of-00002.safetensors", Content::random(seed + 2, 9 << 20)),
    ];
    let all: u64 = files.iter().map(|(_, content)| content.size()).sum();
    let (mut done, mut whole, mut asked, mut useful) = (0, 0, 0, 0);
    while done < kills {
        let place = Place::new();
        place.hub.commit("org/m", &files);
        place.hub.faults(|f| f.slow = Some(Duration::from_millis(12)));
        let mut before = 0;
        loop {
            let mut child = place.sluice(&["pull", "--quiet", "org/m"]).stderr(Stdio::piped()).spawn().unwrap();
            let instant = Instant::now() + Duration::from_micros(random.u64(0..900_000));
            let mut ended = None;
            while Instant::now() < instant && ended.is_none() {
                thread::sleep(Duration::from_millis(1));
                ended = child.try_wait().unwrap();
            }
            if ended.is_none() {
                child.kill().unwrap();
            }
            let output = child.wait_with_output().unwrap();
            assert!(ended.is_none() || output.status.success(), "{}", stderr(&output));
            let there = checked(&place);
            assert!(there >= before, "kill {done}: {there} bytes are there, and {before} were (seed {seed})");
            assert_links_lead_somewhere(&place.cache().join("models--org--m/snapshots"));
            before = there;
            if ended.is_some() {
                break;
            }
            done += 1;
            if done == kills {
                // The last one is to end as well.
                success(place.output(&["pull", "--quiet", "org/m"]));
                break;
            }
        }
        let listed = json(place.output(&["list", "--json"]));
        let path = listed["models"][0]["path"].as_str().unwrap().to_owned();
        for (name, content) in &files {
            assert!(fs::read(Path::new(&path).join(name)).unwrap() == content.bytes(), "{name} is wrong (seed {seed})");
        }
        whole += 1;
        useful += all;
        asked += place
            .hub
            .requests()
            .iter()
            .filter(|r| r.is_for_bytes)
            .filter_map(|r| r.range)
            .map(|(a, b)| b + 1 - a)
            .sum::<u64>();
    }
    eprintln!("{done} kills, {whole} whole models, seed {seed}; {asked} bytes were asked for in ranges, of {useful}");
}
