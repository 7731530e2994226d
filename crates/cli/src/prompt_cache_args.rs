//! The prompt cache on disk: flags that `run`, `chat` and `serve` share, and what is said of it.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, value_parser};
use sluice_engine::{Engine, PromptCacheOptions};

use crate::engine_args::bytes_arg;
use crate::{folders, terminal, units};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Prompt cache")]
pub struct PromptCacheArgs {
    /// Keep what was computed of prompts on disk, so that later starts go on from there; in ~/.cache/sluice/prompt-cache, or in DIR. `prompt-cache = true` in the
    /// configuration file turns it on for good. Never changes the result
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    prompt_cache: Option<PathBuf>,
    /// Bytes that the cache may take on disk, for all models together [default: a twentieth of what is free there]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg)]
    prompt_cache_bytes: Option<u64>,
    /// Bytes that the cache may write in a day, to spare the disk [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg, hide_short_help = true)]
    prompt_cache_daily_bytes: Option<u64>,
    /// Prompts of fewer tokens are not kept
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = value_parser!(u32).range(1..))]
    prompt_cache_min_tokens: u32,
    /// Encrypt the cache with the key in this file: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    prompt_cache_key_file: Option<PathBuf>,
}

impl PromptCacheArgs {
    /// What was asked for; `None` where it is off.
    ///
    /// # Errors
    /// When there is no folder to put it in.
    pub fn options(&self) -> Result<Option<PromptCacheOptions>> {
        let Some(named) = &self.prompt_cache else { return Ok(None) };
        let folder = match named.to_str() {
            // As people write it in a variable or a file.
            Some("false" | "0" | "no" | "off") => return Ok(None),
            Some("" | "true" | "1" | "yes" | "on") => {
                folders::prompt_cache().context("--prompt-cache: there is no home to put it in: name a folder")?
            }
            _ => named.clone(),
        };
        Ok(Some(PromptCacheOptions {
            folder,
            quota: self.prompt_cache_bytes,
            daily_limit: self.prompt_cache_daily_bytes,
            fewest: self.prompt_cache_min_tokens as usize,
            key_file: self.prompt_cache_key_file.clone(),
            sums: folders::sums(),
            at_once: PromptCacheOptions::AT_ONCE,
        }))
    }
}

/// Says where the cache is and what is in it.
pub fn say(engine: &mut Engine) {
    if let Some(s) = engine.prompt_cache() {
        let (bytes, quota) = (units::bytes(s.bytes), units::bytes(s.quota));
        let folder = s.folder.display();
        terminal::say(&format!("prompt cache: {folder}: {} blocks, {bytes} of at most {quota}", s.entries));
    }
    say_notes(engine);
}

/// Says what went wrong with it, each line once.
pub fn say_notes(engine: &mut Engine) {
    engine.take_prompt_cache_notes().iter().for_each(|note| terminal::note(note));
}
