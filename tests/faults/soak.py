"""Many transfers of every kind between a process that stays and others that are killed and started again.

    python tests/faults/soak.py 100000 --json soak.json

The process that stays fetches on each route from two others, and they fetch from it. About one transfer in a hundred is
struck: cancelled, timed out, withdrawn, its control streams cut, or its process killed. In the end nothing may be left:
memory, file descriptors and threads are as they were after a warm-up, the arena is whole or accounted for, and every
byte was right.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from actors import Actor  # noqa: E402 - found by the lines above
from flows import Tally  # noqa: E402
from steps import ROUTES  # noqa: E402

HOME_SEED = 1
PEER_SEED = 5
GIVEN_BLOCKS = 256
"""One byte names each; those that a killed process may still read are not offered again."""
POOL_BLOCKS = 1024
"""Blocks of one stream; those that a killed process leaves in doubt are not used again."""
PEERS = ("east", "west")
KILLS_PER_TRANSFER = 0.001
WARM_UP = 0.1
WARM_UP_LEAST = 200
"""After this part of the transfers, but so many at least, memory is looked at for the first time: until then not
everybody has met everybody."""
RSS_TOLERANCE_BYTES = 48 << 20
FD_TOLERANCE = 24 + 3 * 4
"""What one more peer process takes that was not connected at the first look: streams and transports, and for each of
the four workers that it meets its gates (two) and its process."""
FDS_PER_CUT = 1
"""A cut makes both sides disconnect their transports and connect them anew, and UCX keeps sockets of the connection
that was given up until its agent or the other process ends: one on each side with shared memory, two over TCP."""
THREAD_TOLERANCE = 8
_LOOK_SECONDS = 0.5
_STILL_SECONDS = 60.0
_SETTINGS: dict[str, Any] = {
    "arena_bytes": "16MiB",
    "chunk_bytes": "16KiB",
    "fabric": {"max_post_bytes": "16KiB"},
    "peer_timeout": 5.0,
    "revoke_timeout": 1.0,
    "offer_lease": 3.0,
    "unclaimed_timeout": 10.0,
    "no_progress_timeout": 5.0,
    "connect_timeout": 3.0,
    "drain_timeout": 0.0,
}


class SoakFailedError(Exception):
    """Something is left over, grew, or was wrong."""


@dataclass
class Figures(Tally):
    """What a run came to: what became of transfers, as the process that stays saw it, and what is left.

    Faults that others made, and what was wrong there, count too.
    """

    seconds: float = 0.0  # how long it took
    before: dict[str, int] = field(default_factory=dict)  # memory, descriptors and threads after the warm-up
    after: dict[str, int] = field(default_factory=dict)  # the same at the end
    quarantined_bytes: int = 0  # of arenas, with a reason, at the end
    blocks_in_doubt: int = 0  # in custody at the end
    # what was held after everything was closed and not before it was opened, but for what is in doubt
    left: dict[str, int] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What must not be."""
        found = list(self.wrong[:20])
        fds = FD_TOLERANCE + FDS_PER_CUT * self.faults["cut"]
        bounds = {"resident_bytes": RSS_TOLERANCE_BYTES, "fds": fds, "threads": THREAD_TOLERANCE}
        for what, most in bounds.items():
            grown = self.after[what] - self.before[what]
            if grown > most:
                found.append(f"{what} grew by {grown} from {self.before[what]}; {most} are tolerated")
        if self.left:
            found.append(f"left after everything was closed: {self.left}")
        return found


class Soak:
    """One run."""

    def __init__(self, transfers: int, *, seed: int = 0, say: Callable[[str], None] = print) -> None:
        self._wanted = transfers
        self._say = say
        self._rng = random.Random(seed)
        self._home = Actor()
        self._peers: dict[str, Actor] = {}
        self._generations: Counter[str] = Counter()
        self._card: dict[str, Any] = {}
        self._figures = Figures()
        self._began = time.monotonic()
        self._next_kill = 0.0

    def stop(self) -> None:
        """Let it be enough."""
        self._wanted = 0

    async def run(self) -> Figures:
        """Run it to its end, and end every process.

        Raises:
            SoakFailedError: If nothing ends for a minute.
        """
        try:
            await self._open()
            await self._go_on()
            await self._end()
        finally:
            for actor in (self._home, *self._peers.values()):
                actor.end()
        return self._figures

    async def _open(self) -> None:
        home = self._home
        self._card = await home.open("home", seed=HOME_SEED, layout="NHD", blocks=GIVEN_BLOCKS, **_SETTINGS)
        for route in ROUTES:
            blocks = POOL_BLOCKS * len(PEERS)
            await home.open(route, seed=HOME_SEED + 1, layout="HND", blocks=blocks, route=route, **_SETTINGS)
        for peer in PEERS:
            await self._start(peer)
        self._next_kill = self._rng.expovariate(KILLS_PER_TRANSFER)

    async def _start(self, peer: str) -> None:
        """Start a process, and every stream with it."""
        self._generations[peer] += 1
        generation, actor, home = self._generations[peer], Actor(), self._home
        self._peers[peer] = actor
        route = self._rng.choice(ROUTES)
        card = await actor.open(peer, seed=PEER_SEED, layout="NHD", blocks=GIVEN_BLOCKS, **_SETTINGS)
        await actor.open("take", seed=HOME_SEED, layout="HND", blocks=POOL_BLOCKS, route=route, **_SETTINGS)
        first = PEERS.index(peer) * POOL_BLOCKS
        for name in ROUTES:
            flow = f"{peer}-{generation}-{name}"
            await actor.give(peer, flow)
            pool = (first, first + POOL_BLOCKS)
            await home.take(name, card, flow, seed=PEER_SEED, blocks=GIVEN_BLOCKS, pool=pool)
        flow = f"{peer}-{generation}-home"
        await home.give("home", flow)
        pool = (0, POOL_BLOCKS)
        await actor.take("take", self._card, flow, seed=HOME_SEED, blocks=GIVEN_BLOCKS, pool=pool)

    async def _restart(self, peer: str) -> None:
        """Kill a process in the midst of everything, and start another one."""
        actor, generation = self._peers[peer], self._generations[peer]
        await self._hear(actor)
        actor.end()
        self._figures.faults["kill"] += 1
        for name in (*ROUTES, "home"):
            await self._home.end_flow(f"{peer}-{generation}-{name}")
        await self._start(peer)

    async def _hear(self, actor: Actor) -> None:
        """Take over what a process has counted that is about to end."""
        tally = (await actor.tally())["taken"]
        self._figures.faults += tally.faults
        self._figures.wrong += tally.wrong

    async def _go_on(self) -> None:
        moved_at, ended = time.monotonic(), 0
        while ended < self._wanted:
            await asyncio.sleep(_LOOK_SECONDS)
            seen = await self._home.tally()
            now, before = seen["given"].ended + seen["taken"].ended, ended
            ended = now
            if not self._figures.before and ended >= max(WARM_UP * self._wanted, WARM_UP_LEAST):
                self._figures.before = _held(seen)
            if ended > before:
                moved_at = time.monotonic()
            elif time.monotonic() > moved_at + _STILL_SECONDS:
                raise SoakFailedError(f"nothing has ended for {_STILL_SECONDS:g} s: {seen}")
            if ended >= self._next_kill:
                self._next_kill = ended + self._rng.expovariate(KILLS_PER_TRANSFER)
                await self._restart(self._rng.choice(PEERS))
            self._say(self._progress(ended, seen))

    def _progress(self, ended: int, seen: dict[str, Any]) -> str:
        given, taken = seen["given"], seen["taken"]
        took = time.monotonic() - self._began
        return (
            f"{ended}/{self._wanted} transfers, {ended / took:.0f}/s, {given.ok + taken.ok} ok, "
            f"{sum(self._figures.faults.values()) + sum(taken.faults.values())} faults, "
            f"{len(given.wrong) + len(taken.wrong)} wrong, {seen['resident_bytes'] >> 20} MiB, {seen['fds']} fds, "
            f"{seen['threads']} threads{', ended: ' + ' '.join(seen['stalled']) if seen['stalled'] else ''}"
        )

    async def _end(self) -> None:
        """End every stream, look at what is held, close everything."""
        figures, home = self._figures, self._home
        for peer, actor in self._peers.items():
            for name in (*ROUTES, "home"):
                flow = f"{peer}-{self._generations[peer]}-{name}"
                await asyncio.gather(home.end_flow(flow), actor.end_flow(flow))
        seen = await home.tally()
        for peer in self._peers.values():
            await self._hear(peer)
        for tally in (seen["given"], seen["taken"]):
            figures.add(tally)
        for name in ("home", *ROUTES):
            state = await home.quiet(name, doubts=False, within=20)
            if state["busy"]:
                figures.wrong.append(f"{name} is not quiet: {state}")
            figures.quarantined_bytes += state["quarantined"]
            figures.blocks_in_doubt += state["custody"]
        figures.after = _held(await home.tally())
        figures.before = figures.before or figures.after
        for name in ("home", *ROUTES):
            figures.left |= await home.close(name)
        figures.seconds = time.monotonic() - self._began


def _held(seen: dict[str, Any]) -> dict[str, int]:
    return {what: seen[what] for what in ("resident_bytes", "fds", "threads")}


async def _run(transfers: int, seed: int, end: str) -> Figures:
    soak = Soak(transfers, seed=seed, say=lambda text: print(text, end=end, flush=True))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, soak.stop)  # figures, all the same
    return await soak.run()


def main() -> int:
    """Run it from a command line; Ctrl-C ends it early, with figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transfers", type=int, nargs="?", default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    figures = asyncio.run(_run(given.transfers, given.seed, end="\r" if sys.stdout.isatty() else "\n"))
    text = json.dumps(figures.__dict__, indent=2)
    print(f"\n{text}")
    if given.json:
        given.json.write_text(text + "\n")
    problems = figures.problems()
    print("\n".join(problems) or "nothing is wrong, and nothing is left")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
