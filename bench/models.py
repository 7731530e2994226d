"""Random-weight models in the scratch folder, made when first asked for. Standard library only; `make_model.py` writes them, and `sluice pack` makes bundles of them."""

import os
import shutil
from pathlib import Path

from peers import PYTHON, SLUICE
from scratch import DIR, need_free, run, say
from shapes import tensors

BITS = {"bf16": 16, "q8": 8.5, "q6": 6.5, "q4": 4.5, "q3": 3.5, "q2": 2.5}
BITS |= {"BF16": 16, "Q8_0": 8.5, "Q6_K": 6.5625, "Q4_0": 4.5, "Q3_K": 3.4375, "Q2_K": 2.625}
BITS |= {"Q4_K_M": 5.0, "IQ4_XS": 4.25, "MXFP4": 5.2, "UD-Q2_K": 3.0}


BUNDLE = "-bundle"


def model_path(shape, form):
    return DIR / "models" / f"{shape}-{form}{'.gguf' if form[0].isupper() else ''}"


def model(shape, form):
    """The path of a model: a folder for Sluice's forms, a file for llama.cpp's. A form that ends with `-bundle` is packed from the one without."""
    return _made(model, model_path(shape, form), shape, form)


def served(shape, form):
    """The same model with a vocabulary, so that it can be served."""
    name = f"{shape}-{form.removesuffix(BUNDLE)}-text"
    ending = BUNDLE if form.endswith(BUNDLE) else ".gguf" if form[0].isupper() else ""
    return _made(served, model_path(shape, form).with_name(name + ending), shape, form, "text")


def quickly(shape, form, *text):
    """The same as `model`, or with `"text"` as `served`, of a pool of random blocks, and with what other suites have made already: for models so large that their numbers would take
    minutes."""
    path = model_path(shape, form)
    return _made(quickly, path.with_name("-".join([path.name, *text])), shape, form, *text, "pooled")


def planted(shape, form, part):
    """One of a pair that agrees as `planted.py` says, from a pool of random blocks; `part` is `planted`, or `drafter` for the smaller one. Of a bundle the folder that it is packed from is not
    kept."""
    ending = BUNDLE if form.endswith(BUNDLE) else ".gguf" if form[0].isupper() else ""
    path = DIR / "models" / f"{shape}-{form.removesuffix(BUNDLE)}-{part}{ending}"
    source = path.with_name(path.name.removesuffix(ending))
    made = _made(lambda shape, form: planted(shape, form, part), path, shape, form, "text", "pooled", part)
    if ending == BUNDLE:
        shutil.rmtree(source, ignore_errors=True)
    return made


def _made(of, path, shape, form, *more):
    """Makes the model if it is not there; `of` gives the model that a bundle is packed from."""
    if not path.exists():
        need_free(bytes_of(shape, form), path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if form.endswith(BUNDLE):
            pack(of(shape, form.removesuffix(BUNDLE)), path)
        else:
            say(f"making {path.name}")
            run([PYTHON, Path(__file__).with_name("make_model.py"), shape, form, path, *more], f"{path.name}.log")
    return path


def pack(source, path, bits="none"):
    """A bundle of a model; blocks of GGUF need `bits`, since they would become floats."""
    say(f"making {path.name}")
    unfinished = path.with_name(path.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    run([SLUICE, "pack", source, unfinished, "--bits", bits, "--layout", "bundle"], f"{path.name}.log")
    unfinished.rename(path)


def bytes_of(shape, form):
    """About how many bytes a model has."""
    rest, _, experts = (form, "", "") if form in BITS else form.removesuffix(BUNDLE).partition("-")
    return int(sum(_product(t.shape) * BITS[experts if experts and t.kind == "expert" else rest] for t in tensors(shape)) / 8)


def files(path):
    """A model's files of weights."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def evict(path):
    """Drops a model's files from the page cache, where they may lie in small pages since they were written: as after a start of the machine, the next load decides."""
    for name in files(path):
        file = os.open(name, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def size(path):
    """Bytes of a model's weights; an error if they are not all on the disk."""
    for file in files(path):
        stat = os.stat(file)
        assert stat.st_blocks * 512 >= stat.st_size, f"{file} is sparse"
    return sum(file.stat().st_size for file in files(path))


def _product(numbers):
    result = 1
    for n in numbers:
        result *= n
    return result
