//! The program with a hub of its own, and models on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sluice_test_hub::{Content, TestHub};

use super::{golden, sluice};

/// Variables that say where the hub, its cache and the way to it are.
pub const VARIABLES: [&str; 15] = [
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "HF_HUB_DOWNLOAD_TIMEOUT",
];

/// A hub, and a home with an empty cache.
pub struct Place {
    pub hub: TestHub,
    pub home: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        Place { hub: TestHub::start(), home: tempfile::tempdir().unwrap() }
    }

    /// The program with this hub and cache.
    pub fn sluice(&self, args: &[&str]) -> Command {
        let mut command = sluice(args);
        command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", self.hub.endpoint()).env("HF_HOME", self.home.path());
        command
    }

    pub fn output(&self, args: &[&str]) -> Output {
        self.sluice(args).output().unwrap()
    }

    pub fn cache(&self) -> PathBuf {
        self.home.path().join("hub")
    }

    /// Puts a folder's files on the hub.
    pub fn add_folder(&self, repo: &str, folder: &Path) {
        let entries: Vec<_> =
            fs::read_dir(folder).unwrap().map(Result::unwrap).filter(|e| e.path().is_file()).collect();
        let files: Vec<(String, Content)> = entries
            .iter()
            .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap().into()))
            .collect();
        let files: Vec<(&str, Content)> = files.iter().map(|(name, content)| (&**name, content.clone())).collect();
        self.hub.commit(repo, &files);
    }

    /// A tiny model that runs, `org/tiny`. Returns its folder.
    pub fn add_tiny(&self) -> String {
        let folder = golden("llama_untied");
        self.add_folder("org/tiny", Path::new(&folder));
        folder
    }

    /// Two GGUF files of so many bytes that are no models, `org/two-GGUF`.
    pub fn add_two(&self, size: usize) -> [Content; 2] {
        let [one, two] = [1, 2].map(|seed| Content::random(seed, size));
        self.hub.commit("org/two-GGUF", &[("m-Q4_K_M.gguf", one.clone()), ("m-Q8_0.gguf", two.clone())]);
        [one, two]
    }
}
