"""Whose job is next: owners take turns, weighed by bytes, so that a small copy waits for one large one and not for ten.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). An owner's next job has a start tag: where the owner's
last one ended, but no earlier than where a fair share of all that was copied has come to. The smallest tag is served
(of equal ones the smaller job), and moves its owner on by the job's bytes. Within an owner jobs keep their order,
except that one whose event has not fired holds up nobody.
"""

from collections.abc import Callable, Hashable
from typing import Final

from kvxfer.copy.port import CopyJob

__all__ = ["Turns"]

_REMEMBERED: Final = 1024
"""Owners without jobs of which it is kept where they ended."""


class Turns:
    """The jobs of one direction that wait to be launched. Not safe for threads.

    Attributes:
        waiting: Those of each owner that has any.
    """

    def __init__(self) -> None:
        self.waiting: Final[dict[Hashable, list[CopyJob]]] = {}
        self._tags: dict[Hashable, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def add(self, job: CopyJob) -> None:
        """Queue a job behind those of its owner."""
        waiting = self.waiting.get(job.owner)
        if waiting is not None:
            waiting.append(job)
            return
        self.waiting[job.owner] = [job]
        self._tags[job.owner] = max(self._now, self._tags.get(job.owner, 0))

    def pop(self, ready: Callable[[CopyJob], bool]) -> CopyJob | None:
        """The next job that is ready, or None. `ready` is asked of as few as that takes."""
        for owner in sorted(self.waiting, key=self._order) if len(self.waiting) > 1 else self.waiting:
            waiting = self.waiting[owner]
            for at, job in enumerate(waiting):
                if ready(job):
                    del waiting[at]
                    self._served(owner, job.nbytes)
                    return job
            self._tags[owner] = max(self._tags[owner], self._now)  # who could not go is owed nothing for that
        return None

    def _order(self, owner: Hashable) -> tuple[int, int]:
        return self._tags[owner], self.waiting[owner][0].nbytes

    def _served(self, owner: Hashable, nbytes: int) -> None:
        nbytes = max(1, nbytes)
        # what is copied brings all forward alike: else owners who come ever anew would keep an old one waiting
        self._now = max(self._now, self._tags[owner]) + -(-nbytes // len(self.waiting))
        self._tags[owner] += nbytes
        if not self.waiting[owner]:
            del self.waiting[owner]
        if not self.waiting:  # nobody waits, so nobody is owed anything
            self._tags.clear()
            self._now = 0
        if len(self._tags) > _REMEMBERED + len(self.waiting):
            self._tags = {one: tag for one, tag in self._tags.items() if one in self.waiting or tag > self._now}
