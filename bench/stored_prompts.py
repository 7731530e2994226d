"""Prompts that a server keeps on disk, so that a restart need not compute them: how many bytes they are, servers with such a cache, what a restart restores, and how long the disk by
itself takes for as many bytes. Standard library only."""

import json
import mmap
import os
import random
import secrets
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from models import served
from peers import PLAIN, SLUICE, Died
from scratch import DIR, Failed, need_free, output
from servers import metric, server
from shapes import config, is_hybrid
from streaming import stream

THREADS = len(os.sched_getaffinity(0))
# Tokens of a block, and bytes that a read has in flight.
BLOCK, IN_FLIGHT, PAGE = 32, 48 << 20, 4096
# What the disk's own speed is measured on.
PROBE = 1 << 30


# --- bytes


def has_states(shape):
    return is_hybrid(config(shape))


def full_layers(shape):
    """Layers that see all tokens, and keep keys and values of them."""
    c = config(shape)
    return c["num_hidden_layers"] // c.get("full_attention_interval", 1)


def block_bytes(shape):
    """Keys and values of a block, in bf16."""
    c = config(shape)
    return BLOCK * full_layers(shape) * 2 * c["num_key_value_heads"] * c["head_dim"] * 2


def state_bytes(shape):
    """The recurrent states of all other layers, in f32."""
    if not has_states(shape):
        return 0
    c = config(shape)
    heads, keys, values = c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * keys + heads * values
    return (c["num_hidden_layers"] - full_layers(shape)) * 4 * (heads * keys * values + channels * (c["linear_conv_kernel_dim"] - 1))


def kept_bytes(shape, tokens):
    return -(-tokens // BLOCK) * block_bytes(shape) + state_bytes(shape)


# --- servers and folders


@contextmanager
def folder(shape, tokens):
    """An empty folder for caches of so many tokens; what lies in it goes in the end."""
    path = DIR / "prompt-cache"
    shutil.rmtree(path, ignore_errors=True)
    need_free(kept_bytes(shape, tokens) * 11 // 10 + (256 << 20), f"a prompt cache of {tokens} tokens")
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def kept(shape, path, tokens, *more, busy=None):
    """Our server with a cache in `path`, whose quota is no limit. It writes what it has when it is asked to stop. `busy` begins with it."""
    # A conversation takes half of a quota at most.
    quota = 3 * kept_bytes(shape, tokens) + (512 << 20)
    options = [f"--prompt-cache={path / 'cache'}", "--prompt-cache-bytes", quota, *more] if path else more
    model = served(shape, "q4")

    def command(port):
        if busy:
            busy.begin(port)
        return [SLUICE, "serve", model, "--port", port, "--parallel", 2, "--threads", THREADS, *PLAIN, *options]

    return server(command, f"prompt-cache-{shape}", patience=600)


def prompt(shape, seed, n):
    """So many ids of tokens, without the bytes and the control tokens at both ends."""
    rng = random.Random(str(seed))
    return [rng.randrange(300, config(shape)["vocab_size"] - 300) for _ in range(n)]


def ask(address, ids, tokens=8):
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    try:
        return stream(address, "/v1/completions", body)
    except Died as why:
        raise Failed(f"bench: sluice serve: {why}") from None


def warm(address, shape):
    """Weights into memory, by a prompt that is too short to be kept."""
    ask(address, prompt(shape, "warm", 64))


class Busy:
    """The same as `warm`, again and again from when a server listens: one that has nothing to do reads ahead what is to be measured."""

    def __init__(self, shape):
        self.ids, self.over, self.thread = prompt(shape, "warm", 64), threading.Event(), None

    def begin(self, port):
        self.thread = threading.Thread(target=self._ask, args=(f"http://127.0.0.1:{port}",), daemon=True)
        self.thread.start()

    def _ask(self, address):
        while not self.over.is_set():
            try:
                stream(address, "/v1/completions", {"prompt": self.ids, "max_tokens": 2, "temperature": 0, "ignore_eos": True})
            except Died:
                # It does not listen yet.
                time.sleep(0.003)

    def end(self):
        self.over.set()
        self.thread.join()


def until_written(address):
    """Bytes that were written, once they are no more for a while: what is written while idle takes nothing from others."""
    last, since = -1.0, time.monotonic()
    while time.monotonic() - since < 7:
        now = metric(address, "sluice:prompt_cache_written_bytes")
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.5)
    return last


# --- restarts


def reserved(ids):
    """Flags that have memory for a prompt found and cleared at the start, as other engines have all of theirs."""
    return "--kv", f"reserve={len(ids) + 512}"


def restored(shape, path, ids, drops, *more):
    """A start, and the answer to a prompt that an earlier one has computed. Its tokens must come from disk, all but the last: otherwise there is nothing to time. Once more where
    some were read ahead, between two of the prompts that should prevent it. The weights are in memory in any case."""
    for _ in range(5):
        if drops:
            drop(path)
        for file in served(shape, "q4").glob("*.safetensors"):
            read_in(file)
        busy = Busy(shape)
        with kept(shape, path, len(ids), *more, busy=busy) as address:
            busy.end()
            answer = ask(address, ids)
            from_disk = metric(address, "sluice:prompt_tokens_disk_total")
        if answer.cached == len(ids) - 1 and from_disk >= 0.95 * answer.cached:
            return answer
    raise Failed(f"bench: of {len(ids)} stored tokens {from_disk:.0f} came from disk, {answer.cached} from all caches")


# --- page cache, disk and memory by themselves


def drop(*paths):
    """Drops files from the page cache, and all else where this may."""
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                with open(file, "rb") as f:
                    os.fsync(f.fileno())
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    everything = Path("/proc/sys/vm/drop_caches")
    if os.access(everything, os.W_OK):
        everything.write_text("1")


def read_in(path):
    """Brings a file into the page cache."""
    with open(path, "rb", buffering=0) as f:
        buffer = bytearray(4 << 20)
        while f.readinto(buffer):
            pass


def probe():
    """A file of random bytes, on the disk of the caches."""
    path = DIR / "disk-probe"
    if not path.exists():
        need_free(PROBE, path.name)
        unfinished = path.with_name("disk-probe.part")
        with open(unfinished, "wb") as f:
            for _ in range(PROBE >> 22):
                f.write(secrets.token_bytes(4 << 20))
            f.flush()
            os.fsync(f.fileno())
        unfinished.rename(path)
    return path


def remove_probe():
    for left in ("disk-probe", "disk-probe.part"):
        (DIR / left).unlink(missing_ok=True)


def disk_seconds(shape, tokens):
    """How long the disk takes for a restore's bytes, read past the page cache by slots of the same sizes, as many in flight."""
    seconds = 0.0
    for part, bytes_ in ((block_bytes(shape), kept_bytes(shape, tokens) - state_bytes(shape)), (state_bytes(shape),) * 2):
        if part:
            slot = -(-part // PAGE) * PAGE + PAGE
            depth = max(2, min(IN_FLIGHT // slot, 64))
            said = output([SLUICE, "bench", "disk", probe(), "--request", slot, "--depth", depth, "--order", "sequential", "--seconds", 0.7, "--rounds", 1, "--json"])
            seconds += bytes_ / json.loads(said)["bytes_per_second"]
    return seconds


def copy_ms(n):
    """Milliseconds to copy so many bytes in memory."""
    if n == 0:
        return 0.0
    with mmap.mmap(-1, n) as source, mmap.mmap(-1, n) as target:
        source.write(bytes(n))
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            target[:] = source
            times.append(1e3 * (time.perf_counter() - begun))
    return median(times)
