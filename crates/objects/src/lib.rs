//! Object stores by URL: `s3://BUCKET/PREFIX` (S3 and what speaks like it), `gs://BUCKET/PREFIX`, `file:///FOLDER`. Credentials come from the environment variables that
//! the stores' own programs read, and appear in no message.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg(feature = "cloud")]
mod cloud;
#[cfg(feature = "cloud")]
mod http;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use sluice_cache::remote::{FolderStore, ObjectStore};

/// Opens the store at a URL. Nothing is sent yet.
///
/// # Errors
/// A URL of something else, or with a password in it; settings in the environment that cannot be used.
pub fn open(url: &str) -> Result<Arc<dyn ObjectStore>> {
    open_with(url, &[])
}

/// [`open`] with settings that come before those of the environment: `AWS_ENDPOINT_URL` and the like, and their values.
///
/// # Errors
/// Those of [`open`]; a setting that there is not.
pub fn open_with(url: &str, settings: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>> {
    let Some((scheme, rest)) = url.split_once("://") else {
        bail!("not the URL of a store: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER");
    };
    if rest.contains(['?', '#', '@']) {
        bail!("a store's URL has a bucket and a prefix only; credentials belong into environment variables");
    }
    match scheme {
        "file" => match rest.strip_prefix("localhost").unwrap_or(rest) {
            path if path.starts_with('/') => Ok(Arc::new(FolderStore::new(Path::new(path)))),
            _ => bail!("a folder's URL has three slashes and a whole path: file:///FOLDER"),
        },
        "s3" | "s3a" | "gs" => cloud(scheme, rest, settings),
        _ => bail!("{scheme}: there is no such kind of store: s3, gs or file"),
    }
}

#[cfg(feature = "cloud")]
fn cloud(scheme: &str, rest: &str, settings: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    Ok(Arc::new(cloud::Cloud::open(scheme, bucket, prefix.trim_matches('/'), settings)?))
}

#[cfg(not(feature = "cloud"))]
fn cloud(scheme: &str, _rest: &str, _settings: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>> {
    bail!("{scheme}: this program was built without stores of clouds (feature `object-store`); file:///FOLDER works")
}

#[cfg(test)]
mod tests {
    use super::open;

    #[test]
    fn a_url_names_a_store_and_no_password() {
        assert_eq!(open("file:///var/cache").unwrap().url(), "file:///var/cache");
        let why = |url| open(url).unwrap_err().to_string();
        assert!(why("/var/cache").contains("not the URL"));
        assert!(why("file://var/cache").contains("three slashes"));
        assert!(why("ftp://x/y").contains("no such kind"));
        for secret in ["s3://key:hunter2@bucket/x", "s3://bucket/x?secret=hunter2"] {
            assert!(!why(secret).contains("hunter2"));
        }
        #[cfg(feature = "cloud")]
        {
            assert_eq!(open("s3://bucket/some/prefix/").unwrap().url(), "s3://bucket/some/prefix");
            assert!(why("s3:///prefix").contains("bucket"));
        }
    }
}
