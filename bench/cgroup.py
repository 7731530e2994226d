"""Programs under a limit of memory: a control group (version 1's memory controller), to which page cache is charged as well. Needs root. Standard library only."""

import os
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/memory")


def why_not():
    """Why no control group can be made, or None."""
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        return f"no memory controller of control groups (version 1) at {CONTROLLER}"
    return None if os.access(CONTROLLER, os.W_OK) and os.geteuid() == 0 else "a memory limit by a control group needs root"


@dataclass
class Ran:
    """What a program under a limit did."""

    code: int
    seconds: float
    out: str
    errors: str
    # Bytes: the group's own peak, page cache included, and the peaks of what its process could not have given back.
    peak: int = 0
    anonymous: int = 0
    # Bytes of files that are mapped and resident.
    mapped: int = 0
    # Locked in memory, by the process or for the kernel (registered with io_uring).
    pinned: int = 0
    killed: bool = False
    timed_out: bool = False


def run(command, limit=None, timeout=600):
    """Runs a command in a new group of `limit` bytes (None: no limit, but the same looks at its memory)."""
    with made(limit) as group:
        return _run(command, group, timeout)


@contextmanager
def made(limit=None):
    """A new group, for as long as its programs run."""
    group = CONTROLLER / f"sluice-bench-{os.getpid()}"
    group.mkdir(exist_ok=True)
    try:
        (group / "memory.limit_in_bytes").write_text("-1" if limit is None else str(int(limit)))
        (group / "memory.force_empty").write_text("0")
        (group / "memory.max_usage_in_bytes").write_text("0")
        yield group
    finally:
        _remove(group)


def inside(group, command):
    """A command that runs in a group. The shell enters it before it becomes the program, so nothing of it is charged elsewhere."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *map(str, command)]


def _run(command, group, timeout):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        begun = time.monotonic()
        process = subprocess.Popen(inside(group, command), stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        ran = Ran(0, 0.0, "", "")
        while process.poll() is None:
            _look(process.pid, ran)
            if time.monotonic() - begun > timeout:
                ran.timed_out = True
                process.kill()
            time.sleep(0.02)
        ran.code, ran.seconds = process.returncode, time.monotonic() - begun
        ran.peak = int((group / "memory.max_usage_in_bytes").read_text())
        ran.killed = "oom_kill 0" not in (group / "memory.oom_control").read_text()
        for file, name in ((out, "out"), (errors, "errors")):
            file.seek(0)
            setattr(ran, name, file.read().decode(errors="replace"))
        return ran


def _look(pid, ran):
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    size = lambda *names: sum(int(lines.get(name, "0").split()[0]) * 1024 for name in names)  # noqa: E731
    ran.anonymous = max(ran.anonymous, size("RssAnon"))
    ran.mapped = max(ran.mapped, size("RssFile"))
    ran.pinned = max(ran.pinned, size("VmLck", "VmPin"))


def _remove(group):
    for _ in range(100):
        try:
            (group / "memory.force_empty").write_text("0")
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            # A process that has just ended is still counted.
            time.sleep(0.05)
