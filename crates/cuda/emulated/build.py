#!/usr/bin/env python3
"""build.py OUT: a libcuda.so in the folder OUT whose device is this machine's processor (x86-64 with AVX2, FMA and F16C), for tests where there is no GPU.

A C++ compiler (`c++`, or $CXX) compiles the kernels' own sources for it, unit by unit. `device.h` has the words that they are written in, and `driver.cpp` the
driver's calls that the crate makes, and how a block's threads take turns. What a kernel copies asynchronously arrives when the kernel waits for it and no earlier.
Shared memory and new memory are full of ones. This shows that bits are equal and that no kernel waits for what never comes. It does not show how a device orders
memory, nor how fast it is. `emulated_fail`, `emulated_queue` and `emulated_overlap` (`driver.cpp`) make things go wrong.

Programs find it with LD_LIBRARY_PATH=OUT, and its kernels with SLUICE_CUDA_KERNELS=OUT/kernels: objects that name a unit and have no code. EMULATED_SHARED=BYTES is
the shared memory that a block can have; with EMULATED_DELAY=MICROSECONDS copies from the host come late. A unit whose sources have not changed is not built again.
"""

import fcntl
import gzip
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join(HERE, "..", "kernels")
# Nothing is fused or reordered that is not written so.
FLAGS = ["-std=c++17", "-O2", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w"]
# What the device that is emulated runs: kernels for compute capability 9.0.
ARCHITECTURE = 90
# Replacements for instructions that are written in assembler.
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
    "dp4a.s32.s32": "d = emu_dp4a_signed(a, b, sum);",
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32": "emu_mma(d, a, b0, b1, MAGIC);",
    "mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32": "{{ const unsigned both[4] = {{a0, a1, 0, 0}}; emu_mma(d, both, b0, 0, MAGIC); }}",
    "cvt.f32.f16": "y = _cvtsh_ss(x);",
    "cvt.rn.f16x2.f32": "d = _cvtss_sh(low, 0) | (u32)_cvtss_sh(high, 0) << 16;",
    "sub.f16x2": "d = _cvtss_sh(_cvtsh_ss(a) - _cvtsh_ss(b), 0) | (u32)_cvtss_sh(_cvtsh_ss(a >> 16) - _cvtsh_ss(b >> 16), 0) << 16;",
    "max.u16x2": "d = max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);",
    "cvt.rn.f16.f32": "y = _cvtss_sh(x, 0);",
    "/* in place */ mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32": "emu_mma_more<uint8_t>(d, a, b0, b1);",
    "/* in place */ mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": "emu_mma_more<int8_t>(d, a, b0, b1);",
    "fma.rn.ftz.f32": "d = emu_ftz(a, b, c);",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "emu_mma_f16(d, a, b0, b1);",
    # Of compute capability 9.0 alone: kernels that need them are empty here.
    **dict.fromkeys(["wgmma.", "{ .reg .pred", "mbarrier.", "fence.", "cp.async.mbarrier", "cp.async.bulk", "setmaxnreg", "barrier.sync", "mov.u32 %0, %%dynamic_smem_size", '" :'], ";"),
}

# How units and objects are named and found.
spec = importlib.util.spec_from_file_location("kernels_build", os.path.join(KERNELS, "build.py"))
kernels_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels_build)


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
    # Without comments, so that a change of them builds nothing again.
    text = re.sub(r"^\s*//.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r'#include "([^"]+)"', lambda m: read(m[1], seen), text)


class Builder:
    def __init__(self, out):
        self.out, self.compiler = out, os.environ.get("CXX", "c++")
        with open(os.path.join(HERE, "device.h")) as file:
            self.device = file.read()
        with open(__file__) as file:
            self.own = file.read()

    def is_kept(self, part, *made_from):
        """Whether this part was made from the same; what writes that down."""
        stamp = os.path.join(self.out, f"{part}-made-from.txt")
        now = hashlib.sha256("".join([*made_from, *FLAGS, self.compiler, self.device, self.own]).encode()).hexdigest()
        kept = os.path.exists(stamp) and open(stamp).read() == now

        def write_down():
            with open(stamp, "w") as file:
                file.write(now)

        return kept, write_down

    def compile(self, source, to):
        subprocess.run([self.compiler, *FLAGS, "-c", "-o", to, source], check=True)

    def unit(self, unit):
        """Compiles a unit with a table of its kernels; whether it was not there before."""
        name = unit.replace("/", "_")
        text = read(f"{unit}.cu", set()).replace("extern __shared__ float smem[];", "using ::smem;")
        text = re.sub(r'asm(?: volatile)?\s*\("(?:[^"\\]|\\.)*"(?:[^;"]|"[^"]*")*\);', instruction, text)
        # A namespace of its own: units may give different things the same name.
        text = f'#include "{os.path.join(HERE, "device.h")}"\nextern float smem[];\nnamespace emulated_{name} {{\n{text}\n}}\n'
        kept, write_down = self.is_kept(name, text)
        if kept:
            return False
        source = os.path.join(self.out, f"{name}.cpp")
        with open(source, "w") as file:
            file.write(text)
        # Kernels are found behind the preprocessor, since macros make most of them.
        expanded = subprocess.run([self.compiler, *FLAGS, "-E", source], capture_output=True, text=True, check=True).stdout
        found = re.findall(r'extern "C"\s+void\s+(\w+)\(const\s+(\w+) p\)', expanded)
        with open(source, "a") as file:
            file.write("struct Entry { const char* unit; const char* name; void (*call)(void*); unsigned bytes; };\n")
            for kernel, parameters in found:
                file.write(f"static void call_{kernel}(void* p) {{ emulated_{name}::{kernel}(*(const emulated_{name}::{parameters}*)p); }}\n")
            entries = "".join(f'{{"{unit}", "{kernel}", call_{kernel}, sizeof(emulated_{name}::{parameters})}},\n' for kernel, parameters in found)
            file.write(f"extern const Entry emu_{name}[] = {{\n{entries}{{0, 0, 0, 0}}}};\n")
        self.compile(source, os.path.join(self.out, f"{name}.o"))
        write_down()
        return True


def main():
    out = os.path.abspath(sys.argv[1])
    builder = Builder(out)
    os.makedirs(os.path.join(out, "kernels"), exist_ok=True)
    # One at a time: several test programs want it.
    with open(os.path.join(out, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(builder, out)


def build(builder, out):
    units = [unit for unit in kernels_build.units(KERNELS) if not unit.startswith("probes/")]
    names = [unit.replace("/", "_") for unit in units]

    # 1. The kernels, which take minutes: apart from the driver, so that a change of that takes seconds
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(builder.unit, sorted(units, key=lambda unit: -kernels_build.weight(unit))))

    # 2. Objects that only name their unit: what the emulated driver loads
    for unit in units:
        code = gzip.compress(unit.encode(), mtime=0)
        head = f"{kernels_build.MAGIC}\nunit {unit}\narch {ARCHITECTURE}\nptx {len(code)}\ncode 0\n\n"
        kernels_build.write_whole(os.path.join(out, "kernels", kernels_build.object_name(unit, ARCHITECTURE)), head.encode() + code)

    # 3. The driver with a table of all units, and all together
    with open(os.path.join(HERE, "driver.cpp")) as file:
        driver = file.read()
    tables = "".join(f"extern const Entry emu_{name}[];\n" for name in names)
    tables += f"static const Entry* const tables[] = {{{', '.join(f'emu_{name}' for name in names)}}};\n"
    kept, write_down = builder.is_kept("driver", driver, tables)
    if any(made) or not kept:
        source = os.path.join(out, "driver.cpp")
        with open(source, "w") as file:
            file.write(driver.replace("// TABLES\n", tables))
        objects = [os.path.join(out, f"{name}.o") for name in [*names, "driver"]]
        builder.compile(source, objects[-1])
        subprocess.run([builder.compiler, "-shared", "-o", os.path.join(out, "libcuda.so"), *objects, "-lpthread"], check=True)
        write_down()


if __name__ == "__main__":
    main()
