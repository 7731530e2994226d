"""Sluice: runs language models that are larger than memory, from the files you have.

>>> model, tokenizer = sluice.load(sluice.demo())
>>> text = sluice.generate(model, tokenizer, prompt="Once upon a time", max_tokens=16)
>>> isinstance(text, str)
True

- As ``mlx_lm``: :func:`load`, :func:`generate`, :func:`stream_generate`, :func:`batch_generate`.
- As ``vllm``: :class:`LLM`, :class:`SamplingParams`; :class:`AsyncEngine` for asyncio.
- As ``llama_cpp``: :class:`Llama`.
- As ``safetensors.torch``: :func:`load_file`.
"""

from typing import TYPE_CHECKING, Any

from ._generate import BatchResponse, GenerationResponse, batch_generate, generate, stream_generate
from ._model import Model, Tokenizer, demo, load
from ._sluice import NUMERICS_VERSION, __version__
from .errors import EngineError, Error, ModelError, RequestError
from .sampling import make_logits_processors, make_sampler

if TYPE_CHECKING:
    from .aio import AsyncEngine
    from .llama_cpp import Llama, LlamaGrammar
    from .prompt_cache import PromptCache
    from .tensors import load_file, load_tensors
    from .vllm import LLM, RequestOutput, SamplingParams

# Imported when they are first used: asyncio alone takes longer than the demo model does to load.
_LATER = {
    "AsyncEngine": "aio",
    "LLM": "vllm",
    "Llama": "llama_cpp",
    "LlamaGrammar": "llama_cpp",
    "PromptCache": "prompt_cache",
    "RequestOutput": "vllm",
    "SamplingParams": "vllm",
    "load_file": "tensors",
    "load_tensors": "tensors",
}

__all__ = [
    "LLM",
    "NUMERICS_VERSION",
    "AsyncEngine",
    "BatchResponse",
    "EngineError",
    "Error",
    "GenerationResponse",
    "Llama",
    "LlamaGrammar",
    "Model",
    "ModelError",
    "PromptCache",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Tokenizer",
    "__version__",
    "alias",
    "batch_generate",
    "demo",
    "generate",
    "load",
    "load_file",
    "load_tensors",
    "make_logits_processors",
    "make_sampler",
    "stream_generate",
]


def __getattr__(name: str) -> "Any":
    if name not in _LATER:
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"sluice.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> "list[str]":
    return sorted([*globals(), *__all__])


def alias(name: str) -> None:
    """Makes ``import llama_cpp``, ``import vllm`` or ``import mlx_lm`` mean the module of this package with that interface: for programs that import one of them themselves.

    >>> sluice.alias("llama_cpp")
    >>> from llama_cpp import Llama
    >>> Llama is sluice.Llama
    True
    """
    import importlib
    import sys

    if name not in ("llama_cpp", "vllm", "mlx_lm"):
        raise RequestError(f"{name!r} has no counterpart here; llama_cpp, vllm and mlx_lm have")
    sys.modules[name] = sys.modules[__name__] if name == "mlx_lm" else importlib.import_module(f"sluice.{name}")
    if name == "mlx_lm":
        sys.modules["mlx_lm.sample_utils"] = importlib.import_module("sluice.sampling")
