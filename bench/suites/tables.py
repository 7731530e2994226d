"""Rows of a table on disk, as tables of n-grams and of embeddings for each layer are read: beside fio on the same file. The goals are those that the project set itself."""

import json
import os
import shutil
import subprocess
import sys

from chart import Chart
from findings import Pick, bars, goals, having, said
from peers import answer
from results import compare
from scratch import DIR, ROOT, need_free, output, say

TITLE = "Rows of tables on disk"
SUITE = "tables"
THREADS = 1
FILE, QUICK_FILE = 4_000_000_000, 1_000_000_000
#: The program that reads, if it was built elsewhere.
PROGRAM = os.environ.get("BENCH_ROW_READS")
FIO = shutil.which("fio")
SECONDS = 5
#: Qwen3.8-Flash-Next's table of n-grams: 16 rows of 160 numbers in bf16 for each token.
ROW, ROWS = 320, 16
#: Tokens of a step, what it is, and requests that fio has in flight: as many as the step has rows, all of which it waits for, as a step does; or what it is quickest with.
STEPS = {1: ("a token", (ROWS,)), 512: ("a prompt's 512 tokens", (64, 256, 512))}
RATE, WAIT = "rows from disk", "wait of a token, with nothing computed meanwhile"
# A part of fio's rate, and milliseconds.
PART, MILLISECONDS = 0.9, 1.0


def title(tokens):
    return f"{STEPS[tokens][0]}, {ROWS} rows of {ROW} bytes each"


def picks(_):
    return [Pick(STEPS[tokens][0], title(tokens), RATE, "fio") for tokens in STEPS]


def charts(rows):
    return {"": Chart("Cold rows from disk, beside fio", bars(rows, picks(rows)), under="Rows a second over fio's random reads of 4 KiB from the same file, past the page cache.")}


def found(rows):
    return [
        *said("Rows come at {spread} of fio's random reads from the same file; goals met: {goals}.", having(rows, figure=RATE)),
        *said("A token whose rows are all cold waits for {percent} of the allowed millisecond, even with nothing computed meanwhile; goals met: {goals}.", having(rows, figure=WAIT)),
        f"All goals together: {goals(rows)} met. No byte differs, or there would be no page.",
    ]


def absent():
    return None if FIO else "there is no fio: apt-get install fio"


def cases(_):
    return [title(tokens) for tokens in STEPS]


def program():
    return PROGRAM or ROOT / "target" / "release" / "examples" / "row_reads"


def prepare():
    if PROGRAM is None and subprocess.run(["cargo", "build", "--release", "--locked", "--workspace", "--example", "row_reads"], cwd=ROOT).returncode != 0:
        sys.exit("bench: row_reads does not build")


def versions():
    return {"fio": output([FIO, "--version"]).strip().removeprefix("fio-")}


def table(size):
    """A folder with a file of rows, each a function of its number."""
    folder = DIR / "models" / f"rows-{size // 10**9}g"
    if not folder.exists():
        need_free(size, folder.name)
        say(f"making {folder.name}")
        unfinished = folder.with_suffix(".part")
        unfinished.mkdir(parents=True, exist_ok=True)
        subprocess.run([program(), unfinished, "write", str(size)], check=True)
        unfinished.rename(folder)
    return folder


def ours(folder, tokens):
    got = answer([program(), folder, str(ROW), str(ROWS * tokens), str(SECONDS)], json.loads)
    assert got["mismatches"] == 0, f"{got['mismatches']} words differ"
    return got


def fio(folder, depth):
    """Random reads a second, those of a token in batches."""
    batches = [f"--iodepth_batch={ROWS}", f"--iodepth_batch_complete_min={ROWS}"] if depth == ROWS else []
    job = ["--name=rows", f"--filename={folder / 'model.safetensors'}", "--readonly", "--rw=randread", "--bs=4k", "--direct=1", "--ioengine=io_uring", f"--iodepth={depth}", "--time_based", f"--runtime={SECONDS}"]
    return answer([FIO, *job, *batches, "--output-format=json"], lambda text: json.loads(text)["jobs"][0]["read"]["iops"])


def run(names, quick, rounds, parts):
    folder, rows, notes = table(QUICK_FILE if quick else FILE), [], []
    for tokens in STEPS:
        if title(tokens) in names:
            rows += parts.measure(title(tokens), lambda: measure(folder, tokens, rounds), notes)  # noqa: B023
    notes.append("past the page cache; a cache of the host's beneath a virtual disk cannot be dropped")
    return rows, notes


def measure(folder, tokens, rounds):
    own, theirs = [], []
    for _ in range(rounds):
        say(title(tokens))
        own.append(ours(folder, tokens))
        theirs.append(max(fio(folder, depth) for depth in STEPS[tokens][1]))
    rows = [compare(SUITE, title(tokens), RATE, "1/s", [got["reads_per_second"] for got in own], theirs, "fio", PART, True, THREADS)]
    if tokens == 1:
        waits = [got["milliseconds_a_step"] for got in own]
        rows.append(compare(SUITE, title(tokens), WAIT, "ms", waits, [MILLISECONDS] * rounds, "allowed", 1.0, False, THREADS))
    return rows
