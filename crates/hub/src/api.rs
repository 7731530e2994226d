//! What the hub tells about a repository: the commit of a revision, its files, and each file's size and checksum.

use std::collections::BTreeMap;
use std::io::Read;

use serde::Deserialize;
use ureq::http::HeaderMap;

use crate::client::{Answer, Client, Failure};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::known;
use crate::name::{ModelName, Repo, is_commit, is_relative};
use crate::url::{Url, encoded};

/// The most bytes of a list of files; a repository with a hundred thousand has some twenty million.
const MAX_LIST: u64 = 64 << 20;
/// The most files that are looked at.
const MAX_FILES: usize = 1 << 20;
/// The most bytes of a file: all files together then have a number of bytes that can be counted.
pub const MAX_SIZE: u64 = 1 << 43;

/// A commit of a repository.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Forty digits.
    pub commit: String,
    /// By name. What the hub does not tell in its list is asked for each file that is wanted.
    pub files: BTreeMap<String, Option<FileFacts>>,
}

/// What a file must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFacts {
    /// Bytes.
    pub size: u64,
    /// Its checksum.
    pub digest: Digest,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Sibling {
    fn facts(&self) -> Option<FileFacts> {
        match &self.lfs {
            Some(lfs) => {
                Some(FileFacts { size: lfs.size.or(self.size)?, digest: Digest::of_etag(lfs.sha256.as_ref()?)? })
            }
            None => Some(FileFacts { size: self.size?, digest: Digest::of_etag(self.blob_id.as_ref()?)? }),
        }
    }
}

/// Asks for a repository's files at a revision.
pub fn list(client: &Client, name: &ModelName) -> Result<Listing, Failure> {
    let path =
        format!("/api/models/{}/revision/{}?blobs=true", name.repo, encoded(name.revision()).replace('/', "%2F"));
    let url = client.at(&path);
    let answer = client.get(&url, None)?;
    if answer.status != 200 {
        return Err(match client.refused(answer, name.repo.as_str(), name.revision()) {
            Failure::Final(Error::NotFound(what)) => {
                let hint = known::likely(name.repo.as_str()).map(|known| format!("; do you mean {known}?"));
                Failure::Final(Error::NotFound(what + &hint.unwrap_or_default()))
            }
            other => other,
        });
    }
    let text = body(client, answer, MAX_LIST)?;
    let wrong = |what: String| Failure::Final(Error::Answer { url: url.shown(), what });
    listing(&text).map_err(wrong)
}

/// Reads a list of files.
///
/// # Errors
/// What is wrong with it.
pub fn listing(text: &[u8]) -> Result<Listing, String> {
    let info: Info = serde_json::from_slice(text).map_err(|e| format!("not a list of files: {e}"))?;
    if !is_commit(&info.sha) {
        return Err(format!("{:?} is not a commit", info.sha));
    }
    if info.siblings.len() > MAX_FILES {
        return Err(format!("{} files", info.siblings.len()));
    }
    // A name that would leave the snapshot's folder is no file that anybody needs.
    let files = info.siblings.iter().filter(|file| is_relative(&file.rfilename));
    let files: BTreeMap<_, _> = files.map(|file| (file.rfilename.clone(), file.facts())).collect();
    let large = files.iter().find(|(_, facts)| facts.as_ref().is_some_and(|facts| facts.size > MAX_SIZE));
    if let Some((file, _)) = large {
        return Err(format!("{file}: no file is so large"));
    }
    Ok(Listing { commit: info.sha, files })
}

/// The address of a file.
pub fn file_url(client: &Client, repo: &Repo, commit: &str, file: &str) -> Url {
    client.at(&format!("/{repo}/resolve/{commit}/{}", encoded(file)))
}

/// Asks for one file's size and checksum.
pub fn facts(client: &Client, repo: &Repo, commit: &str, file: &str) -> Result<FileFacts, Failure> {
    let url = file_url(client, repo, commit, file);
    let answer = client.head(&url)?;
    if answer.status >= 400 {
        return Err(client.refused(answer, repo.as_str(), file));
    }
    facts_in(&answer.headers, (300..400).contains(&answer.status)).ok_or_else(|| {
        let what = "no size and checksum of the file; is HF_ENDPOINT a hub?".to_owned();
        Error::Answer { url: url.shown(), what }.into()
    })
}

/// A file's size and checksum, if headers tell them.
pub fn facts_in(headers: &HeaderMap, is_redirect: bool) -> Option<FileFacts> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let digest = header("x-linked-etag").or_else(|| header("etag")).and_then(Digest::of_etag)?;
    let size = header("x-linked-size").or_else(|| header("content-length").filter(|_| !is_redirect));
    let size = size?.parse().ok().filter(|size| *size <= MAX_SIZE)?;
    Some(FileFacts { size, digest })
}

/// Fetches a small file at once, and checks it.
pub fn small_file(
    client: &Client,
    repo: &Repo,
    commit: &str,
    file: &str,
    facts: &FileFacts,
) -> Result<Vec<u8>, Failure> {
    let url = file_url(client, repo, commit, file);
    let answer = client.get(&url, None)?;
    if answer.status != 200 {
        return Err(client.refused(answer, repo.as_str(), file));
    }
    let bytes = body(client, answer, facts.size + 1)?;
    let found = facts.digest.sum_of(&bytes);
    if found != facts.digest.hex() {
        let (kind, expected) = (facts.digest.name(), facts.digest.hex().to_owned());
        // Perhaps it was cut where the end of the connection is the end of the body.
        return Err(Failure::Again(Error::Corrupt { file: file.to_owned(), kind, found, expected }, None));
    }
    Ok(bytes)
}

fn body(client: &Client, answer: Answer, limit: u64) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let read = answer.body.into_reader().take(limit).read_to_end(&mut bytes);
    read.map_err(|e| client.unreachable(&answer.url, &e.to_string()))?;
    Ok(bytes)
}
