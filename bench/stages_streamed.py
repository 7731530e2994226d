#!/usr/bin/env python3
"""A mixture whose experts stay on disk, over one and two processes with a disk limit each: bench/stages_streamed.py MODEL [--limit BYTES] [--tokens N] [--sequences N].

Needs the Python package on PYTHONPATH (scripts/python-package), and root for control groups (version 1's blkio), which limit how fast each process reads: as if each were a machine with such a disk.
Experts are read past the page cache. Prints tokens a second, and how the tokens of both compare.
"""

import argparse
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from sluice.stages import Pipeline, even, layer_count, open_processes

GROUPS = Path("/sys/fs/cgroup/blkio")

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model")
parser.add_argument("--limit", type=int, default=100_000_000, help="bytes a second that each process may read")
parser.add_argument("--tokens", type=int, default=12)
parser.add_argument("--sequences", type=int, default=4)
parser.add_argument("--budget", type=int, default=100_000_000, help="bytes of experts in memory, of all processes together")
args = parser.parse_args()


@contextmanager
def limited(processes):
    """Each process in a group of its own, with the limit for the model's disk."""
    device = os.stat(args.model).st_dev
    made = []
    try:
        for number, process in enumerate(processes):
            group = GROUPS / f"sluice-stage-{os.getpid()}-{number}"
            group.mkdir()
            made.append((group, process))
            (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {args.limit}")
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        for group, process in made:
            if process.poll() is None:
                (GROUPS / "cgroup.procs").write_text(str(process.pid))
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)


def measured(count):
    options = {"experts": "slots", "expert_budget": args.budget // count, "max_context": 512, "parallel": args.sequences, "threads": 1, "load": "direct"}
    stages = open_processes(args.model, even(layer_count(args.model), count), timeout=600, **options)
    with Pipeline(stages, microbatches=args.sequences, chunk=8) as pipeline:
        prompts = [[1000 * number + at for at in range(1, 5)] for number in range(1, args.sequences + 1)]
        pipeline.generate(prompts, max_tokens=1)
        with limited([stage.process for stage in stages.stages]):
            started = time.perf_counter()
            tokens = pipeline.generate(prompts, max_tokens=args.tokens)
            took = time.perf_counter() - started
    return tokens, args.sequences * args.tokens / took


if not (GROUPS / "blkio.throttle.read_bps_device").exists() or os.geteuid() != 0:
    sys.exit("SKIPPED: a disk limit needs root and the blkio controller of control groups, version 1")
one, speed_of_one = measured(1)
two, speed_of_two = measured(2)
print(f"one process   {speed_of_one:.2f} tokens/s")
print(f"two processes {speed_of_two:.2f} tokens/s, {speed_of_two / speed_of_one:.2f} times, {'the same tokens' if one == two else 'OTHER TOKENS'}")
sys.exit(one != two)
