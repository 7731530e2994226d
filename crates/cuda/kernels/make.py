#!/usr/bin/env python3
"""Makes the PTX that the crate embeds from the .cu files beside it. Needs no GPU and no CUDA toolkit:

    python3 -m venv /tmp/nvrtc && /tmp/nvrtc/bin/pip install nvidia-cuda-nvrtc-cu12==12.4.127
    /tmp/nvrtc/bin/python crates/cuda/kernels/make.py

12.4, because drivers refuse PTX of a compiler that is newer than they are: this one does from driver 550 on. What the result was made from is written
beside it, and `tests/ptx.rs` holds that it is what lies here.
"""

import ctypes
import glob
import gzip
import hashlib
import importlib.util
import os
import sys
from concurrent.futures import ProcessPoolExecutor

VERSION = (12, 4)
ARCHITECTURES = [75, 80, 90]
# What `sluice bench roofline` measures with: a module of its own. Products of integers on tensor cores came with compute capability 8.0.
PROBES, PROBES_FOR = "probes/probes.cu", 80
# Arithmetic is as docs/numerics.md has it: nothing is fused, flushed or approximated that is not written so.
OPTIONS = ["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"]

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "ptx")


def sources():
    names = sorted(n for n in os.listdir(HERE) if n.endswith((".cu", ".cuh", ".py"))) + [PROBES]
    return {name: open(os.path.join(HERE, name), "rb").read() for name in names}


def library():
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    if spec is None:
        sys.exit("NVRTC is missing: pip install nvidia-cuda-nvrtc-cu12==12.4.127 (in an environment of its own)")
    found = [p for folder in spec.submodule_search_locations for p in glob.glob(os.path.join(folder, "lib", "libnvrtc.so*"))]
    nvrtc = ctypes.CDLL(found[0])
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != VERSION:
        sys.exit(f"NVRTC {major.value}.{minor.value} is here, and {VERSION[0]}.{VERSION[1]} is wanted")
    return nvrtc


def compiled(nvrtc, architecture, files, main):
    program = ctypes.c_void_p()
    headers = [name for name in files if name.endswith((".cu", ".cuh")) and name not in ("all.cu", PROBES)]
    texts = (ctypes.c_char_p * len(headers))(*(files[name] for name in headers))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), files[main], main.encode(), len(headers), texts, names)
    options = [f"--gpu-architecture=compute_{architecture}", *OPTIONS]
    error = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    if error:
        sys.exit(1)
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.value


def packed(architecture, main="all.cu"):
    # Without a time or a name inside: the same bytes each time.
    return gzip.compress(compiled(library(), architecture, sources(), main), 9, mtime=0)


def main():
    os.makedirs(OUT, exist_ok=True)
    library()
    with ProcessPoolExecutor() as pool:
        results = {f"compute_{a}.ptx.gz": text for a, text in zip(ARCHITECTURES, pool.map(packed, ARCHITECTURES))}
    results["probes.ptx.gz"] = packed(PROBES_FOR, PROBES)
    for name, content in results.items():
        with open(os.path.join(OUT, name), "wb") as out:
            out.write(content)
        print(f"{name}: {len(content)} bytes")
    with open(os.path.join(OUT, "made-from.txt"), "w") as out:
        for name, content in sorted({**sources(), **results}.items()):
            out.write(f"{hashlib.sha256(content).hexdigest()}  {name}\n")


if __name__ == "__main__":
    main()
