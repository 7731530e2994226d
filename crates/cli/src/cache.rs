//! `sluice cache`: lists and checks what the prompt cache on disk holds. Whatever changes the folder needs it for itself; `ls` and `stat` look at it beside a server, too.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sluice_cache::disk::{DiskCache, Error, FileKey, ModelStat, Stat};

use crate::cache_store::{self, print_json};
use crate::progress::Progress;
use crate::terminal::{note, shown};
use crate::{folders, units};

const EXAMPLES: &str = "\
Examples:
  sluice cache ls                          what is kept of which model
  sluice cache stat --json                 how large it is, for a script
  sluice cache verify                      read all of it; what is not right is removed, and the exit code is 2
  sluice cache gc                          give back what is not needed
  sluice cache stat --store s3://b/prompts what replicas share there
  sluice cache clear /mnt/fast/prompts     remove all of it";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
}

#[derive(Subcommand)]
enum CacheCommand {
    /// List models with their entries, tokens, bytes, hits and last use
    Ls(LookArgs),
    /// Show totals: bytes, quota, slabs, entries, bytes written today
    Stat(LookArgs),
    /// Read every slot, compare it with its checksum and the index, and remove what is wrong
    Verify(OpenArgs),
    /// Remove unreachable entries, and free slabs that are not needed
    Gc(OpenArgs),
    /// Remove everything, including the secret that keys its hashes; needs no key
    Clear(FolderArgs),
}

#[derive(Args)]
struct FolderArgs {
    /// The cache's folder [default: ~/.cache/sluice/prompt-cache]
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct OpenArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// The file with the key of an encrypted cache: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

#[derive(Args)]
struct LookArgs {
    #[command(flatten)]
    open: OpenArgs,
    /// Look at the store that replicas share instead: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER. Needs no key
    #[arg(long, value_name = "URL", conflicts_with_all = ["folder", "key_file"])]
    store: Option<String>,
}

impl FolderArgs {
    fn path(&self) -> Result<PathBuf> {
        let default = folders::prompt_cache;
        self.folder.clone().or_else(default).context("there is no home folder for a cache: name a folder")
    }
}

impl OpenArgs {
    /// Opens the cache to look at it: if another process uses it, as that has left it last, and the second value is true.
    fn look(&self) -> Result<(DiskCache, bool, PathBuf)> {
        match self.open() {
            Err(e) if matches!(e.downcast_ref(), Some(Error::InUse { .. })) => {
                let path = self.folder.path()?;
                let key = self.key_file.as_deref().map(FileKey::read).transpose()?;
                let cache = DiskCache::look_at(&path, key).map_err(|e| naming(&path, e))?;
                note(&format!("{}: in use by another process; this is what it has written so far", path.display()));
                Ok((cache, true, path))
            }
            opened => opened.map(|(cache, path)| (cache, false, path)),
        }
    }

    fn open(&self) -> Result<(DiskCache, PathBuf)> {
        let path = self.folder.path()?;
        let key = self.key_file.as_deref().map(FileKey::read).transpose()?;
        let mut cache = DiskCache::open_existing(&path, key).map_err(|e| naming(&path, e))?;
        if let Some(why) = cache.cleared() {
            note(&format!("{}: the prompt cache could not be read and was cleared: {why}", path.display()));
        }
        say_notes(&mut cache);
        Ok((cache, path))
    }
}

/// Some errors name the folder themselves.
fn naming(path: &Path, e: Error) -> anyhow::Error {
    let named = e.to_string().starts_with(&path.display().to_string());
    if named { e.into() } else { anyhow::Error::new(e).context(path.display().to_string()) }
}

fn say_notes(cache: &mut DiskCache) {
    cache.notes().iter().for_each(|line| note(line));
}

/// Runs a subcommand of `sluice cache`.
pub fn run(args: CacheArgs) -> Result<()> {
    match args.command {
        CacheCommand::Ls(LookArgs { store: Some(url), open }) => cache_store::ls(&url, open.folder.json),
        CacheCommand::Stat(LookArgs { store: Some(url), open }) => cache_store::stat(&url, open.folder.json),
        CacheCommand::Ls(args) => ls(&args.open),
        CacheCommand::Stat(args) => stat(&args.open),
        CacheCommand::Verify(args) => verify(&args),
        CacheCommand::Gc(args) => gc(&args),
        CacheCommand::Clear(args) => clear(&args),
    }
}

fn ls(args: &OpenArgs) -> Result<()> {
    let (mut cache, in_use, _) = args.look()?;
    let stat = cache.stat()?;
    // Last used first.
    let mut models: Vec<(&u64, &ModelStat)> = stat.models.iter().collect();
    models.sort_by_key(|(_, m)| std::cmp::Reverse(m.model.used));
    if args.folder.json {
        let rows = models.iter().map(|(fingerprint, m)| model_json(**fingerprint, m));
        return print_json(&json!({"models": rows.collect::<Vec<_>>(), "in_use": in_use}));
    }
    let out = &mut io::stdout().lock();
    if models.is_empty() {
        writeln!(out, "the cache is empty")?;
        return Ok(());
    }
    let name = |m: &ModelStat| if m.model.name.is_empty() { "(unknown)".to_owned() } else { shown(&m.model.name) };
    let width = models.iter().map(|(_, m)| name(m).chars().count()).max().unwrap_or(0).max(5);
    writeln!(
        out,
        "{:width$}  {:>8}  {:>8}  {:>9}  {:>7}  {:>10}  fingerprint       path",
        "model", "entries", "tokens", "size", "hits", "last hit"
    )?;
    for (fingerprint, m) in models {
        writeln!(
            out,
            "{:width$}  {:>8}  {:>8}  {:>9}  {:>7}  {:>10}  {fingerprint:016x}  {}",
            name(m),
            units::count(m.entries),
            units::count(m.tokens),
            units::bytes(m.bytes),
            units::count(m.model.hits),
            ago(m.model.used),
            shown(&m.model.path)
        )?;
    }
    Ok(())
}

fn model_json(fingerprint: u64, m: &ModelStat) -> Value {
    json!({
        "fingerprint": format!("{fingerprint:016x}"),
        "name": m.model.name,
        "path": m.model.path,
        "entries": m.entries,
        "states": m.states,
        "tokens": m.tokens,
        "bytes": m.bytes,
        "hits": m.model.hits,
        "last_hit": (m.model.used > 0).then_some(m.model.used),
    })
}

/// `5 min ago`, from seconds since 1970; 0 means never.
fn ago(then: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    match now.saturating_sub(then) {
        _ if then == 0 => "never".to_owned(),
        s if s < 60 => format!("{s} s ago"),
        s if s < 3600 => format!("{} min ago", s / 60),
        s if s < 2 * 86400 => format!("{} h ago", s / 3600),
        s => format!("{} d ago", s / 86400),
    }
}

fn stat(args: &OpenArgs) -> Result<()> {
    let (mut cache, in_use, path) = args.look()?;
    let stat = cache.stat()?;
    let Stat { quota, bytes, slab_bytes, slabs, encrypted, written_today, ref models } = stat;
    let sum = |of: fn(&ModelStat) -> u64| models.values().map(of).sum::<u64>();
    let (entries, tokens, used) = (sum(|m| m.entries), sum(|m| m.tokens), sum(|m| m.bytes));
    // A cache that was never written to has no quota yet.
    let quota = (quota < u64::MAX).then_some(quota);
    if args.folder.json {
        return print_json(&json!({
            "folder": path.display().to_string(), "quota": quota, "bytes": bytes, "slabs": slabs, "slab_bytes": slab_bytes,
            "used_bytes": used, "models": models.len(), "entries": entries, "tokens": tokens, "states": sum(|m| m.states),
            "hits": sum(|m| m.model.hits), "encrypted": encrypted, "written_today": written_today, "in_use": in_use,
        }));
    }
    let out = &mut io::stdout().lock();
    writeln!(out, "folder         {}", shown(&path.display().to_string()))?;
    let of = quota.map_or(String::new(), |quota| format!(" of {}", units::bytes(quota)));
    writeln!(out, "size           {}{of}", units::bytes(bytes))?;
    writeln!(out, "slabs          {slabs}, {}, of which {} are used", units::bytes(slab_bytes), units::bytes(used))?;
    writeln!(out, "entries        {entries}, {} tokens, of {} models", units::count(tokens), models.len())?;
    writeln!(out, "encrypted      {}", if encrypted { "yes" } else { "no" })?;
    writeln!(out, "written today  {} (UTC)", units::bytes(written_today))?;
    Ok(())
}

fn verify(args: &OpenArgs) -> Result<()> {
    let (mut cache, path) = args.open()?;
    let mut progress = Progress::new("verifying", "entries", cache.len() as usize);
    let verified = cache.verify(|done, all| progress.set(done as usize, all as usize))?;
    progress.finish();
    say_notes(&mut cache);
    let faults = cache.inconsistencies()?;
    if args.folder.json {
        print_json(&json!({
            "entries": verified.entries, "bytes": verified.bytes, "wrong": verified.wrong,
            "unreachable": verified.unreachable, "index": faults,
        }))?;
    } else {
        let read = units::bytes(verified.bytes);
        writeln!(io::stdout().lock(), "{} entries, {read} read, {} wrong", verified.entries, verified.wrong)?;
    }
    if let Some(fault) = faults.first() {
        bail!("{}: {fault} (of {} such faults): `sluice cache clear` begins anew", path.display(), faults.len());
    }
    if verified.wrong > 0 {
        bail!("{}: {} of {} entries were not right, and are removed", path.display(), verified.wrong, verified.entries);
    }
    Ok(())
}

fn gc(args: &OpenArgs) -> Result<()> {
    let (mut cache, _) = args.open()?;
    let (removed, bytes) = cache.collect_garbage()?;
    say_notes(&mut cache);
    if args.folder.json {
        return print_json(&json!({"removed": removed, "bytes": bytes}));
    }
    writeln!(io::stdout().lock(), "{removed} entries removed, {} given back", units::bytes(bytes))?;
    Ok(())
}

fn clear(args: &FolderArgs) -> Result<()> {
    let path = args.path()?;
    DiskCache::clear_folder(&path).map_err(|e| naming(&path, e))?;
    if args.json {
        return print_json(&json!({"cleared": path.display().to_string()}));
    }
    writeln!(io::stdout().lock(), "{}: cleared", shown(&path.display().to_string()))?;
    Ok(())
}
