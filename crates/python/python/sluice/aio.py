"""An engine for asyncio: the server's scheduler, prefix cache, sessions and disk tier, without a server.

Nothing here blocks the event loop: it is woken by a descriptor when there is something to take.
"""

import asyncio
import itertools
import json
import os
import urllib.parse
from typing import Any, AsyncIterator

from ._model import Events, Model, Tokenizer, whole_answer
from .errors import EngineError
from .vllm import CompletionOutput, RequestOutput, SamplingParams, logprobs_of, reason_of

_ENDPOINTS = {
    "chat_completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


async def _parts(source: Any) -> "AsyncIterator[Any]":
    """What a stream or a reply brings, as it comes."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    descriptor = source.fileno()
    loop.add_reader(descriptor, ready.set)
    try:
        while True:
            await ready.wait()
            ready.clear()
            parts, is_over = source.ready()
            for part in parts:
                yield part
            if is_over:
                return
    finally:
        loop.remove_reader(descriptor)
        source.cancel()


class AsyncEngine:
    """A model for any number of requests at once, which are computed together.

    ``generate`` is ``vllm``'s; ``chat``, ``completions`` and the others take and give what the server's endpoints do, streamed if the request says ``"stream": True``.

    >>> async def tell():
    ...     async with AsyncEngine(sluice.demo()) as engine:
    ...         async for output in engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4)):
    ...             pass
    ...         return len(output.outputs[0].token_ids)
    >>> asyncio.run(tell())
    4
    """

    def __init__(self, model: "str | os.PathLike[str] | Model", **options: Any):
        self.model = model if isinstance(model, Model) else Model(model, **options)
        self._streams: "dict[str, Any]" = {}
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, under ``vllm``'s name."""
        return self.model.tokenizer

    async def generate(self, prompt: Any, sampling_params: "SamplingParams | None" = None, request_id: "str | None" = None) -> "AsyncIterator[RequestOutput]":
        """The answers to a prompt (a text, tokens, or a dictionary with one of them), each time with all that is there of them."""
        params = sampling_params or SamplingParams()
        text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
        given: Any = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None if isinstance(prompt, str) else prompt
        loop = asyncio.get_running_loop()
        if given is None:
            given = await loop.run_in_executor(None, lambda: self.tokenizer.encode(text or ""))
        tokens = [int(token) for token in given]
        asked = params.engine_params(tokens, self.tokenizer.eos_token_ids)
        name = request_id if request_id is not None else f"request-{next(self._ids)}"
        # A grammar may take a while to compile.
        stream = await loop.run_in_executor(None, self.model.engine.generate, tokens, asked)
        self._streams[name] = stream
        outputs = [CompletionOutput(index, "", [], 0.0 if params.logprobs is not None else None, None) for index in range(params.n)]
        try:
            async for index, new, token, chosen, top, finish in _parts(stream):
                output = outputs[index]
                output.text += new
                if token is not None:
                    output.token_ids.append(token)
                if chosen is not None and token is not None:
                    output.cumulative_logprob = (output.cumulative_logprob or 0.0) + chosen
                    output.logprobs = (output.logprobs or []) + logprobs_of(self.tokenizer, [token], [(chosen, top or [])])
                output.finish_reason = reason_of(finish) or output.finish_reason
                is_over = all(one.finish_reason for one in outputs)
                yield RequestOutput(name, text, tokens, outputs, is_over, None, stream.cached_tokens)
        finally:
            self._streams.pop(name, None)

    async def abort(self, request_id: str) -> None:
        """Ends a request of ``generate``."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()

    async def request(self, method: str, path: str, body: "dict[str, Any] | None" = None) -> Any:
        """What the server answers a request with. An error of the server's is an exception with its words."""
        reply = self.model.engine.request(method, path, b"" if body is None else json.dumps(body).encode())
        return whole_answer([part async for part in _parts(reply)])

    async def _stream(self, path: str, body: "dict[str, Any]") -> "AsyncIterator[dict[str, Any]]":
        events = Events()
        async for part in _parts(self.model.engine.request("POST", path, json.dumps(body).encode())):
            for event in events.take(part):
                yield event
        events.finish()

    async def _answer(self, path: str, body: "dict[str, Any]") -> Any:
        return self._stream(path, body) if body.get("stream") else await self.request("POST", path, body)

    async def chat(self, body: "dict[str, Any]") -> Any:
        """``/v1/chat/completions``: an answer, or with ``"stream": True`` an asynchronous iterator of its chunks."""
        return await self._answer(_ENDPOINTS["chat_completions"], body)

    async def completions(self, body: "dict[str, Any]") -> Any:
        """``/v1/completions``, likewise."""
        return await self._answer(_ENDPOINTS["completions"], body)

    async def responses(self, body: "dict[str, Any]") -> Any:
        """``/v1/responses``, likewise."""
        return await self._answer(_ENDPOINTS["responses"], body)

    async def messages(self, body: "dict[str, Any]") -> Any:
        """``/v1/messages``, likewise: Anthropic's."""
        return await self._answer(_ENDPOINTS["messages"], body)

    async def embeddings(self, body: "dict[str, Any]") -> Any:
        """``/v1/embeddings``."""
        return await self.request("POST", "/v1/embeddings", body)

    async def tokenize(self, body: "dict[str, Any]") -> Any:
        """``/tokenize``."""
        return await self.request("POST", "/tokenize", body)

    async def detokenize(self, body: "dict[str, Any]") -> Any:
        """``/detokenize``."""
        return await self.request("POST", "/detokenize", body)

    async def save_session(self, name: str, **body: Any) -> Any:
        """Saves a conversation (``messages=..``) or a text (``prompt=..``) under a name. It needs ``prompt_cache``."""
        return await self.request("POST", "/v1/sessions", {"name": name, **body})

    async def sessions(self) -> "list[dict[str, Any]]":
        """All saved sessions."""
        return (await self.request("GET", "/v1/sessions"))["data"]

    async def load_session(self, name: str) -> Any:
        """A session with its tokens, which is read into memory meanwhile."""
        return await self.request("POST", f"/v1/sessions/{urllib.parse.quote(name, safe='')}/load")

    async def delete_session(self, name: str) -> Any:
        """Deletes a session."""
        return await self.request("DELETE", f"/v1/sessions/{urllib.parse.quote(name, safe='')}")

    async def metrics(self) -> str:
        """The server's metrics, as Prometheus reads them."""
        return str(await self.request("GET", "/metrics"))

    async def check_health(self) -> None:
        """Raises why the engine has failed, if it has."""
        failure = self.model.engine.failure
        if failure:
            raise EngineError(failure)

    async def close(self) -> None:
        """Cancels what runs and frees the memory."""
        await asyncio.get_running_loop().run_in_executor(None, self.model.close)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()
