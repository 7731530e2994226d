"""What Sluice is measured against: llama.cpp, mlx-lm and transformers, made once in the scratch folder and used again. Standard library only."""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from scratch import DIR, ROOT, need_free, run, say

LLAMA_CPP_PYTHON = "0.3.36"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PYTHON = DIR / "env" / "bin" / "python"
SLUICE = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute() / "release" / "sluice"
LLAMA_BENCH = DIR / f"llama.cpp-{LLAMA_CPP_PYTHON}" / "bin" / "llama-bench"


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


def make_llama_cpp():
    """llama.cpp from inside the source package of llama-cpp-python, built for this processor."""
    if LLAMA_BENCH.exists():
        return
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
    build = LLAMA_BENCH.parent.parent
    options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF"]
    options += [f"LLAMA_BUILD_{what}=OFF" for what in ("TESTS", "EXAMPLES", "SERVER", "APP")]
    run(["cmake", "-S", tree, "-B", build, *[f"-D{o}" for o in options]], "llama-configure.log")
    run(["cmake", "--build", build, "-j", "--target", "llama-bench"], "llama-build.log")


def prepare():
    build_sluice()
    make_environment()
    make_llama_cpp()


def versions():
    """What was measured, by name."""
    listed = subprocess.run([PYTHON, "-m", "pip", "list", "--format", "json"], capture_output=True, text=True, check=True)
    installed = {p["name"].lower(): p["version"] for p in json.loads(listed.stdout)}
    llama = subprocess.run([LLAMA_BENCH, "--version"], capture_output=True, text=True)
    number = re.search(r"version: (.+)", llama.stdout + llama.stderr)
    found = {p: installed[p] for p in ("mlx", "mlx-lm", "torch", "transformers")}
    found["llama.cpp"] = f"{number[1] if number else 'unknown'}, in llama-cpp-python {LLAMA_CPP_PYTHON}, features {llama_features()}"
    sluice = subprocess.run([SLUICE, "--version"], capture_output=True, text=True, check=True)
    return {"sluice": sluice.stdout.removeprefix("sluice").strip(), **found}


def llama_features():
    """What of the processor llama.cpp was compiled for, of what matters to it."""
    cache = (LLAMA_BENCH.parent.parent / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_C_COMPILER:\w+=(.+)$", cache, re.M)[1]
    macros = subprocess.run([compiler, "-march=native", "-dM", "-E", "-"], input="", capture_output=True, text=True).stdout
    names = ("AVX2", "FMA", "F16C", "AVXVNNI", "AVX512F", "AVX512VBMI", "AVX512VNNI", "AVX512BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16")
    return ", ".join(n for n in names if f"#define __{n}__ 1" in macros)
