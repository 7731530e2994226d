"""Random-weight models in the scratch folder, made when first asked for. Standard library only; `make_model.py` writes them."""

import os
from pathlib import Path

from peers import PYTHON
from scratch import DIR, need_free, run, say
from shapes import tensors

BITS = {"bf16": 16, "q8": 8.5, "q6": 6.5, "q4": 4.5, "q3": 3.5, "q2": 2.5}
BITS |= {"BF16": 16, "Q8_0": 8.5, "Q6_K": 6.5625, "Q4_0": 4.5, "Q3_K": 3.4375, "Q2_K": 2.625}


def model(shape, form):
    """The path of a model: a folder for Sluice's forms, a file for llama.cpp's."""
    path = DIR / "models" / f"{shape}-{form}{'.gguf' if form[0].isupper() else ''}"
    if not path.exists():
        need_free(bytes_of(shape, form), path.name)
        say(f"making {path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        run([PYTHON, Path(__file__).with_name("make_model.py"), shape, form, path], f"{path.name}.log")
    return path


def bytes_of(shape, form):
    """About how many bytes a model has."""
    return int(sum(_product(t.shape) for t in tensors(shape)) * BITS[form] / 8)


def evict(path):
    """Drops a model's file from the page cache, where it may lie in small pages since it was written: as after a start of the machine, the next load decides."""
    file = os.open(path / "model.safetensors", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def size(path):
    """Bytes of a model's weights; an error if they are not all on the disk."""
    file = path / "model.safetensors" if path.is_dir() else path
    stat = os.stat(file)
    assert stat.st_blocks * 512 >= stat.st_size, f"{file} is sparse"
    return stat.st_size


def _product(numbers):
    result = 1
    for n in numbers:
        result *= n
    return result
