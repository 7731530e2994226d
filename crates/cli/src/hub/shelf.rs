//! `sluice list`, `sluice rm` and `sluice verify`: what lies in the cache.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};
use sluice_hub::{Finding, Listed, ModelName, Settings};

use super::screen::{Screen, Voice, time};
use crate::terminal::{note, shown, shown_json};
use crate::{folders, units};

#[derive(Args)]
pub struct ListArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct RemoveArgs {
    /// The model's name; with a quantisation or a revision only that
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
}

#[derive(Args)]
pub struct VerifyArgs {
    /// The model's name
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists the models in the cache.
pub fn list(args: &ListArgs) -> Result<()> {
    let settings = Settings::from_env()?;
    let models = sluice_hub::list(&settings.cache)?;
    let out = &mut io::stdout().lock();
    if args.json {
        let models: Vec<Value> = models.iter().map(to_json).collect();
        let object = json!({"cache": settings.cache.display().to_string(), "models": models});
        writeln!(out, "{}", shown_json(&format!("{object:#}")))?;
        return Ok(());
    }
    if models.is_empty() {
        note(&format!("{}: no models; `sluice pull ORG/NAME` fetches one", folders::shown(&settings.cache)));
        return Ok(());
    }
    let widest = models.iter().map(|model| shown(&model.name).chars().count()).max().unwrap_or(0);
    writeln!(out, "{:widest$}  {:>9}  {:11}  {:10}  changed", "name", "size", "format", "commit")?;
    for model in &models {
        let state = match model.missing {
            Some(missing) => format!("{} are missing: `sluice pull` goes on", units::bytes(missing)),
            None => ago(model.modified),
        };
        let (name, size) = (shown(&model.name), units::bytes(model.bytes));
        let commit: String = shown(&model.commit).chars().take(10).collect();
        writeln!(out, "{name:widest$}  {size:>9}  {:11}  {commit:10}  {state}", model.format)?;
    }
    Ok(out.flush()?)
}

fn to_json(model: &Listed) -> Value {
    let seconds = model.modified.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_secs());
    json!({
        "name": model.name, "format": model.format, "bytes": model.bytes, "missing": model.missing, "commit": model.commit,
        "references": model.references, "path": model.path.as_ref().map(|path| path.display().to_string()), "changed": seconds,
    })
}

fn ago(changed: Option<SystemTime>) -> String {
    let since = changed.and_then(|at| SystemTime::now().duration_since(at).ok());
    since.map_or_else(
        || "-".to_owned(),
        |since| {
            format!(
                "{} ago",
                if since.as_secs() < 172_800 {
                    time(since.as_secs_f64())
                } else {
                    format!("{} days", since.as_secs() / 86_400)
                }
            )
        },
    )
}

/// Removes models.
pub fn remove(args: &RemoveArgs) -> Result<()> {
    let settings = Settings::from_env()?;
    for text in &args.names {
        let name = ModelName::parse(text, settings.host())?;
        let freed = sluice_hub::remove(&settings.cache, &name)?;
        note(&format!("{name}: removed, {} are free again", units::bytes(freed)));
    }
    Ok(())
}

/// Reads models and compares them with their checksums.
///
/// # Errors
/// Files that are wrong; they are removed, so that the next `pull` fetches them.
pub fn verify(args: &VerifyArgs) -> Result<()> {
    let settings = Settings::from_env()?;
    let (mut wrong, mut objects) = (Vec::new(), Vec::new());
    for text in &args.names {
        let name = ModelName::parse(text, settings.host())?;
        let screen =
            Screen::new(&name, settings.host(), if args.json { Voice::Quiet } else { Voice::People }, "verifying");
        let found = sluice_hub::verify(&settings.cache, &name, &screen);
        let found = screen.ended(found)?;
        let count = |finding| found.iter().filter(|(_, f)| *f == finding).count();
        let bad: Vec<&str> =
            found.iter().filter(|(_, f)| *f == Finding::Wrong).map(|(file, _)| file.as_str()).collect();
        if args.json {
            objects.push(json!({"name": name.to_string(), "right": count(Finding::Right), "wrong": bad, "without_checksum": count(Finding::Unknown)}));
        } else {
            let unknown = count(Finding::Unknown);
            let unknown = if unknown > 0 { format!(", {unknown} without a checksum") } else { String::new() };
            note(&format!("{name}: {} files are as the hub announced them{unknown}", count(Finding::Right)));
        }
        wrong.extend(bad.iter().map(|file| format!("{name}: {file}")));
    }
    if args.json {
        writeln!(io::stdout().lock(), "{}", shown_json(&format!("{:#}", json!({"models": objects}))))?;
    }
    if !wrong.is_empty() {
        bail!("{}: other bytes than the hub announced; removed, `sluice pull` fetches them again", wrong.join(", "));
    }
    Ok(())
}
