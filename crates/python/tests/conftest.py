"""What the tests share: the demo model, real models, and the program to compare with. `scripts/python-test` runs them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import sluice

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"
REAL = ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf", "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf"]


@pytest.fixture(scope="session")
def model():
    with sluice.Model(DEMO) as model:
        yield model


@pytest.fixture(scope="session")
def tokenizer(model):
    return model.tokenizer


@pytest.fixture(scope="session", params=REAL)
def real_model(request):
    path = Path(os.environ.get("SLUICE_REAL_MODELS", "")) / request.param
    if not path.is_file():
        pytest.skip("SKIPPED: SLUICE_REAL_MODELS names no folder with this model")
    return path


@pytest.fixture(scope="session")
def program():
    """The command line's program, to compare with."""
    named = os.environ.get("SLUICE_PROGRAM")
    for path in [Path(named)] if named else [ROOT / "target" / profile / "sluice" for profile in ("quick", "release")]:
        if path.is_file():
            return path
    pytest.skip("SKIPPED: there is no program to compare with (cargo build --profile quick, or SLUICE_PROGRAM)")


@pytest.fixture
def python():
    """Runs a program of Python that has this package, in a process of its own; returns the process."""

    def start(code, **options):
        path = os.pathsep.join([str(Path(sluice.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "SLUICE_DEMO": str(DEMO)}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        # Programs in the background of a script ignore Ctrl-C, and so would what they start.
        obey = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        return subprocess.Popen([sys.executable, "-c", code], env=environment, preexec_fn=obey, **options)

    return start
