"""Draining on SIGTERM, for servers that want it: the library takes no signal unasked."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from kvxfer.errors import UsageError
from kvxfer.onlookers import given_seconds
from kvxfer.telemetry import logger
from kvxfer.worker import Worker

__all__ = ["drain_on_signal"]

_log: Final = logger("kvxfer.worker")


async def drain_on_signal(worker: Worker, *signals: signal.Signals, timeout: float | None = None) -> bool:
    """Wait for a signal, and then drain the worker. A further signal cuts the drain short.

        async with kvxfer.Worker(tensors) as worker:
            serving = asyncio.create_task(serve(worker))
            await kvxfer.drain_on_signal(worker)        # until SIGTERM
            serving.cancel()

    Signals are taken from this call to its return, from the loop that it runs on; then whoever had them before has them
    again. A server that handles them itself has no need of this: it awaits `worker.drain()`, and an engine that steps
    calls `BlockingWorker.begin_drain`.

    Args:
        worker: On this loop, or one with `loop="own"`.
        *signals: Which; SIGTERM if none is named.
        timeout: Seconds that the drain may take; the setting `drain_timeout` if left out.

    Returns:
        Whether all that was under way has ended; False also if a further signal came first.

    Raises:
        UsageError: If this is not the main thread, which alone gets signals, or a signal cannot be handled.
    """
    timeout = given_seconds(timeout, None)
    with _taken(signals or (signal.SIGTERM,)) as came:
        first = await came.get()
        _log.info("drain_began", reason=first.name)
        draining = asyncio.ensure_future(worker.drain(timeout))
        further = asyncio.ensure_future(came.get())
        try:
            await asyncio.wait({draining, further}, return_when=asyncio.FIRST_COMPLETED)
            return draining.done() and draining.result()
        finally:
            for waiting in (draining, further):
                waiting.cancel()


@contextmanager
def _taken(signals: tuple[signal.Signals, ...]) -> "Generator[asyncio.Queue[signal.Signals]]":
    """Signals as they come; at the end, their handlers are what they were."""
    loop, came = asyncio.get_running_loop(), asyncio.Queue[signal.Signals]()
    before: dict[signal.Signals, Any] = {}
    try:
        for one in signals:
            try:
                handler = signal.getsignal(one)
                loop.add_signal_handler(one, came.put_nowait, signal.Signals(one))
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"{one!r} cannot be handled here: {error}; await worker.drain() instead") from error
            before[one] = handler
        yield came
    finally:
        for one, handler in before.items():
            loop.remove_signal_handler(one)
            signal.signal(one, handler if handler is not None else signal.SIG_DFL)
