"""Servers as a router knows them: what they have to do, when they failed, and whether they answer at all.

A server whose process is frozen, or whose host is gone, closes no connection: whoever waits for it waits for ever. So
each is asked again and again how it is. One that does not say in time is silent: what was awaited of it has failed, and
it is asked nothing more until it answers again. One that refuses is not silent: it may be ending its last requests.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

SILENT_SECONDS = 10
"""A server may stand still for as long, by default."""
_LOOK_SECONDS = 1.0
"""Between two questions."""
_REST_SECONDS = 5.0
"""How long a server that failed is the last to be asked."""

_T = TypeVar("_T")
_log = logging.getLogger("serving.router")


class SilentError(Exception):
    """A server does not answer any more."""


class UnavailableError(Exception):
    """A server is there, and cannot take a request, stopped in the midst of one, or says what no server should say."""


FAILURES = (httpx.RequestError, httpx.InvalidURL, SilentError, UnavailableError)
"""With one of these a server has failed, and another one is asked."""


@dataclass(slots=True, eq=False)
class Server:
    """A prefill or decode server, as the router has come to know it.

    Attributes:
        url: Where it is.
        under_way: Requests that it has of this router; of a prefill server those that wait for their tickets.
        asked_at: When it was asked last, by the monotonic clock.
        failed_at: When it failed last, likewise.
        failures: How often.
        answers: Whether it said how it is when it was looked at last.
        silent: Whether it did not say so in time.
    """

    url: str
    under_way: int = 0
    asked_at: float = 0.0
    failed_at: float = -_REST_SECONDS
    failures: int = 0
    answers: bool = False
    silent: bool = False
    _waits: set[asyncio.Timeout] = field(default_factory=set)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """It has a request while the block lasts."""
        self.under_way += 1
        self.asked_at = time.monotonic()
        try:
            yield
        finally:
            self.under_way -= 1

    async def heard(self, answer: Awaitable[_T]) -> _T:
        """Wait for what it says, and no longer than until it is silent.

        Raises:
            SilentError: When it is.
        """
        wait = asyncio.timeout(0 if self.silent else None)
        try:
            async with wait:
                self._waits.add(wait)
                return await answer
        except TimeoutError as error:
            if not wait.expired():
                raise
            raise SilentError("it does not answer any more") from error
        finally:
            self._waits.discard(wait)

    async def watch(self, client: httpx.AsyncClient, silent_after: float) -> None:
        """Ask it how it is, for ever."""
        while True:
            try:
                async with asyncio.timeout(silent_after):
                    response = await client.get(f"{self.url}/stats")
            except (TimeoutError, httpx.TimeoutException):
                self._fall_silent()
            except (httpx.HTTPError, httpx.InvalidURL):
                self.answers = self.silent = False  # whoever asks it for more hears as much
            else:
                self.answers, self.silent = response.is_success, False
            await asyncio.sleep(_LOOK_SECONDS)

    def failed(self, error: object) -> None:
        """It did not do what it was asked for."""
        self.failed_at = time.monotonic()
        self.failures += 1
        lost = "it did not answer in time" if isinstance(error, httpx.TimeoutException) else "the connection was lost"
        _log.warning("%s failed: %s", self.url, str(error) or lost)

    def describe(self) -> dict[str, Any]:
        """How it is, as plain data."""
        return {name: getattr(self, name) for name in ("url", "under_way", "failures", "answers", "silent")}

    def _fall_silent(self) -> None:
        if not self.silent:
            _log.warning("%s does not answer any more", self.url)
        self.answers, self.silent = False, True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)


def in_order(servers: list[Server]) -> Iterator[Server]:
    """Servers in the order in which to ask them: those that failed just now last, those with little to do first.

    Of those with as much to do, the one that was not asked for longest. Those that are silent are left out.
    """
    now = time.monotonic()
    speaking = [each for each in servers if not each.silent]
    yield from sorted(speaking, key=lambda each: (now - each.failed_at < _REST_SECONDS, each.under_way, each.asked_at))
