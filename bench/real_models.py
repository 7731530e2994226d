"""The real models in GGUF that `scripts/real-models` fetches, by the names of their golden values (`tests/golden/real`). Standard library only."""

import json
import os
import sys
from pathlib import Path

from scratch import ROOT, run, say

GOLDEN = ROOT / "tests" / "golden" / "real"
# By the name of their golden values: what people call them.
MODELS = {"smollm2": "SmolLM2-135M Q4_1", "gemma3": "Gemma 3 270M Q4_K_M", "qwen2_5_coder": "Qwen2.5-Coder-0.5B Q4_K_M"}


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def folder():
    return Path(os.environ.get("SLUICE_REAL_MODELS") or ROOT / "target" / "real-models")


def path(name):
    return folder() / golden(name)["file"]


def fetch():
    """Those that are not there and can be had; returns the names of the others."""
    if missing():
        say("fetching real models (840 MB, once)")
        run([sys.executable, ROOT / "scripts" / "real-models", "--if-possible", "--to", folder()], "real-models.log")
    return missing()


def missing():
    return [name for name in MODELS if not path(name).exists()]
