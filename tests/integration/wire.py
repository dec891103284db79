"""Two workers in virtual time with a wire between them that can fall silent or be cut.

The control stream of a fetch leads through a `Wire`, because tickets say where a prefill rank is reached; the bytes go
over the loopback network, which has faults of its own.
"""

import asyncio
import contextlib
import inspect
import socket
from pathlib import Path

from stage import Cache, Stage

from kvxfer import Worker
from kvxfer.testing import LoopbackNetwork, simulate

SIZES = {"arena_bytes": "64KiB", "chunk_bytes": "2KiB"}
TIMES = {
    "peer_timeout": 7.0,
    "revoke_timeout": 3.0,
    "grant_lease": 900.0,
    "offer_lease": 11.0,
    "unclaimed_timeout": 23.0,
    "connect_timeout": 2.0,
    "no_progress_timeout": 13.0,
    "drain_timeout": 4.0,
}
"""Unequal, so that none can be mistaken for another."""


class Wire:
    """A Unix socket whose streams are passed on to another one."""

    def __init__(self, path: Path, target: str, now):
        self.endpoint = f"unix:{path}"  # where it listens
        # frames (or parts of them) that came from the far end; frames (or parts of them) that came from whoever
        # connected
        self.heard = self.said = 0
        self.last = 0.0  # when the far end was last heard
        self._path, self._target, self._now = path, target.removeprefix("unix:"), now
        self._silent = False
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def open(self):
        self._server = await asyncio.start_unix_server(self._connected, self._path)

    def silence(self):
        """Let no byte through any more, in either direction, on streams old and new."""
        self._silent = True

    def lead_to(self, endpoint):
        """Lead new streams to another worker; those that there are fall silent, as those to a host that is gone."""
        self._target = endpoint.removeprefix("unix:")

    def speak(self):
        """Let bytes through again; what was swallowed is lost."""
        self._silent = False

    def cut(self):
        """Close every stream and refuse new ones."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)
        self.reset()

    def reset(self):
        """Close every stream; new ones are welcome."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self):
        self.cut()
        await asyncio.gather(*self._pumps)

    async def _connected(self, reader, writer):
        target = self._target
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(target)
        except OSError:  # the worker there is closed
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        self._pumps |= {
            asyncio.create_task(self._pump(reader, far_writer, target, from_far=False)),
            asyncio.create_task(self._pump(far_reader, writer, target, from_far=True)),
        }

    async def _pump(self, reader, writer, target, *, from_far):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                if self._silent or target != self._target:
                    continue
                if from_far:
                    self.heard, self.last = self.heard + 1, self._now()
                else:
                    self.said += 1
                writer.write(data)
        writer.close()


class Play:
    """A prefill and a decode worker in virtual time, `Cache`s of 16 blocks of 4 tokens each."""

    def __init__(self, runtime, folder: Path, stack: contextlib.AsyncExitStack):
        self.runtime, self.folder, self.network = runtime, folder, LoopbackNetwork()
        self.source, self.target = Cache(), Cache(layout="HND")
        self.prefill: Worker
        self.decode: Worker
        self.wire: Wire  # carries the control stream
        self._stage = Stage(self.network, stack, SIZES, runtime)
        self.worker = self._stage.worker

    @property
    def now(self) -> float:
        return self.runtime.now()

    async def pair(self, *, prefill=None, decode=None, source=None, target=None, **both):
        """Open both workers and the wire between them."""
        self.source, self.target = source or self.source, target or self.target
        options = {"prefill": prefill, "decode": decode, **both}
        self.prefill, self.decode = await self._stage.pair(self.source, self.target, **options)
        self.wire = await self.wire_to(self.prefill)

    async def wire_to(self, worker, name="wire") -> Wire:
        return await self.wire_to_endpoint(worker.card.endpoint, name)

    async def wire_to_endpoint(self, endpoint, name) -> Wire:
        wire = Wire(self.folder / name, endpoint, lambda: self.now)
        await wire.open()
        self._stage.stack.push_async_callback(wire.close)
        return wire

    def ticket(self, request, wire=None):
        """A ticket whose holder reaches the prefill worker over the wire."""
        return self.prefill.engine.ticket(request) | {"endpoints": {"prefix": (wire or self.wire).endpoint}}

    def start(self, request, ids=(3, 4), tokens=range(8), **options):
        return self.decode.start_fetch(self.ticket(request), list(ids), tokens=tokens, **options)

    async def bring(self, request, ids=(1, 2), into=(3, 4), tokens=range(8)):
        """See `Stage.bring`; over the wire, and however long it takes."""
        options = {"ticket": self.ticket(request), "timeout": None}
        return await self._stage.bring(self.prefill, self.decode, request, ids, into, tokens, **options)

    async def until(self, condition, seconds=60.0):
        """Let virtual time pass in small steps, of 10 ms in the end, until a condition holds that no event tells of."""
        end, step = self.now + seconds, 1e-3
        while not condition():
            assert self.now < end, "it did not come to pass"
            await asyncio.sleep(step)
            step = min(1.1 * step, 0.01)

    def stand_still(self, seconds):
        """Both workers, as on a machine that is paused."""
        self.runtime.loop._virtual.now += seconds

    async def timed(self, awaitable):
        """What it returned or raised, and after how many seconds."""
        began = self.now
        (outcome,) = await asyncio.gather(awaitable, return_exceptions=True)
        return outcome, self.now - began


def play(scenario, folder, *, seed=0):
    """Run `scenario(play)` in virtual time."""

    async def run(runtime):
        async with contextlib.AsyncExitStack() as stack:
            one = Play(runtime, folder, stack)
            stack.callback(lambda: one.network.release("*"))
            await scenario(one)

    simulate(run, seed=seed)


def virtual(test):
    """An async test in virtual time: its first argument is the `Play`, fixtures and parameters (`seed`) follow."""

    _, *others = inspect.signature(test).parameters.values()
    asked = [one.name for one in others]

    def played(**given):
        mine = {name: given[name] for name in asked}
        play(lambda one: test(one, **mine), given["tmp_path"], seed=given.get("seed", 0))

    folder = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    played.__signature__ = inspect.Signature([folder, *(one for one in others if one.name != "tmp_path")])
    played.__name__, played.__doc__, played.__module__ = test.__name__, test.__doc__, test.__module__
    return played


@contextlib.contextmanager
def deaf_port():
    """A TCP port of this host that answers no connection attempt: its queue is full and nobody takes from it."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        host, port = server.getsockname()
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((host, port))
        yield f"tcp:{host}:{port}"
