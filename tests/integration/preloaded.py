"""Processes that are there in some 50 ms: forked off a server that has imported everything slow, which is done once.

    process = preloaded.process(work, (wire, 3))    # as `multiprocessing.Process`; not started yet
    here, there = preloaded.CONTEXT.Pipe()

The server has neither threads nor an agent. Where there is a GPU processes are spawned instead: nobody knows what
libraries that have seen a driver keep of it.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import torch

__all__ = ["CONTEXT", "Context", "process"]

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
