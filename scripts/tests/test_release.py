"""install.sh, scripts/release and scripts/check-glibc, with a small program instead of Sluice and a server on this machine. Standard library only."""

import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "sluice-1.2.3-x86_64-linux"
# What install.sh uses of a minimal system.
TOOLS = "cat chmod comm cp cut dirname find grep gzip head id mkdir mktemp mv rm rmdir sed sh sha256sum sort tar uname wc".split()


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Install(unittest.TestCase):
    """install.sh on a machine of links, as its own user would have it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name in ["bin", "files", "home"]:
            (self.root / name).mkdir()
        for tool in TOOLS:
            (self.root / "bin" / tool).symlink_to(shutil.which(tool))
        self.tool("curl")
        serve = functools.partial(Quiet, directory=self.root / "files")
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.prefix = self.root / "prefix"

    def tool(self, name):
        if shutil.which(name):
            (self.root / "bin" / name).symlink_to(shutil.which(name))
        elif name == "curl":
            self.skipTest("SKIPPED: no curl here")

    def release(self, version="1.2.3", files=(), runs=True):
        """Puts a release on the server."""
        shutil.rmtree(self.root / "tree", ignore_errors=True)
        tree = self.root / "tree" / f"sluice-{version}-x86_64-linux"
        (tree / "bin").mkdir(parents=True)
        program = tree / "bin" / "sluice"
        program.write_text(f"#!/bin/sh\necho sluice {version}\n" if runs else "#!/bin/sh\necho 'version GLIBC_2.99 not found' >&2; exit 1\n")
        program.chmod(0o755)
        for file in ["share/man/man1/sluice.1.gz", *files]:
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            (tree / file).write_text(version)
        (tree / "SHA256SUMS").write_text("of the files\n")
        for old in (self.root / "files").iterdir():
            old.unlink()
        archive = self.root / "files" / f"{tree.name}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tree, tree.name)
        (self.root / "files" / "SHA256SUMS").write_text(f"{digest(archive)}  {archive.name}\n{'0' * 64}  sluice-{version}-x86_64-linux-symbols.tar.zst\n")
        return archive

    def run_script(self, *args, prefix=True, **env):
        env = {"PATH": str(self.root / "bin"), "HOME": str(self.root / "home"), "TMPDIR": str(self.root), **env}
        args = [*args, "--prefix", str(self.prefix)] if prefix else args
        return subprocess.run([self.root / "bin" / "sh", ROOT / "install.sh", *args], env=env, cwd=self.root, capture_output=True, text=True)

    def installed(self):
        return sorted(str(p.relative_to(self.prefix)) for p in self.prefix.rglob("*") if p.is_file()) if self.prefix.exists() else []

    def assert_refused(self, done, part):
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(part, done.stderr)
        self.assertEqual(self.installed(), [])
        # Nor is anything left where it worked.
        self.assertEqual([p.name for p in self.root.iterdir() if p.name.startswith("tmp.")], [])

    def test_a_release_is_installed_upgraded_and_removed(self):
        self.release(files=["share/sluice/demo/model", "share/doc/sluice/OLD.md"])
        done = self.run_script("--from", self.url)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Installed: sluice 1.2.3", done.stdout)
        self.assertIn("is not on PATH", done.stdout)
        files = ["bin/sluice", "share/doc/sluice/OLD.md", "share/man/man1/sluice.1.gz", "share/sluice/demo/model", "share/sluice/installed"]
        self.assertEqual(self.installed(), files)
        self.assertTrue(os.access(self.prefix / "bin/sluice", os.X_OK))
        # An upgrade takes away what the new version has not, and nothing else.
        (self.prefix / "bin/other").write_text("somebody else's")
        self.release("1.3.0", files=["share/sluice/demo/model"])
        done = self.run_script("--from", self.url, PATH=f"{self.root / 'bin'}:{self.prefix / 'bin'}")
        self.assertIn("Installed: sluice 1.3.0", done.stdout, done.stderr)
        self.assertNotIn("is not on PATH", done.stdout)
        files.remove("share/doc/sluice/OLD.md")
        self.assertEqual(self.installed(), sorted([*files, "bin/other"]))
        self.assertFalse((self.prefix / "share/doc").exists())
        done = self.run_script("--uninstall")
        self.assertEqual((done.returncode, self.installed()), (0, ["bin/other"]), done.stderr)
        self.assertIn("nothing was installed", self.run_script("--uninstall").stderr)

    def test_without_a_prefix_it_goes_to_the_home_folder(self):
        if os.getuid() == 0:
            # Root's is /usr/local: only what it would do is looked at.
            (self.root / "bin" / "id").unlink()
            (self.root / "bin" / "id").write_text("#!/bin/sh\necho 1000\n")
            (self.root / "bin" / "id").chmod(0o755)
        self.release()
        done = self.run_script("--from", self.url, prefix=False)
        self.assertTrue((self.root / "home/.local/bin/sluice").exists(), done.stderr)

    def test_a_folder_is_a_source_too_and_wget_does(self):
        self.release()
        done = self.run_script("--from", str(self.root / "files"))
        self.assertEqual((done.returncode, self.installed()[0]), (0, "bin/sluice"), done.stderr)
        (self.root / "bin" / "curl").unlink()
        if not shutil.which("wget"):
            self.skipTest("SKIPPED: no wget here")
        self.tool("wget")
        self.assertEqual(self.run_script("--from", self.url).returncode, 0)

    def test_wrong_bytes_install_nothing(self):
        archive = self.release()
        whole = archive.read_bytes()
        for wrong in [whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2], b""]:
            archive.write_bytes(wrong)
            self.assert_refused(self.run_script("--from", self.url), "its checksum is wrong")
        archive.unlink()
        self.assert_refused(self.run_script("--from", self.url), "cannot be fetched")

    def test_sums_that_name_no_archive_or_something_else_are_refused(self):
        self.release()
        sums = self.root / "files" / "SHA256SUMS"
        for text, part in [
            ("", "names no archive"),
            (f"{'0' * 64}  sluice-1-aarch64-linux.tar.gz\n", "names no archive"),
            (f"{'0' * 64}  ../../sluice-1-x86_64-linux.tar.gz\n", "names no archive"),
            (f"{'0' * 64}  sluice-1-x86_64-linux.tar.gz\n{'0' * 64}  sluice-2-x86_64-linux.tar.gz\n", "names several"),
        ]:
            sums.write_text(text)
            self.assert_refused(self.run_script("--from", self.url), part)

    def test_a_program_that_does_not_run_here_is_not_installed(self):
        self.release(runs=False)
        self.assert_refused(self.run_script("--from", self.url), "GLIBC_2.99")

    def test_other_machines_and_missing_tools_are_told(self):
        self.release()
        self.assert_refused(self.run_script(), "where are the files?")
        self.assert_refused(self.run_script("--frm", self.url), "--frm: unknown")
        (self.root / "bin" / "curl").unlink()
        self.assert_refused(self.run_script("--from", self.url), "curl or wget is needed")
        (self.root / "bin" / "uname").unlink()
        (self.root / "bin" / "uname").write_text("#!/bin/sh\n[ $1 = -s ] && echo Linux || echo aarch64\n")
        (self.root / "bin" / "uname").chmod(0o755)
        self.assert_refused(self.run_script("--from", self.url), "this is aarch64")

    def test_half_a_script_does_nothing(self):
        self.release()
        text = (ROOT / "install.sh").read_text()
        for end in range(0, len(text) - 12, 97):
            script = self.root / "half.sh"
            script.write_text(text[:end])
            env = {"PATH": str(self.root / "bin"), "HOME": str(self.root / "home"), "SLUICE_URL": self.url}
            subprocess.run([self.root / "bin" / "sh", script], env=env, capture_output=True)
        self.assertEqual(list((self.root / "home").iterdir()), [])


# As much of the program as scripts/release asks.
PROGRAM = r"""
#include <stdio.h>
#include <string.h>
int main(int n, char **words) {
  char path[4096];
  if (n > 1 && !strcmp(words[1], "--version")) return puts("sluice VERSION (numerics 3, generic)"), 0;
  if (n > 2 && !strcmp(words[1], "completions")) return printf("completions for %s\n", words[2]), 0;
  if (n > 2 && !strcmp(words[1], "manuals")) {
    snprintf(path, sizeof path, "%s/sluice.1", words[2]);
    FILE *file = fopen(path, "w");
    return !file || fputs(".TH sluice 1\n", file) < 0 || fclose(file);
  }
  return 2;
}
"""


class Release(unittest.TestCase):
    """scripts/release packs a program that takes no time to build."""

    @classmethod
    def setUpClass(cls):
        missing = [tool for tool in ["cc", "cargo", "objcopy", "objdump", "dpkg-deb", "git", "tar", "gzip"] if not shutil.which(tool)]
        if missing:
            raise unittest.SkipTest(f"SKIPPED: no {missing[0]} here")
        if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
            raise unittest.SkipTest("SKIPPED: not in a repository")
        # Licences are those of the crates, which a first build fetches.
        crates = ["cargo", "metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", "x86_64-unknown-linux-gnu"]
        if subprocess.run(crates, cwd=ROOT, capture_output=True).returncode:
            raise unittest.SkipTest("SKIPPED: the crates are not fetched yet")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)
        text = (ROOT / "Cargo.toml").read_text()
        cls.version = text.split("[workspace.package]")[1].split('version = "')[1].split('"')[0]
        # The demo model takes long to pack.
        (cls.root / "demo").mkdir()
        for name in ["config.json", "README.md"]:
            shutil.copy(ROOT / "models/demo" / name, cls.root / "demo")
        (cls.root / "program.c").write_text(PROGRAM.replace("VERSION", cls.version))
        cls.program = cls.root / "program"
        subprocess.run(["cc", "-g", "-o", cls.program, cls.root / "program.c"], check=True)

    def release(self, *args, output="files"):
        command = [ROOT / "scripts/release", "--snapshot", "--program", self.program, "--output", self.root / output, *args]
        env = {**os.environ, "SLUICE_DEMO": str(self.root / "demo")}
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True)

    def test_a_release_has_all_that_belongs_to_it_and_installs(self):
        done = self.release("--this-libc", "--url", "https://example.org/sluice")
        self.assertEqual(done.returncode, 0, done.stderr)
        files = self.root / "files"
        [archive] = [f for f in files.iterdir() if f.name.endswith("-x86_64-linux.tar.gz")]
        [package] = files.glob("sluice_*_amd64.deb")
        self.assertIn("\nurl=https://example.org/sluice\n", (files / "install.sh").read_text())
        subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=files, check=True)
        self.assertEqual(len((files / "SHA256SUMS").read_text().splitlines()), len(list(files.iterdir())) - 1)
        # What the script installs is what the archive has.
        prefix = self.root / "prefix"
        done = subprocess.run(["sh", files / "install.sh", "--from", files, "--prefix", prefix], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        for file in [
            "bin/sluice",
            "share/man/man1/sluice.1.gz",
            "share/bash-completion/completions/sluice",
            "share/zsh/site-functions/_sluice",
            "share/fish/vendor_completions.d/sluice.fish",
            "share/sluice/demo/config.json",
            "share/sluice/demo/README.md",
            "share/doc/sluice/LICENSE-MIT",
            "share/doc/sluice/THIRD-PARTY.txt",
            "share/doc/sluice/install.md",
            "share/doc/sluice/sluice.service",
        ]:
            self.assertTrue((prefix / file).is_file(), file)
        self.assertIn("clap", (prefix / "share/doc/sluice/THIRD-PARTY.txt").read_text())
        # The package has the same program, and a service that is not started.
        listed = subprocess.run(["dpkg-deb", "--contents", package], check=True, capture_output=True, text=True).stdout
        for file in ["./usr/bin/sluice", "./lib/systemd/system/sluice.service", "./etc/sluice/config.toml", "./usr/share/doc/sluice/copyright"]:
            self.assertIn(f" {file}\n", listed)
        self.assertNotIn(" 1000/", listed)
        control = subprocess.run(["dpkg-deb", "--field", package, "Depends", "Version"], check=True, capture_output=True, text=True).stdout
        self.assertRegex(control, r"libc6 \(>= 2\.\d+\)")
        self.assertIn(f"{self.version}~snapshot", control)
        # And once more: the same bytes.
        again = self.release("--this-libc", "--url", "https://example.org/sluice", output="again")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual((files / "SHA256SUMS").read_text(), (self.root / "again/SHA256SUMS").read_text())
        self.assertEqual(archive.name, next((self.root / "again").glob("*-x86_64-linux.tar.gz")).name)

    def test_what_needs_a_newer_libc_than_old_systems_have_is_refused(self):
        check = [ROOT / "scripts/check-glibc", self.program]
        needed = subprocess.run(check, check=True, capture_output=True, text=True).stdout.strip()
        self.assertRegex(needed, r"^2\.\d+(\.\d+)?$")
        self.assertEqual(subprocess.run([*check, "2.999"], capture_output=True).returncode, 0)
        done = subprocess.run([*check, "2.2.1"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"needs glibc {needed}, and may need 2.2.1", done.stderr)
        if [int(n) for n in needed.split(".")] > [2, 31]:
            done = self.release(output="refused")
            self.assertEqual((done.returncode, "may need 2.31" in done.stderr), (1, True), done.stderr)
        self.assertEqual(subprocess.run([ROOT / "scripts/check-glibc", ROOT / "Cargo.toml"], capture_output=True).returncode, 1)

    def test_a_release_is_not_made_of_trials(self):
        command = [ROOT / "scripts/release"]
        for args, part in [
            (["--no-build"], "--no-build needs --snapshot"),
            (["--profile", "quick"], "--profile needs --snapshot"),
            (["--this-libc"], "--this-libc needs --snapshot"),
            (["--snapshot", "--url", "https://x/$(reboot)"], "not a URL"),
            (["--nonsense"], "unknown"),
        ]:
            done = subprocess.run([*command, *args], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main()
