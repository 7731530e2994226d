"""What Sluice is measured against: llama.cpp, mlx-lm and transformers, made once in the scratch folder and used again. A peer that dies costs its own rows and nothing
else: it raises `Died`, which `Peer` keeps with its reason. Standard library only."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from scratch import DIR, ROOT, Failed, need_free, run, say

LLAMA_CPP_PYTHON = "0.3.36"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PYTHON = DIR / "env" / "bin" / "python"
SLUICE = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute() / "release" / "sluice"
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


# --- a peer that dies


class Died(Exception):
    """A peer gave no answer; as text the reason, in one clause."""

    def __init__(self, why, by=None):
        super().__init__(why)
        # The signal that ended it.
        self.by = by


def died(code, errors):
    """What to raise for a process that ended with `code` (negative: by a signal) and wrote `errors`."""
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    # For a cell of a table.
    last = "".join(c if c.isprintable() and c != "|" else " " for c in last)
    if code >= 0:
        return Died(f"exit code {code}" + (f": {last[:200]}" if last else ""))
    by = signal.Signals(-code)
    why = {signal.SIGILL: ", an instruction that this processor refuses", signal.SIGKILL: ", as for want of memory"}.get(by, "")
    return Died(f"{by.name}{why}", by)


def answer(command, parse):
    """What `parse` makes of what a peer prints."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise Died(f"cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        raise died(done.returncode, done.stderr)
    return parsed(parse, done.stdout)


def parsed(parse, text):
    try:
        return parse(text)
    except (ValueError, KeyError, IndexError, TypeError):
        raise Died("its answer cannot be read") from None


class Peer:
    """One peer in one case: its measurements, or why there are none. Once it has died it is not asked again."""

    def __init__(self):
        self.all = []
        self.died = ""

    def measure(self, what):
        """Keeps what `what()` gives."""
        if self.died:
            return
        try:
            self.all.append(what())
        except Died as why:
            say(f"a peer has died: {why}")
            self.all, self.died = [], str(why)


# --- making them


def cores():
    return len(os.sched_getaffinity(0))


def build_sluice():
    say("building sluice")
    done = subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "sluice"], cwd=ROOT)
    if done.returncode != 0:
        sys.exit("bench: sluice does not build")


def make_environment():
    """A virtual environment with what requirements.txt says, made again when that changes."""
    stamp, wanted = DIR / "env" / "requirements.txt", REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    need_free(8 << 30, "the peers' environment")
    say("making the peers' environment (some gigabytes, once)")
    venv.create(DIR / "env", clear=True, with_pip=True)
    run([PYTHON, "-m", "pip", "install", "-r", REQUIREMENTS], "pip.log")
    stamp.write_text(wanted)


class LlamaCpp:
    """llama.cpp from inside the source package of llama-cpp-python, built for this processor. Some compilers' builds for processors with AMX end with an illegal
    instruction in its products: then it is built once more without AMX, and the rows say so."""

    def __init__(self):
        self.native = DIR / f"llama.cpp-{LLAMA_CPP_PYTHON}"
        # Remembers that the native build has died so.
        self.stamp = self.native / "died-of-an-illegal-instruction"
        self.missing = ""

    @property
    def amx(self):
        return not self.stamp.exists()

    @property
    def folder(self):
        return self.native if self.amx else self.native.with_name(self.native.name + "-without-amx")

    @property
    def bench(self):
        return self.folder / "bin" / "llama-bench"

    def name(self, form):
        """For a row, once it is measured."""
        return f"llama.cpp {form}" + ("" if self.amx else ", built without AMX")

    def attempt(self, what):
        """What `what(path of llama-bench)` gives; after an illegal instruction that of a build without AMX."""
        if self.missing:
            raise Died(self.missing)
        try:
            return what(self.bench)
        except Died as why:
            if why.by != signal.SIGILL or not self.amx:
                raise
        say("llama.cpp ended with SIGILL: once more, built without AMX")
        self.stamp.touch()
        self.make()
        return self.attempt(what)

    def make(self):
        """Builds what is not there. Where that fails, every `attempt` says why."""
        if self.bench.exists():
            return
        try:
            self._make()
        except Failed as why:
            say(str(why))
            self.missing = "does not build: " + str(why).splitlines()[0].removeprefix("bench: ")

    def _make(self):
        need_free(2 << 30, "llama.cpp")
        name = f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
        sources = DIR / "src"
        tree = sources / name / "vendor" / "llama.cpp"
        if not tree.exists():
            say("fetching llama.cpp")
            wanted = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
            run([PYTHON, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", "-d", sources, wanted], "llama-fetch.log")
            with tarfile.open(sources / f"{name}.tar.gz") as archive:
                archive.extractall(sources, filter="data")
        say("building llama.cpp (minutes, once)")
        options = ["CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF"]
        options += [f"LLAMA_BUILD_{what}=OFF" for what in ("TESTS", "EXAMPLES", "SERVER", "APP")]
        if self.amx:
            options.append("GGML_NATIVE=ON")
        else:
            # Its own flags for the processor would come last and win.
            options += ["GGML_NATIVE=OFF", f"CMAKE_C_FLAGS=-march=native {NO_AMX}", f"CMAKE_CXX_FLAGS=-march=native {NO_AMX}"]
        run(["cmake", "-S", tree, "-B", self.folder, *[f"-D{o}" for o in options]], "llama-configure.log")
        # As many jobs as cores: `-j` alone begins all at once.
        run(["cmake", "--build", self.folder, "-j", cores(), "--target", "llama-bench"], "llama-build.log")

    def version(self):
        if self.missing:
            return self.missing
        said = subprocess.run([self.bench, "--version"], capture_output=True, text=True, errors="replace")
        number = re.search(r"version: (.+)", said.stdout + said.stderr)
        without = "" if self.amx else ", without AMX, since the build with it ended with SIGILL"
        return f"{number[1] if number else 'unknown'}, in llama-cpp-python {LLAMA_CPP_PYTHON}, features {self.features()}{without}"

    def features(self):
        """What of the processor it was compiled for, of what matters to it."""
        found = re.search(r"^CMAKE_C_COMPILER:\w+=(.+)$", (self.folder / "CMakeCache.txt").read_text(), re.M)
        flags = ["-march=native", *([] if self.amx else NO_AMX.split())]
        try:
            macros = subprocess.run([found[1] if found else "cc", *flags, "-dM", "-E", "-"], input="", capture_output=True, text=True).stdout
        except OSError:
            return "unknown"
        names = ("AVX2", "FMA", "F16C", "AVXVNNI", "AVX512F", "AVX512VBMI", "AVX512VNNI", "AVX512BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16")
        return ", ".join(n for n in names if f"#define __{n}__ 1" in macros)


LLAMA = LlamaCpp()


def prepare():
    build_sluice()
    make_environment()
    LLAMA.make()


def versions():
    """What was measured, by name."""
    listed = subprocess.run([PYTHON, "-m", "pip", "list", "--format", "json"], capture_output=True, text=True, check=True)
    installed = {p["name"].lower(): p["version"] for p in json.loads(listed.stdout)}
    found = {p: installed.get(p, "missing") for p in ("mlx", "mlx-lm", "torch", "transformers")}
    found["llama.cpp"] = LLAMA.version()
    sluice = subprocess.run([SLUICE, "--version"], capture_output=True, text=True, check=True)
    return {"sluice": sluice.stdout.removeprefix("sluice").strip(), **found}
