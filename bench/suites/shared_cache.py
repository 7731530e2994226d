"""A prompt cache that replicas share: the first token of a replica that never saw a prompt, beside what the store gives and beside computing it. The goals are those that the project set itself."""

import os
import shutil
import socket
import subprocess
import time
from statistics import median

from chart import Chart
from findings import Pick, bars, goals, having, said
from results import compare
from scratch import Failed, say
from servers import metric
from stored_prompts import ask, folder, kept, kept_bytes, prompt, reserved, warm
from suites.prompt_cache import NAMES, SHAPES

TITLE = "A prompt cache that replicas share"
SUITE = "shared-cache"
THREADS = len(os.sched_getaffinity(0))
LENGTHS, QUICK_LENGTHS = (4096, 16_384), (4096,)
#: The server, as `cargo install s3s-fs@0.14.1 --features binary` makes it.
PROGRAM = os.environ.get("SLUICE_S3_SERVER") or shutil.which("s3s-fs")
KEY, SECRET = "AKIDBENCH", "a-secret-of-the-bench"
# Objects at once, as the program asks for them.
CALLS = 16
# Parts of the store's bandwidth, and times of computing.
BANDWIDTH, COMPUTING = 0.8, 10.0


def title(n):
    return f"a cold replica, {n} tokens, {NAMES['dense']}"


def picks(_):
    return [Pick(f"{n:,} tokens", title(n), "TTFT", "computed") for n in LENGTHS]


def charts(rows):
    under = "Time to first token of computing a prompt over that of a replica with an empty folder that finds it in the store."
    return {"": Chart("First token of a cold replica, beside computing", bars(rows, picks(rows)), under=under)}


def found(rows):
    return [
        *said("A cold replica's first token comes {spread} times sooner than when it computes; goals met: {goals}.", having(rows, figure="TTFT", peer="computed")),
        *said("It reads at {spread} of what the store gives to a client that does nothing else; goals met: {goals}.", having(rows, figure="TTFT beyond a decode step")),
        f"All goals together: {goals(rows)} met.",
    ]


def absent():
    return None if PROGRAM else "there is no S3-compatible server: cargo install s3s-fs@0.14.1 --features binary"


def cases(quick):
    return [f"cold {n}" for n in (QUICK_LENGTHS if quick else LENGTHS)]


class Store:
    """A server with one bucket, in a folder."""

    def __init__(self, root):
        (root / "bucket").mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.root = root / "bucket"
        command = [PROGRAM, "--host", "127.0.0.1", "--port", str(self.port), "--access-key", KEY, "--secret-key", SECRET, root]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                time.sleep(0.01)
        os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{self.port}", AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_REGION="us-east-1")

    def objects(self):
        return [path for path in self.root.rglob("*.[0-9][0-9][0-9]") if path.is_file()]

    def seconds(self):
        """What a client takes that gets all objects, as many at once, and looks at none."""
        how = ["-sS", "--fail", "--no-progress-meter", "--parallel", "--parallel-max", str(CALLS), "-w", "%{size_download}\n"]
        signed = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", f"{KEY}:{SECRET}", "-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
        links, bytes_ = [], 0
        for path in self.objects():
            links += ["-o", "/dev/null", f"http://127.0.0.1:{self.port}/bucket/{path.relative_to(self.root)}"]
            bytes_ += path.stat().st_size
        started = time.perf_counter()
        ran = subprocess.run(["curl", *how, *signed, *links], capture_output=True, text=True)
        seconds = time.perf_counter() - started
        came = sum(map(int, ran.stdout.split()))
        if ran.returncode != 0 or came != bytes_:
            raise Failed(f"bench: curl got {came} of {bytes_} bytes: {ran.stderr[-200:]}")
        return seconds

    def end(self):
        self.process.kill()
        self.process.wait()


def cold(n, rounds):
    shape = SHAPES["dense"]
    ids, found, computed, alone = prompt(shape, n, n + 1), [], [], []
    with folder(shape, 3 * n) as path:
        store = Store(path / "store")
        flags = ["--prompt-cache-store", "s3://bucket/replicas"]
        try:
            (path / "first").mkdir()
            with kept(shape, path / "first", n, *flags) as address:
                warm(address, shape)
                computed.append(ask(address, ids).ttft)
                until_stored(address, n)
            bytes_ = sum(file.stat().st_size for file in store.objects())
            for number in range(rounds):
                own = path / f"cold-{number}"
                own.mkdir()
                alone.append(1e3 * store.seconds())
                with kept(shape, own, n, *flags, *reserved(ids)) as address:
                    warm(address, shape)
                    answer = ask(address, ids)
                    read = metric(address, "sluice:prompt_cache_store_read_bytes")
                    if answer.cached < n - 32 or read < 0.95 * kept_bytes(shape, n):
                        raise Failed(f"bench: of {n} tokens {answer.cached} were restored, {read / 1e6:.0f} MB from the store")
                found.append(answer)
                shutil.rmtree(own)
        finally:
            store.end()
    who = f"{bytes_ / 1e6:.0f} MB at the store's {bytes_ / median(alone) / 1e6:.2f} GB/s"
    return [
        compare(SUITE, title(n), "TTFT beyond a decode step", "ms", [a.ttft - a.step for a in found], alone, who, 1 / BANDWIDTH, False, THREADS),
        compare(SUITE, title(n), "TTFT", "ms", [a.ttft for a in found], computed * rounds, "computed", 1 / COMPUTING, False, THREADS),
    ]


def until_stored(address, n):
    """All whole blocks are in the store."""
    for _ in range(1200):
        if metric(address, "sluice:prompt_cache_store_stored_bytes") >= kept_bytes(SHAPES["dense"], n) and metric(address, "sluice:prompt_cache_store_queued") == 0:
            return
        time.sleep(0.1)
    raise Failed("bench: the prompt was not stored within two minutes")


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        say(name)
        rows += parts.measure(f"{name} {rounds}", lambda name=name: cold(int(name.split()[1]), rounds), notes)
    notes.append("the store: s3s-fs on the same machine and disk, in the page cache; its bandwidth is that of curl, sixteen objects at once")
    notes.append("a cold replica has an empty folder; its weights are in memory")
    return rows, notes
