"""Which Rust toolchain and which folders `scripts/setup.sh` takes, on machines made of stubs: nothing is fetched or installed. Standard library only."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# What setup.sh uses of a minimal system.
TOOLS = "bash df dirname env grep head id mkdir mktemp rm sed sh sort".split()


class Setup(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "repository").mkdir()
        (self.root / "repository" / "rust-toolchain.toml").write_text('[toolchain]\nchannel = "1.95.0"\n')
        (self.root / "repository" / "Cargo.toml").write_text('[workspace.package]\nrust-version = "1.95"\n')
        (self.root / "bin").mkdir()
        for tool in TOOLS:
            (self.root / "bin" / tool).symlink_to(shutil.which(tool))
        self.stub("bin/cc", "exit 0")
        self.stub("bin/curl", "echo 'curl: (6) Could not resolve host' >&2; exit 6")

    def stub(self, name, body):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def rustup(self, toolchains):
        """rustup without a network: the toolchains that it has, by name."""
        names = "; ".join(f"echo {name}" for name in toolchains) or "echo no installed toolchains"
        runs = " ".join(f"{name}) echo 'rustc {version} (abc 2026-01-01)';;" for name, version in toolchains.items())
        # A toolchain is also known by the beginning of its name.
        runs += " ".join(f"{name.split('-x86')[0]}) echo 'rustc {version}';;" for name, version in toolchains.items())
        failure = "echo 'error: could not download file: dns error: no such host' >&2; exit 1"
        self.stub("home/.cargo/bin/rustup", f'case "$1 $2" in "toolchain list") {names};; "toolchain install") {failure};; run*) case "$2" in {runs} *) exit 1;; esac;; esac')
        self.stub("home/.cargo/bin/cargo", 'echo "cargo of rustup, ${RUSTUP_TOOLCHAIN:-as pinned}"')

    def distribution(self, version):
        self.stub("bin/rustc", f"echo 'rustc {version} (Debian)'")
        self.stub("bin/cargo", f"echo 'cargo {version} of the distribution'")

    def run_setup(self, **env):
        env = {"PATH": str(self.root / "bin"), "HOME": str(self.root / "home"), **env}
        script = f"set -euo pipefail; . {ROOT}/scripts/setup.sh; cargo --version"
        return subprocess.run([self.root / "bin" / "bash", "-c", script], cwd=self.root / "repository", env=env, capture_output=True, text=True)

    def assert_takes(self, cargo, said, **env):
        done = self.run_setup(**env)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, cargo), done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.startswith("setup: ") and not line.startswith("setup: installing")]
        self.assertEqual(len(lines), len(said), done.stderr)
        for line, part in zip(lines, said):
            self.assertIn(part, line)

    def assert_refused(self, part):
        done = self.run_setup()
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(part, done.stderr.splitlines()[-1])

    def test_the_pinned_toolchain_is_used_without_a_word(self):
        self.rustup({"stable-x86_64-unknown-linux-gnu": "1.97.0", "1.95.0-x86_64-unknown-linux-gnu": "1.95.0"})
        self.assert_takes("cargo of rustup, as pinned", [])

    def test_a_newer_toolchain_stands_in_where_the_pinned_one_cannot_be_fetched(self):
        self.rustup({"1.80.0-x86_64-unknown-linux-gnu": "1.80.0", "nightly-x86_64-unknown-linux-gnu": "1.98.0-nightly", "stable-x86_64-unknown-linux-gnu": "1.97.1"})
        said = "Rust 1.95.0 cannot be fetched (dns error: no such host): using Rust 1.97.1, which is here (stable-x86_64-unknown-linux-gnu)"
        self.assert_takes("cargo of rustup, stable-x86_64-unknown-linux-gnu", [said])

    def test_a_nightly_does_where_there_is_no_release(self):
        self.rustup({"nightly-x86_64-unknown-linux-gnu": "1.98.0-nightly", "stable-x86_64-unknown-linux-gnu": "1.94.1"})
        self.assert_takes("cargo of rustup, nightly-x86_64-unknown-linux-gnu", ["using Rust 1.98.0"])

    def test_a_distributions_does_behind_a_rustup_that_has_none(self):
        self.rustup({})
        self.distribution("1.96.0")
        self.assert_takes("cargo 1.96.0 of the distribution", ["using Rust 1.96.0"])

    def test_a_distributions_is_used_where_there_is_no_rustup(self):
        self.distribution("1.96.0")
        self.assert_takes("cargo 1.96.0 of the distribution", ["using Rust 1.96.0"])
        self.distribution("1.95.0")
        self.assert_takes("cargo 1.95.0 of the distribution", [])

    def test_what_the_user_chose_stays(self):
        self.rustup({"stable-x86_64-unknown-linux-gnu": "1.97.1"})
        self.assert_takes("cargo of rustup, mine", [], RUSTUP_TOOLCHAIN="mine")

    def test_the_second_host_has_the_installer_where_the_first_cannot_be_reached(self):
        self.rustup({})
        (self.root / "home/.cargo/bin/rustup").rename(self.root / "made")
        installer = f"mkdir -p {self.root}/home/.cargo/bin; mv {self.root}/made {self.root}/home/.cargo/bin/rustup; echo installed >&2"
        self.stub("bin/curl", f'for address; do :; done; case $address in https://static*) echo "{installer}";; *) echo "curl: (6) no $address" >&2; exit 6;; esac')
        (self.root / "bin/mv").symlink_to(shutil.which("mv"))
        done = self.run_setup()
        self.assertIn("installed", done.stderr.splitlines())
        self.assertIn("Rust 1.95.0 cannot be fetched (dns error: no such host)", done.stderr)

    def test_too_old_ones_are_refused_in_one_line(self):
        self.distribution("1.85.0")
        self.assert_refused("Rust 1.95.0 cannot be fetched (curl: (6) Could not resolve host), and none that is here is new enough (1.95)")
        self.rustup({"stable-x86_64-unknown-linux-gnu": "1.94.0"})
        self.assert_refused("none that is here is new enough")


class Room(unittest.TestCase):
    def setup_room(self, free, temporary="there"):
        """What is said, and what becomes of TMPDIR, before a build that takes 2000 MB, where `df` says that so many megabytes are free in target/ and in TMPDIR."""
        with tempfile.TemporaryDirectory() as root:
            root = Path(root)
            for name in ("bin", "there", "repository"):
                (root / name).mkdir()
            (root / "bin/df").write_text(f'#!/bin/sh\necho head\ncase $2 in target) echo d 1 1 {free[0]} 1% /;; *) echo d 1 1 {free[1]} 1% /;; esac\n')
            (root / "bin/df").chmod(0o755)
            script = f'set -euo pipefail; eval "$(sed "/^setup_temporary$/,\\$d" {ROOT}/scripts/setup.sh)"; setup_temporary; setup_room 2000; echo "$TMPDIR"'
            env = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}", "TMPDIR": str(root / temporary)}
            env.pop("CARGO_TARGET_DIR", None)
            done = subprocess.run(["bash", "-c", script], cwd=root / "repository", env=env, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stderr.replace(str(root), ""), done.stdout.strip().replace(str(root), "")

    def test_where_there_is_room_nothing_is_said(self):
        self.assertEqual(self.setup_room((2000, 512)), ("", "/there"))

    def test_a_full_disk_is_named_before_the_build(self):
        said, _ = self.setup_room((1999, 512))
        self.assertIn("there are 1999 MB free for target, and a build from nothing takes about 2000", said)

    def test_temporary_files_go_where_there_is_room(self):
        for free, temporary in ((511, "there"), (512, "not-there")):
            said, folder = self.setup_room((2000, free), temporary)
            self.assertEqual(folder, "/repository/target/tmp")
            self.assertIn(f"no room for temporary files in /{temporary}: they go to /repository/target/tmp", said)


class Sourcing(unittest.TestCase):
    def test_a_scripts_own_arguments_are_no_programs_to_install(self):
        """What is sourced sees the arguments of who sources it, unless those are named or taken away."""
        for path in [ROOT / "demo", ROOT / "test", ROOT / ".ci" / "run", *(ROOT / "scripts").glob("*.sh")]:
            lines = path.read_text().splitlines()
            for i, line in enumerate(lines):
                if line.strip() == ". scripts/setup.sh":
                    takes = any("$1" in other or "${1" in other or "$@" in other for other in lines)
                    self.assertTrue(not takes or lines[i - 1] == "set --", path)


class Commands(unittest.TestCase):
    def test_demo_and_test_are_scripts_that_make_calls_too(self):
        for name in ("demo", "test"):
            path = ROOT / name
            self.assertTrue(os.access(path, os.X_OK), name)
            self.assertTrue(path.read_text().startswith("#!/usr/bin/env bash\n"))
            self.assertIn(f"./{name}", (ROOT / "Makefile").read_text())
            self.assertIn(f"\n./{name} ", (ROOT / "README.md").read_text())
        self.assertIn("\n./test", (ROOT / ".ci" / "run").read_text())


if __name__ == "__main__":
    unittest.main()
