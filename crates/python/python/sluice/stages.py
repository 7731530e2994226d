"""A model in stages: layer ranges in processes or on machines of their own, with hidden rows between them.

A stage (:class:`Stage`, or ``sluice.load(path, layers=(0, 12))``) has some layers, with the keys, values and states that sequences have in them. The first has the embedding, the last the head.
A :class:`Pipeline` takes requests through all stages. Several microbatches are on their way at once, so that no stage waits for the others. Tokens are those of one machine, to the bit,
wherever the model is cut.

Where a stage is lost, its pipeline starts it again and computes what sequences had in it once more: the answer goes on with the same tokens.
"""

import collections
import concurrent.futures
import itertools
import os
import pickle
import queue
import socket
import struct
import threading
from typing import Any, Callable, Iterable, Iterator, Sequence

from . import _sluice
from ._options import normalised
from .errors import EngineError, RequestError

#: What one call of a stage takes and gives: pieces of sequences, and their hidden rows.
Pieces = "list[tuple[int, int, list[int], Any, bool]]"


class Lost(EngineError):
    """A stage that does not answer any more."""


class Stage:
    """Layers ``first`` to before ``end`` of a model, in this process. ``options`` are those of :func:`sluice.load`.

    >>> from sluice.stages import Stage, layer_count
    >>> half = layer_count(sluice.demo()) // 2
    >>> front, back = Stage(sluice.demo(), (0, half)), Stage(sluice.demo(), (half, 2 * half))
    >>> hidden, _, _ = front.step([(1, 0, [5, 6, 7], None, False)])
    >>> len(hidden) == 3 * front.hidden * 4
    True
    >>> _, _, tokens = back.step([(1, 0, [5, 6, 7], {"temperature": 0}, False)], hidden)
    >>> len(tokens)
    1
    """

    def __init__(self, path: "str | os.PathLike[str]", layers: "tuple[int, int] | range", **options: Any):
        first, end = (layers.start, layers.stop) if isinstance(layers, range) else layers
        self._inner = _sluice.Stage(_sluice.resolve(os.fspath(path)), first, end, normalised(options))

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self._inner.is_first

    @property
    def is_last(self) -> bool:
        """Whether it gives logits and tokens."""
        return self._inner.is_last

    @property
    def hidden(self) -> int:
        """Elements of a hidden row, which are f32."""
        return self._inner.hidden

    @property
    def limits(self) -> "tuple[int, int, int]":
        """Tokens of a step, sequences, and positions of a sequence, at most."""
        return self._inner.max_tokens, self._inner.max_sequences, self._inner.max_context

    def step(self, pieces: "Pieces", hidden: "bytes | None" = None) -> "tuple[bytes, bytes, list[int | str | None]]":
        """Takes pieces of sequences through the layers: (sequence, position, tokens, wanted, whether they are of the answer).

        ``hidden`` are the rows that the stage before gave for the same pieces. ``wanted`` is of the last stage: ``None``, ``"logits"`` after the last token, ``"all"``
        logits, or parameters of sampling. Gives rows for the next stage, logits, and drawn tokens (a text says why one cannot be drawn); rows and logits are bytes of f32.
        """
        return self._inner.step(pieces, hidden)

    def release(self, sequence: int) -> None:
        """Forgets a sequence."""
        self._inner.release(sequence)

    def close(self) -> None:
        """Frees the memory."""
        self._inner.close()


def layer_count(path: "str | os.PathLike[str]") -> int:
    """How many layers a model has."""
    return _sluice.layer_count(_sluice.resolve(os.fspath(path)))


def even(layers: int, stages: int) -> "list[tuple[int, int]]":
    """Ranges of nearly as many layers each.

    >>> even(30, 4)
    [(0, 8), (8, 15), (15, 23), (23, 30)]
    """
    if not 1 <= stages <= layers:
        raise RequestError(f"stages must be between 1 and {layers}, found {stages}")
    ends = [round(layers * number / stages + 1e-9) for number in range(stages + 1)]
    return list(zip(ends, ends[1:]))


class LocalStages:
    """Stages of this process, each with a thread of its own."""

    def __init__(self, stages: "Sequence[Any]"):
        self.stages = list(stages)
        self._queues: "list[queue.SimpleQueue[Any]]" = [queue.SimpleQueue() for _ in self.stages]
        for number in range(len(self.stages)):
            threading.Thread(target=self._run, args=(number,), daemon=True).start()

    def limits(self) -> "tuple[int, int, int]":
        """The least of all stages."""
        return tuple(min(each) for each in zip(*(stage.limits for stage in self.stages)))  # type: ignore[return-value]

    def submit(self, pieces: "Pieces") -> "concurrent.futures.Future[list[int | str | None]]":
        """Takes pieces through all stages, behind those that were submitted before."""
        future: "concurrent.futures.Future[list[int | str | None]]" = concurrent.futures.Future()
        self._queues[0].put((pieces, None, future))
        return future

    def release(self, sequences: "list[int]") -> None:
        """Forgets sequences, behind everything that was submitted."""
        self._queues[0].put((sequences, None, None))

    def restart(self) -> None:
        """Starts lost stages again."""
        for stage in self.stages:
            restart = getattr(stage, "restart", None)
            if restart is None:
                raise Lost("a stage of this process cannot be started again")
            restart()

    def close(self) -> None:
        """Ends the threads and the stages."""
        self._queues[0].put(None)

    def _run(self, number: int) -> None:
        stage, last = self.stages[number], number + 1 == len(self.stages)
        while True:
            item = self._queues[number].get()
            if item is None:
                stage.close()
            if item is None and last:
                return
            if item is None:
                self._queues[number + 1].put(None)
                return
            pieces, hidden, future = item
            try:
                if future is None:
                    for sequence in pieces:
                        stage.release(sequence)
                elif not future.cancelled():
                    hidden, _, tokens = stage.step(pieces, hidden)
                    if last:
                        future.set_result(tokens)
            except Exception as error:  # noqa: BLE001
                if future is not None and not future.done():
                    future.set_exception(error)
                continue
            if not last:
                self._queues[number + 1].put((pieces, hidden, future))


# Stages in processes of their own


def _send(connection: socket.socket, value: Any) -> None:
    data = pickle.dumps(value, protocol=5)
    connection.sendall(struct.pack("<Q", len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    def exactly(count: int) -> bytearray:
        data, at = bytearray(count), 0
        view = memoryview(data)
        while at < count:
            got = connection.recv_into(view[at:])
            if not got:
                raise EOFError("the other side is gone")
            at += got
        return data

    (length,) = struct.unpack("<Q", exactly(8))
    return pickle.loads(exactly(length))


def serve_stage(connection: socket.socket) -> None:
    """Answers one pipeline over a connection that both ends trust: what comes over it may run anything."""
    stage = None
    while True:
        try:
            name, arguments = _receive(connection)
        except (EOFError, OSError):
            return
        try:
            if name == "open":
                path, layers, options = arguments
                stage = Stage(path, layers, **options)
                answer: Any = stage.limits
            else:
                answer = getattr(stage, name)(*arguments)
            _send(connection, (True, answer))
        except Exception as error:  # noqa: BLE001
            _send(connection, (False, f"{error}"))


class ProcessStage:
    """A stage in a process of its own on this machine."""

    def __init__(self, path: "str | os.PathLike[str]", layers: "tuple[int, int]", timeout: float = 60, **options: Any):
        self._opened = (os.fspath(path), tuple(layers), options)
        self._timeout = timeout
        self._start()

    def _start(self) -> None:
        import subprocess
        import sys

        self._is_lost = False
        ours, theirs = socket.socketpair()
        code = "import socket, sys; from sluice.stages import serve_stage; serve_stage(socket.socket(fileno=int(sys.argv[1])))"
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment)
        ours.settimeout(self._timeout)
        self._connection = ours
        self.limits = self._call("open", *self._opened)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            _send(self._connection, (name, arguments))
            worked, answer = _receive(self._connection)
        except (EOFError, OSError) as error:
            self._is_lost = True
            raise Lost(f"layers {self._opened[1]}: the process is gone: {error}") from error
        if not worked:
            raise EngineError(answer)
        return answer

    def step(self, pieces: "Pieces", hidden: "bytes | None" = None) -> "tuple[bytes, bytes, list[int | str | None]]":
        """:meth:`Stage.step`"""
        return self._call("step", pieces, hidden)

    def release(self, sequence: int) -> None:
        """:meth:`Stage.release`"""
        self._call("release", sequence)

    def restart(self) -> None:
        """Starts the process again, if it is gone."""
        if self._is_lost or self.process.poll() is not None:
            self.close()
            self._start()

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self.process.kill()
        self.process.wait()


# Requests


class Request:
    """A request on its way. Iterating gives its tokens as they come, and raises why it failed."""

    def __init__(self, prompt: "list[int]", params: "dict[str, Any]", max_tokens: int, stop_ids: "Iterable[int]"):
        self.prompt, self.params, self.max_tokens, self.stop_ids = prompt, params, max_tokens, frozenset(stop_ids)
        self.tokens: "list[int]" = []
        self._events: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        # Where it is in the stages
        self.sequence = -1
        self.sent = 0
        self.waits = False
        self.is_over = False

    def __iter__(self) -> "Iterator[int]":
        while True:
            event = self._events.get()
            if event is None:
                return
            if isinstance(event, BaseException):
                raise event
            yield event

    def result(self) -> "list[int]":
        """All tokens."""
        return list(self)

    @property
    def _all(self) -> "list[int]":
        return self.prompt + self.tokens


class Pipeline:
    """Takes requests through stages. ``stages`` has ``submit``, ``release``, ``restart``, ``limits`` and ``close``: :class:`LocalStages`, or those of :mod:`sluice.ray`.

    ``microbatches`` are on their way at once, at most; as many as there are stages and one more keep all of them busy. ``chunk`` is how many tokens of prompts one of them has.

    >>> from sluice.stages import LocalStages, Pipeline, Stage, even, layer_count
    >>> ranges = even(layer_count(sluice.demo()), 2)
    >>> with Pipeline(LocalStages([Stage(sluice.demo(), each, max_context=256) for each in ranges]), microbatches=3) as pipeline:
    ...     tokens = pipeline.generate([[5, 6, 7]], max_tokens=4)[0]
    >>> len(tokens)
    4
    """

    def __init__(self, stages: Any, microbatches: int = 4, chunk: int = 128, restarts: int = 3):
        self._stages, self._depth, self._restarts = stages, microbatches, restarts
        self._max_tokens, self._max_sequences, self._max_context = stages.limits()
        self._chunk = min(chunk, self._max_tokens)
        self._numbers = itertools.count(1)
        self._new: "collections.deque[Request]" = collections.deque()
        self._active: "list[Request]" = []
        self._in_flight: "dict[Any, list[tuple[Request, bool]]]" = {}
        self._changed = threading.Condition()
        self._is_closed = False
        #: How often stages were lost.
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="sluice-pipeline", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: "Sequence[int]", params: "dict[str, Any] | None" = None, max_tokens: int = 128, stop_ids: "Iterable[int]" = ()
    ) -> Request:
        """A request, whose tokens come by iterating it. ``params`` are ``temperature``, ``top_k``, ``top_p``, ``min_p``, penalties and ``seed``."""
        request = Request(list(prompt), dict(params or {"temperature": 0}), max_tokens, stop_ids)
        if not request.prompt or len(request.prompt) + 1 > self._max_context:
            raise RequestError(f"a prompt has between 1 and {self._max_context - 1} tokens, found {len(request.prompt)}")
        with self._changed:
            if self._is_closed:
                raise EngineError("the pipeline is closed")
            self._new.append(request)
            self._changed.notify_all()
        return request

    def generate(self, prompts: "Sequence[Sequence[int]]", params: "dict[str, Any] | None" = None, max_tokens: int = 128) -> "list[list[int]]":
        """The tokens of several prompts, computed together."""
        requests = [self.submit(prompt, params, max_tokens) for prompt in prompts]
        return [request.result() for request in requests]

    def close(self) -> None:
        """Ends all requests and stages."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # What the thread does

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._is_closed or self._new or self._active):
                        self._changed.wait()
                    if self._is_closed:
                        return
                    while self._new and len(self._active) < self._max_sequences:
                        request = self._new.popleft()
                        request.sequence = next(self._numbers)
                        self._active.append(request)
                self._turn()
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
            raise
        finally:
            self._fail(EngineError("the pipeline is closed"))
            self._stages.close()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._is_closed = True
            for request in [*self._active, *self._new]:
                if not request.is_over:
                    request._events.put(error)
            self._active, self._new = [], collections.deque()

    def _turn(self) -> None:
        """Sends what can be sent, and waits for one microbatch."""
        while len(self._in_flight) < self._depth:
            batch = self._next_batch()
            if not batch:
                break
            pieces = [piece for _, piece, _ in batch]
            self._in_flight[self._stages.submit(pieces)] = [(request, draws) for request, _, draws in batch]
        if not self._in_flight:
            return
        done, _ = concurrent.futures.wait(self._in_flight, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            batch = self._in_flight.pop(future, None)
            if batch is None:
                continue
            try:
                tokens = future.result()
            except Lost as error:
                self._recover(error)
                return
            except Exception as error:  # noqa: BLE001
                # What the stages have of these sequences is not known.
                self._end([request for request, _ in batch], error)
                continue
            for (request, draws), token in zip(batch, tokens):
                if draws and not request.is_over:
                    self._take(request, token)

    def _next_batch(self) -> "list[tuple[Request, Any, bool]]":
        ready = [request for request in self._active if not request.waits and not request.is_over]
        # Sequences are divided among microbatches, so that the next one need not wait for this one.
        share = -(-len(self._active) // self._depth)
        batch: "list[tuple[Request, Any, bool]]" = []
        left = self._chunk
        generating = [request for request in ready if len(request._all) - request.sent == 1]
        for request in [*generating, *(request for request in ready if request not in generating)][: max(share, 1)]:
            if left == 0:
                break
            everything, prompt = request._all, len(request.prompt)
            # A piece is of the prompt or of the answer.
            end = min(prompt if request.sent < prompt else len(everything), request.sent + left)
            draws = end == len(everything)
            wanted = request.params if draws else None
            batch.append((request, (request.sequence, request.sent, everything[request.sent : end], wanted, request.sent >= prompt), draws))
            left -= end - request.sent
            request.sent, request.waits = end, draws
        return batch

    def _take(self, request: Request, token: "int | str | None") -> None:
        request.waits = False
        if isinstance(token, str):
            return self._end([request], EngineError(token))
        if token is None or token in request.stop_ids:
            return self._end([request])
        request.tokens.append(token)
        request._events.put(token)
        if len(request.tokens) >= request.max_tokens or len(request._all) >= self._max_context:
            self._end([request])
        return None

    def _end(self, requests: "list[Request]", error: "BaseException | None" = None) -> None:
        for request in requests:
            if not request.is_over:
                request.is_over = True
                request._events.put(error)
        with self._changed:
            self._active = [request for request in self._active if not request.is_over]
        self._stages.release([request.sequence for request in requests])

    def _recover(self, error: BaseException) -> None:
        """Starts lost stages again; sequences begin anew there, with all tokens that they have."""
        concurrent.futures.wait(self._in_flight)
        self._in_flight.clear()
        self.lost += 1
        for attempt in range(self._restarts):
            try:
                self._stages.restart()
                break
            except Exception as why:  # noqa: BLE001
                if attempt + 1 == self._restarts:
                    raise EngineError(f"a stage is lost and cannot be started again: {why}") from error
        self._stages.release([request.sequence for request in self._active])
        for request in self._active:
            request.sequence, request.sent, request.waits = next(self._numbers), 0, False


def open_processes(path: "str | os.PathLike[str]", ranges: "Sequence[tuple[int, int]]", **options: Any) -> LocalStages:
    """Stages in processes of their own on this machine, opened at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(ranges)) as pool:
        opened: "list[Callable[[], ProcessStage]]" = [pool.submit(ProcessStage, path, each, **options).result for each in ranges]
        return LocalStages([result() for result in opened])
