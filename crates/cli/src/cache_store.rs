//! `sluice cache ls|stat --store URL`: what replicas share in an object store.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sluice_cache::remote::{StoreContents, StoredModel};

use crate::terminal::{note, shown, shown_json};
use crate::units;

/// Objects that are looked at, at most, and for how long.
const MOST: u64 = 1_000_000;
const PATIENCE: Duration = Duration::from_secs(120);

/// Prints one JSON object.
pub fn print_json(object: &Value) -> Result<()> {
    writeln!(io::stdout().lock(), "{}", shown_json(&format!("{object:#}")))?;
    Ok(())
}

fn look(url: &str) -> Result<StoreContents> {
    let store = sluice_objects::open(url).context("--store")?;
    let contents = StoreContents::list(&*store, MOST, PATIENCE).with_context(|| store.url().to_owned())?;
    if contents.is_cut {
        note(&format!("{}: more than {MOST} objects; the others are not counted", store.url()));
    }
    Ok(contents)
}

/// Lists the models in a store.
pub fn ls(url: &str, as_json: bool) -> Result<()> {
    let contents = look(url)?;
    if as_json {
        let rows = contents.models.iter().map(|(fingerprint, m)| {
            json!({
                "fingerprint": format!("{fingerprint:016x}"), "name": m.name, "entries": m.entries, "states": m.states,
                "tokens": m.tokens, "objects": m.objects, "bytes": m.bytes,
            })
        });
        return print_json(&json!({"models": rows.collect::<Vec<_>>(), "is_cut": contents.is_cut}));
    }
    let out = &mut io::stdout().lock();
    if contents.models.is_empty() {
        writeln!(out, "the store is empty")?;
        return Ok(());
    }
    let name = |m: &StoredModel| if m.name.is_empty() { "(unknown)".to_owned() } else { shown(&m.name) };
    let width = contents.models.values().map(|m| name(m).chars().count()).max().unwrap_or(0).max(5);
    writeln!(out, "{:width$}  {:>8}  {:>8}  {:>9}  fingerprint", "model", "entries", "tokens", "size")?;
    for (fingerprint, m) in &contents.models {
        let [entries, tokens] = [m.entries, m.tokens].map(units::count);
        let (name, bytes) = (name(m), units::bytes(m.bytes));
        writeln!(out, "{name:width$}  {entries:>8}  {tokens:>8}  {bytes:>9}  {fingerprint:016x}")?;
    }
    Ok(())
}

/// Shows totals of a store.
pub fn stat(url: &str, as_json: bool) -> Result<()> {
    let contents = look(url)?;
    let sum = |of: fn(&StoredModel) -> u64| contents.models.values().map(of).sum::<u64>();
    let (entries, tokens, objects, bytes) =
        (sum(|m| m.entries), sum(|m| m.tokens), sum(|m| m.objects), sum(|m| m.bytes));
    if as_json {
        return print_json(&json!({
            "url": url, "bytes": bytes, "objects": objects, "models": contents.models.len(), "entries": entries, "tokens": tokens,
            "states": sum(|m| m.states), "is_begun": contents.has_secret, "others": contents.others, "is_cut": contents.is_cut,
        }));
    }
    let out = &mut io::stdout().lock();
    writeln!(out, "store    {}", shown(url))?;
    writeln!(out, "size     {}, {} objects", units::bytes(bytes), units::count(objects))?;
    writeln!(
        out,
        "entries  {}, {} tokens, of {} models",
        units::count(entries),
        units::count(tokens),
        contents.models.len()
    )?;
    Ok(())
}
