//! Folders for the program's own files, by the XDG specification. If one cannot be created, the program works without it.

use std::env;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::terminal;

/// Compiled images of tokenizers: `~/.cache/sluice/tokenizers`.
pub fn tokenizer_cache() -> Option<PathBuf> {
    private(base("XDG_CACHE_HOME", ".cache")?.join("sluice/tokenizers"))
}

/// Measured speeds of disks: `~/.cache/sluice/disks.json`.
pub fn disk_speeds() -> Option<PathBuf> {
    Some(private(base("XDG_CACHE_HOME", ".cache")?.join("sluice"))?.join("disks.json"))
}

/// What can be made again: `~/.cache/sluice`. Not created.
pub fn own_cache() -> Option<PathBuf> {
    Some(base("XDG_CACHE_HOME", ".cache")?.join("sluice"))
}

/// Messages of servers that `launch` started: `~/.local/state/sluice`.
pub fn logs() -> Option<PathBuf> {
    private(base("XDG_STATE_HOME", ".local/state")?.join("sluice"))
}

/// The prompt cache: `~/.cache/sluice/prompt-cache`. The cache itself creates it.
pub fn prompt_cache() -> Option<PathBuf> {
    Some(base("XDG_CACHE_HOME", ".cache")?.join("sluice/prompt-cache"))
}

/// Checksums of weights: `~/.cache/sluice/sums.json`.
pub fn sums() -> Option<PathBuf> {
    Some(private(base("XDG_CACHE_HOME", ".cache")?.join("sluice"))?.join("sums.json"))
}

/// The user's settings: `~/.config/sluice/config.toml`.
pub fn config_file() -> Option<PathBuf> {
    Some(base("XDG_CONFIG_HOME", ".config")?.join("sluice/config.toml"))
}

/// Lines typed in chats: `~/.local/state/sluice/chat-history`.
pub fn chat_history() -> Option<PathBuf> {
    Some(private(base("XDG_STATE_HOME", ".local/state")?.join("sluice"))?.join("chat-history"))
}

/// The variable `name` if it is an absolute path (the XDG specification says to ignore others), else the folder in the user's home.
fn base(name: &str, in_home: &str) -> Option<PathBuf> {
    let named = env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    named.or_else(|| Some(home()?.join(in_home)))
}

/// The user's home, if there is one.
pub fn home() -> Option<PathBuf> {
    env::var_os("HOME").map(PathBuf::from).filter(|p| p.is_absolute())
}

/// A folder for messages: the home folder is `~`.
pub fn shown(folder: &Path) -> String {
    let in_home = home().and_then(|home| folder.strip_prefix(home).ok().map(|rest| Path::new("~").join(rest)));
    terminal::shown(&in_home.as_deref().unwrap_or(folder).display().to_string())
}

/// The folder, created for this user alone if it is missing.
fn private(folder: PathBuf) -> Option<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    Some(folder)
}
