"""Functions that run in a process of their own, with one end of a pipe."""

import multiprocessing as mp
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CONTEXT = mp.get_context("spawn")


@contextmanager
def elsewhere(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any]]:
    """A process that runs `work`, whose last argument is a pipe, and the other end of that; it ends with the block."""
    here, there = CONTEXT.Pipe()
    child = CONTEXT.Process(target=work, args=(*arguments, there), daemon=True)
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        here.close()
        child.join(20)
        if child.is_alive():
            child.kill()
            child.join()
