"""How tokens are chosen: samplers and logits processors, as ``mlx_lm.sample_utils`` has them, and what the engine makes of them."""

import math
import random
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

from .errors import RequestError

#: ``processor(tokens, logits)``: numpy arrays. It changes ``logits`` in place, or returns others.
LogitsProcessor = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sampler:
    """Parameters that the engine samples with itself. ``make_sampler`` makes one."""

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0

    def params(self) -> "dict[str, Any]":
        """The parameters under the engine's names. As in ``mlx_lm``, a ``top_p`` of 0 keeps all tokens."""
        top_p = self.top_p if 0 < self.top_p < 1 else 1.0
        return {"temperature": self.temp, "top_p": top_p, "min_p": self.min_p, "top_k": self.top_k}


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.0,
    xtc_special_tokens: "Sequence[int]" = (),
) -> Sampler:
    """The sampler with these parameters; temperature 0 takes the likeliest token.

    >>> make_sampler(temp=0.7, top_p=0.9).params()
    {'temperature': 0.7, 'top_p': 0.9, 'min_p': 0.0, 'top_k': 0}
    """
    if xtc_probability:
        raise RequestError("xtc_probability is not supported")
    return Sampler(temp, top_p, min_p, top_k)


def make_logits_processors(
    logit_bias: "dict[int, float] | None" = None,
    repetition_penalty: "float | None" = None,
    repetition_context_size: "int | None" = 20,
) -> "list[LogitsProcessor]":
    """Processors for a bias of single tokens, and for a penalty on the newest tokens."""
    processors: "list[LogitsProcessor]" = []
    if logit_bias:
        processors.append(biased(logit_bias))
    if repetition_penalty and repetition_penalty != 1.0:

        def penalise(tokens: Any, logits: Any) -> Any:
            recent = tokens[-repetition_context_size:] if repetition_context_size else tokens
            chosen = logits[..., recent]
            logits[..., recent] = _where(chosen, repetition_penalty)
            return logits

        processors.append(penalise)
    return processors


def _where(chosen: Any, penalty: float) -> Any:
    import numpy

    return numpy.where(chosen < 0, chosen * penalty, chosen / penalty)


def biased(logit_bias: "dict[Any, float]") -> LogitsProcessor:
    """Adds to each token's logit its number in ``logit_bias``."""
    ids, values = [int(token) for token in logit_bias], list(logit_bias.values())

    def bias(tokens: Any, logits: Any) -> Any:
        for token, value in zip(ids, values):
            logits[..., token] += value
        return logits

    return bias


def allowed(token_ids: Iterable[int]) -> LogitsProcessor:
    """Allows these tokens alone."""
    ids = sorted({int(token) for token in token_ids})

    def allow(tokens: Any, logits: Any) -> Any:
        kept = logits[..., ids].copy()
        logits[...] = -math.inf
        logits[..., ids] = kept
        return logits

    return allow


def without_end_before(min_tokens: int, prompt_tokens: int, end_ids: Iterable[int]) -> LogitsProcessor:
    """Rules out the tokens that end an answer, until it has ``min_tokens`` tokens."""
    ids = sorted(end_ids)

    def go_on(tokens: Any, logits: Any) -> Any:
        if len(tokens) - prompt_tokens < min_tokens:
            logits[..., ids] = -math.inf
        return logits

    return go_on


def chosen_by(sampler: "Callable[[Any], Any]") -> LogitsProcessor:
    """A processor that lets ``sampler`` choose the token, from log-probabilities ``[1, vocabulary]``, and rules out all others."""

    def choose(tokens: Any, logits: Any) -> Any:
        import numpy

        shifted = logits - logits.max()
        logprobs = shifted - numpy.log(numpy.exp(shifted).sum())
        token = int(numpy.asarray(sampler(logprobs.reshape(1, -1))).reshape(-1)[0])
        logits[...] = -math.inf
        logits[..., token] = 0.0
        return logits

    return choose


def compiled(processors: "Sequence[LogitsProcessor]", rows: bool = False) -> "Callable[[Any, Any], None] | None":
    """One function that runs all of them on the engine's arrays. ``rows``: logits are ``[1, vocabulary]`` and not ``[vocabulary]``."""
    if not processors:
        return None
    import numpy

    def run(tokens: Any, logits: Any) -> None:
        ids = numpy.asarray(tokens)
        out = numpy.asarray(logits)
        shown = out.reshape(1, -1) if rows else out
        found = shown
        for processor in processors:
            returned = processor(ids, found)
            if returned is not None:
                found = returned
        if found is not shown:
            out[...] = numpy.asarray(found, dtype=numpy.float32).reshape(-1)

    return run


def fresh_seed() -> int:
    """A seed that nobody chose."""
    return random.getrandbits(63)
