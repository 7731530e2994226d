//! What the environment says: the same variables as for Hugging Face's own programs.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::url::Url;

/// The hub, if `HF_ENDPOINT` names no other.
const ENDPOINT: &str = "https://huggingface.co";
/// The most bytes of a file with a token.
const MAX_TOKEN: u64 = 4096;

/// Where the hub and the cache are.
#[derive(Clone)]
pub struct Settings {
    /// `HF_ENDPOINT`.
    pub endpoint: Url,
    /// `HF_TOKEN`, or what the token file has.
    pub token: Option<String>,
    /// `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub cache: PathBuf,
    /// `HF_HUB_OFFLINE`: ask nobody.
    pub offline: bool,
    /// Connections at once.
    pub connections: usize,
    /// A connection that is silent for so long is given up.
    pub patience: Duration,
    /// Tries without progress before it gives up.
    pub tries: u32,
    /// The pause after the first failure; each further one doubles it.
    pub pause: Duration,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        // Without the token.
        f.debug_struct("Settings").field("endpoint", &self.endpoint).field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl Settings {
    /// What the environment says.
    ///
    /// # Errors
    /// An `HF_ENDPOINT` that is no URL; no home folder; a token that cannot be a header.
    pub fn from_env() -> Result<Settings> {
        Settings::of(&|name| env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn of(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Settings> {
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let home = variable("HOME").map(PathBuf::from);
        let folder = |name: &str| variable(name).map(|value| expanded(Path::new(&value), home.as_deref()));
        let base = folder("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")));
        let hf_home = folder("HF_HOME").or_else(|| Some(base?.join("huggingface")));
        let cache = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| Some(hf_home.as_ref()?.join("hub")));
        let no_home = || Error::Name("there is no home folder for models: set HF_HOME".to_owned());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let mut endpoint = Url::parse(&endpoint).map_err(|e| Error::Name(format!("HF_ENDPOINT: {e}")))?;
        endpoint.path.truncate(endpoint.path.trim_end_matches('/').len());
        let seconds = text("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|value| value.parse().ok()).filter(|n| *n > 0);
        let of_file = || read_token(&folder("HF_TOKEN_PATH").or_else(|| Some(hf_home.as_ref()?.join("token")))?);
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(of_file);
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            return Err(Error::Name("HF_TOKEN has characters that no token has".to_owned()));
        }
        Ok(Settings {
            endpoint,
            token,
            cache: cache.ok_or_else(no_home)?,
            offline: is_true(text("HF_HUB_OFFLINE").or_else(|| text("TRANSFORMERS_OFFLINE"))),
            connections: 8,
            patience: Duration::from_secs(seconds.unwrap_or(20)),
            tries: 6,
            pause: Duration::from_millis(500),
        })
    }

    /// The hub's host, for messages.
    pub fn host(&self) -> &str {
        &self.endpoint.authority
    }
}

fn is_true(value: Option<String>) -> bool {
    value.is_some_and(|value| ["1", "on", "yes", "true"].contains(&&*value.to_ascii_lowercase()))
}

/// `~/..` is in the home folder.
fn expanded(path: &Path, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path.to_owned(),
    }
}

/// What `hf auth login` wrote.
fn read_token(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_TOKEN).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Settings> {
        Settings::of(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn folders_are_those_of_hugging_faces_programs() {
        for (variables, cache) in [
            (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "~/hf")], "/h/hf/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
            (&[("HF_HUB_CACHE", "/c"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/c"),
        ] {
            assert_eq!(of(variables).unwrap().cache, Path::new(cache));
        }
        assert!(of(&[]).unwrap_err().to_string().contains("HF_HOME"));
    }

    #[test]
    fn the_hub_and_its_token_are_named_by_variables() {
        let home = tempfile::tempdir().unwrap();
        let hf_home = home.path().to_str().unwrap();
        let found =
            of(&[("HF_HOME", hf_home), ("HF_ENDPOINT", "http://127.0.0.1:80/"), ("HF_HUB_OFFLINE", "yes")]).unwrap();
        assert_eq!(
            (found.endpoint.to_string(), found.token.clone(), found.offline),
            ("http://127.0.0.1:80".into(), None, true)
        );
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        assert_eq!(of(&[("HF_HOME", hf_home)]).unwrap().token.as_deref(), Some("hf_file"));
        let both = of(&[("HF_HOME", hf_home), ("HF_TOKEN", "hf_variable")]).unwrap();
        assert_eq!(both.token.as_deref(), Some("hf_variable"));
        assert!(!format!("{both:?}").contains("hf_variable"));
        assert!(of(&[("HF_HOME", hf_home), ("HF_TOKEN", "a b")]).is_err());
        assert!(of(&[("HF_HOME", hf_home), ("HF_ENDPOINT", "hub")]).unwrap_err().to_string().contains("HF_ENDPOINT"));
    }
}
