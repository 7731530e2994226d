"""Drafts: answers with and without them, of the real models that `scripts/real-models` fetches. Text and tokens must be equal, an edit of a file must be much faster, and prose no slower.
The goals are those that the project set itself."""

import json
import os
import subprocess

import real_models
from chart import Chart
from findings import Pick, bars, goals, having, said
from peers import SLUICE
from results import compare
from scratch import ROOT, Failed, say

TITLE = "Drafts that cannot change the text"
SUITE = "drafts"
THREADS = len(os.sched_getaffinity(0))
# The file that is edited: about 2,000 tokens.
EDITED = ROOT / "crates" / "engine" / "src" / "text" / "stop.rs"
OFF = "without drafts"
# An edit with drafts over one without; prose, whatever is drafted.
FASTER, NO_SLOWER = 2.5, 0.98
CODER, PROSE = "qwen2_5_coder", ("smollm2", "gemma3", "qwen2_5_coder")
STORY = "Write a long story about a lighthouse keeper who finds a message in a bottle. Describe the sea, the people and what the message says."
CODE = "Write a Python program that reads a CSV file of sales and prints totals by month and by product. Explain nothing."


def edit():
    return f"Rename the type `StopStrings` to `StopWatcher` in this file. Answer with the whole file, and nothing else.\n\n```rust\n{EDITED.read_text()}```\n"


# A checkpoint with an MTP head, such as `scripts/train_mtp.py` makes.
WITH_HEAD, HEAD = os.environ.get("SLUICE_MTP_MODEL"), "mtp"
# By case: model, prompt, tokens of the answer (quick: a quarter), temperature, goal.
CASES = {
    "edit greedy": (CODER, edit, 1600, 0, FASTER),
    "edit sampled": (CODER, edit, 1600, 0.7, None),
    "code greedy": (CODER, lambda: CODE, 400, 0, NO_SLOWER),
    **{f"prose greedy {name}": (name, lambda: STORY, 200, 0, NO_SLOWER) for name in PROSE},
    **{f"prose sampled {name}": (name, lambda: STORY, 200, 1, NO_SLOWER) for name in PROSE},
    # A model that is as slow as the one that it drafts for: it must be given up.
    **{f"prose {how} smollm2 itself": ("smollm2", lambda: STORY, 200, t, NO_SLOWER) for how, t in (("greedy", 0), ("sampled", 1))},
    f"prose greedy {HEAD}": (HEAD, lambda: STORY, 200, 0, NO_SLOWER),
    f"prose sampled {HEAD}": (HEAD, lambda: STORY, 200, 1, NO_SLOWER),
}
QUICK = ["edit greedy", "prose sampled smollm2", "prose greedy smollm2 itself"]


def title(name):
    what, how, *_ = name.split()
    model = real_models.MODELS.get(CASES[name][0], "a checkpoint with its own head")
    return f"{what}, {how}, {model}" + (", by itself" if name.endswith(" itself") else "")


PICKS = [Pick(title(name), title(name), "speed", OFF, front=f"{title(name)}, n-gram drafts" if name == "edit greedy" else "") for name in CASES]


def picks(_):
    """Rows that charts show."""
    return PICKS


def charts(rows):
    return {"": Chart("Answers with n-gram drafts, beside none", bars(rows, PICKS), under="Tokens per second of an answer over those of the same answer without drafts.")}


def found(rows):
    """What the figures say, a line each."""
    return [
        *said("An edit of a file of 2,000 tokens is written {spread} times as fast as without drafts, in {cases}; goals met: {goals}.", having(rows, "edit", "speed")),
        *said("New code is written {spread} times as fast; goals met: {goals}.", having(rows, "code", "speed")),
        *said("Prose is written {spread} times as fast, in {cases}; goals met: {goals}.", having(rows, "prose", "speed")),
        f"Answers that differ from those without drafts: {sum(r.ours for r in rows if r.figure == 'other tokens'):.0f}.",
        f"All goals together: {goals(rows)} met.",
    ]


def cases(quick):
    return [name for name in (QUICK if quick else CASES) if CASES[name][0] != HEAD or WITH_HEAD]


def absent():
    """What this suite needs and this machine lacks, but for the checkpoint with an MTP head."""
    missing = real_models.fetch()
    return None if not missing else f"real models are not there: {', '.join(missing)}"


def run(names, quick, rounds, parts):
    rows, notes = [], []
    for name in names:
        say(name)
        rows += parts.measure(f"{name} {rounds}", lambda: measured(name, rounds, quick), notes)
    notes.append("one answer after the other, with and without drafts by turns; a ratio is of two answers that follow each other")
    notes.append("speed: tokens after the first over their time; drafts of all drafters that there are (`--draft auto`), 16 tokens at most: look-up in prompt and answer; where a case says so, the model itself as the one that drafts, or the checkpoint's own head")
    return rows, notes


def answered(name, draft, quick):
    """An answer: its tokens, and what `--json` says about it."""
    model, prompt, tokens, temperature, _ = CASES[name]
    path = WITH_HEAD if model == HEAD else real_models.path(model)
    tokens = tokens // 4 if quick else tokens
    how = ["--draft", draft, "--temperature", temperature, "--seed", 1, "--max-tokens", tokens, "--ignore-eos", "--threads", THREADS, "--max-context", 8192]
    if name.endswith(" itself") and draft != "off":
        how += ["--draft-model", path]
    command = [SLUICE, "run", "--json", "--model", path, *how, "--prompt", prompt()]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failed(f"sluice run: {done.stderr.strip()}")
    return json.loads(done.stdout)


def measured(name, rounds, quick):
    *_, goal = CASES[name]
    ours, plain, other, accepted = [], [], 0, []
    for _ in range(rounds):
        without, drafted = answered(name, "off", quick), answered(name, "auto", quick)
        other += without["tokens"] != drafted["tokens"] or without["text"] != drafted["text"]
        for speeds, answer in ((plain, without), (ours, drafted)):
            speeds.append(answer["stats"]["generation"]["tokens_per_second"])
        counts = drafted["stats"]["drafts"].values()
        all_of = lambda what: sum(of_drafter[what] for of_drafter in counts)  # noqa: B023, E731
        accepted.append(100 * all_of("accepted_tokens") / max(all_of("draft_tokens"), 1))
    return [
        compare(SUITE, title(name), "speed", "tokens/s", ours, plain, OFF, goal=goal, threads=THREADS),
        compare(SUITE, title(name), "accepted", "% of drafted tokens", accepted, None, ""),
        compare(SUITE, title(name), "other tokens", "answers", [other], None, ""),
    ]
