//! A hub, a cache, and models in both.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sluice_hub::{Client, Error, Event, Extent, Model, ModelName, Settings, Url, Watch, find, pull};
use sluice_test_hub::{Content, TestHub};

/// Bytes of a file in several segments.
pub const LARGE: usize = (18 << 20) + 12345;

/// A hub and an empty cache.
pub struct Place {
    pub hub: TestHub,
    pub dir: tempfile::TempDir,
    pub token: Option<String>,
}

/// Hears everything.
#[derive(Default)]
pub struct Heard {
    pub notes: RefCell<Vec<String>>,
    /// Bytes that were announced, and those of them that were there.
    pub planned: RefCell<Option<(u64, u64)>>,
    /// Stops when so many bytes are there.
    pub stop_at: Option<u64>,
    pub done: RefCell<u64>,
}

impl Watch for Heard {
    fn event(&self, event: Event) {
        match event {
            Event::Note(note) => self.notes.borrow_mut().push(note),
            Event::Planned(planned) => *self.planned.borrow_mut() = Some((planned.bytes, planned.kept)),
            Event::Progress { done, .. } => *self.done.borrow_mut() = done,
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop_at.is_some_and(|limit| *self.done.borrow() >= limit)
    }
}

impl Place {
    pub fn new() -> Place {
        Place { hub: TestHub::start(), dir: tempfile::tempdir().unwrap(), token: None }
    }

    pub fn cache(&self) -> PathBuf {
        self.dir.path().join("hub")
    }

    pub fn settings(&self) -> Settings {
        Settings {
            endpoint: Url { path: String::new(), ..Url::parse(&self.hub.endpoint()).unwrap() },
            token: self.token.clone(),
            cache: self.cache(),
            offline: false,
            connections: 4,
            patience: Duration::from_secs(2),
            tries: 4,
            pause: Duration::from_millis(10),
        }
    }

    pub fn name(&self, text: &str) -> ModelName {
        ModelName::parse(text, "hub.example").unwrap()
    }

    pub fn pull(&self, text: &str) -> Result<Model, Error> {
        self.pull_with(text, &Heard::default())
    }

    pub fn pull_with(&self, text: &str, watch: &dyn Watch) -> Result<Model, Error> {
        pull(&Arc::new(Client::new(self.settings())), &self.name(text), Extent::Whole, watch)
    }

    /// The message of a pull that fails.
    #[track_caller]
    pub fn refused(&self, text: &str) -> String {
        let error = self.pull(text).expect_err("it must fail").to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    }

    pub fn find(&self, text: &str) -> Option<Model> {
        find(&self.settings(), &self.name(text), Extent::Whole)
    }

    /// Puts a model of safetensors in two shards, and what lies beside it, on the hub.
    pub fn add_safetensors(&self, repo: &str) -> Vec<(&'static str, Content)> {
        let index =
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
        let files = vec![
            ("config.json", r#"{"model_type": "llama"}"#.into()),
            ("tokenizer.json", Content::random(1, 3 << 20)),
            ("model.safetensors.index.json", index.into()),
            ("model-00001-of-00002.safetensors", Content::random(2, LARGE)),
            ("model-00002-of-00002.safetensors", Content::random(3, 2 << 20)),
        ];
        let others = [("README.md", "# A model".into()), ("pytorch_model.bin", Content::random(4, 1 << 20))];
        self.hub.commit(repo, &[&files[..], &others[..]].concat());
        files
    }

    /// Puts a repository with one GGUF file on the hub.
    pub fn add_gguf(&self, repo: &str) -> Content {
        let content = Content::random(5, LARGE);
        self.hub.commit(repo, &[("m-Q4_K_M.gguf", content.clone())]);
        content
    }

    /// Names below the cache that are no longer than it takes: nothing temporary, nothing partial.
    pub fn leftovers(&self) -> Vec<PathBuf> {
        below(&self.cache()).into_iter().filter(|path| path.to_string_lossy().contains("sluice")).collect()
    }

    /// Bytes that were asked of the server that has them.
    pub fn asked_bytes(&self) -> u64 {
        let ranges = self.hub.requests().into_iter().filter(|r| r.is_for_bytes).filter_map(|r| r.range);
        ranges.map(|(first, last)| last + 1 - first).sum()
    }
}

/// All paths below a folder.
pub fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(below(&path));
        }
        found.push(path);
    }
    found
}

/// Checks that a model has exactly these files, with these bytes.
#[track_caller]
pub fn assert_files(model: &Model, snapshot: &Path, files: &[(&str, Content)]) {
    let found: BTreeSet<&str> = model.files.iter().map(|(file, _)| file.as_str()).collect();
    assert_eq!(found, files.iter().map(|(name, _)| *name).collect());
    for (name, content) in files {
        assert!(fs::read(snapshot.join(name)).unwrap() == content.bytes(), "{name} has other bytes");
    }
}
