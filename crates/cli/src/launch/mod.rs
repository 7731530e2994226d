//! `sluice launch AGENT [MODEL]`: a coding agent with a model of this machine. Takes the server that answers on the port, or starts one and ends it after the agent. An agent
//! gets its settings as variables and flags: no file of the user's is written.

mod agents;
mod server;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use crate::terminal::{note, shown};
use crate::{default_model, hub, interrupt};
use agents::{Agent, Launch, Place};
use server::{Answer, Own, Served};

const EXAMPLES: &str = "\
Examples:
  sluice launch claude Qwen/Qwen3-Coder-30B-A3B-Instruct
  sluice launch codex                                        the server that answers on port 8080, or one with the default model
  sluice launch opencode path/to/model --serve \"--max-context 65536 --device auto\"
  sluice launch qwen --print                                 the settings, to use them elsewhere
  sluice launch claude -- -p \"What does this repository do?\"  what stands behind -- is the agent's";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct LaunchArgs {
    /// The agent; without one, all are listed
    #[arg(value_name = "AGENT")]
    agent: Option<Agent>,
    /// The model: a folder, a GGUF file or a name on the hub [default: what the server has, or the default model]
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,
    /// The server's port on this machine
    #[arg(long, value_name = "PORT", default_value_t = 8080, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// More flags for the server, if one is started
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    serve: Option<String>,
    /// Print the settings for a shell instead; starts nothing
    #[arg(long)]
    print: bool,
    /// The agent's own arguments, behind --
    #[arg(last = true, value_name = "ARGUMENTS")]
    arguments: Vec<OsString>,
}

/// Starts the agent, and ends as it does. `config`: the file of settings that the command line names.
///
/// # Errors
/// An agent that is not installed, a port that another program has, and whatever keeps a server from starting.
pub fn run(args: &LaunchArgs, config: Option<&Path>) -> Result<()> {
    let Some(agent) = args.agent else {
        list();
        return Ok(());
    };
    let url = format!("http://127.0.0.1:{}", args.port);
    let key = server::key();
    let asked = server::ask(args.port, key.as_deref())?;
    if args.print {
        let served = match asked {
            Answer::Models(models) => Some(chosen(&models, args.model.as_deref(), &url)?.clone()),
            _ => None,
        };
        let place = Place { url, key, served: served.unwrap_or_else(|| Served::named(args.model.as_deref())) };
        print(agent, &agent.launch(&place), &args.arguments);
        return Ok(());
    }
    let program = agent.find()?;
    let (own, models) = match asked {
        Answer::Models(models) => (None, models),
        Answer::Loading => (None, server::wait(args.port, key.as_deref(), None)?),
        Answer::Nobody => {
            let own = start(args, config, &url)?;
            let models = server::wait(args.port, key.as_deref(), Some(&own))?;
            (Some(own), models)
        }
        Answer::Another => {
            bail!("{url} is answered by another program than sluice serve: --port names another port")
        }
        Answer::WantsKey => bail!("the server at {url} wants a key: put it into SLUICE_API_KEY"),
    };
    let asked = args.model.as_deref().filter(|_| own.is_none());
    let served = chosen(&models, asked, &url)?.clone();
    let is_ours = if own.is_some() { "" } else { ", which runs already" };
    note(&format!("{}: {} at {url}{is_ours}", agent.title(), shown(&served.name)));
    let place = Place { url, key, served };
    let status = start_agent(&program, &agent.launch(&place), &args.arguments);
    drop(own);
    end_as(status?)
}

/// Starts a server for the model, which is fetched first if it must be.
fn start(args: &LaunchArgs, config: Option<&Path>, url: &str) -> Result<Own> {
    let configured = || default_model::configured().map(Path::to_owned);
    let model = match args.model.clone().or_else(configured) {
        Some(model) => model,
        None => default_model::demo_folder()?,
    };
    // In front of the user's eyes: the server's messages go to a file.
    hub::resolved(&model)?;
    let own = Own::start(&model, args.port, args.serve.as_deref().unwrap_or(""), config)?;
    note(&format!(
        "starting {} at {url}; its messages are in {}",
        shown(&model.display().to_string()),
        own.log().display()
    ));
    Ok(own)
}

/// The model that is meant: of a server that runs already, one that it has.
fn chosen<'a>(models: &'a [Served], wanted: Option<&Path>, url: &str) -> Result<&'a Served> {
    let first = models.first().with_context(|| format!("the server at {url} has no model"))?;
    let Some(wanted) = wanted else { return Ok(first) };
    let text = wanted.display().to_string();
    let file = wanted.file_stem().map(|name| name.to_string_lossy().into_owned());
    let folder = wanted.file_name().map(|name| name.to_string_lossy().into_owned());
    // A name without its quantisation means the one that is there.
    let is_it = |served: &&Served| {
        let name = &served.name;
        let begins = |with: &str| {
            name.len() > with.len()
                && name.is_char_boundary(with.len())
                && name[..with.len()].eq_ignore_ascii_case(with)
                && name[with.len()..].starts_with(':')
        };
        name.eq_ignore_ascii_case(&text)
            || begins(&text)
            || Some(name) == file.as_ref()
            || Some(name) == folder.as_ref()
    };
    models.iter().find(is_it).with_context(|| {
        let names: Vec<String> = models.iter().map(|served| shown(&served.name)).collect();
        format!(
            "the server at {url} has {}, and not {}: --port names another port, where one is started",
            names.join(", "),
            shown(&text)
        )
    })
}

fn start_agent(program: &Path, launch: &Launch, arguments: &[OsString]) -> Result<ExitStatus> {
    // Ctrl-C is the agent's.
    let _held = interrupt::hold();
    let mut command = Command::new(program);
    command.args(launch.arguments(arguments)).envs(launch.variables.iter().map(|(name, value)| (name, value)));
    for name in launch.unset {
        command.env_remove(name);
    }
    command.status().with_context(|| format!("cannot start {}", program.display()))
}

/// Ends this program as the agent ended.
fn end_as(status: ExitStatus) -> Result<()> {
    match status.code().or_else(|| status.signal().map(|signal| 128 + signal)) {
        Some(0) | None => Ok(()),
        Some(code) => std::process::exit(code),
    }
}

/// Prints what a shell would have to be told.
fn print(agent: Agent, launch: &Launch, arguments: &[OsString]) {
    for name in launch.unset {
        println!("unset {name}");
    }
    for (name, value) in &launch.variables {
        println!("export {name}={}", quoted(value));
    }
    let words: Vec<String> = launch.arguments(arguments).iter().map(|word| quoted(&word.to_string_lossy())).collect();
    println!("{}", [&[agent.program().to_owned()], &words[..]].concat().join(" "));
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@,+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn list() {
    for agent in Agent::value_variants() {
        let state = agent
            .find()
            .map_or_else(|_| format!("not installed: {}", agent.how_to_install()), |path| path.display().to_string());
        println!("{:<10}{:<20}{state}", agent.program(), agent.title());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_what_is_quoted() {
        for (word, written) in
            [("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1"), ("", "''"), ("a b", "'a b'"), ("it's", r"'it'\''s'")]
        {
            assert_eq!(quoted(word), written);
        }
    }

    #[test]
    fn of_a_running_servers_models_the_meant_one_is_taken() {
        let models = ["org/m-GGUF:Q4_K_M", "demo"].map(|name| Served { name: name.into(), context: None });
        let of = |wanted: Option<&str>| chosen(&models, wanted.map(Path::new), "U").map(|served| served.name.clone());
        assert_eq!(of(None).unwrap(), "org/m-GGUF:Q4_K_M");
        assert_eq!(of(Some("ORG/m-gguf")).unwrap(), "org/m-GGUF:Q4_K_M");
        assert_eq!(of(Some("org/m-GGUF:q4_k_m")).unwrap(), "org/m-GGUF:Q4_K_M");
        assert_eq!(of(Some("models/demo")).unwrap(), "demo");
        assert_eq!(of(Some("demo.gguf")).unwrap(), "demo");
        let error = of(Some("org/other")).unwrap_err().to_string();
        assert!(
            error.contains("has org/m-GGUF:Q4_K_M, demo, and not org/other") && error.contains("--port"),
            "{error}"
        );
    }
}
