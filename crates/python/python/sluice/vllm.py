"""The interface of ``vllm``: ``LLM(model).generate(prompts, SamplingParams(..))`` and ``.chat(messages)``."""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Sequence

from ._generate import collect_all
from ._model import Model, Tokenizer
from .errors import RequestError
from .sampling import LogitsProcessor, allowed, biased, compiled, fresh_seed, without_end_before

#: Arguments of ``vllm.LLM`` that change nothing here, since there is one way or the model's files say it.
_WITHOUT_EFFECT = {
    "block_size",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "distributed_executor_backend",
    "download_dir",
    "dtype",
    "enable_chunked_prefill",
    "enforce_eager",
    "gpu_memory_utilization",
    "load_format",
    "max_num_batched_tokens",
    "max_seq_len_to_capture",
    "quantization",
    "skip_tokenizer_init",
    "swap_space",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
}


@dataclass
class SamplingParams:
    """How answers are generated. The names and defaults are ``vllm``'s; ``max_tokens`` of ``None`` is as many as fit the context.

    >>> SamplingParams(temperature=0, max_tokens=8).max_tokens
    8
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: "int | None" = None
    stop: "str | list[str] | None" = None
    stop_token_ids: "list[int] | None" = None
    ignore_eos: bool = False
    max_tokens: "int | None" = 16
    min_tokens: int = 0
    logprobs: "int | None" = None
    prompt_logprobs: "int | None" = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logits_processors: "list[LogitsProcessor] | None" = None
    truncate_prompt_tokens: "int | None" = None
    logit_bias: "dict[int, float] | None" = None
    allowed_token_ids: "list[int] | None" = None
    #: ``{"json": schema}``, ``{"regex": ..}``, ``{"grammar": ..}`` (Lark), ``{"choice": [..]}`` or ``{"json_object": True}``, or an object with such attributes.
    structured_outputs: Any = None
    guided_decoding: Any = None
    best_of: "int | None" = None
    bad_words: "list[str] | None" = None
    extra_args: "dict[str, Any] | None" = None

    def __post_init__(self) -> None:
        if self.include_stop_str_in_output:
            raise RequestError("include_stop_str_in_output is not supported")
        if self.bad_words:
            raise RequestError("bad_words are not supported: logit_bias or logits_processors rule tokens out")
        if self.best_of not in (None, self.n):
            raise RequestError("best_of is not supported")

    def engine_params(self, prompt: "list[int]", end_ids: "set[int]") -> "dict[str, Any]":
        """The parameters under the engine's names."""
        params: "dict[str, Any]" = {
            name: getattr(self, name)
            for name in (
                "n",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "max_tokens",
                "ignore_eos",
                "stop_token_ids",
                "logprobs",
                "skip_special_tokens",
            )
        }
        if self.stop:
            params["stop"] = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        params["seed"] = self.seed if self.seed is not None else fresh_seed() if self.temperature > 0 else 0
        processors = list(self.logits_processors or [])
        if self.logit_bias:
            processors.append(biased(self.logit_bias))
        if self.allowed_token_ids:
            processors.append(allowed(self.allowed_token_ids))
        if self.min_tokens:
            processors.append(without_end_before(self.min_tokens, len(prompt), end_ids | set(self.stop_token_ids or [])))
        run = compiled(processors)
        if run is not None:
            params["logits_processor"] = run
        params.update(_form(self.structured_outputs or self.guided_decoding))
        return params


def _form(spec: Any) -> "dict[str, Any]":
    if spec is None:
        return {}

    def get(name: str) -> Any:
        return spec.get(name) if isinstance(spec, dict) else getattr(spec, name, None)

    if get("json") is not None:
        schema = get("json")
        return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
    if get("choice"):
        import re

        return {"regex": "|".join(re.escape(choice) for choice in get("choice"))}
    for name in ("regex", "grammar", "json_object"):
        if get(name):
            return {name: get(name)}
    raise RequestError("structured_outputs: expected json, regex, grammar, choice or json_object")


@dataclass
class Logprob:
    """The log-probability of a token at its place."""

    logprob: float
    rank: "int | None" = None
    decoded_token: "str | None" = None


@dataclass
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: "list[int]"
    cumulative_logprob: "float | None"
    logprobs: "list[dict[int, Logprob]] | None"
    finish_reason: "str | None" = None
    stop_reason: "int | str | None" = None

    def finished(self) -> bool:
        """Whether it is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The answers to a prompt."""

    request_id: str
    prompt: "str | None"
    prompt_token_ids: "list[int]"
    outputs: "list[CompletionOutput]"
    finished: bool
    prompt_logprobs: "list[dict[int, Logprob] | None] | None" = None
    num_cached_tokens: "int | None" = None
    metrics: Any = None


@dataclass
class EmbeddingOutput:
    """A vector."""

    embedding: "list[float]"


@dataclass
class EmbeddingRequestOutput:
    """The vector of a prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: "list[int]"
    finished: bool = True


def reason_of(finish: "str | None") -> "str | None":
    """The engine's reason in ``vllm``'s words."""
    return {"context_full": "length", "stop_string": "stop", "cancelled": "abort"}.get(finish, finish) if finish else None


def logprobs_of(tokenizer: Tokenizer, tokens: "Sequence[int]", found: "Sequence[tuple[float, Any]]") -> "list[dict[int, Logprob]]":
    """Log-probabilities by token: the likeliest ones, and the chosen one."""
    lists = []
    for token, (chosen, top) in zip(tokens, found):
        ranked = {one: Logprob(value, rank, tokenizer.decode([one])) for rank, (one, value) in enumerate(top, 1)}
        ranked.setdefault(token, Logprob(chosen, None, tokenizer.decode([token])))
        lists.append(ranked)
    return lists


def output_of(tokenizer: Tokenizer, index: int, whole: Any, with_logprobs: bool) -> CompletionOutput:
    """An answer of the engine's."""
    text, tokens, logprobs, finish = whole
    lists = logprobs_of(tokenizer, tokens, logprobs) if with_logprobs else None
    total = sum(chosen for chosen, _ in logprobs) if with_logprobs else None
    return CompletionOutput(index, text, list(tokens), total, lists, reason_of(finish))


class LLM:
    """A model for whole answers to many prompts at once.

    >>> llm = LLM(sluice.demo())
    >>> outputs = llm.generate(["Once upon a time", "The cat"], SamplingParams(temperature=0, max_tokens=4))
    >>> [len(output.outputs[0].token_ids) for output in outputs]
    [4, 4]
    """

    def __init__(
        self,
        model: "str | os.PathLike[str] | Model",
        tokenizer: Any = None,
        *,
        seed: "int | None" = None,
        max_model_len: "int | None" = None,
        max_num_seqs: int = 16,
        enable_prefix_caching: bool = True,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
        revision: "str | None" = None,
        **options: Any,
    ):
        if tokenizer not in (None, model):
            raise RequestError("tokenizer: a model is used with its own")
        options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
        devices = tensor_parallel_size * pipeline_parallel_size
        if devices > 1:
            options.setdefault("device", "cuda:" + ",".join(map(str, range(devices))))
        if kv_cache_dtype != "auto":
            options.setdefault("kv_type", kv_cache_dtype)
        name: Any = f"{model}@{revision}" if revision else model
        settings: "dict[str, Any]" = {"max_context": max_model_len, "parallel": max_num_seqs, "prefix_cache": enable_prefix_caching}
        self.llm_engine = model if isinstance(model, Model) else Model(name, **settings, **options)
        self._seed = seed
        self._count = 0

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's files suggest."""
        temperature, top_k, top_p, min_p, penalty = self.llm_engine.tokenizer._inner.defaults
        return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)

    def generate(
        self,
        prompts: Any,
        sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
        use_tqdm: Any = False,
        **_: Any,
    ) -> "list[RequestOutput]":
        """The answers to prompts: texts, lists of tokens, or ``{"prompt": ..}`` or ``{"prompt_token_ids": ..}``. They are computed together."""
        single = isinstance(prompts, (str, dict)) or bool(prompts) and isinstance(prompts[0], int)
        return self._answers([self._prompt(one) for one in ([prompts] if single else prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: "SamplingParams | Sequence[SamplingParams] | None" = None,
        use_tqdm: Any = False,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: "dict[str, Any] | None" = None,
        **_: Any,
    ) -> "list[RequestOutput]":
        """The answers to conversations, or to one."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        tokenizer = self.llm_engine.tokenizer
        variables = chat_template_kwargs or {}
        prompts = [
            tokenizer.apply_chat_template(one, tools, add_generation_prompt=add_generation_prompt, **variables) for one in conversations
        ]
        return self._answers([(None, list(tokens)) for tokens in prompts], sampling_params, use_tqdm)  # type: ignore[arg-type]

    def embed(self, prompts: Any, **_: Any) -> "list[EmbeddingRequestOutput]":
        """A vector for each prompt."""
        single = isinstance(prompts, (str, dict)) or bool(prompts) and isinstance(prompts[0], int)
        tokens = [self._prompt(one)[1] for one in ([prompts] if single else prompts)]
        vectors = self.llm_engine.embed(tokens)
        return [
            EmbeddingRequestOutput(self._next_id(), EmbeddingOutput([float(x) for x in vector]), ids) for ids, vector in zip(tokens, vectors)
        ]

    def close(self) -> None:
        """Frees the memory."""
        self.llm_engine.close()

    def _prompt(self, prompt: Any) -> "tuple[str | None, list[int]]":
        if isinstance(prompt, str):
            return prompt, self.llm_engine.tokenizer.encode(prompt)
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), [int(token) for token in prompt["prompt_token_ids"]]
            return prompt["prompt"], self.llm_engine.tokenizer.encode(prompt["prompt"])
        return None, [int(token) for token in prompt]

    def _next_id(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def _answers(self, prompts: "list[tuple[str | None, list[int]]]", params: Any, use_tqdm: Any) -> "list[RequestOutput]":
        all_params = list(params) if isinstance(params, (list, tuple)) else [params or self.get_default_sampling_params()] * len(prompts)
        if len(all_params) != len(prompts):
            raise RequestError(f"there are {len(all_params)} sampling_params for {len(prompts)} prompts")
        tokenizer = self.llm_engine.tokenizer
        ends = tokenizer.eos_token_ids
        asked = []
        for at, ((_, tokens), one) in enumerate(zip(prompts, all_params)):
            if one.truncate_prompt_tokens:
                tokens[:] = tokens[-one.truncate_prompt_tokens :]
            found = one.engine_params(tokens, ends)
            if one.seed is None and self._seed is not None:
                found["seed"] = self._seed + at
            asked.append((tokens, found))
        told = None
        if use_tqdm and asked:
            told = lambda done: print(f"\r{done}/{len(asked)}", end="" if done < len(asked) else "\n", file=sys.stderr, flush=True)  # noqa: E731
        results = collect_all(self.llm_engine, asked, told)
        outputs = []
        for (text, tokens), one, result in zip(prompts, all_params, results):
            answers = [output_of(tokenizer, index, whole, one.logprobs is not None) for index, whole in enumerate(result)]
            scored = self._prompt_logprobs(tokens, one.prompt_logprobs)
            outputs.append(RequestOutput(self._next_id(), text, tokens, answers, True, scored))
        return outputs

    def _prompt_logprobs(self, tokens: "list[int]", top: "int | None") -> "list[dict[int, Logprob] | None] | None":
        if top is None:
            return None
        found = self.llm_engine.engine.logprobs(tokens, 1, top)
        rest: "list[dict[int, Logprob] | None]" = list(logprobs_of(self.llm_engine.tokenizer, tokens[1:], found))
        return [None, *rest]


@dataclass
class StructuredOutputsParams:
    """What an answer must match."""

    json: Any = None
    regex: "str | None" = None
    choice: "list[str] | None" = None
    grammar: "str | None" = None
    json_object: "bool | None" = None
