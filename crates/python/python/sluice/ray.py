"""Replicas of a model on Ray Serve, on one machine or on many: ``serve.run(sluice.ray.build_app({"model": .., "replicas": 2}))``.

Each replica is an :class:`AsyncEngine` with cores or GPUs of its own. In front of them is the API of the server, all of its paths. Requests that begin alike go to the same replica
as long as it is not much busier than the others, so that its prefix cache has what it needs.

This module needs ``ray[serve]`` alone. For Ray Serve LLM there is a ``server_cls`` in :mod:`sluice.ray_llm`. One model over several machines is in :mod:`sluice.ray_stages`.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from typing import Any, AsyncIterator, Sequence

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .aio import AsyncEngine, _parts
from .errors import EngineError, RequestError

#: Characters of a prompt that decide which replica gets it, at most, and between two marks.
_PREFIX, _STEP = 1 << 16, 512
#: Marks that a router remembers.
_REMEMBERED = 100_000
_KNOWN = {"model", "name", "options", "replicas", "autoscaling", "cpus", "gpus", "max_ongoing_requests", "imbalance", "pin_cores", "actor_options", "route_prefix", "ingress_replicas"}


def prefix_of(body: "dict[str, Any]") -> str:
    """What of a request decides where it goes: its salt, and the beginning of its prompt. Of a conversation that is all up to the first message of the user, which later turns have too.

    >>> first = {"messages": [{"role": "user", "content": "Hi"}]}
    >>> later = {"messages": [*first["messages"], {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]}
    >>> prefix_of(first) == prefix_of(later)
    True
    """
    messages = body.get("messages")
    if isinstance(messages, list):
        beginning = []
        for message in messages:
            beginning.append(message)
            if isinstance(message, dict) and message.get("role") == "user":
                break
        start: Any = [body.get("tools"), body.get("system"), beginning]
    else:
        start = body.get("prompt", body.get("input", body.get("name")))
    return json.dumps([body.get("cache_salt"), start], sort_keys=True)[:_PREFIX]


def marks_of(prefix: str) -> "list[bytes]":
    """Hashes of a prefix up to each 512 characters, and of all of it. Prefixes that begin alike have their first marks in common.

    >>> [len(marks_of("a" * count)) for count in (0, 512, 513)]
    [1, 1, 2]
    >>> marks_of("a" * 513)[0] == marks_of("a" * 512)[0]
    True
    """
    hasher = hashlib.blake2b(digest_size=8)
    marks = []
    for start in range(0, max(len(prefix), 1), _STEP):
        hasher.update(prefix[start : start + _STEP].encode())
        marks.append(hasher.digest())
    return marks


def ranked(mark: bytes, replicas: "Sequence[str]") -> "list[str]":
    """The replicas, with the preferred one for a mark first. It is rendezvous hashing: a replica that is added or removed moves only its own share.

    >>> order = ranked(b"Once", ["a", "b", "c"])
    >>> [one for one in order if one != order[0]] == ranked(b"Once", [one for one in ["a", "b", "c"] if one != order[0]])
    True
    """
    return sorted(replicas, key=lambda name: hashlib.blake2b(mark + b"\0" + name.encode(), digest_size=8).digest())


class Affinity:
    """Which replica a prompt goes to: the one that got another with at least half of its marks, and else the one that hashing prefers. So a document keeps its replica, whatever is asked of it, and
    prompts with nothing but a system message in common are spread."""

    def __init__(self) -> None:
        self._seen: "OrderedDict[bytes, str]" = OrderedDict()

    def order(self, marks: "Sequence[bytes]", replicas: "Sequence[str]") -> "list[str]":
        """The replicas, the preferred one first."""
        order = ranked(marks[-1], replicas)
        for mark in reversed(marks[(len(marks) - 1) // 2 :]):
            name = self._seen.get(mark)
            if name in order:
                order.remove(name)
                return [name, *order]
        return order

    def remember(self, marks: "Sequence[bytes]", name: str) -> None:
        """A replica gets a prompt with these marks."""
        for mark in marks:
            self._seen[mark] = name
            self._seen.move_to_end(mark)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)


class PrefixRouter(RequestRouter):
    """Sends requests that begin alike to the same replica."""

    def initialize_state(self, imbalance: int = 4) -> None:
        """``imbalance``: how many more requests than the least busy one a replica may have before it is not preferred any more."""
        self._imbalance = imbalance
        self._affinity = Affinity()

    async def choose_replicas(
        self, candidate_replicas: "list[RunningReplica]", pending_request: "PendingRequest | None" = None
    ) -> "list[list[RunningReplica]]":
        """The replica that suits the request first, then the others."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        marks = pending_request.kwargs.get("marks") if pending_request is not None else None
        if not marks or len(by_name) < 2:
            return [candidate_replicas]
        waiting = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        best, *others = self._affinity.order(marks, list(by_name))
        if waiting[best] > min(waiting.values()) + self._imbalance:
            return [[by_name[name] for name in sorted([*others, best], key=lambda name: waiting[name])]]
        return [[by_name[best]], [by_name[name] for name in others]]

    def on_request_routed(self, pending_request: "PendingRequest", replica_id: Any, result: Any) -> None:
        """Remembers who got it: not always the one that suited it, since one that does not say in time how busy it is is passed over."""
        marks = pending_request.kwargs.get("marks")
        if marks:
            self._affinity.remember(marks, replica_id.unique_id)


class _Cores:
    """Processors of this machine that this replica has alone, as far as other replicas of the same user are concerned."""

    def __init__(self, count: int):
        self._locks: "list[Any]" = []
        self.cores: "list[int]" = []
        folder = os.path.join(tempfile.gettempdir(), f"sluice-cores-{os.getuid()}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for core in sorted(os.sched_getaffinity(0)):
            if len(self.cores) == count:
                break
            lock = open(os.path.join(folder, str(core)), "w")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            self._locks.append(lock)
            self.cores.append(core)

    def release(self) -> None:
        for lock in self._locks:
            lock.close()
        self._locks.clear()


class SluiceServer:
    """A replica: an engine, with the methods that Ray Serve calls."""

    def __init__(self, config: "dict[str, Any]"):
        self._config = config
        self._engine: "AsyncEngine | None" = None
        self._cores: "_Cores | None" = None
        self._start()

    def _start(self) -> None:
        config = self._config
        options = dict(config.get("options") or {})
        cpus, gpus = config.get("cpus", 1), config.get("gpus", 0)
        if gpus:
            # Ray shows a replica its own GPUs only.
            options.setdefault("device", "cuda:" + ",".join(str(number) for number in range(int(gpus) or 1)))
        elif cpus >= 1:
            options.setdefault("threads", int(cpus))
            if config.get("pin_cores", True):
                self._cores = _Cores(int(cpus))
                if len(self._cores.cores) == int(cpus):
                    os.sched_setaffinity(0, self._cores.cores)
        options.setdefault("model_name", config.get("name"))
        self._engine = AsyncEngine(config["model"], **options)

    @property
    def engine(self) -> AsyncEngine:
        """The engine."""
        if self._engine is None:
            raise EngineError("the replica was stopped")
        return self._engine

    async def start(self) -> None:
        """Loads the model, if it is not loaded."""
        if self._engine is None:
            self._start()

    async def check_health(self) -> None:
        """Raises why the engine has failed, if it has: Ray then starts another replica."""
        await self.engine.check_health()

    async def stop(self) -> None:
        """Frees the memory."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        if self._cores is not None:
            self._cores.release()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self._engine.model.close()  # type: ignore[union-attr]

    async def http(self, method: str, path: str, body: bytes, marks: "list[bytes] | None" = None) -> "AsyncIterator[Any]":
        """The reply to a request: first its status and ignored fields, then bytes as they come."""
        async for part in _parts(self.engine.model.engine.request(method, path, body)):
            yield part

    async def whole(self, method: str, path: str, body: bytes, marks: "list[bytes] | None" = None) -> "tuple[int, str, bytes]":
        """The same in one piece: status, ignored fields, and all bytes. Each piece of a stream is a message of its own, which costs a millisecond."""
        parts = self.http(method, path, body)
        status, ignored = await parts.__anext__()
        return status, ignored, b"".join([part async for part in parts])

    async def _answers(self, path: str, request: Any) -> "AsyncIterator[Any]":
        """What Ray Serve LLM expects: events as text for a stream, and else one object."""
        body = _plain(request)
        if not body.get("stream"):
            yield await self.engine.request("POST", path, body)
            return
        async for event in self.engine._stream(path, body):
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    async def chat(self, request: Any, raw_request_info: Any = None, *, marks: "list[bytes] | None" = None) -> "AsyncIterator[Any]":
        """``/v1/chat/completions``."""
        async for part in self._answers("/v1/chat/completions", request):
            yield part

    async def completions(self, request: Any, raw_request_info: Any = None, *, marks: "list[bytes] | None" = None) -> "AsyncIterator[Any]":
        """``/v1/completions``."""
        async for part in self._answers("/v1/completions", request):
            yield part

    async def embeddings(self, request: Any, raw_request_info: Any = None, *, marks: "list[bytes] | None" = None) -> "AsyncIterator[Any]":
        """``/v1/embeddings``."""
        async for part in self._answers("/v1/embeddings", request):
            yield part

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> "AsyncIterator[Any]":
        """``/tokenize``."""
        async for part in self._answers("/tokenize", request):
            yield part

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> "AsyncIterator[Any]":
        """``/detokenize``."""
        async for part in self._answers("/detokenize", request):
            yield part


def _plain(request: Any) -> "dict[str, Any]":
    if isinstance(request, dict):
        return request
    # Some classes take messages that they warn of when they give them back.
    return request.model_dump(mode="json", exclude_none=True, exclude_unset=True, warnings=False)


class Ingress:
    """What clients talk to: all paths of the server, answered by a replica."""

    def __init__(self, servers: Any):
        self._stream = servers.options(stream=True).http
        self._whole = servers.whole

    async def __call__(self, request: Any) -> Any:
        """Passes a request on."""
        return await _respond(request, self._whole.remote, self._stream.remote)


async def _respond(request: Any, whole: Any, stream: Any) -> Any:
    """The response to a request over HTTP: ``whole`` and ``stream`` are those methods of a replica, or of a handle to some."""
    from starlette.responses import Response, StreamingResponse

    body = await request.body()
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    try:
        marks = marks_of(prefix_of(json.loads(body))) if body else None
    except (ValueError, AttributeError):
        marks = None
    if not _streams(body):
        status, ignored, answer = await whole(request.method, path, body, marks=marks)
        kind = "application/json"
        if request.method == "GET" and path.partition("?")[0] == "/metrics":
            kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return Response(answer, status, {"sluice-ignored": ignored} if ignored else {}, kind)
    # A failure before the first part becomes the status that the client gets.
    parts = stream(request.method, path, body, marks=marks).__aiter__()
    status, ignored = await parts.__anext__()
    headers = {"sluice-ignored": ignored} if ignored else {}
    if status != 200:
        return Response(b"".join([part async for part in parts]), status, headers, "application/json")
    return StreamingResponse(parts, status, headers, "text/event-stream")


def _streams(body: bytes) -> bool:
    try:
        return b'"stream"' in body and json.loads(body).get("stream") is True
    except (ValueError, AttributeError):
        return False


def build_app(config: "dict[str, Any]") -> "serve.Application":
    """An application for ``serve.run``.

    ``config``: ``model`` (a name or a path that every node can open), ``name`` in answers, ``options`` of engines as in :func:`sluice.load`, ``replicas`` (default 1) or
    ``autoscaling`` (Ray's ``autoscaling_config``), ``cpus`` (default 1) and ``gpus`` of each replica, ``pin_cores`` (default true), ``max_ongoing_requests`` (default 64), ``imbalance`` of the
    router, more ``actor_options``, and ``ingress_replicas`` (default 1).
    """
    unknown = set(config) - _KNOWN
    if unknown or "model" not in config:
        raise RequestError(f"{', '.join(sorted(unknown))}: no such setting" if unknown else "config: model is missing")
    actor = {"num_cpus": config.get("cpus", 1), "num_gpus": config.get("gpus", 0), **(config.get("actor_options") or {})}
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"imbalance": config.get("imbalance", 4)})
    more: "dict[str, Any]" = {"autoscaling_config": config["autoscaling"]} if "autoscaling" in config else {"num_replicas": config.get("replicas", 1)}
    servers = serve.deployment(
        name="SluiceServer",
        ray_actor_options=actor,
        max_ongoing_requests=config.get("max_ongoing_requests", 64),
        request_router_config=router,
        health_check_period_s=5,
        **more,
    )(SluiceServer)
    ingress = serve.deployment(
        name="Ingress", num_replicas=config.get("ingress_replicas", 1), ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000
    )(Ingress)
    return ingress.bind(servers.bind(config))
