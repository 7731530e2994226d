"""The scratch folder that `BENCH_DIR` names: peers and models live there, and later runs use them again. Standard library only."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIR = Path(os.environ.get("BENCH_DIR") or Path.home() / ".cache" / "sluice-bench").absolute()


class Failed(SystemExit):
    """Ends the run with a message, unless a caller that can do without catches it."""


def say(text):
    """A line about what is going on, away from the results."""
    print(text, file=sys.stderr, flush=True)


def free():
    """Bytes that may still be written here. A twentieth of the bytes that we may use stays free; a file system may reserve most of its size, so that does not count."""
    DIR.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(DIR)
    return disk.free - (disk.used + disk.free) // 20


def need_free(size, what):
    """Ends the run if the disk has not `size` bytes to spare."""
    if free() < size:
        raise Failed(f"bench: {what} needs {size / 1e9:.1f} GB, {DIR} has {free() / 1e9:.1f} GB to spare")


def run(command, log, **more):
    """Runs a command whose output nobody reads unless it fails."""
    path = DIR / "logs" / log
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "w") as f:
            code = subprocess.run([str(c) for c in command], stdout=f, stderr=subprocess.STDOUT, **more).returncode
    except OSError as error:
        raise Failed(f"bench: {error}") from None
    if code != 0:
        tail = "\n".join(path.read_text(errors="replace").splitlines()[-15:])
        raise Failed(f"bench: {' '.join(map(str, command))} failed, see {path}:\n{tail}")


def output(command, **environment):
    """What a command prints; ends the run if it fails."""
    command = [str(c) for c in command]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode != 0:
        raise Failed(f"bench: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def busy(processes):
    """Loops that never wait, each a process."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
