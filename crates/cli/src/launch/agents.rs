//! The agents: how each is told of a server, and how it is installed. Variables and flags are those that its own documentation names; `scripts/agents` tries them with the real
//! programs.

use std::env;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::json;

use super::server::Served;

/// An agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Agent {
    Claude,
    Codex,
    Opencode,
    Qwen,
    Goose,
    Copilot,
    Aider,
}

/// Where the model is.
pub struct Place {
    /// `http://127.0.0.1:8080`
    pub url: String,
    pub key: Option<String>,
    pub served: Served,
}

/// How an agent is started.
pub struct Launch {
    pub variables: Vec<(&'static str, String)>,
    /// Variables that would lead it elsewhere.
    pub unset: &'static [&'static str],
    flags: Vec<String>,
    /// Its arguments if the user asks for nothing.
    usual: &'static [&'static str],
}

impl Launch {
    /// All arguments.
    pub fn arguments(&self, own: &[OsString]) -> Vec<OsString> {
        let usual: Vec<OsString> = self.usual.iter().map(OsString::from).collect();
        let own = if own.is_empty() { &usual[..] } else { own };
        self.flags.iter().map(OsString::from).chain(own.iter().cloned()).collect()
    }
}

impl Agent {
    /// The program's name.
    pub fn program(self) -> &'static str {
        match self {
            Agent::Claude => "claude",
            Agent::Codex => "codex",
            Agent::Opencode => "opencode",
            Agent::Qwen => "qwen",
            Agent::Goose => "goose",
            Agent::Copilot => "copilot",
            Agent::Aider => "aider",
        }
    }

    pub fn title(self) -> &'static str {
        match self {
            Agent::Claude => "Claude Code",
            Agent::Codex => "Codex",
            Agent::Opencode => "opencode",
            Agent::Qwen => "Qwen Code",
            Agent::Goose => "goose",
            Agent::Copilot => "GitHub Copilot CLI",
            Agent::Aider => "aider",
        }
    }

    pub fn how_to_install(self) -> &'static str {
        match self {
            Agent::Claude => "npm install -g @anthropic-ai/claude-code",
            Agent::Codex => "npm install -g @openai/codex",
            Agent::Opencode => "npm install -g opencode-ai",
            Agent::Qwen => "npm install -g @qwen-code/qwen-code",
            Agent::Goose => "see its installation guide (block/goose)",
            Agent::Copilot => "npm install -g @github/copilot",
            Agent::Aider => "pip install aider-chat",
        }
    }

    /// The program on PATH.
    ///
    /// # Errors
    /// If it is not there; the message says how to install it.
    pub fn find(self) -> Result<PathBuf> {
        let folders = env::var_os("PATH").unwrap_or_default();
        let is_program =
            |path: &PathBuf| path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
        let found = env::split_paths(&folders).map(|folder| folder.join(self.program())).find(is_program);
        found.with_context(|| format!("{} is not installed: {}", self.program(), self.how_to_install()))
    }

    /// How it is started with this server.
    pub fn launch(self, place: &Place) -> Launch {
        let (url, model) = (&place.url, &place.served.name);
        let v1 = format!("{url}/v1");
        // A server without keys takes any; agents want one.
        let key = place.key.clone().unwrap_or_else(|| "none".to_owned());
        let context = place.served.context;
        let own = |variables: &[(&'static str, &str)]| {
            variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect::<Vec<_>>()
        };
        let mut launch = Launch { variables: Vec::new(), unset: &[], flags: Vec::new(), usual: &[] };
        match self {
            Agent::Claude => {
                launch.variables = own(&[
                    ("ANTHROPIC_BASE_URL", url),
                    ("ANTHROPIC_AUTH_TOKEN", &key),
                    ("ANTHROPIC_MODEL", model),
                    ("ANTHROPIC_DEFAULT_OPUS_MODEL", model),
                    ("ANTHROPIC_DEFAULT_SONNET_MODEL", model),
                    ("ANTHROPIC_DEFAULT_HAIKU_MODEL", model),
                    ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
                ]);
                // For unknown models it assumes a million.
                launch.variables.extend(context.map(|n| ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", n.to_string())));
                launch.unset = &["ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"];
            }
            Agent::Codex => {
                let key_name = place.key.as_ref().map(|_| ", env_key = \"SLUICE_API_KEY\"").unwrap_or_default();
                let provider =
                    format!("{{name = \"sluice\", base_url = {}, wire_api = \"responses\"{key_name}}}", in_toml(&v1));
                let mut settings = vec![
                    format!("model={}", in_toml(model)),
                    "model_provider=\"sluice\"".to_owned(),
                    format!("model_providers.sluice={provider}"),
                ];
                settings.extend(context.map(|n| format!("model_context_window={n}")));
                launch.flags = settings.into_iter().flat_map(|one| ["-c".to_owned(), one]).collect();
                launch.variables = place.key.iter().map(|key| ("SLUICE_API_KEY", key.clone())).collect();
            }
            Agent::Opencode => {
                let mut one = json!({"name": model});
                if let Some(context) = context {
                    one["limit"] = json!({"context": context, "output": context / 4});
                }
                let provider = json!({
                    "npm": "@ai-sdk/openai-compatible", "name": "sluice",
                    "options": {"baseURL": v1, "apiKey": key}, "models": {model: one},
                });
                let name = format!("sluice/{model}");
                let config = json!({"provider": {"sluice": provider}, "model": name, "small_model": name});
                launch.variables = own(&[("OPENCODE_CONFIG_CONTENT", &config.to_string())]);
            }
            Agent::Qwen => {
                launch.variables = own(&[("OPENAI_BASE_URL", &v1), ("OPENAI_API_KEY", &key), ("OPENAI_MODEL", model)]);
                launch.flags = ["--auth-type", "openai"].map(str::to_owned).to_vec();
            }
            Agent::Goose => {
                launch.variables = own(&[
                    ("GOOSE_PROVIDER", "openai"),
                    ("GOOSE_MODEL", model),
                    ("OPENAI_HOST", url),
                    ("OPENAI_BASE_PATH", "v1/chat/completions"),
                    ("OPENAI_API_KEY", &key),
                ]);
                launch.variables.extend(context.map(|n| ("GOOSE_CONTEXT_LIMIT", n.to_string())));
                launch.usual = &["session"];
            }
            Agent::Copilot => {
                launch.variables = own(&[
                    ("COPILOT_PROVIDER_TYPE", "openai"),
                    ("COPILOT_PROVIDER_BASE_URL", &v1),
                    ("COPILOT_PROVIDER_API_KEY", &key),
                    ("COPILOT_MODEL", model),
                ]);
            }
            Agent::Aider => {
                let name = format!("openai/{model}");
                launch.variables = own(&[("OPENAI_API_BASE", &v1), ("OPENAI_API_KEY", &key), ("AIDER_MODEL", &name)]);
            }
        }
        launch
    }
}

/// A string in TOML. JSON's escapes are all TOML's.
fn in_toml(text: &str) -> String {
    json!(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(key: Option<&str>) -> Place {
        let served = Served { name: "org/m-GGUF:Q4_K_M".into(), context: Some(32768) };
        Place { url: "http://127.0.0.1:8080".into(), key: key.map(str::to_owned), served }
    }

    #[test]
    fn every_agent_is_told_of_the_server_and_the_model() {
        for agent in Agent::value_variants() {
            for key in [None, Some("secret")] {
                let launch = agent.launch(&place(key));
                let words =
                    launch.arguments(&[]).iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>();
                let all = format!("{:?} {words:?}", launch.variables);
                assert!(all.contains("http://127.0.0.1:8080") && all.contains("org/m-GGUF:Q4_K_M"), "{agent:?}: {all}");
                // Others on the machine see a command line.
                assert!(!words.iter().any(|word| word.contains("secret")), "{agent:?}: {all}");
                assert_eq!(all.contains("secret"), key.is_some(), "{agent:?}: {all}");
            }
        }
    }

    #[test]
    fn codex_reads_its_settings_as_toml() {
        let launch = Agent::Codex.launch(&place(Some("secret")));
        let settings: String = launch.flags.iter().filter(|flag| *flag != "-c").map(|one| format!("{one}\n")).collect();
        let found: toml::Table = settings.parse().unwrap();
        let provider = &found["model_providers"]["sluice"];
        assert_eq!(provider["base_url"].as_str(), Some("http://127.0.0.1:8080/v1"));
        assert_eq!(
            (provider["wire_api"].as_str(), provider["env_key"].as_str()),
            (Some("responses"), Some("SLUICE_API_KEY"))
        );
        assert_eq!(
            (found["model"].as_str(), found["model_context_window"].as_integer()),
            (Some("org/m-GGUF:Q4_K_M"), Some(32768))
        );
    }

    #[test]
    fn an_agents_own_arguments_come_last_and_replace_the_usual_ones() {
        let goose = Agent::Goose.launch(&place(None));
        assert_eq!(goose.arguments(&[]), ["session"]);
        assert_eq!(goose.arguments(&["run".into()]), ["run"]);
        assert_eq!(
            Agent::Qwen.launch(&place(None)).arguments(&["-p".into(), "x".into()]),
            ["--auth-type", "openai", "-p", "x"]
        );
    }
}
