"""Loads a file of safetensors as torch tensors: `python_load.py LOADER FILE`, with the Python of the peers' environment and the package of this repository in PYTHONPATH. Prints JSON: seconds
until every page of every tensor was there, bytes, and a sum over the pages."""

import contextlib
import json
import sys
import time

import torch


def sluice(path):
    import sluice

    return sluice.load_file(path)


def safetensors(path):
    from safetensors.torch import load_file

    return load_file(path)


def fastsafetensors(path, held):
    from fastsafetensors import fastsafe_open

    file = held.enter_context(fastsafe_open(filenames=[path], nogds=True, device="cpu"))
    return {name: file.get_tensor(name) for name in file.keys()}


def runai_model_streamer(path, held):
    from runai_model_streamer import SafetensorsStreamer

    streamer = held.enter_context(SafetensorsStreamer())
    streamer.stream_file(path)
    # The streamer reuses its buffer, so tensors that are kept must be copies.
    return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def disk(path):
    """The disk's best rate: eight threads read 4 MiB at a time past the page cache, and drop the bytes."""
    import concurrent.futures
    import mmap
    import os

    size, step = os.path.getsize(path), 4 << 20
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(first):
        with mmap.mmap(-1, step) as buffer:
            return sum(os.preadv(file, [buffer], at) for at in range(first * step, size, 8 * step))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return sum(pool.map(read, range(8)))


def touched(tensors):
    """A sum over a byte of each page."""
    return sum(int(t.reshape(-1).view(torch.uint8)[::4096].sum()) for t in tensors.values() if t.numel())


loader, path = sys.argv[1:]
# The import of the reader's package is not measured.
with contextlib.suppress(ImportError):
    __import__(loader)
with contextlib.ExitStack() as held:
    begun = time.perf_counter()
    if loader == "disk":
        size, total = disk(path), 0
    else:
        load = globals()[loader]
        tensors = load(path, held) if loader in ("fastsafetensors", "runai_model_streamer") else load(path)
        total, size = touched(tensors), sum(t.nbytes for t in tensors.values())
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "bytes": size, "sum": total}), flush=True)
