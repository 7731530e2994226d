//! Settings from environment variables, such as `SLUICE_PORT=9000` for `--port 9000`, and from a file,
//!
//! ```toml
//! threads = 4            # for run, chat and serve
//!
//! [serve]
//! port = 9000
//! ```
//!
//! by default `~/.config/sluice/config.toml`. Each becomes the default of the flag of the same name, so flags win over variables, and variables over the file.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};
use sluice_store::{Error, MAX_SETTINGS, read_named, read_small};
use toml::{Table, Value};

use crate::{default_model, folders, prompt_cache_args};

/// The commands that use settings.
const COMMANDS: [&str; 3] = ["run", "chat", "serve"];
/// Flags that settings cannot set, and one that is handled separately.
const NOT_SET: [&str; 4] = ["help", "version", "config", MODEL];
const MODEL: &str = "model";

/// Parses the command line, with settings as defaults. Exits the program as `clap` does if the command line is wrong.
///
/// # Errors
/// An invalid setting; the message names the file or the variable.
pub fn matches(command: &Command) -> Result<ArgMatches> {
    let file = SettingsFile::find(named_file(command, env::args_os()))?;
    if let Some(file) = &file {
        file.check(command)?;
    }
    let mut configured = command.clone();
    let mut models = Vec::new();
    for name in COMMANDS {
        configured = configured.mut_subcommand(name, |c| c.mut_args(|arg| with_default(arg, name, file.as_ref())));
        models.push((name, setting(MODEL, name, file.as_ref()).and_then(|values| values.into_iter().next())));
    }
    // The server that `launch` starts or finds is the one that `serve` would be.
    let port = |arg: Arg| if arg.get_long() == Some("port") { with_default(arg, "serve", file.as_ref()) } else { arg };
    configured = configured.mut_subcommand("launch", |c| c.mut_args(port));
    models.push(("launch", setting(MODEL, "serve", file.as_ref()).and_then(|values| values.into_iter().next())));
    let has_model = |name: &str| models.iter().any(|(command, model)| *command == name && model.is_some());
    let command_line = prompt_cache_args::join_folder(env::args_os().collect(), command, has_model);
    let found = match configured.try_get_matches_from(&command_line) {
        Ok(found) => found,
        // clap reports these as errors.
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => e.exit(),
        Err(e) => match command.clone().try_get_matches_from(command_line) {
            Err(own) => own.exit(),
            // The command line is valid by itself, so a setting is not.
            Ok(_) => {
                let why = e.to_string();
                let why = why.lines().next().unwrap_or("").trim_start_matches("error: ").to_owned();
                let file = file.map(|f| format!("{} or ", f.path.display())).unwrap_or_default();
                bail!("{file}a variable SLUICE_..: {why}")
            }
        },
    };
    let name = found.subcommand_name();
    if let Some(model) = models.into_iter().find_map(|(command, model)| model.filter(|_| Some(command) == name)) {
        default_model::set_configured(model.into());
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
struct SettingsFile {
    path: PathBuf,
    settings: Table,
}

impl SettingsFile {
    /// The named file, or the user's own if there is one.
    fn find(named: Option<PathBuf>) -> Result<Option<SettingsFile>> {
        let is_named = named.is_some();
        let Some(path) = named.or_else(folders::config_file) else { return Ok(None) };
        let name = || path.display().to_string();
        let read = if is_named { read_named } else { read_small };
        let text = match read(&path, MAX_SETTINGS) {
            Ok(text) => String::from_utf8(text).with_context(name)?,
            Err(Error::Io { cause, .. }) if cause.kind() == std::io::ErrorKind::NotFound && !is_named => {
                return Ok(None);
            }
            Err(e) => return Err(e.into()),
        };
        let settings = text.parse::<Table>().map_err(|e| {
            let line = e.span().map_or(1, |at| text[..at.start.min(text.len())].lines().count().max(1));
            anyhow::anyhow!("{}: line {line}: {}", name(), e.message())
        })?;
        Ok(Some(SettingsFile { path, settings }))
    }

    /// Checks that each setting is a flag of its command.
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
                    ensure!(COMMANDS.contains(&key.as_str()), "{name}: [{key}] must be one of {}", COMMANDS.join(", "));
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

    /// The setting of a flag, for this command or for all.
    fn get(&self, flag: &str, command: &str) -> Option<&Value> {
        let of = |table: &'_ Table| table.keys().find(|key| key.replace('_', "-") == flag).cloned();
        let own = self.settings.get(command).and_then(Value::as_table);
        let found = own.and_then(|table| table.get(&of(table)?));
        found.or_else(|| self.settings.get(&of(&self.settings)?).filter(|v| !v.is_table()))
    }
}

/// A setting as command-line values.
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
        Value::Datetime(_) | Value::Table(_) => bail!("must be a string, a number, true or false, or a list of them"),
    })
}

fn may_be_set(arg: &Arg) -> bool {
    arg.get_long().is_some_and(|long| !NOT_SET.contains(&long))
}

/// The setting of a flag, from a variable or the file.
fn setting(flag: &str, command: &str, file: Option<&SettingsFile>) -> Option<Vec<OsString>> {
    let variable = format!("SLUICE_{}", flag.replace('-', "_").to_uppercase());
    if let Some(value) = env::var_os(variable).filter(|v| !v.is_empty()) {
        return Some(vec![value]);
    }
    values(file?.get(flag, command)?).ok()
}

fn with_default(arg: Arg, command: &str, file: Option<&SettingsFile>) -> Arg {
    let Some(long) = arg.get_long().filter(|_| may_be_set(&arg)) else { return arg };
    let Some(mut values) = setting(long, command, file) else { return arg };
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        // Other spellings that people use in variables.
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

    fn file(text: &str) -> SettingsFile {
        SettingsFile { path: "config.toml".into(), settings: text.parse().unwrap() }
    }

    fn found(file: &SettingsFile, args: &[&str]) -> ArgMatches {
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
    fn unknown_settings_are_errors_that_name_them() {
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
