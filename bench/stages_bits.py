#!/usr/bin/env python3
"""Compares logits of models in stages on several devices with those of one engine: `stages_bits.py cuda:0,cuda:1,cpu MODEL..`.

Needs the package on PYTHONPATH (`scripts/python-package` says where). Every device has the whole model first, then stages at several cuts on neighbours among the devices; a prompt
in two chunks and single tokens behind it. Prints a line for each and ends with 1 where any bit differs.
"""

import random
import sys

from sluice.stages import LocalStages, Pipeline, Stage, layer_count

OPTIONS = {"max_context": 1024, "parallel": 2}
PARAMS = ({"temperature": 0}, {"temperature": 0.9, "seed": 5})
PROMPT, CHUNK, STEPS, VOCABULARY = 128, 70, 6, 1000


def opened(path, ranges, devices):
    return [Stage(path, layers, device=device, **OPTIONS) for layers, device in zip(ranges, devices)]


def logits(path, ranges, devices, prompt, steps):
    """All logits, in bytes, of the prompt and of each step."""
    stages, found, at = opened(path, ranges, devices), [], 0
    for tokens in [prompt[:CHUNK], prompt[CHUNK:], *([t] for t in steps)]:
        hidden, out = None, b""
        for stage in stages:
            hidden, out, _ = stage.step([(1, at, tokens, "all" if stage.is_last else None, False)], hidden)
        at += len(tokens)
        found.append(out)
    for stage in stages:
        stage.close()
    return found


def generated(path, ranges, devices, prompt, params):
    with Pipeline(LocalStages(opened(path, ranges, devices)), microbatches=len(ranges), chunk=64) as pipeline:
        return pipeline.generate([prompt], params, 32)


def main(devices, models):
    chance, differs = random.Random(3), 0
    for path in models:
        layers = layer_count(path)
        prompt, steps = ([chance.randrange(VOCABULARY) for _ in range(n)] for n in (PROMPT, STEPS))
        whole = logits(path, [(0, layers)], devices[:1], prompt, steps)
        cuts = {f"all layers on {device}": ([(0, layers)], [device]) for device in devices[1:]}
        for first, second in zip(devices, devices[1:]):
            for at in sorted({1, layers // 3, layers // 2, layers - 1} - {0, layers}):
                cuts[f"0..{at} on {first}, {at}..{layers} on {second}"] = ([(0, at), (at, layers)], [first, second])
        if layers >= 4:
            ends = [round(layers * i / 4) for i in range(5)]
            on = [devices[i % len(devices)] for i in range(4)]
            cuts[f"four stages on {', '.join(on)}"] = (list(zip(ends, ends[1:])), on)
        found = {name: logits(path, *cut, prompt, steps) == whole for name, cut in cuts.items()}
        for params in PARAMS:
            one = generated(path, [(0, layers)], devices[:1], prompt, params)
            two = generated(path, [(0, layers // 2), (layers // 2, layers)], (devices * 2)[:2], prompt, params)
            found[f"generated with {params}"] = one == two
        print(f"{path}: {layers} layers, {sum(map(len, whole)) // 4:,} logits")
        for name, is_equal in found.items():
            print(f"  {'equal' if is_equal else 'DIFFERS'}: {name}", flush=True)
            differs += not is_equal
    return differs > 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__.split("\n")[0])
    sys.exit(main(sys.argv[1].split(","), sys.argv[2:]))
