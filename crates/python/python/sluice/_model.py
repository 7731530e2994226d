"""Models and tokenizers."""

import atexit
import base64
import json
import os
import weakref
from typing import Any, Callable, Iterable, Sequence

from . import _sluice
from ._options import normalised, tokenizer_cache
from .errors import EngineError, RequestError

Messages = Sequence["dict[str, Any]"]


class Tokenizer:
    """A model's tokenizer and chat template, with the names that transformers and ``mlx_lm`` have for them. It stays usable when the model is closed."""

    def __init__(self, inner: "_sluice.Tokenizer"):
        self._inner = inner

    @classmethod
    def from_pretrained(cls, name_or_path: "str | os.PathLike[str]") -> "Tokenizer":
        """Reads the tokenizer of a model, and no weights."""
        return cls(_sluice.Tokenizer(_sluice.resolve(os.fspath(name_or_path)), tokenizer_cache()))

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> "list[int]":
        """The tokens of a text. Control tokens in it become their ids, unless ``parse_special`` is false: then they are text like any other."""
        return self._inner.encode(text, add_special_tokens, parse_special)

    def decode(self, token_ids: "int | Iterable[int]", skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._inner.decode(ids, skip_special_tokens)

    def __call__(self, text: "str | Sequence[str]", add_special_tokens: bool = True) -> "dict[str, Any]":
        """``input_ids`` and ``attention_mask`` of a text or of several, as transformers has them."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        ids = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}

    def apply_chat_template(
        self,
        conversation: Messages,
        tools: "Sequence[dict[str, Any]] | None" = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> "list[int] | str":
        """The prompt of a conversation, as tokens or as text. ``variables`` are more variables of the template (``enable_thinking``).

        As tokens, with ``add_generation_prompt``, control tokens that messages spell stay text.
        """
        messages, tools_json = json.dumps(list(conversation)), json.dumps(list(tools)) if tools else None
        variables.pop("return_tensors", None)
        variables.pop("return_dict", None)
        extra = json.dumps(variables) if variables else None
        if tokenize and add_generation_prompt:
            return self._inner.prompt(messages, tools_json, extra)
        text = self._inner.render(messages, tools_json, add_generation_prompt, extra)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_ids_to_tokens(self, ids: "int | Iterable[int]") -> Any:
        """Tokens as the vocabulary writes them."""
        return self._inner.token(ids) if isinstance(ids, int) else [self._inner.token(token) for token in ids]

    def convert_tokens_to_ids(self, tokens: "str | Iterable[str]") -> Any:
        """The ids of tokens as the vocabulary writes them; ``None`` for those that it does not have."""
        return self._inner.id(tokens) if isinstance(tokens, str) else [self._inner.id(token) for token in tokens]

    @property
    def eos_token_ids(self) -> "set[int]":
        """Tokens that end an answer."""
        return set(self._inner.stop_ids)

    @property
    def eos_token_id(self) -> "int | None":
        """One of the tokens that end an answer."""
        return self._inner.stop_ids[0] if self._inner.stop_ids else None

    @property
    def eos_token(self) -> "str | None":
        """That one as the vocabulary writes it."""
        return None if self.eos_token_id is None else self._inner.token(self.eos_token_id)

    @property
    def bos_token_id(self) -> "int | None":
        """The token that the tokenizer puts in front of a text, if it does."""
        first = self.encode("", add_special_tokens=True)
        return first[0] if first else None

    @property
    def bos_token(self) -> "str | None":
        """That one as the vocabulary writes it."""
        return None if self.bos_token_id is None else self._inner.token(self.bos_token_id)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self._inner.vocab_size

    @property
    def all_special_tokens(self) -> "list[str]":
        """Names of control tokens."""
        return self._inner.control_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations have a template of the model's own."""
        return self._inner.has_template

    def __len__(self) -> int:
        return self.vocab_size


def _close_at_exit(reference: "weakref.ref[Model]") -> None:
    model = reference()
    if model is not None and os.getpid() == model._process:
        model.close()


class Model:
    """A model in memory, with the server's scheduler and caches. Any number of threads may use it at once: what they ask for is computed together.

    ``options`` are the command line's flags: ``device``, ``threads``, ``activations``, ``kv_type``, ``attention``, ``max_context``, ``load``, ``memory_budget``
    (bytes, or ``"8G"``), ``gpu_memory``, ``unified`` (``"on"``, ``"off"``), ``experts``, ``expert_budget``, ``prompt_cache`` (a folder, or ``True``), ``parallel``
    (sequences that are computed at once), ``draft`` and so on. A with-statement, ``close()`` or ``del`` frees the memory.
    """

    def __init__(
        self,
        name_or_path: "str | os.PathLike[str]",
        *,
        progress: "Callable[[int, int], Any] | None" = None,
        **options: Any,
    ):
        path = _sluice.resolve(os.path.expanduser(os.fspath(name_or_path)), progress)
        self.engine = _sluice.Engine(path, normalised(options), tokenizer_cache())
        #: The model's tokenizer and chat template.
        self.tokenizer = Tokenizer(self.engine.tokenizer)
        self._process = os.getpid()
        # What is to be kept is written, though the interpreter may never drop this.
        self._at_exit = atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def name(self) -> str:
        """Its name in answers."""
        return self.engine.name

    @property
    def context(self) -> int:
        """The longest context in tokens: prompt and answer together."""
        return self.engine.context

    def _tokens(self, text_or_tokens: "str | Iterable[int]") -> "list[int]":
        if isinstance(text_or_tokens, str):
            return self.tokenizer.encode(text_or_tokens)
        return [int(token) for token in text_or_tokens]

    def logits(self, tokens: "str | Iterable[int]", *, all: bool = True) -> Any:
        """The logits behind each token, ``[tokens, vocabulary]`` as a numpy array of float32, or behind the last, ``[1, vocabulary]``."""
        return _numpy().asarray(self.engine.logits(self._tokens(tokens), all))

    def hidden_states(self, tokens: "str | Iterable[int]") -> Any:
        """The final hidden state of each token, which is the head's input: ``[tokens, hidden]`` as a numpy array of float32."""
        return _numpy().asarray(self.engine.hidden_states(self._tokens(tokens)))

    def logprobs(self, tokens: "str | Iterable[int]", start: int = 1, top: int = 0) -> "list[tuple[float, list[tuple[int, float]]]]":
        """The log-probability of each token from ``start`` on, given those before it, with the ``top`` likeliest tokens and theirs."""
        return self.engine.logprobs(self._tokens(tokens), start, top)

    def embed(self, inputs: "str | Sequence[str] | Sequence[Sequence[int]]", dimensions: "int | None" = None) -> Any:
        """A vector for each input, as the model's files say: ``[inputs, dimensions]`` as a numpy array of float32."""
        numpy = _numpy()
        body: "dict[str, Any]" = {"input": [inputs] if isinstance(inputs, str) else list(inputs), "encoding_format": "base64"}
        if dimensions is not None:
            body["dimensions"] = dimensions
        vectors = sorted(self.request("POST", "/v1/embeddings", body)["data"], key=lambda one: one["index"])
        return numpy.stack([numpy.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in vectors])

    def request(self, method: str, path: str, body: "dict[str, Any] | None" = None) -> Any:
        """What the server answers a request with, without a server: ``model.request("POST", "/v1/chat/completions", {..})``. A text where it is no JSON.

        An error of the server's is an exception with its words.
        """
        reply = self.engine.request(method, path, b"" if body is None else json.dumps(body).encode())
        return whole_answer(list(reply))

    def stream_request(self, path: str, body: "dict[str, Any]") -> Any:
        """The events of a streamed answer, parsed, as they come."""
        reply = self.engine.request("POST", path, json.dumps({**body, "stream": True}).encode())
        events = Events()
        for part in reply:
            yield from events.take(part)
        events.finish()

    def memory(self) -> "dict[str, int]":
        """Bytes by class: mapped weights, copied weights, keys and values, and so on."""
        return dict(self.engine.memory())

    def facts(self) -> "dict[str, Any]":
        """The architecture, how weights are read, the instruction set, and notes."""
        facts, notes = self.engine.facts()
        return {**dict(facts), "notes": notes, "load_seconds": self.engine.load_seconds, "path": str(self.engine.path)}

    def wait_loaded(self) -> None:
        """Waits until all weights are in memory. Without it, the first steps wait for those that they need."""
        self.engine.wait_loaded()

    def close(self) -> None:
        """Cancels what runs, writes what is to be kept to the prompt cache, and frees the memory."""
        self.engine.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<sluice.Model {self.engine.path}{' (closed)' if self.engine.is_closed else ''}>"


def load(
    path_or_hf_repo: "str | os.PathLike[str]",
    tokenizer_config: "dict[str, Any] | None" = None,
    model_config: "dict[str, Any] | None" = None,
    adapter_path: "str | None" = None,
    lazy: bool = False,
    revision: "str | None" = None,
    layers: "tuple[int, int] | range | None" = None,
    **options: Any,
) -> "tuple[Any, Tokenizer]":
    """Loads a model and its tokenizer, as ``mlx_lm.load``: a folder, a GGUF file, or a name of the Hugging Face hub, which is fetched if it is not in the cache.

    ``options`` are those of :class:`Model`. The files say what the model and the tokenizer are, so ``model_config`` and ``tokenizer_config`` must be empty. Weights are always lazy: see
    :meth:`Model.wait_loaded`. With ``layers``, a :class:`sluice.stages.Stage` takes the place of the model.

    >>> model, tokenizer = load(demo())
    >>> tokenizer.decode(tokenizer.encode("Once upon a time"), skip_special_tokens=True)
    'Once upon a time'
    """
    for name, value in (("tokenizer_config", tokenizer_config), ("model_config", model_config), ("adapter_path", adapter_path)):
        # `trust_remote_code` has no effect: architectures are built in.
        if value and value != {"trust_remote_code": True}:
            raise RequestError(f"{name} is not supported")
    name = f"{path_or_hf_repo}@{revision}" if revision else path_or_hf_repo
    if layers is not None:
        from .stages import Stage

        return Stage(name, layers, **options), Tokenizer.from_pretrained(name)
    model = Model(name, **options)
    return model, model.tokenizer


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise EngineError("arrays need numpy: pip install numpy") from error
    return numpy


def _raise(status: int, text: str) -> None:
    try:
        parsed = json.loads(text)
        error = parsed.get("error", parsed)
        message, param = (error, None) if isinstance(error, str) else (error.get("message", text), error.get("param"))
    except (ValueError, AttributeError):
        message, param = text or f"status {status}", None
    if status >= 500 and status != 504:
        raise EngineError(message)
    raise RequestError(message, status, param)


def whole_answer(parts: "list[Any]") -> Any:
    """The answer of a reply's parts."""
    if not parts:
        raise EngineError("the engine has ended")
    (status, _), text = parts[0], b"".join(parts[1:]).decode()
    if status >= 400:
        _raise(status, text)
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    # The server has sent white space to keep the connection, and then an error.
    if isinstance(answer, dict) and set(answer) == {"error"}:
        _raise(int(answer["error"].get("code") or 500) if str(answer["error"].get("code")).isdigit() else 500, text)
    return answer


class Events:
    """Reads server-sent events, and lines of JSON, from the parts of a reply."""

    def __init__(self) -> None:
        self._status = 0
        self._rest = b""

    def take(self, part: Any) -> "list[Any]":
        """The events that a part completes."""
        if isinstance(part, tuple):
            self._status = part[0]
            return []
        self._rest += part
        if self._status >= 400:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        events = []
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else line if line.startswith(b"{") else b""
            if data and data != b"[DONE]":
                event = json.loads(data)
                if isinstance(event, dict) and isinstance(event.get("error"), dict):
                    raise EngineError(event["error"].get("message", ""))
                events.append(event)
        return events

    def finish(self) -> None:
        """Raises what the server has refused."""
        if self._status >= 400:
            _raise(self._status, self._rest.decode())


def demo() -> str:
    """The path of the demo model: ``SLUICE_DEMO``, or ``models/demo`` in this folder, in one above it, or above this package."""
    named = os.environ.get("SLUICE_DEMO")
    if named:
        return named
    for start in (os.getcwd(), os.path.dirname(os.path.abspath(__file__))):
        folder = start
        while True:
            path = os.path.join(folder, "models", "demo")
            if os.path.isfile(os.path.join(path, "config.json")):
                return path
            above = os.path.dirname(folder)
            if above == folder:
                break
            folder = above
    from .errors import ModelError

    raise ModelError("the demo model was not found: SLUICE_DEMO is not set, and there is no models/demo here or above; name a model's folder instead")
