"""Processes to whom nothing happens: a survivor and a third for each lane, which outlive the cases."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from actors import Actor, ActorFailedError
from faults import LANES, HarmError, Scene

_log = logging.getLogger("kvxfer.tests")
PATIENCE = (1.0, 4.0)
STALLED_SECONDS = 0.4
"""A process that got no time for so long is given up rightly, by settings as short as these."""


class _StarvedError(Exception):
    """Somebody got no time."""


class Company:
    """Started when they are first needed."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Actor, Actor]] = {}

    async def play(self, lane: str, scene: Callable[..., Scene], *, apart: bool = False) -> None:
        """Play a scene. If it fails, and somebody got little time, that proves nothing: once more, patiently.

        Harm proves itself, however little time anybody got.
        """
        for patience in PATIENCE:
            with suppress(_StarvedError), self.case(lane, apart=apart) as actors:
                playing = scene(*actors, patience=patience)
                await starved(actors[:2], patience)  # until now
                try:
                    await playing.play()
                except HarmError:
                    raise
                except (AssertionError, TimeoutError, ActorFailedError) as error:
                    await harmless(playing.everybody(), error)
                    if patience == PATIENCE[-1] or not await starved(playing.runs(), patience):
                        raise
                    _log.warning("played again, patiently: %r", error)
                    raise _StarvedError from error
                return

    @contextmanager
    def case(self, lane: str, *, apart: bool = False) -> Iterator[tuple[Actor, Actor, Actor]]:
        """Survivor, third, and a fresh victim, which is ended afterwards; after a failure all of them are."""
        if lane not in self._pairs:
            self._pairs[lane] = (Actor(LANES[lane]), Actor(LANES[lane]))
        victim = Actor(LANES[lane], apart=apart)
        try:
            yield *self._pairs[lane], victim
        except BaseException:
            for actor in self._pairs.pop(lane):  # they may have anything left
                actor.end()
            raise
        finally:
            victim.end()

    def leave_loop(self) -> None:
        """The test is over, and with it the loop on which they were listened to."""
        for pair in self._pairs.values():
            for actor in pair:
                actor.leave_loop()

    def end(self) -> None:
        """Kill and reap them all."""
        for pair in self._pairs.values():
            for actor in pair:
                actor.end()


async def starved(actors: Iterable[Actor], patience: float) -> bool:
    """Whether one of them got too little time since that was last asked; who does not say did not."""
    told: list[bool] = []
    for actor in actors:
        with suppress(ActorFailedError, TimeoutError):
            told.append(await actor.starved(STALLED_SECONDS * patience))
    return any(told)


async def harmless(actors: Iterable[Actor], error: BaseException) -> None:
    """See that none of them has seen harm before the error was; who does not answer may have."""
    seen: list[str] = []
    for actor in actors:
        if actor.answers:
            with suppress(ActorFailedError, TimeoutError):
                seen += await actor.harm()
    if seen:
        raise HarmError(seen) from error
