#!/usr/bin/env python3
"""Makes the PTX and the machine code that the crate embeds from the .cu files beside it. Needs no GPU and no CUDA toolkit:

    python3 -m venv /tmp/nvrtc && /tmp/nvrtc/bin/pip install nvidia-cuda-nvrtc-cu12==12.4.127
    /tmp/nvrtc/bin/python crates/cuda/kernels/make.py

`make.py stamped FILE` writes a module for trying, whose kernels add up where their time goes: builds with the feature `tuning` take it with
SLUICE_CUDA_PTX=FILE, and print that at their end.

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
# Compiled to the end, since a driver takes half a minute for that when it first sees the PTX; newer drivers take it all the same.
CUBINS = [90]
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


def compiled(nvrtc, kind, architecture, files, main="all.cu", more=()):
    program = ctypes.c_void_p()
    headers = [name for name in files if name.endswith((".cu", ".cuh")) and name not in ("all.cu", PROBES)]
    texts = (ctypes.c_char_p * len(headers))(*(files[name] for name in headers))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), files[main], main.encode(), len(headers), texts, names)
    options = [f"--gpu-architecture={kind}_{architecture}", *OPTIONS, *more]
    error = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    if error:
        sys.exit(1)
    if kind == "sm":
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.value


def packed(wanted):
    kind, architecture, _, main = wanted
    # Without a time or a name inside: the same bytes each time.
    return gzip.compress(compiled(library(), kind, architecture, sources(), main), 9, mtime=0)


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "stamped":
        with open(sys.argv[2], "wb") as out:
            # The host looks for them by name.
            text = compiled(library(), "compute", ARCHITECTURES[-1], sources(), more=["-DSTAMPS"])
            out.write(text.replace(b"\n.global .align 8 .b8 stamps", b"\n.visible .global .align 8 .b8 stamps"))
        return
    os.makedirs(OUT, exist_ok=True)
    library()
    wanted = [("sm", a, f"sm_{a}.cubin.gz", "all.cu") for a in CUBINS]
    wanted += [("compute", a, f"compute_{a}.ptx.gz", "all.cu") for a in ARCHITECTURES]
    wanted.append(("compute", PROBES_FOR, "probes.ptx.gz", PROBES))
    with ProcessPoolExecutor() as pool:
        results = {name: content for (_, _, name, _), content in zip(wanted, pool.map(packed, wanted))}
    for name, content in results.items():
        with open(os.path.join(OUT, name), "wb") as out:
            out.write(content)
        print(f"{name}: {len(content)} bytes")
    with open(os.path.join(OUT, "made-from.txt"), "w") as out:
        for name, content in sorted({**sources(), **results}.items()):
            out.write(f"{hashlib.sha256(content).hexdigest()}  {name}\n")


if __name__ == "__main__":
    main()
