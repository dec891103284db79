"""What a prefill and a decode server have in common: an engine and its ranks, open from startup to shutdown."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, ClassVar

import msgspec
from starlette.applications import Starlette

from examples.serving.api import ApiError
from examples.serving.engine import Engine, EngineSettings
from examples.serving.ranks import OpenWorker, Ranks

_log = logging.getLogger("serving")
_starting = logging.getLogger("serving.start")


class Handover(msgspec.Struct):
    """What prefill tells decode beside K and V. It travels behind them, so it is there only when they are whole.

    Attributes:
        first: The first token of the answer.
        prompt: Digest of the prompt's tokens, so that a ticket that came with another prompt is noticed.
        digest: Digest of K and V if they are to be compared, otherwise empty.
    """

    first: int
    prompt: str
    digest: str = ""


def prompt_digest(tokens: list[int]) -> str:
    """Digest of a prompt."""
    return hashlib.blake2b(" ".join(map(str, tokens)).encode(), digest_size=16).hexdigest()


class Tasks:
    """Work that is of no HTTP request, or outlives it; cancelled, and seen to its end, when the server stops."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Begin it."""
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(self._over)
        return task

    def cancel(self, name: str) -> None:
        """Give it up, if it is still under way. Once: what it does to end well is not to be cancelled."""
        task = self._tasks.get(name)
        if task is not None and not task.cancelling():
            task.cancel()

    async def stop(self) -> None:
        """Give up all of it and wait."""
        tasks = dict(self._tasks)
        for name in tasks:
            self.cancel(name)
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _over(self, task: "asyncio.Task[None]") -> None:
        del self._tasks[task.get_name()]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)


class Node:
    """A server with an engine, and a worker for each of its ranks.

    Args:
        settings: Model and pool.
        verify: Compare K and V of every prompt on both sides, by digest.
        open_worker: Makes the workers.
        config: Settings of the workers that no `KVXFER_*` variable may change.
        admin: Where an operator finds kvxfer's page, its metrics and its readiness, as `host:port`; nowhere if empty.
    """

    role: ClassVar[str]
    engine: Engine
    ranks: Ranks

    def __init__(
        self,
        settings: EngineSettings,
        *,
        verify: bool,
        open_worker: OpenWorker,
        config: Mapping[str, Any],
        admin: str = "",
    ) -> None:
        self.verify = verify
        self.tasks = Tasks()
        self._settings = settings
        self._open_worker = open_worker
        self._config = config
        self._admin = admin

    @asynccontextmanager
    async def lifespan(self, application: Starlette) -> AsyncIterator[None]:
        """As `Server` runs it.

        On the way out it drains: what was promised to others is still fetched. Then requests end, transfers, the model.
        """
        _starting.info("building the model")
        self.engine = await asyncio.to_thread(Engine.load, self._settings)
        _starting.info("opening workers")
        config = {"model": self.engine.model_name, **self._config}
        opening = Ranks.open(self.engine.cache, self._open_worker, **config)
        async with self.engine, opening as self.ranks, self._watched(application.state.stopping):
            _starting.info("ready")
            try:
                yield
                await self.ranks.drain()
            finally:
                await self.tasks.stop()

    def _watched(self, stopping: Callable[[], bool]) -> AbstractAsyncContextManager[object]:
        if not self._admin:
            return nullcontext()
        from kvxfer.tools.admin import Limits, serve  # an extra

        return serve(self.ranks.workers, address=self._admin, limits=Limits(stopping=stopping))

    def check_length(self, prompt: int, limit: int = 0) -> None:
        """Refuse a request that could never have enough blocks.

        Raises:
            ApiError: If so.
        """
        most = self.engine.most_tokens
        if prompt + limit > most:
            counted = f"{prompt} tokens of the prompt" + f" and {limit} to generate" * bool(limit)
            what = f"{counted} are too many: a {self.role} server has room for {most}"
            raise ApiError(400, what, "context_length_exceeded")

    def describe(self) -> dict[str, Any]:
        """How it is, as plain data."""
        return {"ok": self.engine.alive, "tasks": len(self.tasks), **self.engine.describe()}
