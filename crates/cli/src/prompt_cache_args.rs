//! The prompt cache on disk: flags that `run`, `chat` and `serve` share, and messages about it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{ArgMatches, Args, Command, value_parser};
use sluice_engine::{Engine, PromptCacheOptions};

use crate::engine_args::bytes_arg;
use crate::{folders, terminal, units};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Prompt cache")]
pub struct PromptCacheArgs {
    /// Keep computed prompts on disk, so that later starts can continue from them; in ~/.cache/sluice/prompt-cache, or in DIR (also as --prompt-cache DIR).
    /// `prompt-cache = true` in the configuration file turns it on permanently. Never changes the result
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    prompt_cache: Option<PathBuf>,
    /// Most bytes that the cache may take on disk, for all models together [default: a twentieth of the free space]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg)]
    prompt_cache_bytes: Option<u64>,
    /// Most bytes that the cache may write per day, to spare the disk [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = bytes_arg, hide_short_help = true)]
    prompt_cache_daily_bytes: Option<u64>,
    /// Do not keep prompts with fewer tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 256, value_parser = value_parser!(u32).range(1..))]
    prompt_cache_min_tokens: u32,
    /// Encrypt the cache with the key in this file: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    prompt_cache_key_file: Option<PathBuf>,
    /// Share the cache with other machines in an object store: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER. Turns the cache on. Credentials come from AWS_* and
    /// GOOGLE_* environment variables
    #[arg(long, value_name = "URL")]
    prompt_cache_store: Option<String>,
}

impl PromptCacheArgs {
    /// The options; `None` if the cache is off.
    ///
    /// # Errors
    /// When there is no home folder to put it in.
    pub fn options(&self) -> Result<Option<PromptCacheOptions>> {
        let default = self.prompt_cache_store.as_ref().map(|_| PathBuf::from("true"));
        let Some(named) = self.prompt_cache.as_ref().or(default.as_ref()) else { return Ok(None) };
        let store = self.prompt_cache_store.as_deref();
        let store = store.map(|url| sluice_objects::open(url).context("--prompt-cache-store")).transpose()?;
        let folder = match named.to_str() {
            // Spellings that people use in a variable or a file.
            Some("false" | "0" | "no" | "off") => return Ok(None),
            Some("" | "true" | "1" | "yes" | "on") => {
                folders::prompt_cache().context("--prompt-cache: there is no home folder for it: name a folder")?
            }
            _ => named.clone(),
        };
        Ok(Some(PromptCacheOptions {
            folder,
            quota: self.prompt_cache_bytes,
            daily_limit: self.prompt_cache_daily_bytes,
            min_tokens: self.prompt_cache_min_tokens as usize,
            key_file: self.prompt_cache_key_file.clone(),
            sums_file: folders::sums(),
            sum_at_start: PromptCacheOptions::SUM_AT_START,
            store,
        }))
    }
}

const FLAG: &str = "--prompt-cache";
/// Values that turn the cache on or off; people also write them after the flag.
const SWITCHES: [&str; 8] = ["true", "1", "yes", "on", "false", "0", "no", "off"];

/// Rewrites `--prompt-cache DIR` to `--prompt-cache=DIR`. DIR is optional, so the word after the flag may also be the model or the prompt. It is taken as DIR if it is a
/// cache's folder, or if it can be nothing else. `has_model`: whether a setting names a model for a command.
pub fn join_folder(args: Vec<OsString>, command: &Command, has_model: impl Fn(&str) -> bool) -> Vec<OsString> {
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    let Some(at) = args[..end].iter().position(|arg| arg == FLAG) else { return args };
    let Some(word) = args[..end].get(at + 1).filter(|word| !word.as_encoded_bytes().starts_with(b"-")) else {
        return args;
    };
    let path = Path::new(word);
    let joined = || {
        let mut value = OsString::from(FLAG);
        value.push("=");
        value.push(word);
        [&args[..at], &[value][..], &args[at + 2..]].concat()
    };
    if sluice_model::source::is_model(path) {
        return args;
    }
    if is_cache(path) {
        return joined();
    }
    let parse = |args: &[OsString]| command.clone().try_get_matches_from(args);
    let is_folder = match parse(&args) {
        Ok(found) => match found.subcommand() {
            Some((name, found)) => is_left_over(name, found, word, has_model(name)),
            None => false,
        },
        // One word too many.
        Err(_) => parse(&joined()).is_ok(),
    };
    if is_folder { joined() } else { args }
}

/// Whether a folder is a prompt cache, or may become one.
fn is_cache(path: &Path) -> bool {
    path.join("lock").is_file() && path.join("secret").is_file()
        || path.read_dir().is_ok_and(|mut entries| entries.next().is_none())
}

/// Whether `word`, which is not a model, is one word too many for this command. The command's own parser accepts more than one.
fn is_left_over(name: &str, found: &ArgMatches, word: &OsStr, has_model: bool) -> bool {
    let words = |id: &str| found.try_get_raw(id).ok().flatten().map_or(0, Iterator::count);
    let given = |id: &str| words(id) > 0;
    match name {
        "run" => {
            // A model and a prompt; each may also be given by a flag.
            let most = 2 - usize::from(given("model")) - usize::from(given("prompt_text"));
            let text = word.to_string_lossy();
            let is_path = ["/", "./", "../"].iter().any(|start| text.starts_with(start));
            // The last word is a prompt, which hardly looks like a path. Another word is the model, and this one is not a model.
            let is_last = found.try_get_raw("words").ok().flatten().and_then(Iterator::last) == Some(word);
            let is_prompt = is_last && !given("prompt_text") && (words("words") == 2 || given("model"));
            words("words") > most || is_path && is_prompt && !text.contains(char::is_whitespace)
        }
        // Several models may be served, but this is not a model.
        _ => words("folders") + words("folder") > 1 || has_model || SWITCHES.contains(&&*word.to_string_lossy()),
    }
}

/// Reports where the cache is and how full it is.
pub fn say(engine: &mut Engine) {
    if let Some(s) = engine.prompt_cache() {
        let (bytes, quota) = (units::bytes(s.bytes), units::bytes(s.quota));
        let folder = s.folder.display();
        terminal::say(&format!("prompt cache: {folder}: {} blocks, {bytes} of at most {quota}", s.entries));
    }
    say_notes(engine);
}

/// Reports problems of the cache, each once.
pub fn say_notes(engine: &mut Engine) {
    engine.take_prompt_cache_notes().iter().for_each(|note| terminal::note(note));
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::{Arg, ArgAction};

    use super::*;

    /// The commands that have the flag, as far as these tests need them.
    fn command() -> Command {
        let flag = Arg::new("prompt_cache").long("prompt-cache").num_args(0..=1).require_equals(true);
        let model = Arg::new("model").short('m').long("model");
        let with = |name: &'static str, words: Arg| Command::new(name).args([flag.clone(), model.clone(), words]);
        let all = |id: &'static str| Arg::new(id).action(ArgAction::Append).num_args(0..);
        let run = with("run", all("words")).arg(Arg::new("prompt_text").short('p'));
        let serve = with("serve", all("folders")).mut_arg("model", |a| a.conflicts_with("folders"));
        let chat = with("chat", Arg::new("folder")).mut_arg("model", |a| a.conflicts_with("folder"));
        Command::new("sluice").subcommands([run, serve, chat])
    }

    #[test]
    fn the_word_behind_the_flag_is_the_folder_where_it_can_be_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        let path = |name: &str| home.path().join(name).display().to_string();
        let (model, new, empty, cache, full) = (path("model"), path("new"), path("empty"), path("cache"), path("full"));
        for folder in [&model, &empty, &cache, &full] {
            fs::create_dir(folder).unwrap();
        }
        fs::write(path("model/config.json"), "{}").unwrap();
        fs::write(path("full/x"), "").unwrap();
        for name in ["cache/lock", "cache/secret"] {
            fs::write(path(name), "").unwrap();
        }
        let (model, new, empty, cache, full) = (&*model, &*new, &*empty, &*cache, &*full);
        let is_joined = |words: &[&str], set: bool| {
            let args: Vec<OsString> = ["sluice"].iter().chain(words).map(OsString::from).collect();
            let found = join_folder(args.clone(), &command(), |_| set);
            let at = words.iter().position(|w| *w == FLAG).unwrap();
            let mut other: Vec<OsString> = args.clone();
            if let Some(word) = words.get(at + 1) {
                other.splice(at + 1..at + 3, [OsString::from(format!("{FLAG}={word}"))]);
            }
            assert!(found == args || found == other, "{found:?}");
            found != args
        };
        for words in [
            &["serve", model, FLAG, new][..],
            &["serve", FLAG, new, model],
            &["serve", model, FLAG, full],
            &["serve", "-m", model, FLAG, new],
            &["serve", FLAG, empty],
            &["serve", FLAG, cache],
            &["serve", FLAG, "on"],
            &["chat", model, FLAG, new],
            &["chat", FLAG, "new", model],
            &["chat", "-m", model, FLAG, new],
            &["run", model, "Hello", FLAG, "new"],
            &["run", model, FLAG, "new", "Hello"],
            &["run", FLAG, new, model, "Hello"],
            &["run", "-m", model, "-p", "Hello", FLAG, "new"],
            &["run", "-m", model, FLAG, "new", "Hello"],
            &["run", "-p", "Hello", model, FLAG, "new"],
            &["run", model, FLAG, new],
            &["run", FLAG, cache, "Hello"],
        ] {
            assert!(is_joined(words, false), "{words:?}");
        }
        for words in [
            &["serve", model, FLAG][..],
            &["serve", FLAG, model],
            &["serve", model, FLAG, model],
            &["serve", FLAG, "--port", "1", model],
            // A model that does not exist.
            &["serve", FLAG, new],
            &["chat", FLAG, model],
            &["run", FLAG, "Hello"],
            &["run", model, FLAG, "Hello"],
            &["run", FLAG, model, "Hello"],
            &["run", FLAG, new, "Hello"],
            &["run", "-m", model, FLAG, "Hello"],
            &["run", model, "--", FLAG, "new"],
        ] {
            assert!(!is_joined(words, false), "{words:?}");
        }
        assert!(is_joined(&["serve", FLAG, new], true) && is_joined(&["chat", FLAG, new], true));
        assert!(!is_joined(&["run", FLAG, "Hello"], true) && !is_joined(&["serve", FLAG, model], true));
    }
}
