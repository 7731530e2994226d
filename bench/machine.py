"""What a run was made on. Standard library only."""

import datetime
import os
import platform
import resource
import subprocess
import time
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


class Others:
    """How much of the processor everybody else used since this was made. More than a little, and the figures are not to be trusted: threads that wait for each other
    by spinning suffer most."""

    def __init__(self):
        self.start = self._now()

    def share(self):
        """Of all processors, 0 to 1."""
        (t, busy, own), (t0, busy0, own0) = self._now(), self.start
        return max(0.0, (busy - busy0 - (own - own0)) / ((t - t0) * os.cpu_count()))

    @staticmethod
    def _now():
        # user nice system idle iowait irq softirq steal: what was stolen by other guests counts as used by others.
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(u.ru_utime + u.ru_stime for u in used)


def commit():
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    # A copy of the tree may have no history, or an older one. Then this variable names the commit.
    if copied := os.environ.get("BENCH_COMMIT"):
        return copied
    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--", "crates", "Cargo.lock", "bench")
    return f"{name} with uncommitted changes" if changed else name


def disk():
    """File system and device of the scratch folder."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    under = [m for m in mounts if DIR == Path(m[1]) or Path(m[1]) in DIR.parents]
    device, _, kind = max(under, key=lambda m: len(m[1]))[:3]
    return f"{kind} on {os.path.basename(device)}"


def nodes():
    """Nodes of memory that have processors of which this process may use any."""
    own, found = os.sched_getaffinity(0), 0
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        # 0-3,8,10-11
        ranges = [part.split("-") for part in (folder / "cpulist").read_text().strip().split(",") if part]
        found += any(own & set(range(int(r[0]), int(r[-1]) + 1)) for r in ranges)
    return max(found, 1)


def gpu():
    """Name, memory and driver of the first GPU; None where there is none or no driver."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def _line(path, name):
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _cpu(name):
    return _line("/proc/cpuinfo", name) or "unknown"
