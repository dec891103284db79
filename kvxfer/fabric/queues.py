"""Posts that have no result yet, by peer: whose turn it is, what has ended, when to look again."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from kvxfer.errors import FabricError
from kvxfer.fabric.parts import LivePost, Poster, Release
from kvxfer.fabric.port import Transport
from kvxfer.fabric.wire import Paces, Wire

__all__ = ["Queues"]


class Queues:
    """The posts of a fabric. Belongs to its thread; `clock` counts the time in which that ran.

    Args:
        transport: Says what has ended.
        poster: Takes parts.
        release: Gives a handle back.
        now: Monotonic seconds.
        no_progress_timeout: Seconds by the clock until a post of which no part is posted or ends is given up.
    """

    def __init__(
        self,
        transport: Transport,
        poster: Poster,
        release: Release,
        now: Callable[[], float],
        no_progress_timeout: float,
    ) -> None:
        self._transport: Final = transport
        self._poster: Final = poster
        self._release: Final = release
        self._now: Final = now
        self._no_progress_timeout: Final = no_progress_timeout
        self._posts: dict[str, deque[LivePost]] = {}

    def __bool__(self) -> bool:
        return bool(self._posts)

    def __iter__(self) -> Iterator[LivePost]:
        return (live for queue in self._posts.values() for live in queue)

    def add(self, live: LivePost) -> None:
        """A post came in."""
        self._posts.setdefault(live.post.peer, deque()).append(live)

    def of(self, peer: str) -> tuple[LivePost, ...]:
        """Posts to one peer."""
        return tuple(self._posts.get(peer, ()))

    def take_all(self) -> list[LivePost]:
        """Let go of all of them."""
        posts = list(self)
        self._posts.clear()
        return posts

    @property
    def wants_turn(self) -> bool:
        """Whether a part could be posted now."""
        return any(live.wants_turn for live in self)

    def post(self, clock: float) -> bool:
        """Post one part for each peer, of that post of the peer whose turn it is. True if any was."""
        posted = False
        for queue in self._posts.values():
            for _ in range(len(queue)):
                live = queue[0]
                queue.rotate(-1)
                if live.wants_turn and live.post_part(self._poster, self._now, clock):
                    posted = True
                    break
        return posted

    def poll(self, clock: float) -> bool:
        """Look at every part once. True if any has ended."""
        for wire in self._wires():
            wire.looked(self._now())
        ended = [live.poll(self._transport, self._release, self._now, clock) for live in self]
        return any(ended)

    def settle(self, clock: float) -> list[LivePost]:
        """Give up what is silent, and take out what has a result."""
        done: list[LivePost] = []
        for peer in list(self._posts):
            queue = self._posts[peer]
            for live in tuple(queue):
                if live.silent(clock):
                    reason = FabricError(f"no progress for {self._no_progress_timeout:g} s to {peer}")
                    live.give_up(reason, self._release, watch=True)
                if live.settled:
                    queue.remove(live)
                    done.append(live)
            if not queue:
                del self._posts[peer]
        return done

    def delays(self, paces: Paces) -> list[float]:
        """Seconds until what is under way to each peer should be looked at again."""
        now = self._now()
        return [delay for wire in self._wires() if (delay := wire.delay(now, paces)) is not None]

    def _wires(self) -> set[Wire]:
        """One a peer, unless it was disconnected with posts under way, or never connected."""
        return {live.wire for live in self}
