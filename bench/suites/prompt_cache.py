"""The prompt cache on disk: what a restart costs, beside the disk's own speed, computing anew, and what llama.cpp and mlx-lm save and restore; what saving costs those who wait; and
the campaigns that show that it is never wrong. Random-weight models of real dimensions per layer, each start a new process. The goals are those that the project set itself."""

import os
import re
import secrets
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from statistics import median

import turns
from chart import Chart
from findings import Pick, bars, goals, having, said
from models import served
from peers import LLAMA, PYTHON, Peer, died
from results import compare, lines
from scratch import DIR, ROOT, Failed, say
from servers import server
from shapes import config
from stored_prompts import THREADS, ask, copy_ms, disk_seconds, drop, folder, has_states, kept, kept_bytes, prompt, read_in, remove_probe, reserved, restored, state_bytes, until_written, warm
from streaming import post, stream
from suites.serving import met, own

TITLE = "A prompt cache that survives restarts"
SUITE = "prompt-cache"
SHAPES = {"dense": "dense", "moe": "moe", "hybrid": "qwen3.5-35b-a3b@4"}
NAMES = {"dense": "Qwen3-0.6B", "moe": "6 layers of 30B-A3B", "hybrid": "4 layers of Qwen3.5-35B-A3B"}
LENGTHS, QUICK_LENGTHS = (1024, 4096, 16_384, 32_768, 98_304), (1024, 4096)
# What is saved beside peers.
SAVED, QUICK_SAVED = 4096, 1024
# A prompt that would take longer to compute once is left out; how that grows with the length beyond what is linear.
LIMIT, GROWTH = 300, 1.6
# Seconds that a new server may take to read ahead what was used last.
READ_AHEAD = 4
# From memory only a recurrent state is copied.
MEMORY_LIMIT = 5.0
# Published on another machine (mlx-lm, M4 Max): tokens, milliseconds to the first token cold, and to map the state back.
PUBLISHED = [(4096, 2905, 2.0), (16_384, 12_307, 5.9), (32_768, 28_788, 15.9), (98_304, 141_142, 30.8)]

CASES = [f"{case} {shape}" for case in ("restore", "peers", "shared", "saving", "conversation") for shape in SHAPES if (case, shape) not in [("saving", "hybrid"), ("conversation", "moe")]]
CASES += ["encrypted dense", "campaigns"]
QUICK = ["restore dense", "shared dense", "conversation dense", "campaigns"]


def title(n, shape):
    return f"restore of {n} tokens, {NAMES[shape]}"


def saved(n, shape):
    return f"saved and restored, {n} tokens, {NAMES[shape]}"


PICKS = [Pick(f"{n:,} tokens, {NAMES[s]}", title(n, s), "TTFT", "computed") for s in SHAPES for n in LENGTHS]
# Compared with what llama-server saves of a slot.
PEERS = [Pick(f"{SAVED:,} tokens, {NAMES[s]}", saved(SAVED, s), "first token, cold", "llama-server", front=f"First token after a restart, {s}, {SAVED:,} tokens") for s in SHAPES]


def picks(_):
    """Rows that charts show."""
    return [*PICKS, *PEERS]


def charts(rows):
    under = "Time to first token of computing the prompt over that of restoring it after a restart, from a disk whose page cache is empty."
    drawn = {"": Chart("First token after a restart, beside computing", bars(rows, PICKS), under=under)}
    if beside := bars(rows, PEERS):
        drawn["peers"] = Chart("First token after a restart, beside llama-server's saved slots", beside, under="Its time over ours; weights in memory, saved state on disk only.")
    return drawn


def found(rows):
    """What the figures say, a line each."""
    turned = [r for r in rows if r.figure.startswith("turns that compute more")]
    never = [r for r in rows if r.figure.startswith("wrong, lost")]
    saving = having(rows, peer="no prompt cache")
    return [
        *said("After a restart, time to first token is {spread} times lower than when the prompt is computed, in {cases}.", having(rows, "restore", "TTFT", "computed")),
        *said("Its data arrives at {spread} of the disk's own speed; goals met: {goals}.", [r for r in having(rows, "restore", "TTFT beyond") if "memory" not in r.figure]),
        *said("If its memory must be found and cleared meanwhile, at {spread} of it.", having(rows, "restore", "TTFT beyond a decode step, its memory")),
        *said("From memory it takes {percent} of five milliseconds and a copy of the state; goals met: {goals}.", having(rows, "restore", "TTFT beyond a decode step, from memory")),
        *said("Against llama-server's saved slots, time to first token is {spread} times lower; goals met: {goals}.", having(rows, "saved and", "first token", "llama-server")),
        *said("Against mlx-lm's saved caches, {spread} times; goals met: {goals}.", having(rows, "saved and", "first token", "mlx-lm")),
        *said("Encrypted, a restore reads at {percent} of the speed; goals met: {goals}.", having(rows, figure="bytes beyond")),
        *said("Of the prefix tokens shared with a stored prompt, {percent} were found; goals met: {goals}.", having(rows, figure="found after a restart")),
        *said("While prompts are saved, throughput and time to first token are {spread} times as good as without saving; goals met: {goals}.", saving),
        *([f"Conversations, restarted after each turn, in which some turn recomputes more than the last: {sum(r.ours > 0 for r in turned)} of {len(turned)}."] if turned else []),
        *([f"Campaigns of kills, power losses and corruptions after which something was wrong, lost or could not be opened: {sum(r.ours > 0 for r in never)} of {len(never)}."] if never else []),
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    return CASES if not quick else QUICK


def run(names, quick, rounds, parts):
    rows, notes = [], []
    if any(name.startswith("peers") for name in names):
        LLAMA.serves()
    try:
        for name in names:
            say(name)
            what, _, shape = name.partition(" ")
            measure = {"restore": restore, "peers": beside_peers, "shared": shared, "saving": saving, "conversation": conversation, "encrypted": encrypted, "campaigns": campaigns}[what]
            rows += parts.measure(f"{name} {rounds}", lambda: measure(shape, rounds, quick, notes), notes)
    finally:
        remove_probe()
    notes.append("restored: the server was stopped and started between, and what it reads was dropped from the page cache, which it reads past; small prompts before bring its weights into memory, and keep it from reading ahead")
    notes.append("memory for the prompt is found at the start (`--kv reserve=TOKENS`) and \"meanwhile\" without: the system clears each page that it gives to a process")
    notes.append("\"read ahead\": the server was new and idle for a few seconds; it then has in memory what was used last")
    notes.append("prompts are random token ids: nothing is tokenised, and nothing is shared by chance; a decode step is the usual gap between the tokens of the same answer")
    notes.append("the disk: `sluice bench disk`, direct reads of a slot's size, as many in flight, from a file of the same disk, measured before each restore")
    notes.append("lengths are whole blocks and one token, which is computed")
    notes.append("the published figures (mlx-lm, M4 Max) are the time to map a state back, not to produce a token")
    return rows, notes


def sections(rows):
    """The published table with ours beside it."""
    found = {(row.case, row.figure): row for row in rows}
    body = []
    for shape, name in NAMES.items():
        for n in LENGTHS:
            row = found.get((title(n, shape), "TTFT"))
            if row is not None:
                cold, warm = next(((f"{c:.0f}", f"{w:.1f}") for tokens, c, w in PUBLISHED if tokens == n), ("-", "-"))
                speedup = f"{float(cold) / float(warm):.0f}" if cold != "-" else "-"
                body.append([name, str(n), f"{row.peer:.0f}", f"{row.ours:.1f}", f"{1 / row.ratio:.0f}", cold, warm, speedup])
    head = ["model", "tokens", "computed, ms", "restored, ms", "times", "mlx-lm computed, ms", "mlx-lm mapped back, ms", "times"]
    return [("Beside the published table", lines(head, body))]


# --- restoring


def read_ahead(shape, path, ids):
    """Milliseconds to the first token of a server that was new and had nothing to do for as long as reading takes: it has read by itself what was used last."""
    with kept(shape, path, len(ids), *reserved(ids)) as address:
        warm(address, shape)
        time.sleep(READ_AHEAD)
        answer = ask(address, ids)
        if answer.cached != len(ids) - 1:
            raise Failed(f"bench: {answer.cached} of {len(ids) - 1} stored tokens were read ahead")
        return answer.ttft


def restore(name, rounds, quick, notes):
    shape, rows, took = SHAPES[name], [], None
    for n in QUICK_LENGTHS if quick else LENGTHS:
        expected = took and took[1] * (n / took[0]) ** GROWTH
        if n + 64 > config(shape)["max_position_embeddings"]:
            notes.append(f"left out: {title(n, name)}, longer than the model's context")
            continue
        if expected and expected > (60 if quick else LIMIT):
            notes.append(f"left out: {title(n, name)}, which would take about {expected / 60:.0f} minutes to compute once ({took[0] / took[1]:.0f} tokens/s at {took[0]})")
            continue
        try:
            found, cold = restore_of(name, n, rounds)
        except Failed as why:
            if "GB free" not in str(why):
                raise
            notes.append(f"left out: {title(n, name)}: {str(why).removeprefix('bench: ')}")
            continue
        took = n, cold / 1e3
        rows += found
    return rows


def restore_of(name, n, rounds):
    """Rows of one length, and the milliseconds that the prompt took to compute."""
    # One more than whole blocks: one is always computed.
    shape, ids = SHAPES[name], prompt(SHAPES[name], n, n + 1)
    case, found, growing, at_disk, bytes_ = title(n, name), [], [], [], kept_bytes(shape, n)
    say(case)
    with folder(shape, n) as path:
        with kept(shape, path, n) as address:
            warm(address, shape)
            cold = ask(address, ids)
            # What it costs those who ask meanwhile is another case.
            until_written(address)
            again = [ask(address, ids) for _ in range(rounds)]
        for _ in range(rounds):
            at_disk.append(1e3 * disk_seconds(shape, n))
            found.append(restored(shape, path, ids, True, *reserved(ids)))
            growing.append(restored(shape, path, ids, True))
    beyond = [a.ttft - a.step for a in found]
    in_memory = [a.ttft - a.step for a in again]
    limit = [MEMORY_LIMIT + copy_ms(state_bytes(shape))] * rounds
    who = f"{bytes_ / 1e6:.0f} MB at the disk's {bytes_ / median(at_disk) / 1e6:.2f} GB/s"
    missed = sum(a.cached < n for a in again)
    rows = [
        compare(SUITE, case, "TTFT beyond a decode step", "ms", beyond, at_disk, who, 1 / 0.9, False, THREADS),
        compare(SUITE, case, "TTFT beyond a decode step, its memory found meanwhile", "ms", [a.ttft - a.step for a in growing], at_disk, who, None, False, THREADS),
        compare(SUITE, case, "TTFT", "ms", [a.ttft for a in found], [cold.ttft] * rounds, "computed", None, False, THREADS),
        compare(SUITE, case, "TTFT beyond a decode step, from memory", "ms", in_memory, limit, "5 ms and a state's copy", 1.0, False, THREADS),
    ]
    if missed:
        rows.append(met(compare(SUITE, case, "misses in memory", "times", [missed], None, "", 0, False, THREADS), False))
    return rows, cold.ttft


# --- peers


def beside_peers(name, rounds, quick, notes):
    """From what lies on disk to the first token, server started and weights in memory."""
    shape, n = SHAPES[name], QUICK_SAVED if quick else SAVED
    ids, rows = prompt(shape, n, n + 1), []
    case = saved(n, name)
    found, ahead = {"cold": [], "warm": []}, []
    recomputed = []
    with folder(shape, 6 * n) as path:
        with kept(shape, path, n) as address:
            ask(address, ids)
        llama = LlamaSlots(shape, path, ids)
        mlx = {dtype: Mlx(shape, path, n, dtype) for dtype in ("float32", "bfloat16")}
        for _ in range(rounds):
            for state, ours in found.items():
                answer = restored(shape, path, ids, state == "cold", *reserved(ids))
                ours.append(answer.ttft)
                recomputed.append(len(ids) - answer.cached)
                llama.restore(state)
                for m in mlx.values():
                    m.restore(state)
            ahead.append(read_ahead(shape, path, ids))
    for state, ours in found.items():
        peer = llama.by[state]
        rows.append(compare(SUITE, case, f"first token, {state}", "ms", ours, peer.all, f"llama-server {LLAMA.name('Q4_0').partition(' ')[2]}", 1 / 1.5, False, THREADS, peer.died))
        # The better of two types of its own.
        of = lambda d: mlx[d].by[state]  # noqa: B023, E731
        best = min(mlx, key=lambda d: median(of(d).all) if of(d).all else float("inf"))
        if state == "warm":
            rows.append(compare(SUITE, case, "first token, read ahead", "ms", ahead, peer.all, f"llama-server {LLAMA.name('Q4_0').partition(' ')[2]}, warm", 1 / 1.5, False, THREADS, peer.died))
        rows.append(compare(SUITE, case, f"first token, {state}", "ms", ours, of(best).all, f"mlx-lm, CPU, {best}", 1 / 1.5, False, THREADS, of(best).died))
    if llama.computed:
        row = compare(SUITE, case, "tokens computed again", "tokens", [recomputed[0]], [llama.computed[0]], "llama-server", None, False, THREADS)
        rows.append(row)
        if has_states(shape):
            notes.append(f"{NAMES[name]}: llama-server's slot, restored, computes {llama.computed[0]} of {n} tokens again for the same prompt, {llama.goes_on} for one that goes on from its answer")
    notes.append("llama-server: /slots/0?action=restore and the prompt, one slot; the answer's one token is behind what was saved")
    notes.append("mlx-lm: load_prompt_cache and one token; its caches are filled at random, since computing them takes minutes there")
    return rows


class LlamaSlots:
    """llama-server's slots: saved once, restored by servers that are new."""

    def __init__(self, shape, path, ids):
        self.shape, self.path, self.ids = shape, path / "slots", ids
        self.path.mkdir()
        self.by = {"cold": Peer(), "warm": Peer()}
        # Of each restore, the tokens that it computed; of a prompt that goes on from the answer.
        self.computed, self.goes_on = [], None
        self.saved = Peer()
        self.saved.measure(self._save)
        for peer in self.by.values():
            peer.died = self.saved.died

    @contextmanager
    def _server(self):
        """Weights in memory."""
        file = served(self.shape, "Q4_0")
        options = ["-m", file, "-t", THREADS, "-np", 1, "-c", len(self.ids) + 256, "-cram", 0, "-fit", "off", "--host", "127.0.0.1", "--slot-save-path", self.path]
        with ExitStack() as stack:
            address = LLAMA.attempt(lambda bench: stack.enter_context(server(lambda port: [bench.with_name("llama-server"), *options, "--port", port], f"llama-slots-{self.shape}")))
            self._ask(address, prompt(self.shape, "warm", 64))
            yield address

    def _ask(self, address, ids, tokens=1):
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "id_slot": 0, "cache_prompt": True, "return_tokens": True}
        return stream(address, "/completion", body)

    def _save(self):
        with self._server() as address:
            self._ask(address, self.ids)
            post(address, "/slots/0?action=save", {"filename": "prompt"})

    def restore(self, state):
        self.by[state].measure(lambda: self._restore(state))

    def _restore(self, state):
        file = self.path / "prompt"
        with self._server() as address:
            drop(file) if state == "cold" else read_in(file)
            begun = time.perf_counter()
            post(address, "/slots/0?action=restore", {"filename": "prompt"})
            restoring = 1e3 * (time.perf_counter() - begun)
            answer = self._ask(address, self.ids)
            self.computed.append(answer.said["timings"]["prompt_n"])
            if self.goes_on is None:
                post(address, "/slots/0?action=restore", {"filename": "prompt"})
                longer = self.ids + list(answer.said.get("tokens") or []) + prompt(self.shape, "more", 16)
                self.goes_on = self._ask(address, longer).said["timings"]["prompt_n"]
            return restoring + answer.ttft


class Mlx:
    """mlx-lm's saved prompt cache, loaded by one process again and again."""

    def __init__(self, shape, path, n, dtype):
        self.file = path / f"{dtype}.safetensors"
        self.command = [PYTHON, ROOT / "bench" / "prompt_cache_mlx.py", served(shape, "q4"), THREADS, dtype, n, self.file]
        self.by = {"cold": Peer(), "warm": Peer()}

    def restore(self, state):
        self.by[state].measure(lambda: self._restore(state))

    def _restore(self, state):
        process = subprocess.Popen([str(c) for c in self.command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            # The first is not counted: it compiles what the others use.
            for line in ("ready", "first", "counted"):
                if line != "ready":
                    drop(self.file) if state == "cold" else read_in(self.file)
                    process.stdin.write("\n")
                    process.stdin.flush()
                said = process.stdout.readline()
                if not said:
                    raise died(process.wait(), process.stderr.read())
            return float(said)
        except BrokenPipeError:
            raise died(process.wait(), process.stderr.read()) from None
        finally:
            process.kill()
            process.communicate()


# --- what else a restart keeps


def shared(name, rounds, quick, notes):
    """A prompt that begins as a stored one does."""
    shape, n = SHAPES[name], 1024 if quick else 4096
    common = n * 7 // 10
    stored, other = prompt(shape, 1, n), prompt(shape, 1, common) + prompt(shape, 2, n - common)
    case = f"{common} of {n} tokens as in a stored prompt, {NAMES[name]}"
    # A state is kept where a prompt ended: the common part was a turn of its own.
    wanted = common - 1 if has_states(shape) else common
    with folder(shape, 2 * n) as path:
        with kept(shape, path, n) as address:
            warm(address, shape)
            if has_states(shape):
                ask(address, stored[:common])
            ask(address, stored)
        drop(path)
        with kept(shape, path, n) as address:
            warm(address, shape)
            found = ask(address, other)
    # Whether it was read for the request or ahead of it: the server is new.
    return [compare(SUITE, case, "found after a restart", "tokens", [found.cached], [wanted], "to the state" if has_states(shape) else "to the token", 1.0, True, THREADS)]


def encrypted(name, rounds, quick, notes):
    shape, n = SHAPES[name], 1024 if quick else 4096
    ids, speeds = prompt(shape, n, n + 1), {"plain": [], "encrypted": []}
    with folder(shape, 2 * n) as path:
        key = path / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(32))
        kinds = {"plain": (path / "plain", ()), "encrypted": (path / "encrypted", ("--prompt-cache-key-file", key))}
        for at, flags in kinds.values():
            at.mkdir()
            with kept(shape, at, n, *flags) as address:
                ask(address, ids)
        for i in range(rounds):
            for kind in list(kinds) if i % 2 else reversed(kinds):
                at, flags = kinds[kind]
                answer = restored(shape, at, ids, True, *reserved(ids), *flags)
                speeds[kind].append(kept_bytes(shape, n) / (answer.ttft - answer.step) / 1e6)
    case = f"restore of {n} tokens, encrypted, {NAMES[name]}"
    return [compare(SUITE, case, "bytes beyond a decode step", "GB/s", speeds["encrypted"], speeds["plain"], "plain", 0.8, True, THREADS)]


def saving(name, rounds, quick, notes):
    """The same requests of a server that keeps them and of one that does not, in turn. Half of each prompt comes again, so that it is kept while others wait."""
    shape = SHAPES[name]
    tokens, out, requests = (640, 16, 4) if quick else (1024, 64, 8)
    case = f"half of {tokens} tokens shared, {out} out, 4 at once, {NAMES[name]}"
    options = ["--input", tokens, "--shared", tokens // 2, "--output", out, "--requests", requests, "--concurrency", 4, "--rate", 0, "--warmups", 1]
    found, written = {"on": [], "off": []}, 0
    # What is kept comes to more than the quota of so many: some is evicted.
    room = 4_000
    with folder(shape, 4 * room) as path, kept(shape, path, room) as on, kept(shape, None, 0) as off:
        for seed in range(1, rounds + 1):
            for which in ("on", "off") if seed % 2 else ("off", "on"):
                found[which].append(own({"on": on, "off": off}[which], shape, seed, *options, workload="shared-prefix"))
                if which == "on":
                    written = until_written(on)
    rows = []
    for figure, of, goal, above in (
        ("output", lambda s: s["output_tokens_per_second"], 0.99, True),
        ("TTFT, mean", lambda s: s["ttft_ms"]["mean"], 1.01, False),
    ):
        unit = "tokens/s" if above else "ms"
        rows.append(compare(SUITE, case, figure, unit, [of(s) for s in found["on"]], [of(s) for s in found["off"]], "no prompt cache", goal, above, THREADS))
    notes.append(f"saving, {NAMES[name]}: {written / 1e6:.0f} MB were written in {rounds} rounds")
    return rows


def conversation(name, rounds, quick, notes):
    """A conversation with tools whose server is stopped and started behind each turn; counted, so one round is enough."""
    shape, rows, count = SHAPES[name], [], 8 if quick else 30
    for thinking in ("kept",) if quick else ("kept", "stripped"):
        case = f"conversation, a restart behind each turn, thinking {thinking}, {NAMES[name]}"
        before, beyond, again, new = [], [], 0, 0
        with folder(shape, 16_384) as path:
            for number, (kind, messages) in enumerate(turns.requests(1, count, thinking == "stripped")):
                body = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
                with kept(shape, path, 16_384) as address:
                    answer = stream(address, "/v1/chat/completions", body)
                last = turns.last_turn(before, messages, answer.prompt)
                recomputed = answer.prompt - answer.cached
                if recomputed > last + turns.JOIN:
                    beyond.append(f"{kind} {number + 1}: {recomputed} of {answer.prompt} tokens, {last} of them new")
                again, new = again + recomputed, new + last
                before.append((messages, answer.prompt))
        row = compare(SUITE, case, "turns that compute more than the last turn again", f"of {count}", [len(beyond)], None, "", 0, False, THREADS)
        rows.append(met(row, not beyond))
        rows.append(compare(SUITE, case, "computed", "tokens", [again], [new], "new in their turns", None, False, THREADS))
        if beyond:
            notes.append(f"{case}: " + "; ".join(beyond[:6]))
    return rows


# --- campaigns

# (what the store's own tests run, the variable that makes it long, how often, its test)
CAMPAIGNS = [
    ("killed under load, then opened and read", "SLUICE_KILLS", 1000, "campaigns::a_process_that_is_killed_at_any_instant_leaves_a_cache_that_opens_and_is_right"),
    ("simulated losses of power", "SLUICE_POWER_LOSSES", 1000, "crashes::no_loss_of_power_makes_it_wrong"),
    ("random corruptions", "SLUICE_CORRUPTIONS", 10_000, "campaigns::no_random_corruption_gives_wrong_bytes_or_ends_the_process"),
    ("requests over 50 prefixes, a quota for 20", "SLUICE_REQUESTS", 10_000, "campaigns::with_a_quota_for_twenty_of_fifty_prefixes_hits_are_those_of_the_least_recently_used"),
]


def campaigns(_, rounds, quick, notes):
    """The tests of crates/cache, made long: each asserts what its row says."""
    rows = []
    for what, variable, count, test in CAMPAIGNS:
        say(what)
        place = DIR / "campaigns"
        place.mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(place), **({} if quick else {variable: str(count)})}
        command = ["cargo", "test", "--release", "--quiet", "--locked", "-p", "sluice-cache", "--test", "disk", "--", "--exact", "--nocapture", test]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
        shutil.rmtree(place, ignore_errors=True)
        said = next((line for line in done.stdout.splitlines() if re.match(r"\d+ \w+", line) and "test" not in line), "")
        failed = done.returncode != 0 or not said
        times = said.partition(" ")[0] if said else count
        notes.append(f"{what}: {said or (done.stdout + done.stderr).strip()[-300:]}")
        row = compare(SUITE, f"{times} {what}", "wrong, lost or not opened", "times", [int(failed)], None, "", 0, False)
        rows.append(met(row, not failed))
        if numbers := re.search(r"(\d+) of \d+ blocks hit, (\d+) of an ideal cache; at most (\d+) of (\d+) bytes", said):
            hit, ideal, most, quota = map(float, numbers.groups())
            rows.append(compare(SUITE, f"{times} {what}", "hits", "blocks", [hit], [ideal], "an ideal LRU cache", 0.9, True))
            rows.append(compare(SUITE, f"{times} {what}", "bytes at most", "MB", [most / 1e6], [quota / 1e6], "the quota", 1.0, False))
    return rows
