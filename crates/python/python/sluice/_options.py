"""Options of engines, under the names of the command line's flags."""

import os
import re
from typing import Any

from .errors import RequestError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = ("memory_budget", "gpu_memory", "kv_spill", "expert_budget", "prompt_cache_bytes", "prompt_cache_daily_bytes")


def bytes_of(value: "int | str") -> int:
    """A number of bytes, as a number or as the command line has it: ``8G``, ``7.5GB``, ``900Mi``.

    >>> bytes_of("8G"), bytes_of("2KiB"), bytes_of(5)
    (8000000000, 2048, 5)
    """
    if isinstance(value, int):
        return value
    found = re.fullmatch(r"([0-9.]+)\s*([kmgt]?i?)b?", str(value).strip().lower())
    try:
        return int(float(found.group(1)) * _UNITS[found.group(2)])  # type: ignore[union-attr]
    except (AttributeError, KeyError, ValueError):
        raise RequestError(f"expected a number of bytes, such as 8G, 7.5GB or 900Mi, found {value!r}") from None


def cache_folder() -> str:
    """The folder of what can be made again, which the command line uses too: ``~/.cache/sluice``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache"), "sluice")


def _private(folder: str) -> "str | None":
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


def tokenizer_cache() -> "str | None":
    """The folder of compiled tokenizers, which the command line uses too. ``None`` where it cannot be made: then nothing is kept."""
    return _private(os.path.join(cache_folder(), "tokenizers"))


def normalised(options: "dict[str, Any]") -> "dict[str, Any]":
    """The options under the engine's names, checked."""
    found = {name: value for name, value in options.items() if value is not None}
    for name in _BYTES:
        if name in found:
            found[name] = bytes_of(found[name])
    home = _private(cache_folder())
    if home:
        found.setdefault("disk_speeds_file", os.path.join(home, "disks.json"))
    cache = found.pop("prompt_cache", None)
    if cache not in (None, False):
        found["prompt_cache"] = os.path.join(cache_folder(), "prompt-cache") if cache is True else os.fspath(cache)
        if home:
            found.setdefault("sums_file", os.path.join(home, "sums.json"))
    return found
