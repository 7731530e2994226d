//! `sluice completions SHELL`, and the manual pages of a release: both are made from the flags themselves.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Command, ValueEnum};
use clap_complete::Shell;

/// A shell that completions are tried with.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum KnownShell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: KnownShell,
}

#[derive(Args)]
pub struct ManualsArgs {
    /// The folder to write to
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

/// Prints the completions.
pub fn run(args: &CompletionsArgs, mut command: Command) -> Result<()> {
    let shell = match args.shell {
        KnownShell::Bash => Shell::Bash,
        KnownShell::Zsh => Shell::Zsh,
        KnownShell::Fish => Shell::Fish,
    };
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "sluice", &mut text);
    Ok(io::stdout().lock().write_all(&text)?)
}

/// Writes `sluice.1`, `sluice-run.1` and so on.
pub fn write_manuals(args: &ManualsArgs, command: Command) -> Result<()> {
    let name = || args.folder.display().to_string();
    fs::create_dir_all(&args.folder).with_context(name)?;
    clap_mangen::generate_to(command, &args.folder).with_context(name)
}
