"""The servers of `examples/serving` on this loop, joined by real HTTP on ports from the system.

K and V travel by kvxfer's in-process transport, over the route that uses it, so a test can hold, refuse or damage them.
"""

import asyncio
import contextlib
import socket
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import kvxfer
from examples.serving import decode, prefill, router, server
from examples.serving.api import Policy
from examples.serving.engine import Engine, EngineSettings
from examples.serving.prefill import OfferBy
from examples.serving.tokenizer import STOPS, TextStream, encode
from kvxfer.testing import LoopbackNetwork, LoopbackTransport
from kvxfer.tools.demo.model import Sequence
from kvxfer.tools.demo.model import decode as continued
from kvxfer.tools.demo.model import prefill as run

MODEL: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16, "hidden": 32, "blocks": 64, "chunk": 64}
WORKER = {"route": "staged", "arena_bytes": "4MiB", "drain_timeout": 2}
SECONDS = 60


class Server(server.Server):
    """One of several in a process that has signals of its own."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@asynccontextmanager
async def served(application):
    """An ASGI application under a URL of its own."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listening.getsockname())
    running = Server(application, log_level="error")
    serving = asyncio.create_task(running.serve([listening]))
    try:
        await eventually(lambda: running.started or serving.done())
        yield url, running
    finally:
        running.should_exit = True
        await serving


async def eventually(condition):
    """Until it holds; what it then gave."""
    async with asyncio.timeout(SECONDS):
        while not (found := condition()):  # noqa: ASYNC110 - nobody sets an event for it
            await asyncio.sleep(0.005)
        return found


class Wire:
    """Another way to a server. While it is frozen connections are open and silent, as to a process that is stopped."""

    def __init__(self, url):
        # where it begins; what the line from the server has in it behind which it freezes, once
        self.url, self.freeze_at = "", b""
        self._host, self._port = url.removeprefix("http://").split(":")
        self._open, self._tasks = asyncio.Event(), set()
        self._open.set()

    def freeze(self):
        self._open.clear()

    def thaw(self):
        self._open.set()

    @asynccontextmanager
    async def laid(self):
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        there, back = await asyncio.open_connection(self._host, self._port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader, writer):
        try:
            while data := await reader.read(2**16):
                for line in data.splitlines(keepends=True):
                    await self._open.wait()
                    writer.write(line)
                    if self.freeze_at and self.freeze_at in line:
                        self.freeze_at = b""
                        self.freeze()
            await self._open.wait()
        finally:
            writer.close()


class Service:
    """A prefill server, decode servers and a router; each is there while the stack is open."""

    eventually = staticmethod(eventually)

    def __init__(self, stack, client):
        self.network = LoopbackNetwork()
        self.client = client
        self.nodes = {}  # by name: `Prefill` and `Decode`, to look behind what HTTP says
        self._stack = stack
        self._servers = {}

    async def start(self, application):
        url, server = await self._stack.enter_async_context(served(application))
        self._servers[url] = server
        return url

    def stop(self, url):
        """Ask a server to end, as SIGTERM does."""
        self._servers[url].should_exit = True

    def connections(self, url):
        """Those that a server has."""
        return set(self._servers[url].server_state.connections)

    async def prefill(self, name="prefill", *, verify=False, offer_by: OfferBy = "layers", **model):
        settings = EngineSettings(**{**MODEL, "layout": "NHD", "block_tokens": 16, **model})
        worker = self._worker(name)
        application = prefill.app(
            settings, offer_by=offer_by, verify=verify, open_worker=worker, engine="prefill", **WORKER
        )
        self.nodes[name] = application.state.node
        return await self.start(application)

    async def decode(self, name="decode", *, verify=False, on_failure: Policy = "recompute", admin="", **model):
        settings = EngineSettings(**{**MODEL, "layout": "HND", "block_tokens": 32, **model})
        worker = self._worker(name)
        application = decode.app(
            settings, verify=verify, on_failure=on_failure, open_worker=worker, admin=admin, engine=name, **WORKER
        )
        self.nodes[name] = application.state.node
        return await self.start(application)

    async def router(self, prefill, decode, on_failure: Policy = "recompute", **settings):
        return await self.start(router.app(prefill=prefill, decode=decode, on_failure=on_failure, **settings))

    async def wire(self, url):
        """Another way to a server, which can be frozen."""
        return await self._stack.enter_async_context(Wire(url).laid())

    async def all(self, *, verify=False, on_failure: Policy = "recompute"):
        """One of each; their addresses."""
        first = await self.prefill(verify=verify)
        second = await self.decode(verify=verify, on_failure=on_failure)
        return SimpleNamespace(prefill=first, decode=second, router=await self.router([first], [second], on_failure))

    async def post(self, url, path="/v1/completions", **body):
        return await self.client.post(url + path, json={"max_tokens": 8, **body})

    async def stats(self, url):
        return (await self.client.get(f"{url}/stats")).json()

    async def idle(self, *names):
        """Until no request has a block at these servers, and none is under way."""
        for name in names:
            node = self.nodes[name]
            await eventually(lambda node=node: not node.tasks and node.engine.cache.free_blocks == MODEL["blocks"])
            assert node.engine.describe()["running"] == 0

    @contextlib.contextmanager
    def paused(self, name):
        """The model of a server stands still while the block lasts."""
        gate = threading.Event()
        self.nodes[name].engine._inbox.put(gate.wait)
        try:
            yield
        finally:
            gate.set()

    def _worker(self, name):
        def worker(tensors, config):
            place = f"{name} {config.rank}" if config.world > 1 else name
            return kvxfer.Worker(tensors, config, transport=LoopbackTransport(place, self.network))

        return worker


@pytest.fixture
async def service():
    async with AsyncExitStack() as stack, httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
        yield Service(stack, client)


@pytest.fixture(scope="session")
def alone():
    """What the model says to a prompt if it has a cache to itself, and is asked by a call: the reference."""
    engine = Engine.load(EngineSettings(**MODEL))

    def answer(prompt, limit=8):
        sequence, ids, chunk, first = Sequence([]), encode(prompt), engine.settings.chunk, 0
        for start in range(0, len(ids), chunk):  # as servers do: the last bits of K and V depend on it
            first = run(engine._model, engine.cache, sequence, ids[start : start + chunk])
        digest = engine.digest(sequence)
        tokens = [first, *continued(engine._model, engine.cache, sequence, first, limit - 1)]
        engine.cache.free(sequence.block_ids)
        end = next((i for i, token in enumerate(tokens, 1) if token in STOPS), None)
        stream = TextStream()
        text = "".join(stream.feed(token) for token in tokens[:end]) + stream.end()
        return SimpleNamespace(
            text=text, tokens=tokens[:end], finish="length" if end is None else "stop", digest=digest
        )

    return answer
