"""Generation as ``mlx_lm`` has it: ``generate``, ``stream_generate``, ``batch_generate``."""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence

from ._model import Model, Tokenizer
from .errors import RequestError
from .sampling import LogitsProcessor, Sampler, chosen_by, compiled, fresh_seed

#: Arguments of ``mlx_lm`` that say how its own memory is used. They change nothing here.
_WITHOUT_EFFECT = {"prefill_step_size", "kv_group_size", "quantized_kv_start", "num_draft_tokens", "completion_batch_size", "prefill_batch_size"}
_FORMS = ("json_schema", "json_object", "regex", "grammar", "thinking_budget")
_PLAIN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "cache_salt",
    "skip_special_tokens",
)


@dataclass
class GenerationResponse:
    """A piece of an answer. ``logprobs`` has the likeliest tokens and their log-probabilities, if they were asked for."""

    text: str
    token: int
    logprobs: "dict[int, float] | None"
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    #: The peak memory of the process in GB.
    peak_memory: float
    finish_reason: "str | None" = None
    #: Tokens of the prompt that were cached.
    cached_tokens: int = 0


@dataclass
class BatchStats:
    """Sums over a batch."""

    prompt_tokens: int = 0
    prompt_tps: float = 0.0
    prompt_time: float = 0.0
    generation_tokens: int = 0
    generation_tps: float = 0.0
    generation_time: float = 0.0
    peak_memory: float = 0.0


@dataclass
class BatchResponse:
    """The answers of a batch, in the order of the prompts."""

    texts: "list[str]"
    stats: BatchStats
    token_ids: "list[list[int]]" = field(default_factory=list)


def peak_memory() -> float:
    """The most memory that this process has had resident, in GB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def engine_params(arguments: "dict[str, Any]") -> "dict[str, Any]":
    """The engine's parameters for the arguments of ``generate``."""
    arguments = dict(arguments)
    sampler: "Any" = arguments.pop("sampler", None)
    processors: "list[LogitsProcessor]" = list(arguments.pop("logits_processors", None) or [])
    params: "dict[str, Any]" = {"temperature": 0.0}
    for name in _PLAIN:
        if arguments.get(name) is not None:
            params[name] = arguments.pop(name)
    if isinstance(sampler, Sampler):
        params.update(sampler.params())
    elif sampler is not None:
        processors.append(chosen_by(sampler))
    for name in _FORMS:
        value = arguments.pop(name, None)
        if value is not None:
            params[name] = json.dumps(value) if name == "json_schema" and not isinstance(value, str) else value
    stop = arguments.pop("stop", None)
    if stop:
        params["stop"] = [stop] if isinstance(stop, str) else list(stop)
    if arguments.get("logprobs") is not None:
        params["logprobs"] = int(arguments.pop("logprobs"))
    run = compiled(processors, rows=True)
    if run is not None:
        params["logits_processor"] = run
    if params["temperature"] > 0 and "seed" not in params:
        params["seed"] = fresh_seed()
    for name in list(arguments):
        if name in _WITHOUT_EFFECT or arguments[name] is None:
            arguments.pop(name)
    if arguments:
        raise RequestError(f"{', '.join(arguments)}: no such argument")
    return params


def prompt_tokens(tokenizer: Tokenizer, prompt: "str | Sequence[int]") -> "list[int]":
    """The tokens of a prompt. A text gets the tokenizer's own tokens in front, unless it has them."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        return tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    return [int(token) for token in prompt]


def stream_generate(
    model: Model,
    tokenizer: "Tokenizer | None" = None,
    prompt: "str | Sequence[int]" = "",
    max_tokens: int = 256,
    prompt_progress_callback: "Callable[[int, int], Any] | None" = None,
    **arguments: Any,
) -> Iterator[GenerationResponse]:
    """The pieces of an answer, as they come. What the iterator leaves is cancelled when it is closed.

    ``sampler`` is one of ``make_sampler``, or a function of log-probabilities; or there are ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed`` and penalties. ``stop``:
    texts that end the answer. ``json_schema``, ``regex`` or ``grammar`` say what it must match. ``logits_processors``: functions of tokens and logits. ``logprobs``: how many
    of the likeliest tokens to report.
    """
    tokens = prompt_tokens(tokenizer or model.tokenizer, prompt)
    stream = model.engine.generate(tokens, {**engine_params(arguments), "max_tokens": max_tokens})
    begun = time.perf_counter()
    first = begun
    count, token, prompt_tps = 0, 0, 0.0
    try:
        for _, text, new, _, top, finish in stream:
            now = time.perf_counter()
            if new is not None:
                token = new
                count += 1
                if count == 1:
                    first = now
                    prompt_tps = len(tokens) / max(now - begun, 1e-9)
                    if prompt_progress_callback:
                        prompt_progress_callback(len(tokens), len(tokens))
            yield GenerationResponse(
                text,
                token,
                None if top is None else dict(top),
                False,
                len(tokens),
                prompt_tps,
                count,
                (count - 1) / max(now - first, 1e-9),
                peak_memory() if finish else 0.0,
                _reason(finish),
                stream.cached_tokens or 0 if finish else 0,
            )
    finally:
        stream.cancel()


def _reason(finish: "str | None") -> "str | None":
    return {"context_full": "length", "stop_string": "stop"}.get(finish, finish) if finish else None


def generate(model: Model, tokenizer: "Tokenizer | None" = None, prompt: "str | Sequence[int]" = "", verbose: bool = False, **arguments: Any) -> str:
    """The whole answer. ``verbose`` prints it as it comes, and figures at the end.

    >>> model, tokenizer = sluice.load(sluice.demo())
    >>> len(sluice.generate(model, tokenizer, prompt="Once upon a time", max_tokens=8)) > 0
    True
    """
    text, last = "", None
    if verbose:
        print("=" * 10)
    for last in stream_generate(model, tokenizer, prompt, **arguments):
        text += last.text
        if verbose:
            print(last.text, end="", flush=True)
    if verbose and last is not None:
        print(f"\n{'=' * 10}\nPrompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {last.peak_memory:.3f} GB")
        sys.stdout.flush()
    return text


def batch_generate(
    model: Model,
    tokenizer: "Tokenizer | None" = None,
    prompts: "Sequence[str | Sequence[int]]" = (),
    max_tokens: "int | Sequence[int]" = 128,
    verbose: bool = False,
    **arguments: Any,
) -> BatchResponse:
    """The answers to several prompts, which are computed together: as many at once as ``load(parallel=..)`` says."""
    tokenizer = tokenizer or model.tokenizer
    params = engine_params(arguments)
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    if len(limits) != len(prompts):
        raise RequestError(f"max_tokens has {len(limits)} entries for {len(prompts)} prompts")
    begun = time.perf_counter()
    all_tokens = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    results = collect_all(model, [(tokens, {**params, "max_tokens": limit}) for tokens, limit in zip(all_tokens, limits)])
    took = time.perf_counter() - begun
    found = [result[0] for result in results]
    generated = sum(len(tokens) for _, tokens, _, _ in found)
    prompt_count = sum(map(len, all_tokens))
    stats = BatchStats(prompt_count, prompt_count / took, took, generated, generated / took, took, peak_memory())
    if verbose:
        print(f"{len(found)} answers: {generated} tokens in {took:.2f} s, {stats.generation_tps:.1f} tokens-per-sec", file=sys.stderr)
    return BatchResponse([text for text, _, _, _ in found], stats, [tokens for _, tokens, _, _ in found])


def collect_all(model: Model, asked: "Sequence[tuple[list[int], dict[str, Any]]]", told: "Callable[[int], Any] | None" = None) -> "list[Any]":
    """The whole answers to prompts. ``asked``: the tokens and parameters of each. The engine's queue is given some thousands at a time."""
    streams: "list[Any]" = []
    results: "list[Any]" = []
    window = 4096
    try:
        for tokens, params in asked:
            streams.append(model.engine.generate(tokens, params))
            if len(streams) - len(results) > window:
                results.append(streams[len(results)].collect())
        while len(results) < len(streams):
            results.append(streams[len(results)].collect())
            if told:
                told(len(results))
    finally:
        for stream in streams[len(results) :]:
            stream.cancel()
    return results


