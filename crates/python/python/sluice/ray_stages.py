"""A model over several machines of a Ray cluster: layer ranges as actors of a placement group, hidden rows over Ray's channels.

>>> from sluice.ray_stages import checked
>>> checked({"model": "m", "stages": 2})["microbatches"]
3

``open_pipeline(config)`` gives a :class:`sluice.stages.Pipeline`, whose tokens are those of one machine. Several microbatches are on their way at once, through a compiled graph where Ray can
compile one. A lost actor is started again, on another machine if need be, and what was in it is computed once more.
"""

import collections
import concurrent.futures
import queue
import threading
from typing import Any

from .errors import RequestError
from .stages import Lost, Pipeline, even, layer_count

_DEFAULTS = {
    "model": None,
    "stages": 2,
    "cpus": 1,
    "gpus": 0,
    "options": {},
    "strategy": "SPREAD",
    "microbatches": None,
    "chunk": 128,
    "restarts": 3,
    "compiled": True,
    "timeout": 120,
}
#: Bytes of a channel between two stages of a compiled graph: rows of a microbatch, and what surrounds them.
_CHANNEL = 64 << 20


def checked(config: "dict[str, Any]") -> "dict[str, Any]":
    """A configuration with all its settings."""
    unknown = set(config) - set(_DEFAULTS)
    if unknown or "model" not in config:
        raise RequestError(f"{', '.join(sorted(unknown))}: no such setting" if unknown else "config: model is missing")
    found = {**_DEFAULTS, **config}
    count = found["stages"] if isinstance(found["stages"], int) else len(found["stages"])
    found["microbatches"] = found["microbatches"] or count + 1
    return found


class StageActor:
    """What runs on a machine: a stage, and a method that goes into graphs."""

    def __init__(self, path: str, layers: "tuple[int, int]", options: "dict[str, Any]"):
        from .stages import Stage

        self._stage = Stage(path, layers, **options)

    def limits(self) -> "tuple[int, int, int]":
        """:attr:`sluice.stages.Stage.limits`"""
        return self._stage.limits

    def step(self, item: Any) -> Any:
        """Pieces and rows go in; rows for the next stage, or tokens of the last one, come out. An error takes the place of rows, and passes the stages that follow."""
        pieces, hidden, released = item
        try:
            for sequence in released:
                self._stage.release(sequence)
            if isinstance(hidden, str) or not pieces:
                return pieces, hidden, released
            hidden, _, tokens = self._stage.step(pieces, hidden)
            return (pieces, tokens, released) if self._stage.is_last else (pieces, hidden, released)
        except Exception as error:  # noqa: BLE001
            return pieces, f"{error}", released


class RayStages:
    """Stages as actors, for a :class:`sluice.stages.Pipeline`."""

    def __init__(self, config: "dict[str, Any]"):
        import ray
        from ray.util.placement_group import placement_group

        self._config = config = checked(config)
        ranges = config["stages"]
        if isinstance(ranges, int):
            ranges = even(layer_count(config["model"]), ranges)
        self._ranges = [tuple(each) for each in ranges]
        bundle = {"CPU": config["cpus"], **({"GPU": config["gpus"]} if config["gpus"] else {})}
        self._group = placement_group([bundle] * len(self._ranges), strategy=config["strategy"])
        ray.get(self._group.ready(), timeout=config["timeout"])
        self._released: "collections.deque[int]" = collections.deque()
        self._waiting: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._graph: Any = None
        self._start()
        threading.Thread(target=self._collect, name="sluice-stages", daemon=True).start()

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config = self._config
        options = dict(config["options"])
        if not config["gpus"]:
            options.setdefault("threads", int(config["cpus"]))
        remote = ray.remote(StageActor)
        self._actors = [
            remote.options(
                num_cpus=config["cpus"],
                num_gpus=config["gpus"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            ).remote(config["model"], each, options)
            for number, each in enumerate(self._ranges)
        ]
        self._limits = ray.get([actor.limits.remote() for actor in self._actors], timeout=config["timeout"])
        self._graph = self._compiled() if config["compiled"] else None

    def _compiled(self) -> Any:
        """The graph of all stages; ``None`` where Ray cannot compile it. Calls then follow each other by references."""
        try:
            from ray.dag import InputNode

            with InputNode() as item:
                node = item
                for actor in self._actors:
                    node = actor.step.bind(node)
            return node.experimental_compile(_buffer_size_bytes=_CHANNEL, _max_inflight_executions=self._config["microbatches"] + 2)
        except Exception:  # noqa: BLE001
            return None

    @property
    def is_compiled(self) -> bool:
        """Whether Ray has compiled the graph."""
        return self._graph is not None

    @property
    def actors(self) -> "list[Any]":
        """The actors, first to last."""
        return list(self._actors)

    def limits(self) -> "tuple[int, int, int]":
        """The least of all stages."""
        return tuple(min(each) for each in zip(*self._limits))  # type: ignore[return-value]

    def submit(self, pieces: Any) -> "concurrent.futures.Future[list[int | str | None]]":
        """Takes pieces through all stages, behind those that were submitted before."""
        future: "concurrent.futures.Future[list[int | str | None]]" = concurrent.futures.Future()
        released = [self._released.popleft() for _ in range(len(self._released))]
        try:
            item: Any = (pieces, None, released)
            if self._graph is not None:
                item = self._graph.execute(item)
            else:
                for actor in self._actors:
                    item = actor.step.remote(item)
            self._waiting.put((item, future))
        except Exception as error:  # noqa: BLE001
            future.set_exception(Lost(f"{error}"))
        return future

    def release(self, sequences: "list[int]") -> None:
        """Forgets sequences, with what is submitted next."""
        self._released.extend(sequences)

    def restart(self) -> None:
        """Starts all actors anew."""
        self._stop()
        self._released.clear()
        self._start()

    def close(self) -> None:
        """Ends the actors and gives their places back."""
        from ray.util.placement_group import remove_placement_group

        self._waiting.put(None)
        self._stop()
        remove_placement_group(self._group)

    def _stop(self) -> None:
        import ray

        graph, self._graph = self._graph, None
        if graph is not None:
            try:
                graph.teardown(kill_actors=True)
            except Exception:  # noqa: BLE001
                pass
        for actor in self._actors:
            try:
                ray.kill(actor)
            except Exception:  # noqa: BLE001
                pass

    def _collect(self) -> None:
        """Waits for results in the order of submission, which is that of their arrival."""
        import ray

        while (waiting := self._waiting.get()) is not None:
            reference, future = waiting
            try:
                _, tokens, _ = ray.get(reference, timeout=self._config["timeout"])
            except Exception as error:  # noqa: BLE001
                future.set_exception(Lost(f"a stage is lost: {error}"))
                continue
            if isinstance(tokens, str):
                from .errors import EngineError

                future.set_exception(EngineError(tokens))
            else:
                future.set_result(tokens)


def open_pipeline(config: "dict[str, Any]") -> Pipeline:
    """A model over the machines of the cluster that this process has joined (``ray.init``).

    ``config``: ``model`` (a path that every machine can open), ``stages`` (a number, or ranges of layers: default 2), ``cpus`` (1) and ``gpus`` (0) of each, ``options`` of engines as in
    :func:`sluice.load`, ``strategy`` of the placement group (``SPREAD``), ``microbatches`` on their way at once (one more than stages), ``chunk`` of prompts (128), ``restarts`` of lost stages (3),
    ``compiled`` (true) and ``timeout`` in seconds of one microbatch and of a start (120).
    """
    config = checked(config)
    return Pipeline(RayStages(config), config["microbatches"], config["chunk"], config["restarts"])
