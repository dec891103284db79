"""Processes that are there in some 50 ms: forked off a server that has imported everything slow, which is done once.

    process = preloaded.process(work, (wire, 3))    # as `multiprocessing.Process`; not started yet
    here, there = preloaded.CONTEXT.Pipe()
    away = preloaded.Away(Counter, "abc")           # an object in a process of its own
    away.most_common(2); away.end()                 # killed and reaped, as at the end of `with preloaded.Away(...)`

The server has neither threads nor an agent. Where there is a GPU processes are spawned instead: nobody knows what
libraries that have seen a driver keep of it.
"""

import asyncio
import gc
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from typing import Any, Self

import torch

__all__ = ["CONTEXT", "Away", "Context", "process"]

ANSWER_SECONDS = 90

_IMPORTED = ["torch", "kvxfer.worker", "kvxfer.fabric.nixl", "kvxfer.copy.machine", "kvxfer.mapped.host"]
_SERVER = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Of the server alone: threads would be forked without their locks."""

CONTEXT: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")


def process(target: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """A daemonic process with the variables that this one has now."""
    if CONTEXT.get_start_method() == "forkserver":
        _serve()
    return CONTEXT.Process(target=_run, args=(dict(os.environ), target, arguments), daemon=True)


class Context:
    """As the context of a start method, for those who know theirs by name."""

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool) -> Any:
        """A process as `process` makes them."""
        assert daemon
        made = process(target, args)
        made.name = name
        return made


def _serve() -> None:
    """See that there is a server."""
    CONTEXT.set_forkserver_preload(_IMPORTED)
    kept = {name: os.environ.get(name) for name in _SERVER}
    os.environ.update(_SERVER)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what was imported: to look through it takes 0.2 s, in which nothing else runs
    target(*arguments)


class Away:
    """An object in a process of its own: whatever it can do is asked of it here, one call after the other.

    Calls are made in the turns of a loop over there, and a coroutine is run to its end.
    """

    def __init__(self, make: Callable[..., Any], *given: Any) -> None:
        self._wire, theirs = CONTEXT.Pipe()
        self._alone = threading.Lock()
        self.process = process(_serve_calls, (theirs, make, given))
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *given: Any, **named: Any) -> Any:
        with self._alone:
            self._wire.send_bytes(pickle.dumps((name, given, named)))
            assert self._wire.poll(ANSWER_SECONDS), f"{name} does not end over there"
            value, error = pickle.loads(self._wire.recv_bytes())
        assert not error, f"{name} failed over there: {error}"
        return value

    def hang_up(self) -> int | None:
        """Ask nothing more; how the process ends by itself."""
        self._wire.close()
        self.process.join(20)
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join(20)

    def end(self) -> None:
        self.kill()
        self.process.close()  # raises if it still runs
        self._wire.close()


def _serve_calls(wire: Any, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    asyncio.run(_answer_calls(wire, make, given))


async def _answer_calls(wire: Any, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """One after the other, until the pipe is closed."""
    target = make(*given)
    while True:
        try:
            name, arguments, options = pickle.loads(await asyncio.to_thread(wire.recv_bytes))
        except EOFError:
            return
        value, error = None, ""
        try:
            value = getattr(target, name)(*arguments, **options)
            if asyncio.iscoroutine(value):
                value = await value
        except Exception:  # noqa: BLE001 - whoever called hears of it
            value, error = None, traceback.format_exc()
        wire.send_bytes(pickle.dumps((value, error)))
