//! `sluice --help`, with the commands in groups. clap has no headings for commands, so the groups are part of its template.

use std::fmt::Write;

use clap::Command;

/// Each group's heading, and its commands.
const GROUPS: [(&str, &[&str]); 8] = [
    ("Talk with a model", &["run", "chat"]),
    ("Let programs and browsers talk with it", &["serve", "launch"]),
    ("Fetch and keep models", &["pull", "list", "rm", "verify"]),
    ("See what fits before it is loaded", &["inspect", "plan"]),
    ("Make a model smaller", &["pack"]),
    ("Measure speed and quality", &["bench", "eval"]),
    ("Look after what is kept on disk", &["cache"]),
    ("See that all is well", &["doctor", "self-test", "completions"]),
];

/// The command with its help in groups.
pub fn grouped(command: Command) -> Command {
    let header = command.get_styles().get_header();
    let literal = command.get_styles().get_literal();
    let widest = command.get_subcommands().filter(|c| !c.is_hide_set()).map(|c| c.get_name().len()).max().unwrap_or(0);
    let mut template = String::from("{before-help}{about-with-newline}\n{usage-heading} {usage}\n");
    for (heading, names) in GROUPS {
        let _ = writeln!(template, "\n{header}{heading}:{header:#}");
        for found in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = found.get_about().map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(template, "  {literal}{:widest$}{literal:#}  {about}", found.get_name());
        }
    }
    let _ = write!(
        template,
        "\n{header}Options:{header:#}\n{{options}}\n\n`sluice COMMAND --help` lists all options of a command.{{after-help}}"
    );
    command.help_template(template)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    #[test]
    fn every_command_stands_in_one_group() {
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let command = Cli::command();
        let mut all: Vec<&str> =
            command.get_subcommands().filter(|c| !c.is_hide_set()).map(Command::get_name).collect();
        grouped.sort_unstable();
        all.sort_unstable();
        assert_eq!(grouped, all);
    }

    #[test]
    fn help_has_each_command_below_its_heading_within_eighty_columns() {
        let help = grouped(Cli::command()).render_help().to_string();
        let mut from = 0;
        for (heading, names) in GROUPS {
            from += help[from..].find(&format!("\n{heading}:\n")).unwrap_or_else(|| panic!("{heading}: {help}"));
            for name in names {
                from += help[from..].find(&format!("\n  {name} ")).unwrap_or_else(|| panic!("{name}: {help}"));
            }
        }
        assert!(help[from..].contains("--config") && help[from..].contains("--version"), "{help}");
        assert!(!help.contains("Commands:"), "{help}");
        let commands = help.lines().take_while(|line| !line.starts_with("Options:"));
        assert_eq!(commands.filter(|line| line.chars().count() > 80).collect::<Vec<_>>(), [""; 0]);
    }

    #[test]
    fn a_commands_own_help_is_its_own() {
        let mut command = grouped(Cli::command());
        command.build();
        let help = command.find_subcommand_mut("run").unwrap().render_help().to_string();
        assert!(help.contains("--max-tokens") && !help.contains(GROUPS[0].0), "{help}");
    }
}
