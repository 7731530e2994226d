//! Settings that hold until a flag says otherwise: `SLUICE_PORT=9000` for `--port 9000`, and before that a file,
//!
//! ```toml
//! threads = 4            # for run, chat and serve
//!
//! [serve]
//! port = 9000
//! ```
//!
//! by default `~/.config/sluice/config.toml`. Each becomes the default of the flag of the same name, so flags win over variables and these over the file.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::{Table, Value};

use crate::{folders, prompt_cache_args};

/// The commands that look at settings: those that people give again and again.
const COMMANDS: [&str; 3] = ["run", "chat", "serve"];
/// Flags that are none to set for good, and one that has a way of its own.
const NOT_SET: [&str; 4] = ["help", "version", "config", MODEL];
const MODEL: &str = "model";

/// The model that a setting names.
static DEFAULT_MODEL: OnceLock<PathBuf> = OnceLock::new();

/// The model's folder where the command line names none.
pub fn default_model() -> Option<&'static Path> {
    DEFAULT_MODEL.get().map(PathBuf::as_path)
}

/// The command line, with what the settings say where it says nothing. Leaves the program as `clap` does where the command line is wrong.
///
/// # Errors
/// What is wrong with a setting; the message names the file or the variable.
pub fn matches(command: &Command) -> Result<ArgMatches> {
    let file = File::find(named_file(command, env::args_os()))?;
    if let Some(file) = &file {
        file.check(command)?;
    }
    let mut configured = command.clone();
    let mut models = Vec::new();
    for name in COMMANDS {
        configured = configured.mut_subcommand(name, |c| c.mut_args(|arg| with_default(arg, name, file.as_ref())));
        models.push((name, setting(MODEL, name, file.as_ref()).and_then(|values| values.into_iter().next())));
    }
    let has_model = |name: &str| models.iter().any(|(of, model)| *of == name && model.is_some());
    let command_line = prompt_cache_args::joined(env::args_os().collect(), command, has_model);
    let found = match configured.try_get_matches_from(&command_line) {
        Ok(found) => found,
        // Help and the version are asked for as errors.
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => e.exit(),
        Err(e) => match command.clone().try_get_matches_from(command_line) {
            Err(own) => own.exit(),
            // Nothing is wrong with what was typed.
            Ok(_) => {
                let why = e.to_string();
                let why = why.lines().next().unwrap_or("").trim_start_matches("error: ").to_owned();
                let file = file.map(|f| format!("{} or ", f.path.display())).unwrap_or_default();
                bail!("{file}a variable SLUICE_..: {why}")
            }
        },
    };
    let name = found.subcommand_name();
    if let Some(model) = models.into_iter().find_map(|(of, model)| model.filter(|_| Some(of) == name)) {
        let _ = DEFAULT_MODEL.set(model.into());
    }
    Ok(found)
}

/// The file that the command line or `SLUICE_CONFIG` names.
fn named_file(command: &Command, args: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    let found = command.clone().ignore_errors(true).disable_help_flag(true).try_get_matches_from(args).ok()?;
    let inner = found.subcommand().and_then(|(_, m)| m.try_get_one::<PathBuf>("config").ok().flatten());
    let outer = found.try_get_one::<PathBuf>("config").ok().flatten();
    inner.or(outer).cloned().or_else(|| env::var_os("SLUICE_CONFIG").filter(|v| !v.is_empty()).map(PathBuf::from))
}

/// A file of settings.
struct File {
    path: PathBuf,
    settings: Table,
}

impl File {
    /// The named one, or the user's own if there is one.
    fn find(named: Option<PathBuf>) -> Result<Option<File>> {
        let is_named = named.is_some();
        let Some(path) = named.or_else(folders::config_file) else { return Ok(None) };
        let name = || path.display().to_string();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !is_named => return Ok(None),
            Err(e) => return Err(e).with_context(name),
        };
        let settings = text.parse::<Table>().map_err(|e| {
            let line = e.span().map_or(1, |at| text[..at.start.min(text.len())].lines().count().max(1));
            anyhow::anyhow!("{}: line {line}: {}", name(), e.message())
        })?;
        Ok(Some(File { path, settings }))
    }

    /// Whether each setting is a flag of the command that it is for.
    fn check(&self, command: &Command) -> Result<()> {
        let name = self.path.display();
        let has = |of: &str, key: &str| {
            let long = key.replace('_', "-");
            let flags = command.find_subcommand(of).into_iter().flat_map(Command::get_arguments);
            long == MODEL || flags.filter(|a| may_be_set(a)).any(|a| a.get_long() == Some(&long))
        };
        for (key, value) in &self.settings {
            match value.as_table() {
                Some(table) => {
                    ensure!(COMMANDS.contains(&key.as_str()), "{name}: [{key}] is none of {}", COMMANDS.join(", "));
                    for (inner, value) in table {
                        ensure!(has(key, inner), "{name}: `sluice {key}` has no flag --{}", inner.replace('_', "-"));
                        values(value).with_context(|| format!("{name}: {inner} in [{key}]"))?;
                    }
                }
                None => {
                    let known = COMMANDS.iter().any(|of| has(of, key));
                    ensure!(known, "{name}: neither run, chat nor serve has a flag --{}", key.replace('_', "-"));
                    values(value).with_context(|| format!("{name}: {key}"))?;
                }
            }
        }
        Ok(())
    }

    /// What it says of a flag: for this command, or for all.
    fn get(&self, flag: &str, command: &str) -> Option<&Value> {
        let of = |table: &'_ Table| table.keys().find(|key| key.replace('_', "-") == flag).cloned();
        let own = self.settings.get(command).and_then(Value::as_table);
        let found = own.and_then(|table| table.get(&of(table)?));
        found.or_else(|| self.settings.get(&of(&self.settings)?).filter(|v| !v.is_table()))
    }
}

/// A setting as words of a command line.
fn values(value: &Value) -> Result<Vec<OsString>> {
    Ok(match value {
        Value::String(text) => vec![text.into()],
        Value::Integer(n) => vec![n.to_string().into()],
        Value::Float(x) => vec![x.to_string().into()],
        Value::Boolean(on) => vec![on.to_string().into()],
        Value::Array(all) => {
            let each: Vec<Vec<OsString>> = all.iter().map(values).collect::<Result<_>>()?;
            each.into_iter().flatten().collect()
        }
        Value::Datetime(_) | Value::Table(_) => bail!("neither a text, a number, true or false, nor a list of them"),
    })
}

fn may_be_set(arg: &Arg) -> bool {
    arg.get_long().is_some_and(|long| !NOT_SET.contains(&long))
}

/// What a variable or the file says of a flag.
fn setting(flag: &str, command: &str, file: Option<&File>) -> Option<Vec<OsString>> {
    let variable = format!("SLUICE_{}", flag.replace('-', "_").to_uppercase());
    if let Some(value) = env::var_os(variable).filter(|v| !v.is_empty()) {
        return Some(vec![value]);
    }
    values(file?.get(flag, command)?).ok()
}

fn with_default(arg: Arg, command: &str, file: Option<&File>) -> Arg {
    let Some(long) = arg.get_long().filter(|_| may_be_set(&arg)) else { return arg };
    let Some(mut values) = setting(long, command, file) else { return arg };
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        // As people write it in a variable.
        for value in &mut values {
            match value.to_str().map(str::to_lowercase).as_deref() {
                Some("1" | "yes" | "on") => *value = "true".into(),
                Some("0" | "no" | "off") => *value = "false".into(),
                _ => {}
            }
        }
    }
    arg.default_values(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        let flags = [
            Arg::new("port").long("port").default_value("8080"),
            Arg::new("no-prefix-cache").long("no-prefix-cache").action(ArgAction::SetTrue),
            Arg::new("stop").long("stop").action(ArgAction::Append),
        ];
        COMMANDS.iter().fold(Command::new("sluice"), |c, name| c.subcommand(Command::new(*name).args(flags.clone())))
    }

    fn file(text: &str) -> File {
        File { path: "config.toml".into(), settings: text.parse().unwrap() }
    }

    fn found(file: &File, args: &[&str]) -> ArgMatches {
        let command = command().mut_subcommand("serve", |c| c.mut_args(|a| with_default(a, "serve", Some(file))));
        let found = command.try_get_matches_from(["sluice", "serve"].iter().chain(args)).unwrap();
        found.subcommand().unwrap().1.clone()
    }

    #[test]
    fn a_flag_wins_over_the_file_and_a_commands_own_part_over_the_rest() {
        let file = file("port = 1\nstop = ['a', 'b']\n[serve]\nport = 2\nno_prefix_cache = true\n");
        file.check(&command()).unwrap();
        let port = |args: &[&str]| found(&file, args).get_one::<String>("port").unwrap().clone();
        assert_eq!((port(&[]), port(&["--port", "3"])), ("2".into(), "3".into()));
        let m = found(&file, &[]);
        assert!(m.get_flag("no-prefix-cache"));
        assert_eq!(m.get_many::<String>("stop").unwrap().collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn what_no_command_knows_is_an_error_that_names_it() {
        for (text, part) in [
            ("prot = 1", "--prot"),
            ("[serve]\nprot = 1", "`sluice serve` has no flag --prot"),
            ("[pack]\nbits = 4", "[pack]"),
            ("port = 1979-05-27", "port"),
            ("help = true", "--help"),
        ] {
            let error = format!("{:#}", file(text).check(&command()).unwrap_err());
            assert!(error.starts_with("config.toml: ") && error.contains(part), "{error}");
        }
    }
}
