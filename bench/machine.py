"""What a run was made on. Standard library only."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

from scratch import DIR, ROOT


def describe():
    """Lines of (name, value)."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "processor": f"{_cpu('model name')} (family {_cpu('cpu family')}, model {_cpu('model')}), {os.cpu_count()} threads, {_cpu('cache size')} cache",
        "instruction sets": ", ".join(f for f in _cpu("flags").split() if f.startswith(("avx", "amx", "f16c", "fma"))),
        "memory": f"{int(_line('/proc/meminfo', 'MemTotal').split()[0]) / 1e6:.1f} GB",
        "kernel": f"{platform.system()} {platform.release()}",
        "disk": disk(),
        "load before": " ".join(f"{x:.2f}" for x in os.getloadavg()),
    }


def commit():
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--", "crates", "Cargo.lock", "bench")
    return f"{name} with uncommitted changes" if changed else name


def disk():
    """File system and device of the scratch folder."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    under = [m for m in mounts if DIR == Path(m[1]) or Path(m[1]) in DIR.parents]
    device, _, kind = max(under, key=lambda m: len(m[1]))[:3]
    return f"{kind} on {os.path.basename(device)}"


def _line(path, name):
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _cpu(name):
    return _line("/proc/cpuinfo", name) or "unknown"
