"""Drafts: answers with and without them. Real models, which `scripts/real-models` fetches, for how often drafts come true: text and tokens must be equal, an edit of a file must be much
faster, and prose no slower. Pairs of random weights at real dimensions whose agreement is planted (`planted.py`), for speed. The goals are those that the project set itself."""

import json
import os
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import planted
import real_models
from chart import Chart
from findings import Pick, bars, goals, having, said
from models import evict, tensors
from models import planted as pair_of
from peers import LLAMA, SLUICE, Peer
from results import compare
from scratch import ROOT, Failed, output, say
from servers import server
from streaming import post
from suites.serving import met

TITLE = "Drafts that cannot change the text"
SUITE = "drafts"
THREADS = len(os.sched_getaffinity(0))
# The file that is edited: about 2,000 tokens.
EDITED = ROOT / "crates" / "engine" / "src" / "text" / "stop.rs"
OFF, DRAFTING = "without drafts", "its own drafts"
# Tokens that are drafted at a time, at most: the usual limit.
MOST = 16
# An edit with drafts over one without; prose, whatever is drafted.
FASTER, NO_SLOWER = 2.5, 0.98
CODER, PROSE = "qwen2_5_coder", ("smollm2", "gemma3", "qwen2_5_coder")
STORY = "Write a long story about a lighthouse keeper who finds a message in a bottle. Describe the sea, the people and what the message says."
CODE = "Write a Python program that reads a CSV file of sales and prints totals by month and by product. Explain nothing."


def edit():
    return f"Rename the type `StopStrings` to `StopWatcher` in this file. Answer with the whole file, and nothing else.\n\n```rust\n{EDITED.read_text()}```\n"


# The demo model with the MTP head that `scripts/train_mtp.py` made for it.
WITH_HEAD, HEAD = ROOT / "models" / "demo-mtp", "mtp"
# By case: model, prompt, tokens of the answer (quick: a quarter), temperature, goal.
CASES = {
    "edit greedy": (CODER, edit, 1200, 0, FASTER),
    "edit sampled": (CODER, edit, 400, 0.7, None),
    "code greedy": (CODER, lambda: CODE, 200, 0, NO_SLOWER),
    **{f"prose greedy {name}": (name, lambda: STORY, 200, 0, NO_SLOWER) for name in PROSE},
    **{f"prose sampled {name}": (name, lambda: STORY, 200, 1, NO_SLOWER) for name in PROSE},
    # A model that is as slow as the one that it drafts for: it must be given up.
    **{f"prose {how} smollm2 itself": ("smollm2", lambda: STORY, 200, t, NO_SLOWER) for how, t in (("greedy", 0), ("sampled", 1))},
    f"prose greedy {HEAD}": (HEAD, lambda: STORY, 200, 0, 1.3),
    f"prose sampled {HEAD}": (HEAD, lambda: STORY, 200, 1, NO_SLOWER),
}


@dataclass
class Pair:
    """A model of random weights at real dimensions, and a smaller one that drafts for it and is right as often as `share`."""

    target: str
    name: str
    share: float
    goal: float
    # Streamed, with room for this part of its experts.
    part: float = 0.0
    # The lowest that any answer may have.
    floor: float | None = None
    tokens: int = 200

    @property
    def case(self):
        return f"{self.name}, {self.share:.0%} right"


DENSE, MOE, HYBRID = "8b-quarter", "qwen3-30b-a3b@12", "qwen3.5-35b-a3b@8:37888"
# A quarter of the layers, of the small model too, and of the vocabulary.
SMALL = "0.6b-quarter"
LAYERS = {DENSE: "9 of 36 layers of Qwen3-8B", MOE: "12 of 48 layers of Qwen3-30B-A3B", HYBRID: "8 of 40 layers of Qwen3.5-35B-A3B"}
STREAMED = f"streamed, {LAYERS[MOE]}"
PAIRS = {
    "pair dense 0.8": Pair(DENSE, LAYERS[DENSE], 0.8, 1.8),
    "pair dense 0": Pair(DENSE, LAYERS[DENSE], 0.0, NO_SLOWER),
    "pair mixture 0.8": Pair(MOE, LAYERS[MOE], 0.8, 1.3),
    "streamed mixture 0.8": Pair(MOE, STREAMED, 0.8, 1.15, 0.5, NO_SLOWER, 100),
    "streamed mixture 0.4": Pair(MOE, STREAMED, 0.4, 1.0, 0.5, NO_SLOWER, 100),
    "streamed mixture 0": Pair(MOE, STREAMED, 0.0, NO_SLOWER, 0.5, None, 100),
}
HYBRIDS, BESIDE, WIDTHS = "pair hybrid 0.8", "pair beside llama.cpp", f"widths {HEAD}"
# Of a step of a hybrid that keeps states, over one that does not.
KEEPING = 1.05
# Over llama.cpp's drafts, and drafted tokens of the pair, for both.
BEYOND, WIDTH = 1.3, 4
# The governor's choice over the best fixed width.
GOVERNED = 0.95
QUICK = ["edit greedy", "prose sampled smollm2", "prose greedy smollm2 itself", "pair dense 0.8"]


def title(name):
    what, how, *_ = name.split()
    model = real_models.MODELS.get(CASES[name][0], "the demo with its MTP head")
    return f"{what}, {how}, {model}" + (", by itself" if name.endswith(" itself") else "")


PICKS = [
    *(Pick(title(name), title(name), "speed", OFF, front=f"{title(name)}, n-gram drafts" if name == "edit greedy" else "") for name in CASES),
    *(Pick(f"a small model, {pair.case}", pair.case, "speed", OFF) for pair in PAIRS.values()),
]


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    return {"": Chart("Answers with drafts, beside none", bars(rows, PICKS), under="Tokens per second of an answer over those of the same answer without drafts.")}


def found(rows):
    """What the figures say, a line each."""
    layers = [r for r in having(rows, figure="speed", peer=OFF) if "layers" in r.case]
    return [
        *said("An edit of a file of 2,000 tokens is written {spread} times as fast as without drafts, in {cases}; goals met: {goals}.", having(rows, "edit", "speed", OFF)),
        *said("New code is written {spread} times as fast; goals met: {goals}.", having(rows, "code", "speed", OFF)),
        *said("Prose is written {spread} times as fast, in {cases}; goals met: {goals}.", having(rows, "prose", "speed", OFF)),
        *said("A small model whose guesses are right as often as planted: {spread} times as fast as without, in {cases}; goals met: {goals}.", [r for r in layers if "streamed" not in r.case]),
        *said("The same for a mixture whose experts are streamed: {spread} times, in {cases}; goals met: {goals}.", [r for r in layers if "streamed" in r.case]),
        *said("A step that keeps recurrent states takes {spread} times as long, in {cases}; goals met: {goals}.", having(rows, figure="a step with states kept"), less=True),
        *said("Beside llama.cpp with its own drafts, in {cases}: {spread} times as fast; goals met: {goals}.", having(rows, peer=f"llama.cpp {DRAFTING}")),
        *said("Beside llama.cpp without drafts: {spread} times as fast; goals met: {goals}.", having(rows, peer=f"llama.cpp {OFF}")),
        *said("What the governor chooses is {spread} times as fast as the best fixed width; goals met: {goals}.", having(rows, figure="speed, as many as pay")),
        f"Answers that differ from those without drafts: {sum(r.ours for r in rows if r.figure == 'other tokens'):.0f}.",
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    return QUICK if quick else [*CASES, *PAIRS, HYBRIDS, BESIDE, WIDTHS]


def absent():
    """What this suite needs and this machine lacks."""
    missing = real_models.fetch()
    return None if not missing else f"real models are not there: {', '.join(missing)}"


def run(names, quick, rounds, parts):
    rows, notes = [], []
    if {BESIDE, "edit greedy"} & set(names):
        LLAMA.serves()
    others = {HYBRIDS: hybrid, BESIDE: beside, WIDTHS: widths}
    for name in names:
        say(name)
        what = others.get(name) or (paired if name in PAIRS else measured)
        rows += parts.measure(f"{name} {rounds}", lambda: what(name, rounds, quick, notes), notes)  # noqa: B023
    notes.append("one answer after the other, with and without drafts by turns; a ratio is of two answers that follow each other")
    notes.append("speed: tokens after the first over their time; drafts of all drafters that there are (`--draft auto`), 16 tokens at most: look-up in prompt and answer; where a case says so, the model itself as the one that drafts, or the checkpoint's own head")
    notes.append(f"pairs: random weights, 4 bits, real dimensions; a quarter of the layers of Qwen3-0.6B drafts. How often it is right is planted (`bench/planted.py`); it is as sure of wrong tokens as of right ones. Streamed: slots for half of the experts, all of them filled before; {MOE}'s routing repeats itself as a trained model's does")
    notes.append("every answer is by a program, or an engine, that has just been started: what it must learn of drafts first is in its time")
    return rows, notes


# --- pairs


def path_of(target):
    """A pair's larger model; of a mixture a bundle, which is streamed best."""
    return pair_of(target, "q4" if target == DENSE else "q4-bundle", "planted")


def expert_bytes(target):
    """Bytes of a mixture's experts, in 4 bits and a scale for each 64."""
    sizes = (t.shape for t in tensors(target) if t.kind == "expert")
    return sum(n * rows * cols for n, rows, cols in sizes) * 4.5 / 8


def drafted(path, small, *more):
    """By width: what `sluice bench drafts` says of it."""
    command = [SLUICE, "bench", "drafts", path, "--json", "--threads", THREADS, *(["--draft-model", small] if small else []), *more]
    return {line["width"]: line for line in map(json.loads, output(command).splitlines())}


def pair_rows(case, lines, goal, suite=SUITE):
    plain, ours = (lines[width]["tokens_per_second"]["all"] for width in ("off", "auto"))
    counts = lines["auto"]
    return [
        compare(suite, case, "speed", "tokens/s", ours, plain, OFF, goal=goal, threads=THREADS),
        compare(suite, case, "accepted", "% of drafted tokens", [100 * counts["accepted_tokens"] / max(counts["draft_tokens"], 1)], None, ""),
        compare(suite, case, "drafted", "tokens an answer", [counts["draft_tokens"] / counts["rounds"]], None, ""),
        # `bench drafts` refuses to go on where they differ.
        compare(suite, case, "other tokens", "answers", [0], None, ""),
    ]


def paired(name, rounds, quick, _):
    pair = PAIRS[name]
    path, small = path_of(pair.target), pair_of(SMALL, "q4", "drafter")
    how = ["--tokens", pair.tokens // 4 if quick else pair.tokens, "--rounds", rounds, "--prompt", planted.start(pair.share)]
    if pair.part:
        evict(path)
        how += ["--experts", "slots", "--expert-budget", int(pair.part * expert_bytes(pair.target))]
    lines = drafted(path, small, *how)
    rows = pair_rows(pair.case, lines, pair.goal)
    if pair.floor:
        by_ratio = sorted(zip(rows[0].ours_all, rows[0].peer_all), key=lambda both: both[0] / both[1])
        rows.append(compare(SUITE, pair.case, "slowest answer", "tokens/s", [by_ratio[0][0]], [by_ratio[0][1]], OFF, goal=pair.floor, threads=THREADS))
    return rows


def hybrid(_, rounds, quick, notes):
    """Drafts that are wrong leave a recurrent state that must be undone: tokens computed again, and what keeping states costs a step."""
    path, small = path_of(HYBRID), pair_of(SMALL, "q4", "drafter")
    case = f"{LAYERS[HYBRID]}, 80% right"
    lines = drafted(path, small, "--tokens", 50 if quick else 200, "--rounds", rounds, "--prompt", planted.start(0.8))
    again = sum(line["computed_again"] for line in lines.values())
    rows = [*pair_rows(case, lines, None), met(compare(SUITE, case, "computed again", "tokens", [again], None, ""), again == 0)]
    for line in drafted_states(path, rounds, quick):
        seconds = (1e3 * s for s in line["step_seconds_with_states_kept"]["all"])
        plain = (1e3 * s for s in line["step_seconds"]["all"])
        step = f"a step of {1 + line['drafted']} tokens, {LAYERS[HYBRID]}"
        rows.append(compare(SUITE, step, "a step with states kept", "ms", list(seconds), list(plain), "no state kept", goal=KEEPING, above=False, threads=THREADS))
        notes.append(f"{step}: {line['kept_bytes'] / 1e6:.0f} MB of states are kept")
    return rows


def drafted_states(path, rounds, quick):
    command = [SLUICE, "bench", "drafts", path, "--kept-states", "--widths", "1,3", "--tokens", 5 if quick else 20, "--rounds", rounds, "--threads", THREADS, "--json"]
    return map(json.loads, output(command).splitlines())


# --- peers


@contextmanager
def llama_server(model, context, *more):
    """llama-server, ready."""
    options = ["-m", model, "-t", THREADS, "-np", 1, "-c", context, "-cram", 0, "-fit", "off", "--host", "127.0.0.1", *more]
    with ExitStack() as stack:
        yield LLAMA.attempt(lambda bench: stack.enter_context(server(lambda port: [bench.with_name("llama-server"), *options, "--port", port], "llama-drafts")))


class Llama(Peer):
    """Its speed, and how many of its drafts came true."""

    def __init__(self):
        super().__init__()
        self.drafted = self.accepted = 0

    def ask(self, address, path, body):
        timings = post(address, path, {**body, "temperature": 0, "ignore_eos": True, "cache_prompt": False})["timings"]
        self.drafted += timings.get("draft_n", 0)
        self.accepted += timings.get("draft_n_accepted", 0)
        return timings["predicted_per_second"]

    def row(self, case, ours, form):
        return compare(SUITE, case, "speed", "tokens/s", ours, self.all, LLAMA.name(form), goal=BEYOND, threads=THREADS, died=self.died)


@contextmanager
def beside_llama(model, context, options, path, body):
    """llama.cpp on the same file, with drafts (`options` turns them on) and without. Yields two functions: `ask` has each answer once, `rows` compares all answers with ours."""
    peers = {DRAFTING: (Llama(), options), OFF: (Llama(), [])}
    with ExitStack() as stack:
        addresses = {form: stack.enter_context(serving(peer, model, context, *more)) for form, (peer, more) in peers.items()}

        def ask():
            for form, (peer, _) in peers.items():
                peer.measure(lambda: peer.ask(addresses[form], path, body))  # noqa: B023

        def rows(case, ours, notes):
            drafting = peers[DRAFTING][0]
            notes.append(f"{case}: llama.cpp drafted {drafting.drafted} tokens, of which {drafting.accepted} came true")
            return [peer.row(case, ours, form) for form, (peer, _) in peers.items()]

        yield ask, rows


def beside(_, rounds, quick, notes):
    """The dense pair in GGUF, by ourselves and by llama.cpp, as many tokens drafted at most."""
    path, small, tokens = pair_of(DENSE, "Q4_0", "planted"), pair_of(SMALL, "Q4_0", "drafter"), 50 if quick else 200
    first, ours = planted.start(0.8), []
    how = ["--tokens", tokens, "--draft-tokens", WIDTH, "--rounds", 1, "--prompt", first, "--widths", "auto"]
    options = ["--spec-type", "draft-simple", "-md", small, "-td", THREADS, "--spec-draft-n-max", WIDTH]
    with beside_llama(path, 1024, options, "/completion", {"prompt": [first], "n_predict": tokens}) as (ask, rows):
        for _ in range(rounds):
            ours += drafted(path, small, *how)["auto"]["tokens_per_second"]["all"]
            ask()
    return rows(f"{LAYERS[DENSE]}, Q4_0, 80% right, at most {WIDTH} drafted", ours, notes)


@contextmanager
def serving(peer, *how):
    """The address of a llama-server; None where it cannot be had, which its peer then says."""
    with ExitStack() as stack:
        began = Peer()
        began.measure(lambda: stack.enter_context(llama_server(*how)))
        peer.died = began.died
        yield began.all[0] if began.all else None


# --- MTP


def widths(_, rounds, quick, notes):
    """A checkpoint's own head with fixed numbers of tokens, and with as many as pay."""
    prompt = answered(f"prose greedy {HEAD}", "off", quick)["tokens"][:64]
    how = ["--draft", HEAD, "--widths", "off,1,2,3,4,auto", "--tokens", 50 if quick else 200, "--rounds", rounds, "--prompt", ",".join(map(str, prompt))]
    lines = drafted(WITH_HEAD, None, *how)
    speeds = {width: line["tokens_per_second"]["all"] for width, line in lines.items()}
    ours = speeds.pop("auto")
    best = max(speeds, key=lambda width: lines[width]["tokens_per_second"]["median"])
    notes.append(f"the checkpoint's own head: the best fixed width is {best}")
    return [compare(SUITE, title(f"prose greedy {HEAD}"), "speed, as many as pay", "tokens/s", ours, speeds[best], f"the best of widths {', '.join(speeds)}", goal=GOVERNED, threads=THREADS)]


# --- real models


def answered(name, draft, quick, *more):
    """An answer: its tokens, and what `--json` says about it. `more`: options."""
    model, prompt, tokens, temperature, _ = CASES[name]
    path = WITH_HEAD if model == HEAD else real_models.path(model)
    tokens = tokens // 4 if quick else tokens
    how = ["--draft", draft, "--temperature", temperature, "--seed", 1, "--max-tokens", tokens, "--ignore-eos", "--threads", THREADS, "--max-context", 8192, *more]
    if name.endswith(" itself") and draft != "off":
        how += ["--draft-model", path]
    command = [SLUICE, "run", "--json", "--model", path, *how, "--prompt", prompt()]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failed(f"sluice run: {done.stderr.strip()}")
    return json.loads(done.stdout)


def measured(name, rounds, quick, notes):
    """An answer by turns without drafts and with them; of the edit, and with llama.cpp's own look-up."""
    if name != "edit greedy":
        return compared(name, rounds, quick)
    model, prompt, tokens, *_ = CASES[name]
    body = {"messages": [{"role": "user", "content": prompt()}], "max_tokens": tokens // 4 if quick else tokens}
    options = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", MOST, "--spec-draft-n-max", MOST]
    with beside_llama(real_models.path(model), 8192, options, "/v1/chat/completions", body) as (ask, rows):
        own = compared(name, rounds, quick, ask)
    return [*own, *rows(title(name), own[0].ours_all, notes)]


def compared(name, rounds, quick, each=None, goal=None, suite=SUITE, draft="auto", more=()):
    """`each`: what is done after each round. `goal`: in place of the case's own. `more`: options of both answers."""
    *_, own = CASES[name]
    goal = goal or own
    ours, plain, other, accepted = [], [], 0, []
    for _ in range(rounds):
        without, drafted = answered(name, "off", quick, *more), answered(name, draft, quick, *more)
        other += without["tokens"] != drafted["tokens"] or without["text"] != drafted["text"]
        for speeds, answer in ((plain, without), (ours, drafted)):
            speeds.append(answer["stats"]["generation"]["tokens_per_second"])
        counts = drafted["stats"]["drafts"].values()
        all_of = lambda what: sum(of_drafter[what] for of_drafter in counts)  # noqa: B023, E731
        accepted.append(100 * all_of("accepted_tokens") / max(all_of("draft_tokens"), 1))
        if each:
            each()
    return [
        compare(suite, title(name), "speed", "tokens/s", ours, plain, OFF, goal=goal, threads=THREADS),
        compare(suite, title(name), "accepted", "% of drafted tokens", accepted, None, ""),
        compare(suite, title(name), "other tokens", "answers", [other], None, ""),
    ]
