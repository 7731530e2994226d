#!/usr/bin/env python3
"""Makes the GPU's kernels from the sources in this folder: `scripts/kernels` calls it. Needs no GPU and no CUDA toolkit, only NVRTC's wheel, which it installs into
the output folder. `cargo build` packs what is there and fresh into the program (`build.rs`).

Every .cu file is a unit. A unit and an architecture become one object, `UNIT.ARCH.kernels`: a head of lines that says what it was made from, an empty line, then PTX
and, for some architectures, machine code, compressed. An object whose sources have not changed is never made again.
"""

import argparse
import ctypes
import glob
import gzip
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
# Version 12.4, because drivers refuse PTX of a compiler that is newer than they are: they take this one's from driver 550 on. Arithmetic is as docs/numerics.md has
# it: nothing is fused, flushed or approximated that is not written so. Machine code saves the first start half a minute of the driver's compiling.
SETTINGS = "nvrtc.json"
LIMITS = "shared_memory.txt"
MAGIC = "sluice-kernels 1"
SUFFIX = ".kernels"
# The driver keeps so much static shared memory for itself in each block.
DRIVERS_SHARED = 1024


class Failure(Exception):
    """What stops the build, as one sentence for whoever called it."""


def read(name, folder=HERE):
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


# ---- what there is to make


def units(folder=HERE):
    """Names of all units, as `gemv/fused`."""
    found = glob.glob(os.path.join(folder, "*", "*.cu"))
    return sorted(os.path.relpath(path, folder)[: -len(".cu")].replace(os.sep, "/") for path in found)


def sources(unit, folder=HERE):
    """Everything that a unit is made from, by name: its file, all that it includes, and the settings."""
    found, todo = {}, [f"{unit}.cu"]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            found[name] = read(name, folder)
        except FileNotFoundError:
            raise Failure(f"{unit}.cu includes {name}, which is not there") from None
        todo += re.findall(r'^#include "([^"]+)"', found[name].decode(), re.MULTILINE)
    found[SETTINGS] = read(SETTINGS, folder)
    return found


def object_name(unit, architecture):
    return f"{unit.replace('/', '-')}.{architecture}{SUFFIX}"


def head(unit, architecture, made_from, more=()):
    lines = [MAGIC, f"unit {unit}", f"arch {architecture}", *(f"option {option}" for option in more)]
    lines += [f"source {sha256(content)} {name}" for name, content in sorted(made_from.items())]
    return "".join(f"{line}\n" for line in lines)


def is_fresh(path, begins):
    """Whether an object was made from the sources that are here now."""
    try:
        with open(path, "rb") as file:
            return file.read(len(begins)) == begins.encode() and file.read(4) == b"ptx "
    except FileNotFoundError:
        return False


# ---- the compiler


def nvrtc_version(unit):
    """Units with instructions of one generation have a compiler of their own: 12.4 puts wgmmas one after the other where 12.9 does not."""
    settings = json.loads(read(SETTINGS))
    return settings["specific"].get(unit, settings["version"])


def nvrtc_folder(out, version):
    return os.path.join(out, f"nvrtc-{version}")


def install_nvrtc(out, version):
    """The folder of NVRTC's wheel, which is fetched where it is missing."""
    settings, folder = json.loads(read(SETTINGS)), nvrtc_folder(out, version)
    if glob.glob(os.path.join(folder, "nvidia", "cuda_nvrtc", "lib", "libnvrtc.so*")):
        return folder
    wanted, partial = f"{settings['package']}=={version}", f"{folder}.{os.getpid()}.partial"
    print(f"kernels: installing {wanted}", flush=True)
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        # Debian's Python has none of its own; a virtual environment brings one.
        venv = os.path.join(out, "venv")
        made = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
        if made.returncode:
            raise Failure(f"pip is needed to install {wanted}: on Debian and Ubuntu, apt install python3-venv")
        pip = [os.path.join(venv, "bin", "python"), "-m", "pip"]
    try:
        call = [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", partial, wanted]
        done = subprocess.run(call, capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"pip cannot install {wanted}: {(done.stderr.strip().splitlines() or ['it does not say why'])[-1]}")
        try:
            os.rename(partial, folder)
        except OSError:
            # Another build was quicker.
            if not os.path.isdir(folder):
                raise
    finally:
        subprocess.run(["rm", "-rf", partial])
    return folder


def compiled(nvrtc, unit, architecture, made_from, more=()):
    """PTX of a unit, and machine code where there shall be some."""
    settings = json.loads(made_from[SETTINGS])
    kind = "sm" if architecture in settings["machine_code"] else "compute"
    main = f"{unit}.cu"
    headers = [name for name in made_from if name.endswith(".cuh")]
    texts = (ctypes.c_char_p * len(headers))(*(made_from[name] for name in headers))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    # Instructions that only the machine code of 9.0 itself has (wgmma)
    specific = "a" if kind == "sm" and unit in settings["specific"] else ""
    options = [f"--gpu-architecture={kind}_{architecture}{specific}", *settings["options"], *more]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def fetched(what):
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw[: size.value]

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), made_from[main], main.encode(), len(headers), texts, names)
    error = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    log = fetched("ProgramLog").rstrip(b"\0").decode().strip()
    if log:
        print(log, file=sys.stderr)
    if error:
        raise Failure(f"{main} does not compile for architecture {architecture}")
    return fetched("PTX").rstrip(b"\0"), fetched("CUBIN") if kind == "sm" else b""


# ---- what must hold of the result


def check_ptx(unit, ptx):
    """Nothing approximate, nothing that may be fused, and nothing flushed but the products of bf16 pairs. Atomics have no order: they count, or set bits."""
    for line in map(str.strip, ptx.decode().splitlines()):
        operation = line.split(None, 1)[0] if line else ""
        approximate = "approx" in operation or operation.startswith("div.full")
        flushes = ".ftz" in operation and operation != "fma.rn.ftz.f32"
        counts = ".inc.u32" in operation or operation == "atom.shared.add.u32" or operation in ("red.shared.or.b32", "red.shared.add.u32")
        unordered = operation.startswith(("red.", "atom")) and not counts
        unrounded = operation in ("add.f32", "sub.f32", "mul.f32", "fma.f32", "mad.f32")
        if approximate or flushes or unordered or unrounded:
            raise Failure(f"{unit}.cu: `{line}` is not exact arithmetic in a fixed order")


def shared_limits(text):
    """(beginning of a name, bytes) of the kernels whose static shared memory is limited."""
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    most = next(int(line[1]) for line in lines if line[0] == "most")
    return [(line[0], int(line[1]) if len(line) > 1 else most) for line in lines if line[0] != "most"]


def static_shared(code):
    """Bytes of static shared memory of each kernel in machine code, an ELF file of 64 bits."""
    (table,), (size, count, names) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    begin = headers[names][4]
    found = {}
    for name, _, _, _, _, bytes_ in headers:
        name = code[begin + name : code.index(b"\0", begin + name)].decode()
        if name.startswith(".nv.shared."):
            found[name[len(".nv.shared.") :]] = max(0, bytes_ - DRIVERS_SHARED)
    return found


def check_shared(unit, code, limits):
    for kernel, bytes_ in static_shared(code).items():
        for begin, limit in limits:
            if kernel.startswith(begin) and bytes_ > limit:
                raise Failure(f"{unit}.cu: {kernel} has {bytes_} bytes of static shared memory, and {LIMITS} allows {limit}")


# ---- making


def make(unit, architecture, out, more=()):
    """Makes one object, whole or not at all."""
    made_from = sources(unit)
    nvrtc = ctypes.CDLL(glob.glob(os.path.join(nvrtc_folder(os.environ["SLUICE_NVRTC_IN"], nvrtc_version(unit)), "nvidia", "cuda_nvrtc", "lib", "libnvrtc.so*"))[0])
    ptx, code = compiled(nvrtc, unit, architecture, made_from, more)
    if more:
        # The host looks for them by name.
        ptx, code = ptx.replace(b"\n.global .align 8 .b8 stamps", b"\n.visible .global .align 8 .b8 stamps"), b""
    elif not unit.startswith("probes/"):
        check_ptx(unit, ptx)
        if code:
            check_shared(unit, code, shared_limits(read(LIMITS).decode()))
    # Without a time inside: the same bytes each time.
    ptx, code = gzip.compress(ptx, 9, mtime=0), gzip.compress(code, 9, mtime=0) if code else b""
    begins = head(unit, architecture, made_from, more) + f"ptx {len(ptx)}\ncode {len(code)}\n\n"
    write_whole(os.path.join(out, object_name(unit, architecture)), begins.encode() + ptx + code)


def write_whole(path, content):
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def make_all(wanted, out, jobs, more=()):
    """Makes objects, as many at a time as there are jobs, each in a process of its own: a compiler in a thread cannot be interrupted."""
    wanted, running, done, total = list(wanted), {}, 0, len(wanted)
    call = [sys.executable, "-B", os.path.abspath(__file__), "--out", out, *(f"--option={option}" for option in more)]
    failed = []
    try:
        while wanted or running:
            while wanted and len(running) < jobs and not failed:
                unit, architecture = wanted.pop(0)
                child = subprocess.Popen([*call, "--one", unit, "--arch", str(architecture)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                running[child] = unit, architecture, time.monotonic()
            if failed and not running:
                break
            for child in [child for child in running if child.poll() is not None]:
                unit, architecture, begun = running.pop(child)
                done += 1
                said = child.stdout.read().strip()
                if child.returncode:
                    failed.append(said or f"{unit} for {architecture}: the compiler was killed")
                else:
                    print(f"kernels: [{done}/{total}] {unit} for {architecture}: {time.monotonic() - begun:.1f} s", flush=True)
            time.sleep(0.02)
    finally:
        for child in running:
            child.kill()
        for child in running:
            child.wait()
            sweep(out, child.pid)
    if failed:
        raise Failure("\n".join(failed))


def sweep(out, pid):
    """Removes what a build that was killed has left."""
    for path in glob.glob(os.path.join(out, f"*.{pid}.partial")):
        os.unlink(path)


def capabilities():
    """Compute capabilities of the GPUs that are here, as 90 for 9.0; None where there is none."""
    try:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True)
    except OSError:
        return None
    found = [int(line.replace(".", "")) for line in asked.stdout.split() if re.fullmatch(r"\d+\.\d", line)]
    return found if asked.returncode == 0 and found else None


def for_capabilities(found, known):
    """The newest architecture that each device takes."""
    chosen = sorted({max((a for a in known if a <= capability), default=0) for capability in found} - {0})
    if not chosen:
        raise Failure(f"no GPU here is new enough: compute capability {known[0] / 10} is needed")
    return chosen


def main():
    parser = argparse.ArgumentParser(prog="scripts/kernels", description="Makes the GPU's kernels, which `cargo build` then packs into the program.")
    known = json.loads(read(SETTINGS))["architectures"]
    parser.add_argument("--arch", action="append", type=int, choices=known, help="compute capability times ten, may be given several times (default: those of the GPUs here, else all)")
    parser.add_argument("--all", action="store_true", help="for all architectures")
    parser.add_argument("--if-gpu", action="store_true", help="do nothing where there is no GPU")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time (default: one for each core)")
    parser.add_argument("--unit", action="append", help="only this unit, such as gemv/fused; may be given several times")
    parser.add_argument("--out", help="output folder (default: target/kernels)")
    parser.add_argument("--option", action="append", default=[], help="one more option of the compiler, as --option=-DSTAMPS, into another --out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    default_out = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "kernels")
    out = os.path.abspath(asked.out or default_out)
    if asked.option and out == os.path.abspath(default_out):
        raise Failure("kernels with more options need a folder of their own: give --out")
    if asked.one:
        return make(asked.one, asked.arch[0], out, asked.option)

    # 1. What is wanted
    found = capabilities()
    if asked.if_gpu and not found and not os.path.exists("/dev/nvidia0"):
        return None
    architectures = sorted(set(asked.arch or ())) or (known if asked.all or not found else for_capabilities(found, known))
    least = json.loads(read(SETTINGS))["least"]
    all_units = asked.unit or units()
    unknown = sorted(set(all_units) - set(units()))
    if unknown:
        raise Failure(f"there is no unit {unknown[0]}: there are {', '.join(units())}")
    wanted = [(unit, a) for unit in all_units for a in architectures if a >= least.get(unit, 0)]
    stale = [(u, a) for u, a in wanted if not is_fresh(os.path.join(out, object_name(u, a)), head(u, a, sources(u), asked.option))]

    # 2. What is there of units that are gone goes
    os.makedirs(out, exist_ok=True)
    expected = {object_name(u, a) for u in units() for a in known}
    for path in glob.glob(os.path.join(out, f"*{SUFFIX}")):
        if os.path.basename(path) not in expected:
            os.unlink(path)
    for path in glob.glob(os.path.join(out, "*.partial")):
        pid = path.split(".")[-2]
        if os.path.isfile(path) and not os.path.exists(f"/proc/{pid}"):
            os.unlink(path)
    listed = ", ".join(map(str, architectures))
    if not stale:
        print(f"kernels: all {len(wanted)} for architecture {listed} are up to date")
        return None

    # 3. The longest first, as far as that is known, so that all cores end together
    os.environ["SLUICE_NVRTC_IN"] = os.path.abspath(default_out)
    os.makedirs(default_out, exist_ok=True)
    for version in sorted({nvrtc_version(unit) for unit, _ in stale}):
        install_nvrtc(os.path.abspath(default_out), version)
    stale.sort(key=lambda of: (-of[1], -weight(of[0])))
    begun = time.monotonic()
    print(f"kernels: making {len(stale)} of {len(wanted)} objects for architecture {listed}", flush=True)
    make_all(stale, out, max(1, asked.jobs), asked.option)
    print(f"kernels: done in {time.monotonic() - begun:.0f} s; `cargo build` packs them into the program")
    return None


def weight(unit):
    """About how long a unit takes: instances times what each is made of."""
    made_from = sources(unit)
    kernels = made_from[f"{unit}.cu"].count(b"__global__")
    formats = 6 if b"_FORMATS(" in made_from[f"{unit}.cu"] else 1
    return kernels * formats * (3 if unit.startswith("gemm/mma") else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("kernels: interrupted; what is done is kept")
    except (Failure, OSError) as why:
        sys.exit(f"kernels: {why}")
