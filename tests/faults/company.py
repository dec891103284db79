"""Processes to whom nothing happens: a survivor and a third for each lane, which outlive the cases."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from actors import Actor, ActorFailedError
from faults import LANES, Scene

PATIENCE = (1.0, 4.0)
STALLED_SECONDS = 0.4
"""A process that got no time for so long is given up rightly, by settings as short as these."""


class _StalledError(Exception):
    """Somebody got no time."""


class Company:
    """Started when they are first needed."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Actor, Actor]] = {}

    async def play(self, lane: str, scene: Callable[..., Scene], *, apart: bool = False) -> None:
        """Play a scene. If it fails, and somebody got no time for long, that proves nothing: once more, patiently.

        Args:
            lane: What the bytes take.
            scene: Makes it of the three processes, with a `patience`.
            apart: Whether the victim is in another PID namespace.
        """
        for patience in PATIENCE:
            with suppress(_StalledError), self.case(lane, apart=apart) as actors:
                playing = scene(*actors, patience=patience)
                await longest_stall(actors[:2])  # until now
                try:
                    await playing.play()
                except Exception as error:
                    stalled = await longest_stall(playing.runs())
                    if stalled < STALLED_SECONDS * patience or patience == PATIENCE[-1]:
                        raise
                    raise _StalledError from error
                return

    @contextmanager
    def case(self, lane: str, *, apart: bool = False) -> Iterator[tuple[Actor, Actor, Actor]]:
        """Survivor, third, and a fresh victim, which is ended afterwards; after a failure all of them are.

        Args:
            lane: What the bytes take.
            apart: Whether the victim is in another PID namespace.
        """
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


async def longest_stall(actors: Iterable[Actor]) -> float:
    """For how many seconds one of them stood still, since that was last asked; who does not say, for none."""
    longest = 0.0
    for actor in actors:
        with suppress(ActorFailedError, TimeoutError):
            longest = max(longest, await actor.stalled())
    return longest
