#!/usr/bin/env python3
"""Counts the instructions of matrix products on arm64, per weight and token, beside llama.cpp's: bench/arm64/count.py TOOLS PROGRAM [COLUMNS]

scripts/cross-arm64.sh count calls it. TOOLS is its folder of compilers and qemu, PROGRAM the example `one_product` as built for arm64. qemu's plugin `count.c` counts what a process
executes; of three products and of one, the difference is two products without start and end. llama.cpp's kernels come from llama-cpp-python's source package, fetched by pip.
Prints a table. Standard library only."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from peers import LLAMA_CPP_PYTHON  # noqa: E402

SETS = {"dotprod": "armv8.2-a+dotprod+fp16", "i8mm": "armv8.6-a+dotprod+i8mm+fp16"}
# A format of ours, and llama.cpp's kernels for it: as the file has the rows, and with rows interleaved when the model is loaded.
CASES = {
    "q4_0": ("q4_0", {"dotprod": "q4_0_4x4", "i8mm": "q4_0_4x8"}),
    "q4_k": ("q4_k", {"dotprod": "q4_k_8x4", "i8mm": "q4_k_8x8"}),
    "affine4": None,
}
ROWS, TOKENS = 128, 128


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **more)
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(c) for c in command)}\nended with {done.returncode}:\n{done.stderr}")
    return done


def sources(folder):
    """ggml's source folder."""
    name = f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    ggml = folder / name / "vendor" / "llama.cpp" / "ggml"
    if not ggml.exists():
        say("fetching llama.cpp")
        wanted = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
        run([sys.executable, "-m", "pip", "download", "-q", "--no-binary", "llama-cpp-python", "--no-deps", "-d", folder, wanted])
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, [m for m in archive if "/vendor/llama.cpp/ggml/" in m.name], filter="data")
    return ggml


def peer(tools, folder, ggml, name):
    """llama.cpp's kernels for an instruction set, as a program."""
    program = folder / f"peer-{name}"
    flags = ["-O3", f"-march={SETS[name]}", "-DNDEBUG", "-w", "-ffunction-sections", *([] if name == "dotprod" else ["-DPAIRS"])]
    flags += [f"-I{ggml / part}" for part in ("include", "src", "src/ggml-cpu")]
    arm = ggml / "src" / "ggml-cpu" / "arch" / "arm"
    for source, compiler, more in ((arm / "quants.c", "gcc", []), (arm / "repack.cpp", "g++", ["-std=c++17"]), (HERE / "peer.cpp", "g++", ["-std=c++17"])):
        run([tools / "bin" / compiler, *flags, *more, "-c", source, "-o", folder / f"{source.stem}-{name}.o"])
    objects = [folder / f"{part}-{name}.o" for part in ("peer", "quants", "repack")]
    # What the kernels do not call is not there.
    run([tools / "bin" / "g++", "-static", *objects, "-Wl,--gc-sections", "-Wl,--unresolved-symbols=ignore-all", "-o", program])
    return program


def executed(tools, plugin, command, isa):
    done = run([tools / "bin" / "qemu", "-plugin", plugin, *command], env={"PATH": "/usr/bin:/bin", "SLUICE_ISA": isa})
    return [int(n) for n in re.search(r"counted (\d+) (\d+) (\d+) (\d+)", done.stderr).groups()]


def per_weight(tools, plugin, program, kernel, isa, tokens, cols):
    """Instructions, loads, stores, products of bytes: of a weight times a token."""
    one, three = (executed(tools, plugin, [program, kernel, ROWS, cols, tokens, times], isa) for times in (1, 3))
    return [(b - a) / (2 * ROWS * cols * tokens) for a, b in zip(one, three)]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    tools, program, cols = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 2048
    folder = tools / "count"
    folder.mkdir(exist_ok=True)
    plugin = folder / "count.so"
    run([shutil.which("cc"), "-O2", "-shared", "-fPIC", HERE / "count.c", "-o", plugin])
    ggml = sources(folder)
    peers = {name: peer(tools, folder, ggml, name) for name in SETS}
    print(f"Instructions per weight and token, {ROWS} rows of {cols} columns; in brackets loads, products of bytes. llama.cpp of llama-cpp-python {LLAMA_CPP_PYTHON}.\n")
    print("| weights | tokens | instruction set | Sluice | llama.cpp, rows as in the file | ratio | llama.cpp, rows interleaved at load | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for weights, others in CASES.items():
        for tokens in (1, TOKENS):
            for name in SETS:
                ours = per_weight(tools, plugin, program, weights, name, tokens, cols)
                cells = [weights, tokens, name, text(ours)]
                for kernel in (others[0], others[1][name]) if others else (None, None):
                    theirs = per_weight(tools, plugin, peers[name], kernel, name, tokens, cols) if kernel else None
                    cells += [text(theirs), f"{ours[0] / theirs[0]:.2f}"] if theirs else ["", ""]
                print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def text(counted):
    return f"{counted[0]:.3f} ({counted[1]:.3f}, {counted[3]:.3f})"


if __name__ == "__main__":
    main()
