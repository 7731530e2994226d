//! Flags for who may use a server.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use sluice_server::{Access, Bound, Keys};
use sluice_store::{MAX_SETTINGS, read_named};

#[derive(Args)]
pub struct AccessArgs {
    /// An API key; requests must have one of the given keys. Other users of this machine can see it, unless it is in SLUICE_API_KEY or the settings file
    #[arg(long = "api-key", value_name = "KEY", hide_default_value = true)]
    api_keys: Vec<String>,
    /// A file with API keys, one per line; lines that begin with # are ignored
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen on an address that other machines can reach, without any key
    #[arg(long)]
    insecure: bool,
    /// A host name to accept besides localhost, while the server listens on loopback
    #[arg(long = "allowed-host", value_name = "NAME")]
    allowed_hosts: Vec<String>,
    /// An origin whose pages may use the server from a browser: https://example.org, or * for all
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    cors_origins: Vec<String>,
}

impl AccessArgs {
    /// Who may use the server.
    ///
    /// # Errors
    /// A file that cannot be read; an invalid key or origin.
    pub fn access(&self) -> Result<Access> {
        let file = self.api_key_file.as_deref().map(read_keys).transpose()?;
        let keys = Keys::new(self.api_keys.iter().map(String::as_str)).context("--api-key")?;
        let keys = match file {
            Some(more) => keys.merge(more),
            None => keys,
        };
        let access = Access { keys, hosts: self.allowed_hosts.clone(), origins: self.cors_origins.clone() };
        access.cors()?;
        Ok(access)
    }

    /// Checks that it is safe to listen there.
    ///
    /// # Errors
    /// If other machines could use the server without a key.
    pub fn check(&self, access: &Access, bound: &Bound, host: &str) -> Result<()> {
        ensure!(
            bound.is_local() || self.insecure || !access.keys.is_empty(),
            "--host {host}: other machines could use the model: set a key (--api-key-file FILE), or use --insecure"
        );
        Ok(())
    }
}

fn read_keys(path: &Path) -> Result<Keys> {
    let name = || format!("--api-key-file {}", path.display());
    let text = String::from_utf8(read_named(path, MAX_SETTINGS).with_context(name)?).with_context(name)?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys = Keys::new(lines).with_context(name)?;
    ensure!(!keys.is_empty(), "{}: the file has no key", name());
    Ok(keys)
}
