#!/usr/bin/env python3
"""build.py OUT: a libcuda.so in the folder OUT whose device is this machine's processor (x86-64 with AVX2, FMA and F16C), for tests where there is no GPU.

The kernels' own sources are compiled for it by a C++ compiler (`c++`, or $CXX). `device.h` has the words that they are written in, and `driver.cpp` the calls of
the driver that the crate makes, and how a block's threads take turns. What a kernel copies asynchronously comes when it is waited for and no earlier; shared memory
and new memory are full of ones. Programs find it with LD_LIBRARY_PATH=OUT; EMULATED_SHARED=BYTES is what a block has of shared memory. It shows that bits are equal and that nobody waits for what never comes; how
a device orders memory, and how fast it is, it does not show. `emulated_fail`, `emulated_queue` and `emulated_overlap` (`driver.cpp`) have things go wrong. What was built from the same sources is kept.
"""

import hashlib
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join(HERE, "..", "kernels")
# Nothing is fused or reordered that is not written so.
FLAGS = ["-std=c++17", "-O2", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w"]
# What stands for an instruction that is written as such.
INSTRUCTIONS = {
    "cp.async.ca.shared.global": "emu_copy(to, from, {bytes}); (void)at;",
    "cp.async.cg.shared.global": "emu_copy(to, from, {bytes}); (void)at;",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "emu_load_rows(to, from); (void)at;",
    "cp.async.wait_group": "emu_wait(N);",
    "cp.async.commit_group": "emu_commit();",
    "cp.async.wait_all": "emu_wait_all();",
    "griddepcontrol": ";",
    "prefetch": ";",
    "// computed": ";",
    "dp4a.u32.s32": "d = emu_dp4a(a, b, sum);",
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32": "emu_mma(d, a, b0, b1, MAGIC);",
    "cvt.f32.f16": "y = _cvtsh_ss(x);",
    "cvt.rn.f16.f32": "y = _cvtss_sh(x, 0);",
    "/* in place */ mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32": "emu_mma_more<uint8_t>(d, a, b0, b1);",
    "/* in place */ mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": "emu_mma_more<int8_t>(d, a, b0, b1);",
    "fma.rn.ftz.f32": "d = emu_ftz(a, b, c);",
}


def instruction(found):
    text = found[0]
    for name, stands in INSTRUCTIONS.items():
        if f'"{name}' in text:
            size = re.search(r"\[%1\], (\d+);", text)
            return stands.format(bytes=size[1] if size else 0)
    sys.exit(f"an instruction that is not known: {text}")


def read(name, seen):
    """A source with all that it includes, once each."""
    if name in seen:
        return ""
    seen.add(name)
    with open(os.path.join(KERNELS, name)) as file:
        text = file.read().replace("#pragma once", "")
    return re.sub(r'#include "([^"]+)"', lambda m: read(m[1], seen), text)


def main():
    out = sys.argv[1]
    compiler = os.environ.get("CXX", "c++")
    device, driver, kernels = (os.path.join(HERE, "device.h"), os.path.join(HERE, "driver.cpp"), os.path.join(out, "kernels.cpp"))
    text = read("all.cu", set()).replace("extern __shared__ float room[];", "using ::room;")
    text = re.sub(r'asm(?: volatile)?\s*\("(?:[^"\\]|\\.)*"(?:[^;"]|"[^"]*")*\);', instruction, text)
    text = f'#include "{device}"\nextern float room[];\nnamespace emulated {{\n{text}\n}}\n'
    os.makedirs(out, exist_ok=True)

    def is_kept(part, *made_from):
        """Whether this part was made from the same; what writes that down."""
        stamp = os.path.join(out, f"{part}-made-from.txt")
        now = hashlib.sha256("".join([*made_from, *FLAGS, compiler, open(__file__).read()]).encode()).hexdigest()
        kept = os.path.exists(stamp) and open(stamp).read() == now
        return kept, lambda: open(stamp, "w").write(now)

    def compiled(source, to):
        subprocess.run([compiler, *FLAGS, "-c", "-o", to, source], check=True)

    # 1. The kernels, which take minutes: apart from the driver, so that a change of that takes seconds
    objects = [os.path.join(out, f"{part}.o") for part in ("kernels", "driver")]
    kernels_kept, write_down = is_kept("kernels", text, open(device).read())
    if not kernels_kept:
        with open(kernels, "w") as file:
            file.write(text)
        # Kernels are found behind the preprocessor, since most are made by macros.
        expanded = subprocess.run([compiler, *FLAGS, "-E", kernels], capture_output=True, text=True, check=True).stdout
        found = re.findall(r'extern "C"\s+void\s+(\w+)\(const\s+(\w+) p\)', expanded)
        with open(kernels, "a") as file:
            file.write("struct Entry { const char* name; void (*call)(void*); unsigned bytes; };\n")
            for name, parameters in found:
                file.write(f"static void call_{name}(void* p) {{ emulated::{name}(*(const emulated::{parameters}*)p); }}\n")
            entries = "".join(f'{{"{name}", call_{name}, sizeof(emulated::{parameters})}},\n' for name, parameters in found)
            file.write(f"extern const Entry emu_kernels[] = {{\n{entries}{{0, 0, 0}}}};\n")
        compiled(kernels, objects[0])
        write_down()
    # 2. The driver, and both together
    driver_kept, write_down = is_kept("driver", open(driver).read(), text, open(device).read())
    if not (kernels_kept and driver_kept):
        compiled(driver, objects[1])
        subprocess.run([compiler, "-shared", "-o", os.path.join(out, "libcuda.so"), *objects, "-lpthread"], check=True)
        write_down()


if __name__ == "__main__":
    main()
