"""What Sluice is measured against: llama.cpp (ik_llama.cpp too), mlx-lm and transformers, made once in the scratch folder and used again. A peer that dies costs its own rows and nothing
else: it raises `Died`, which `Peer` keeps with its reason. Standard library only."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from scratch import DIR, ROOT, Failed, need_free, run, say

LLAMA_CPP_PYTHON = "0.3.36"
IK_LLAMA_CPP_PYTHON = "0.1.5"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# On a machine without network or cargo both may be named: what is named is not made.
PYTHON = Path(os.environ.get("BENCH_PYTHON") or DIR / "env" / "bin" / "python")
SLUICE = Path(os.environ.get("BENCH_SLUICE") or Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "sluice").absolute()
# Where drafts are not what is measured: peers make none, and random weights repeat themselves more than models do.
PLAIN = ["--draft", "off"]
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
        """Keeps the measurements that `what()` gives."""
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
    if "BENCH_SLUICE" in os.environ:
        return
    say("building sluice")
    done = subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "sluice"], cwd=ROOT)
    if done.returncode != 0:
        sys.exit("bench: sluice does not build")


def make_environment(*only):
    """A virtual environment with what requirements.txt says, or with `only` these packages of it, made again where something is missing."""
    if "BENCH_PYTHON" in os.environ:
        return
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    wanted = [line for line in lines if not only or re.split(r"[=\[]", line)[0] in only]
    stamp = DIR / "env" / "requirements.txt"
    if stamp.exists() and set(wanted) <= set(stamp.read_text().splitlines()):
        return
    need_free(1 << 30 if only else 8 << 30, "the peers' environment")
    say(f"making the peers' environment ({', '.join(only) or 'some gigabytes'}, once)")
    venv.create(DIR / "env", clear=True, with_pip=True)
    run([PYTHON, "-m", "pip", "install", *wanted], "pip.log")
    stamp.write_text("\n".join(wanted))


def compilers():
    """For C and C++: those that CC and CXX name, or else the system's; but where the processor has AMX, of which gcc before 13 makes code that dies, another one that is there."""
    if "CC" in os.environ or "amx_tile" not in Path("/proc/cpuinfo").read_text():
        return None
    said = subprocess.run(["cc", "-dM", "-E", "-"], input="", capture_output=True, text=True).stdout
    major = re.search(r"#define __GNUC__ (\d+)", said)
    if "__clang__" in said or major is None or int(major[1]) >= 13:
        return None
    found = [(f"clang{v}", f"clang++{v}") for v in ["", *(f"-{n}" for n in range(22, 13, -1))]] + [(f"gcc-{n}", f"g++-{n}") for n in range(16, 12, -1)]
    return next(((c, cxx) for c, cxx in found if shutil.which(c) and shutil.which(cxx)), None)


class LlamaCpp:
    """llama.cpp from inside the source package of llama-cpp-python, built for this processor. Some compilers' builds for processors with AMX die in its products: then it
    is built once more without AMX, and the rows say so."""

    # The package, its version, the tree in it, and what is built first.
    package, package_version, tree, targets = "llama-cpp-python", LLAMA_CPP_PYTHON, "llama.cpp", ("llama-bench",)
    options = ("LLAMA_OPENSSL=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF")
    # Its page would be fetched from the network.
    server_options = ("LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF")

    # What may name a folder that has its programs already.
    variable = "BENCH_LLAMA"

    def __init__(self):
        self.named = os.environ.get(self.variable)
        self.native = Path(self.named).absolute() if self.named else DIR / f"{self.tree}-{self.package_version}"
        # Remembers that the native build has died so.
        self.stamp = self.native / "died-in-its-products"
        self.missing = ""

    @property
    def amx(self):
        return not self.stamp.exists()

    @property
    def folder(self):
        return self.native if self.amx else self.native.with_name(self.native.name + "-without-amx")

    @property
    def bench(self):
        return self.program("llama-bench")

    @property
    def server(self):
        return self.program("llama-server")

    def program(self, name):
        return self.folder / name if self.named else self.folder / "bin" / name

    def name(self, form):
        """For a row, once it is measured."""
        return f"{self.tree} {form}" + ("" if self.amx else ", built without AMX")

    def serves(self):
        """From here on there is a server too."""
        if "llama-server" not in self.targets:
            self.targets = (*self.targets, "llama-server")
        if not self.missing:
            self.make()

    def attempt(self, what):
        """What `what(path of llama-bench)` gives; where it dies in its products, that of a build without AMX."""
        if self.missing:
            raise Died(self.missing)
        try:
            return what(self.bench)
        except Died as why:
            if self.named or why.by not in (signal.SIGILL, signal.SIGSEGV) or not self.amx:
                raise
            say(f"llama.cpp ended with {why.by.name}: once more, built without AMX")
        self.stamp.touch()
        self.make()
        return self.attempt(what)

    def make(self):
        """Builds what is not there. Where that fails, every `attempt` says why."""
        if all(self.program(target).exists() for target in self.targets):
            return
        if self.named:
            self.missing = f"not in {self.named}"
            return
        try:
            self._make()
        except Failed as why:
            say(str(why))
            self.missing = "does not build: " + str(why).splitlines()[0].removeprefix("bench: ")

    def _make(self):
        need_free(2 << 30, self.tree)
        name = f"{self.package.replace('-', '_')}-{self.package_version}"
        sources = DIR / "src"
        tree = sources / name / "vendor" / self.tree
        if not tree.exists():
            say(f"fetching {self.tree}")
            wanted = f"{self.package}=={self.package_version}"
            run([PYTHON, "-m", "pip", "download", "--no-binary", self.package, "--no-deps", "-d", sources, wanted], "llama-fetch.log")
            with tarfile.open(sources / f"{name}.tar.gz") as archive:
                archive.extractall(sources, filter="data")
        self.complete(tree)
        say(f"building {self.tree} (minutes, once)")
        options = ["CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", *self.options]
        options += ["LLAMA_BUILD_SERVER=ON", *self.server_options] if "llama-server" in self.targets else ["LLAMA_BUILD_SERVER=OFF"]
        if chosen := compilers():
            options += [f"CMAKE_C_COMPILER={chosen[0]}", f"CMAKE_CXX_COMPILER={chosen[1]}"]
        if self.amx:
            options.append("GGML_NATIVE=ON")
        else:
            # Its own flags for the processor would come last and win.
            options += ["GGML_NATIVE=OFF", f"CMAKE_C_FLAGS=-march=native {NO_AMX}", f"CMAKE_CXX_FLAGS=-march=native {NO_AMX}"]
        run(["cmake", "-S", tree, "-B", self.folder, *[f"-D{o}" for o in options]], "llama-configure.log")
        # As many jobs as cores: `-j` alone begins all at once.
        run(["cmake", "--build", self.folder, "-j", cores(), "--target", *self.targets], "llama-build.log")

    def complete(self, tree):
        """Adds to a tree what its package has left out."""

    def version(self):
        if self.missing:
            return self.missing
        said = subprocess.run([self.bench, "--version"], capture_output=True, text=True, errors="replace")
        number = re.search(r"version: (.+)", said.stdout + said.stderr)
        without = "" if self.amx else ", without AMX, since the build with it died"
        return f"{number[1] if number else 'unknown'}, in llama-cpp-python {LLAMA_CPP_PYTHON}, features {self.features()}{without}"

    def features(self):
        """What of the processor it was compiled for, of what matters to it."""
        if self.named:
            return "not known: it was built before"
        found = re.search(r"^CMAKE_C_COMPILER:\w+=(.+)$", (self.folder / "CMakeCache.txt").read_text(), re.M)
        flags = ["-march=native", *([] if self.amx else NO_AMX.split())]
        try:
            macros = subprocess.run([found[1] if found else "cc", *flags, "-dM", "-E", "-"], input="", capture_output=True, text=True).stdout
        except OSError:
            return "unknown"
        names = ("AVX2", "FMA", "F16C", "AVXVNNI", "AVX512F", "AVX512VBMI", "AVX512VNNI", "AVX512BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16")
        return ", ".join(n for n in names if f"#define __{n}__ 1" in macros)


class CudaLlamaCpp(LlamaCpp):
    """llama.cpp for the GPU of this machine: built with nvcc, or in the folder that BENCH_LLAMA_CUDA names."""

    targets = ("llama-bench", "llama-batched-bench")
    variable = "BENCH_LLAMA_CUDA"

    def __init__(self):
        super().__init__()
        if not self.named:
            self.native = self.native.with_name(self.native.name + "-cuda")
        self.options = (*self.options, "GGML_CUDA=ON", "CMAKE_CUDA_ARCHITECTURES=native")

    @property
    def folder(self):
        return self.native

    def attempt(self, what):
        if self.missing:
            raise Died(self.missing)
        return what(self.bench)

    def make(self):
        there = all(self.program(target).exists() for target in self.targets)
        if not there and not self.named and shutil.which("nvcc") is None:
            self.missing = f"not there: nvcc is missing, and {self.variable} names no folder"
        else:
            super().make()
        if self.missing:
            say(f"llama.cpp with CUDA: {self.missing}")

    def name(self, form):
        return f"llama.cpp CUDA {form}"

    def features(self):
        return "CUDA, built before" if self.named else "CUDA"


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp, a fork that is quicker on processors, from inside the source package of its own Python binding. Only its server is measured."""

    package, package_version, tree, targets = "ik-llama-cpp-python", IK_LLAMA_CPP_PYTHON, "ik_llama.cpp", ("llama-server",)
    # The server is one of its examples; attention over quantised keys and values, which nobody asks it for, takes most of the time to build.
    options, server_options = ("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=ON", "GGML_IQK_FA_ALL_QUANTS=OFF"), ()
    variable = "BENCH_IK_LLAMA"

    def complete(self, tree):
        """The script that fills in a template with what was built and by whom."""
        script = tree / "common" / "cmake" / "build-info-gen-cpp.cmake"
        script.parent.mkdir(exist_ok=True)
        values = {"BUILD_NUMBER": 0, "BUILD_COMMIT": self.package_version, "BUILD_COMPILER": "${CMAKE_C_COMPILER_ID}", "BUILD_TARGET": "this machine"}
        lines = [f'set({name} "{value}")' for name, value in values.items()]
        script.write_text("\n".join([*lines, "configure_file(common/build-info.cpp.in common/build-info.cpp @ONLY)", ""]))


LLAMA = LlamaCpp()
IK_LLAMA = IkLlamaCpp()


def prepare():
    build_sluice()
    make_environment()
    LLAMA.make()


def versions_of(llama=None):
    """What was measured, by name, where it is Sluice, and this llama.cpp if one is given."""
    sluice = subprocess.run([SLUICE, "--version"], capture_output=True, text=True, check=True)
    return {"sluice": sluice.stdout.removeprefix("sluice").strip(), **({"llama.cpp": llama.version()} if llama else {})}


def versions():
    """What was measured, by name."""
    listed = subprocess.run([PYTHON, "-m", "pip", "list", "--format", "json"], capture_output=True, text=True, check=True)
    installed = {p["name"].lower(): p["version"] for p in json.loads(listed.stdout)}
    return {**versions_of(LLAMA), **{p: installed.get(p, "missing") for p in ("mlx", "mlx-lm", "torch", "transformers")}}
