"""Servers that are measured, ours and peers': started on a free port, waited for, and ended with all that they have started; and what they count of themselves. Standard library only."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import cgroup
from peers import Died, died
from scratch import DIR

# Seconds until a server is ready, and after SIGTERM.
READY, LEAVES = 300, 20
LIBC = ctypes.CDLL(None)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def server(command, name, group=None, patience=LEAVES):
    """A server that is ready, as its address; `command(port)` starts it. In the end it is asked to stop, and killed if it has not after `patience` seconds."""
    port = free_port()
    words = [str(c) for c in command(port)]
    path = DIR / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as log:
        try:
            process = subprocess.Popen(cgroup.inside(group, words) if group else words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=DIR, start_new_session=True, preexec_fn=die_with_us)
        except OSError as error:
            raise Died(f"cannot be started: {error.strerror}") from None
    try:
        address = f"http://127.0.0.1:{port}"
        wait(process, address, path)
        yield address
    finally:
        end(process, patience)


def die_with_us():
    """In a server before it begins: where this program is killed, the kernel kills the server."""
    PR_SET_PDEATHSIG = 1
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process, patience=LEAVES):
    """Asks a server to end, and kills it and all that it has started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def wait(process, address, log):
    until = time.monotonic() + READY
    while time.monotonic() < until:
        if process.poll() is not None:
            raise died(process.returncode, log.read_text(errors="replace"))
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise Died(f"not ready in {READY} s")


def metric(address, name):
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.M)
    return float(found[1])
