"""Who waits for the agent to be made anew, and what waits while it is; `kvxfer.rebuilding` does it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["Rebuilds", "Want"]


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A doubt that nothing else is likely to end.

    Attributes:
        since: When it was noticed.
        urgent: Whether it is about the caller's blocks, and not about staging memory.
        answered: Whether the peer has said all that it can, and is not to be waited for.
    """

    since: float
    urgent: bool
    answered: bool = False


class Rebuilds:
    """The books of it.

    Attributes:
        count: How often the agent was made anew.
        paused: It is about to be: nothing is granted to peers, and nothing announced to be read.
        wanted: Called when somebody new waits for it.

    Args:
        now: Monotonic seconds.
        loop: The worker's event loop.
    """

    def __init__(self, now: Callable[[], float], loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        self.paused = False
        self.wanted: Callable[[], None] = lambda: None
        self._now: Final = now
        self._loop: Final = loop
        self._wants: dict[Want, None] = {}
        self._taken: list[Want] = []
        self._held: list[Callable[[], None]] = []
        self._next: asyncio.Future[None] = loop.create_future()

    @property
    def wants(self) -> list[Want]:
        """Who waits."""
        return list(self._wants)

    def want(self, *, urgent: bool, answered: bool = False) -> Callable[[], None]:
        """Wait for it until it has been begun and done, or until the returned function is called."""
        want = Want(self._now(), urgent, answered)
        self._wants[want] = None
        self.wanted()
        return lambda: self._drop(want)

    @property
    def next(self) -> "asyncio.Future[None]":
        """Done when it has been done once more."""
        return self._next

    def when_open(self, then: Callable[[], None]) -> None:
        """Call `then` once peers may be granted or told something: at once, unless it is about to be done."""
        if self.paused:
            self._held.append(then)
        else:
            then()

    def begin(self) -> None:
        """It is about to be done. What is wanted by now will be over then, and nothing that comes later."""
        self.paused = True
        self._taken = list(self._wants)

    def end(self, *, done: bool) -> None:
        """It has been, or could not be."""
        taken, self._taken = self._taken, []
        held, self._held = self._held, []
        self.paused = False
        if done:
            self.count += 1
            self._next.set_result(None)
            self._next = self._loop.create_future()
            for want in taken:
                self._drop(want)
        for then in held:
            then()

    def _drop(self, want: Want) -> None:
        self._wants.pop(want, None)
