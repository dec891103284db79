"""Processes to whom nothing happens: a survivor and a third for each lane, which outlive the cases."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors import Actor
from faults import LANES


class Company:
    """Started when they are first needed."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Actor, Actor]] = {}

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
