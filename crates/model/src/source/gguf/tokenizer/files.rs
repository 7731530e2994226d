//! Metadata as the small files of a model.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use sluice_store::Error;

use super::super::metadata::Metadata;
use super::text::{fingerprint, has_tokenizer, main_key, text_file};
use crate::source::text_files::TextFiles;

/// The small files that a file's metadata stands for, under the names that they have in a Hugging Face folder.
pub struct MetadataFiles<'a>(pub &'a Metadata);

impl TextFiles for MetadataFiles<'_> {
    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        match text_file(self.0, name).map_err(|e| Error::Refused { why: format!("{e:#}") })? {
            Some(text) if text.len() as u64 <= limit => Ok(text.into_bytes()),
            Some(_) => Err(Error::TooLarge { path: self.locate(name), limit }),
            None => Err(Error::Io { path: self.locate(name), doing: "open", cause: ErrorKind::NotFound.into() }),
        }
    }

    fn list(&self, _folder: &str) -> io::Result<Vec<(String, u64)>> {
        Ok(Vec::new())
    }

    fn locate(&self, name: &str) -> PathBuf {
        let path = self.0.path().display();
        format!("{path}: {}", main_key(name).unwrap_or(name)).into()
    }

    fn fingerprint(&self, name: &str) -> Option<u128> {
        (name == "tokenizer.json").then(|| fingerprint(self.0))
    }

    fn has(&self, name: &str) -> bool {
        // Not the text itself, which may take a second to make.
        if name == "tokenizer.json" {
            has_tokenizer(self.0)
        } else {
            text_file(self.0, name).is_ok_and(|text| text.is_some())
        }
    }
}
