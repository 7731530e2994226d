//! Names of models, in every form that people copy from somewhere: a card, an URL, the command line of another program.

use std::fmt;

use crate::error::{Error, Result};
use crate::known;
use crate::quant;
use crate::url::{Url, decoded};

/// The most characters of an organisation's or a repository's name; the hub's own limit.
const MAX_PART: usize = 96;
/// The most characters of a revision or a file's name.
const MAX_TEXT: usize = 512;
/// Hosts whose pages are the hub's. Requests for them go to `HF_ENDPOINT`.
const HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];

/// A repository of the hub: `ORG/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Repo(String);

impl Repo {
    /// # Errors
    /// What the hub does not allow as a name.
    pub fn new(org: &str, name: &str) -> Result<Repo> {
        let is_plain = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            let ends = |c: char| "-.".contains(c);
            !part.is_empty()
                && part.len() <= MAX_PART
                && part.chars().all(allowed)
                && !part.starts_with(ends)
                && !part.ends_with(ends)
                && !part.contains("..")
        };
        if is_plain(org) && is_plain(name) {
            Ok(Repo(format!("{org}/{name}")))
        } else {
            Err(Error::Name(format!("{:?}: not the name of a model (ORG/NAME)", format!("{org}/{name}"))))
        }
    }

    /// The repository of a cache folder, `models--ORG--NAME`.
    pub fn of_folder(folder: &str) -> Option<Repo> {
        let (org, name) = folder.strip_prefix("models--")?.split_once("--")?;
        Repo::new(org, name).ok()
    }

    /// The name of its folder in the cache.
    pub fn folder(&self) -> String {
        format!("models--{}", self.0.replace('/', "--"))
    }

    /// `ORG/NAME`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which files of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Safetensors if there are any, or else the usual quantisation.
    Usual,
    /// The quantisation with this label, in upper case.
    Quant(String),
    /// This GGUF file, and the other parts if it is one of several.
    File(String),
}

/// A model's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// The repository.
    pub repo: Repo,
    /// A branch, a tag or a commit, if one is named.
    pub revision: Option<String>,
    /// Which of its files.
    pub choice: Choice,
}

impl ModelName {
    /// Reads `ORG/NAME`, `ORG/NAME:QUANT`, `ORG/NAME@REVISION`, all of these after `hf:`, `hf://` or `hf.co/`, and URLs of a repository or of a file in it.
    /// `host` is another host whose URLs are the hub's: that of `HF_ENDPOINT`.
    ///
    /// # Errors
    /// Anything else. For names of Ollama's and LM Studio's the message has the likely one of the hub.
    pub fn parse(text: &str, host: &str) -> Result<ModelName> {
        if text.is_empty() {
            return Err(Error::Name("the model's name is empty".into()));
        }
        if text.contains("://") && !text.starts_with("hf://") {
            let url = Url::parse(text)?;
            if !HOSTS.contains(&&*url.authority) && url.authority != host {
                return Err(Error::Name(format!(
                    "{}: not a page of {host}: download the file, and give its path",
                    url.shown()
                )));
            }
            return from_page(url.path.split('?').next().unwrap_or_default(), text);
        }
        let plain = ["hf://", "hf:"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
        let (first, rest) = plain.split_once('/').unwrap_or((plain, ""));
        if HOSTS.contains(&&*first.to_ascii_lowercase()) || first == host {
            return from_page(rest, text);
        }
        from_name(plain, text)
    }

    /// The revision to ask for.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        match &self.choice {
            Choice::Usual => Ok(()),
            Choice::Quant(label) => write!(f, ":{label}"),
            Choice::File(file) => write!(f, ":{file}"),
        }
    }
}

/// `ORG/NAME`, with a quantisation and a revision in either order.
fn from_name(plain: &str, whole: &str) -> Result<ModelName> {
    let wrong = || {
        let hint = known::likely(whole).map(|name| format!("; the hub has it as {name}"));
        Error::Name(format!(
            "{whole:?}: not the name of a model (ORG/NAME, ORG/NAME:QUANT){}",
            hint.unwrap_or_default()
        ))
    };
    let end = plain.find([':', '@']).unwrap_or(plain.len());
    let (repo, mut rest) = plain.split_at(end);
    let (org, name) = repo.split_once('/').ok_or_else(wrong)?;
    let repo = Repo::new(org, name).map_err(|_| wrong())?;
    let (mut revision, mut choice) = (None, Choice::Usual);
    while let Some(mark) = rest.chars().next() {
        let part = &rest[1..];
        // A revision has no colon, and a label no at sign.
        let end = part.find(if mark == '@' { ':' } else { '@' }).unwrap_or(part.len());
        let (value, after) = part.split_at(end);
        match mark {
            '@' if revision.is_none() && quant::is_label(value) => {
                return Err(Error::Name(format!(
                    "{whole}: after @ comes a revision; a quantisation comes after a colon: {repo}:{}",
                    value.to_uppercase()
                )));
            }
            '@' if revision.is_none() => revision = Some(checked_revision(value).ok_or_else(wrong)?),
            ':' if choice == Choice::Usual => choice = chosen(value).ok_or_else(wrong)?,
            _ => return Err(wrong()),
        }
        rest = after;
    }
    Ok(ModelName { repo, revision, choice })
}

/// The path of a page: `ORG/NAME`, `ORG/NAME/tree/REVISION`, `ORG/NAME/resolve/REVISION/FILE`.
fn from_page(path: &str, whole: &str) -> Result<ModelName> {
    let wrong = || Error::Name(format!("{whole}: not the page of a model or of a GGUF file in it"));
    let path = decoded(path).ok_or_else(wrong)?;
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    if parts.first().is_some_and(|first| ["datasets", "spaces", "kernels", "buckets"].contains(first)) {
        return Err(wrong());
    }
    let parts = parts.strip_prefix(&["models"]).unwrap_or(&parts);
    match parts {
        [org, name] => from_name(&format!("{org}/{name}"), whole),
        [org, name, "tree", revision] => Ok(ModelName {
            repo: Repo::new(org, name)?,
            revision: Some(checked_revision(revision).ok_or_else(wrong)?),
            choice: Choice::Usual,
        }),
        [org, name, "resolve" | "blob" | "raw", revision, file @ ..] if !file.is_empty() => {
            let file = file.join("/");
            let choice = match chosen(&file).ok_or_else(wrong)? {
                Choice::File(file) => Choice::File(file),
                _ if file.ends_with(".safetensors") || file.ends_with("config.json") => Choice::Usual,
                _ => return Err(wrong()),
            };
            // The branch that everybody means needs no name.
            let revision = Some(*revision).filter(|r| *r != "main");
            let revision = revision.map(|r| checked_revision(r).ok_or_else(wrong)).transpose()?;
            Ok(ModelName { repo: Repo::new(org, name)?, revision, choice })
        }
        _ => Err(wrong()),
    }
}

fn chosen(text: &str) -> Option<Choice> {
    let is_file = text.to_ascii_lowercase().ends_with(".gguf");
    if is_file {
        return is_relative(text).then(|| Choice::File(text.to_owned()));
    }
    // Ollama's word for what is usual.
    if text.eq_ignore_ascii_case("latest") {
        return Some(Choice::Usual);
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_plain = !text.is_empty() && text.len() <= MAX_PART && text.chars().all(plain);
    is_plain.then(|| Choice::Quant(text.to_uppercase()))
}

/// A branch, tag or commit that is safe as a path below `refs/` and in an URL.
pub(crate) fn checked_revision(text: &str) -> Option<String> {
    is_relative(text).then(|| text.to_owned())
}

/// Whether a name of the hub's may become a path below a folder: nothing absolute, nothing above it, no control characters.
pub(crate) fn is_relative(path: &str) -> bool {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    path.len() <= MAX_TEXT && path.split('/').all(is_plain) && !path.chars().any(|c| c.is_control() || c == '\\')
}

/// Whether this is the hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        ModelName::parse(text, "hub.example").unwrap().to_string()
    }

    #[test]
    fn a_model_has_many_names() {
        for (text, same) in [
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("unsloth/Qwen3-8B-GGUF:q4_k_m", "unsloth/Qwen3-8B-GGUF:Q4_K_M"),
            ("unsloth/Qwen3-8B-GGUF:ud-q4_k_xl", "unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL"),
            ("unsloth/Qwen3-8B-GGUF:latest", "unsloth/Qwen3-8B-GGUF"),
            ("hf.co/unsloth/Qwen3-8B-GGUF:Q8_0", "unsloth/Qwen3-8B-GGUF:Q8_0"),
            ("huggingface.co/org/name", "org/name"),
            ("org/name@v1.0", "org/name@v1.0"),
            ("org/name@refs/pr/1", "org/name@refs/pr/1"),
            ("org/name@v1:q8_0", "org/name@v1:Q8_0"),
            ("org/name:q8_0@v1", "org/name@v1:Q8_0"),
            ("org/name:sub/a-Q8_0.gguf", "org/name:sub/a-Q8_0.gguf"),
            ("https://huggingface.co/org/name", "org/name"),
            ("https://huggingface.co/org/name/", "org/name"),
            ("https://huggingface.co/org/name/tree/v1", "org/name@v1"),
            ("https://hub.example/org/name/tree/main", "org/name@main"),
            ("https://huggingface.co/org/name/blob/main/a%20b.gguf", "org/name:a b.gguf"),
            ("https://huggingface.co/org/name/resolve/main/a.gguf?download=true", "org/name:a.gguf"),
            ("https://huggingface.co/org/name/resolve/v2/model-00001-of-00002.safetensors", "org/name@v2"),
        ] {
            assert_eq!(parsed(text), same, "{text}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused_with_the_likely_one() {
        for (text, part) in [
            ("", "empty"),
            ("Qwen", "ORG/NAME"),
            ("../models/x", "ORG/NAME"),
            ("a/b/c", "ORG/NAME"),
            ("org/na me", "ORG/NAME"),
            ("org/--x", "ORG/NAME"),
            ("org/name@../../x", "ORG/NAME"),
            ("org/name:../x.gguf", "ORG/NAME"),
            ("org/name@", "ORG/NAME"),
            ("org/name:", "ORG/NAME"),
            ("org/name:a:b", "ORG/NAME"),
            ("qwen/qwen3-8b@q4_k_m", "qwen/qwen3-8b:Q4_K_M"),
            ("qwen3:8b", "unsloth/Qwen3-8B-GGUF"),
            ("https://elsewhere.example/a.gguf", "give its path"),
            ("https://huggingface.co/datasets/org/name", "not the page of a model"),
            ("https://huggingface.co/org/name/resolve/main/README.md", "not the page of a model"),
            ("https://huggingface.co/org/name/resolve/main/..%2f..%2fa.gguf", "not the page of a model"),
        ] {
            let error = ModelName::parse(text, "hub.example").unwrap_err().to_string();
            assert!(error.contains(part) && error.lines().count() == 1, "{text}: {error}");
        }
    }

    #[test]
    fn no_text_makes_a_name_that_leads_elsewhere() {
        let mut random = fastrand::Rng::with_seed(1);
        let parts = [
            "org",
            "name",
            "/",
            "/",
            ":",
            "@",
            "..",
            ".",
            "hf:",
            "https://",
            "hf.co/",
            "resolve/main/",
            "a.gguf",
            "%2f",
            "é",
            "\n",
            "\\",
            "~",
            "Q8_0",
        ];
        for _ in 0..50_000 {
            let text: String = (0..random.usize(1..8)).map(|_| *random.choice(&parts).unwrap()).collect();
            let Ok(name) = ModelName::parse(&text, "hub.example") else { continue };
            assert!(!name.repo.folder().contains('/') && name.repo.as_str().matches('/').count() == 1, "{text}");
            assert!(is_relative(name.revision()), "{text}");
            if let Choice::File(file) = &name.choice {
                assert!(is_relative(file), "{text}");
            }
        }
    }

    #[test]
    fn folders_of_the_cache_are_repositories() {
        let repo = Repo::new("org", "some-model").unwrap();
        assert_eq!(repo.folder(), "models--org--some-model");
        assert_eq!(Repo::of_folder("models--org--some-model"), Some(repo));
        for wrong in ["datasets--a--b", "models--gpt2", "models--a--", ".locks"] {
            assert_eq!(Repo::of_folder(wrong), None, "{wrong}");
        }
    }
}
