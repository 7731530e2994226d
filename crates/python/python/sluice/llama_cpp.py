"""The interface of ``llama_cpp`` (llama-cpp-python): ``Llama(model_path=..)`` and its completions."""

import os
import time
import uuid
from typing import Any, Callable, Iterator, Sequence

from ._generate import collect_all
from ._model import Model, Tokenizer
from .errors import RequestError
from .sampling import biased, compiled, fresh_seed

#: Arguments of ``Llama`` that say how llama.cpp uses memory and devices, or that have one way here.
_WITHOUT_EFFECT = {
    "chat_format",
    "f16_kv",
    "chat_handler",
    "embedding",
    "flash_attn",
    "last_n_tokens_size",
    "logits_all",
    "main_gpu",
    "mul_mat_q",
    "n_parts",
    "n_threads_batch",
    "numa",
    "offload_kqv",
    "op_offload",
    "pooling_type",
    "spm_infill",
    "split_mode",
    "swa_full",
    "tensor_split",
    "tokenizer",
    "type_k",
    "type_v",
    "use_mlock",
    "use_mmap",
    "verbose",
    "vocab_only",
}
#: Arguments of ``Llama`` that would change the output, with the values that mean "as the model's files say", or that programs send as a default.
_AS_FILES_SAY: "dict[str, Any]" = {"rope_freq_base": (0, 10000.0), "rope_freq_scale": (0, 1.0), "rope_scaling_type": (-1,), "lora_scale": (1.0,), "no_perf": (False, True)}
#: Arguments of generations that llama.cpp has and Sluice does not, with the values that mean "off".
_OFF: "dict[str, Any]" = {"tfs_z": 1.0, "typical_p": 1.0, "mirostat_mode": 0, "xtc_probability": 0.0, "suffix": None, "functions": None, "function_call": None, "stopping_criteria": None}
#: Parameters of what is off.
_IGNORED = {"mirostat_tau", "mirostat_eta", "xtc_threshold", "penalize_nl", "model"}

LogitsProcessorList = list
StoppingCriteriaList = list


class LlamaGrammar:
    """What an answer must match."""

    def __init__(self, params: "dict[str, Any]"):
        self.params = params

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> "LlamaGrammar":
        """JSON of this schema."""
        return cls({"json_schema": json_schema})

    @classmethod
    def from_regex(cls, regex: str) -> "LlamaGrammar":
        """Text that matches this regular expression."""
        return cls({"regex": regex})

    @classmethod
    def from_lark(cls, grammar: str) -> "LlamaGrammar":
        """Text of this grammar, in llguidance's Lark."""
        return cls({"grammar": grammar})

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> "LlamaGrammar":
        """GBNF is not supported."""
        raise RequestError("grammars in GBNF are not supported: from_json_schema, from_regex and from_lark make one")


def _check_off(arguments: "dict[str, Any]") -> None:
    for name, value in arguments.items():
        if name in _IGNORED or name in _OFF and value in (_OFF[name], None, [], 0):
            continue
        raise RequestError(f"{name} is not supported")


# The arguments of a completion that say how tokens are drawn.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repeat_penalty", "seed", "logits_processor", "grammar", "logit_bias")


class Llama:
    """A model with the interface of llama-cpp-python.

    >>> llm = Llama(model_path=sluice.demo(), n_ctx=256)
    >>> llm("Once upon a time", max_tokens=4, temperature=0)["usage"]["completion_tokens"]
    4
    """

    def __init__(
        self,
        model_path: "str | os.PathLike[str]",
        *,
        n_gpu_layers: int = 0,
        n_ctx: int = 512,
        n_batch: "int | None" = None,
        n_ubatch: "int | None" = None,
        n_threads: "int | None" = None,
        seed: int = 0xFFFFFFFF,
        **options: Any,
    ):
        as_it_is = {name for name, value in options.items() if value in _AS_FILES_SAY.get(name, ())}
        options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT and name not in as_it_is}
        options.setdefault("device", "auto" if n_gpu_layers else "cpu")
        options.setdefault("parallel", 1)
        self.model_path = os.fspath(model_path)
        self._model = Model(model_path, max_context=n_ctx or None, chunk=n_ubatch or n_batch, threads=n_threads, **options)
        self._seed = seed

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: "str | None" = None, *, revision: "str | None" = None, **options: Any) -> "Llama":
        """A model of the hub: a file of it by its name, or by the quantisation in a pattern such as ``*q4_k_m.gguf``."""
        for name in ("additional_files", "local_dir", "local_dir_use_symlinks", "cache_dir"):
            if options.pop(name, None) not in (None, "auto", []):
                raise RequestError(f"{name} is not supported: HF_HUB_CACHE names another cache")
        if filename is None:
            name = repo_id
        elif "*" in filename or "?" in filename:
            label = filename.removesuffix(".gguf").strip("*?").lstrip("-._")
            if not label or "*" in label or "?" in label:
                raise RequestError(f"filename {filename!r}: name the file, or its quantisation as in '*q4_k_m.gguf'")
            name = f"{repo_id}:{label}"
        else:
            return cls(f"https://huggingface.co/{repo_id}/resolve/{revision or 'main'}/{filename}", **options)
        return cls(f"{name}@{revision}" if revision else name, **options)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> "list[int]":
        """The tokens of a text."""
        return self._model.tokenizer.encode(text.decode(), add_bos, parse_special=special)

    def detokenize(self, tokens: "Sequence[int]", prev_tokens: Any = None, special: bool = False) -> bytes:
        """The text of tokens."""
        return self._model.tokenizer.decode(tokens, skip_special_tokens=not special).encode()

    def n_ctx(self) -> int:
        """The longest context in tokens."""
        return self._model.context

    def n_vocab(self) -> int:
        """The size of the vocabulary."""
        return self._model.engine.vocabulary

    def n_embd(self) -> int:
        """Width of hidden states."""
        return self._model.engine.hidden

    def token_eos(self) -> int:
        """A token that ends an answer; -1 without one."""
        end = self._model.tokenizer.eos_token_id
        return -1 if end is None else end

    def token_bos(self) -> int:
        """The token that texts begin with; -1 without one."""
        begin = self._model.tokenizer.bos_token_id
        return -1 if begin is None else begin

    def set_seed(self, seed: int) -> None:
        """Sets the seed of what follows."""
        self._seed = seed

    def create_embedding(self, input: "str | list[str]", model: "str | None" = None) -> "dict[str, Any]":
        """Vectors of texts, as OpenAI's API has them."""
        return self._model.request("POST", "/v1/embeddings", {"input": input})

    def embed(self, input: "str | list[str]", normalize: bool = True, truncate: bool = True, return_count: bool = False) -> Any:
        """Vectors of texts, as lists."""
        found = [[float(x) for x in vector] for vector in self._model.embed(input)]
        return found[0] if isinstance(input, str) else found

    def _params(self, arguments: "dict[str, Any]") -> "dict[str, Any]":
        params = {
            "temperature": arguments.pop("temperature"),
            "top_p": arguments.pop("top_p"),
            "top_k": arguments.pop("top_k"),
            "min_p": arguments.pop("min_p"),
            "frequency_penalty": arguments.pop("frequency_penalty"),
            "presence_penalty": arguments.pop("presence_penalty"),
            "repetition_penalty": arguments.pop("repeat_penalty"),
        }
        # As in llama.cpp, where values outside of the range switch a filter off.
        params["top_p"] = params["top_p"] if 0 < params["top_p"] <= 1 else 1.0
        params["temperature"] = max(params["temperature"], 0.0)
        seed = arguments.pop("seed", None)
        seed = self._seed if seed is None else seed
        params["seed"] = fresh_seed() if seed in (-1, 0xFFFFFFFF) else seed
        processors = list(arguments.pop("logits_processor", None) or [])
        bias = arguments.pop("logit_bias", None)
        if bias:
            processors.append(biased(bias))
        run = compiled(processors)
        if run is not None:
            params["logits_processor"] = run
        grammar = arguments.pop("grammar", None)
        if grammar is not None:
            params.update(grammar.params)
        return params

    def create_completion(
        self,
        prompt: "str | list[int]",
        max_tokens: "int | None" = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        top_k: int = 40,
        logprobs: "int | None" = None,
        echo: bool = False,
        stop: "str | list[str] | None" = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        stream: bool = False,
        seed: "int | None" = None,
        model: "str | None" = None,
        logits_processor: "list[Callable[[Any, Any], Any]] | None" = None,
        grammar: "LlamaGrammar | None" = None,
        logit_bias: "dict[int, float] | None" = None,
        **others: Any,
    ) -> Any:
        """Continues a text: an object of OpenAI's API, or with ``stream`` an iterator of its chunks."""
        _check_off(others)
        given = locals()
        params = self._params({name: given[name] for name in SAMPLING})
        params["max_tokens"] = max_tokens if max_tokens and max_tokens > 0 else None
        params["stop"] = [stop] if isinstance(stop, str) else list(stop or [])
        if logprobs is not None:
            params["logprobs"] = logprobs
        tokens = self._model.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        head = {"id": f"cmpl-{uuid.uuid4()}", "object": "text_completion", "created": int(time.time()), "model": model or self.model_path}
        if stream:
            return self._completion_chunks(head, tokens, params, prompt if echo else None)
        text, ids, found_logprobs, finish = collect_all(self._model, [(tokens, params)])[0][0]
        shown = (prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt)) if echo else ""
        choice = {"text": shown + text, "index": 0, "logprobs": None, "finish_reason": _reason(finish)}
        if logprobs is not None:
            choice["logprobs"] = self._logprobs(tokens if echo else [], ids, found_logprobs, logprobs)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(ids), "total_tokens": len(tokens) + len(ids)}
        return {**head, "choices": [choice], "usage": usage}

    __call__ = create_completion

    def _completion_chunks(self, head: "dict[str, Any]", tokens: "list[int]", params: "dict[str, Any]", echo: Any) -> "Iterator[dict[str, Any]]":
        def chunk(text: str, finish: "str | None") -> "dict[str, Any]":
            return {**head, "choices": [{"text": text, "index": 0, "logprobs": None, "finish_reason": finish}]}

        source = self._model.engine.generate(tokens, {name: value for name, value in params.items() if value is not None})
        try:
            if echo is not None:
                yield chunk(echo if isinstance(echo, str) else self._model.tokenizer.decode(echo), None)
            for _, text, _, _, _, finish in source:
                if text:
                    yield chunk(text, None)
                if finish:
                    yield chunk("", _reason(finish))
        finally:
            source.cancel()

    def _logprobs(self, prompt: "list[int]", ids: "list[int]", found: "list[tuple[float, Any]]", top: int) -> "dict[str, Any]":
        """Log-probabilities in the form of OpenAI's completions; those of the prompt, too, if it is echoed."""
        scored = list(found)
        if len(prompt) > 1:
            scored = [(None, []), *self._model.engine.logprobs(prompt, 1, top), *scored]  # type: ignore[list-item]
        elif prompt:
            scored = [(None, []), *scored]  # type: ignore[list-item]
        pieces = self._model.tokenizer._inner.pieces(prompt + ids, True)
        offsets, at = [], 0
        for piece in pieces[:-1]:
            offsets.append(at)
            at += len(piece)
        decode = self._model.tokenizer.decode
        return {
            "tokens": pieces[:-1],
            "text_offset": offsets,
            "token_logprobs": [chosen for chosen, _ in scored],
            "top_logprobs": [{decode([token]): value for token, value in likeliest} if likeliest else None for _, likeliest in scored],
        }

    def create_chat_completion(
        self,
        messages: "Sequence[dict[str, Any]]",
        tools: Any = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        stream: bool = False,
        stop: "str | list[str] | None" = None,
        seed: "int | None" = None,
        response_format: "dict[str, Any] | None" = None,
        max_tokens: "int | None" = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        model: "str | None" = None,
        logits_processor: Any = None,
        grammar: "LlamaGrammar | None" = None,
        logit_bias: "dict[int, float] | None" = None,
        logprobs: "bool | None" = None,
        top_logprobs: "int | None" = None,
        **others: Any,
    ) -> Any:
        """Answers a conversation: an object of OpenAI's API, or with ``stream`` an iterator of its chunks. Tools, thoughts and JSON are the server's."""
        _check_off(others)
        given = locals()
        params = self._params({name: given[name] for name in SAMPLING})
        if "logits_processor" in params or grammar is not None:
            if tools:
                raise RequestError("tools cannot be called together with logits_processor, logit_bias or grammar")
            return self._chat_by_tokens(list(messages), params, max_tokens, stop, stream, model)
        body: "dict[str, Any]" = {**params, "seed": params["seed"] % 2**63, "messages": list(messages)}
        for name in ("tools", "tool_choice", "response_format", "stop", "logprobs", "top_logprobs"):
            if given[name] is not None:
                body[name] = given[name]
        schema = (response_format or {}).get("schema")
        if schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        if max_tokens and max_tokens > 0:
            body["max_tokens"] = max_tokens
        if stream:
            return self._model.stream_request("/v1/chat/completions", body)
        return self._model.request("POST", "/v1/chat/completions", body)

    def _chat_by_tokens(self, messages: Any, params: "dict[str, Any]", max_tokens: Any, stop: Any, stream: bool, model: Any) -> Any:
        tokens = self._model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        if max_tokens and max_tokens > 0:
            params["max_tokens"] = max_tokens
        if stop:
            params["stop"] = [stop] if isinstance(stop, str) else list(stop)
        head = {"id": f"chatcmpl-{uuid.uuid4()}", "created": int(time.time()), "model": model or self.model_path}
        if stream:
            return self._chat_chunks(head, list(tokens), params)  # type: ignore[arg-type]
        text, ids, _, finish = collect_all(self._model, [(list(tokens), params)])[0][0]  # type: ignore[arg-type]
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": _reason(finish)}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(ids), "total_tokens": len(tokens) + len(ids)}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def _chat_chunks(self, head: "dict[str, Any]", tokens: "list[int]", params: "dict[str, Any]") -> "Iterator[dict[str, Any]]":
        def chunk(delta: "dict[str, str]", finish: "str | None") -> "dict[str, Any]":
            return {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}

        source = self._model.engine.generate(tokens, params)
        try:
            yield chunk({"role": "assistant", "content": ""}, None)
            for _, text, _, _, _, finish in source:
                if text:
                    yield chunk({"content": text}, None)
                if finish:
                    yield chunk({}, _reason(finish))
        finally:
            source.cancel()

    def create_chat_completion_openai_v1(self, *arguments: Any, **named: Any) -> Any:
        """The same as objects of the package ``openai``."""
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        answer = self.create_chat_completion(*arguments, **named)
        if named.get("stream"):
            return (ChatCompletionChunk(**chunk) for chunk in answer)
        return ChatCompletion(**answer)

    def close(self) -> None:
        """Frees the memory."""
        self._model.close()


def _reason(finish: "str | None") -> "str | None":
    return {"context_full": "length", "stop_string": "stop"}.get(finish, finish) if finish else None


def llama_supports_gpu_offload() -> bool:
    """GPUs are used where ``n_gpu_layers`` is not 0."""
    return True


__all__ = ["Llama", "LlamaGrammar", "LogitsProcessorList", "StoppingCriteriaList", "llama_supports_gpu_offload"]
