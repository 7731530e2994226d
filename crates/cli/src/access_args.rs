//! Flags for who may ask a server.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use sluice_server::{Access, Bound, Keys};

#[derive(Args)]
pub struct AccessArgs {
    /// A key of which requests must have one; others on this machine can see it, unless it is set by SLUICE_API_KEY or in the file of settings
    #[arg(long = "api-key", value_name = "KEY", hide_default_value = true)]
    api_keys: Vec<String>,
    /// A file of such keys, one a line; lines that begin with # are left out
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen without a key where others than this machine can ask
    #[arg(long)]
    insecure: bool,
    /// A name that this machine is asked by, beside localhost, while the server listens there
    #[arg(long = "allowed-host", value_name = "NAME")]
    allowed_hosts: Vec<String>,
    /// Pages that may ask from a browser: https://example.org, or * for all
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    cors_origins: Vec<String>,
}

impl AccessArgs {
    /// # Errors
    /// A file that cannot be read, a key that is none, an origin that is none.
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

    /// Whether it may listen there.
    ///
    /// # Errors
    /// Where others could ask, and nothing keeps them from it.
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
    let text = fs::read_to_string(path).with_context(name)?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys = Keys::new(lines).with_context(name)?;
    ensure!(!keys.is_empty(), "{}: the file has no key", name());
    Ok(keys)
}
