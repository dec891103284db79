"""Engines of vLLM as child processes, and what a router does between a prefill engine and decode engines."""

# neither vLLM nor what comes with it is installed where types are checked
# pyright: reportMissingImports=false

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from make_model import VOCABULARY

from kvxfer.tickets import Issuer, Ticket

T = TypeVar("T")
R = TypeVar("R", bound="Router")

TOKENS = 24
"""Of an answer."""
LENGTHS = (1, 5, 31, 32, 33, 64, 100, 127, 128, 129, 200, 256, 300, 400)
EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_PORTS = iter(random.sample(range(EPHEMERAL // 2, EPHEMERAL), EPHEMERAL // 2))
PATIENCE = aiohttp.ClientTimeout(total=300)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in the core's process: each imports for a dozen seconds
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("indexed")), os.environ.get("PYTHONPATH", "")]),
}


def free_port() -> int:
    """One that nobody has, below those that the system gives to whoever asks for any: engines do while they start."""
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port := next(_PORTS)))
            return port


def prompts(seed: int, lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
    """Token ids of each length, without special ones."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


class EngineError(Exception):
    """An engine ended, did not start, or refused a request."""


@dataclass
class Engine:
    """`vllm serve` in a process group of its own."""

    name: str  # of its log
    model: Path  # folder
    logs: Path  # folder
    args: Sequence[str] = ()  # more of the command line
    transfer: dict[str, Any] | None = None  # what stands in `--kv-transfer-config`, if anything
    environment: dict[str, str] = field(default_factory=dict[str, str])
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(self.model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "512"]
        command += ["--max-num-seqs", "16", *self.args]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        env = os.environ | ENVIRONMENT | self.environment
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def wait(self, seconds: float = 300) -> None:
        """Until it answers.

        Raises:
            EngineError: If it ended, with what kvxfer said, or does not answer in time.
        """
        assert self.process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                said = re.findall(r"kvxfer\.errors\.\w+: .*", self.log.read_text())
                raise EngineError(f"{self.name} ended: {said[0] if said else f'see {self.log}'}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=5).read()
                return
            time.sleep(0.2)
        raise EngineError(f"{self.name} did not start in {seconds} s: see {self.log}")

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes at once, as when its container is paused or killed."""
        assert self.process is not None
        os.killpg(self.process.pid, number)
        if number is signal.SIGKILL:
            self.process.wait()

    def stop(self) -> None:
        """End it and whatever it has started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kvxfer(self, event: str) -> list[str]:
        """Lines of its log with this event of ours."""
        return [line for line in self.log.read_text().splitlines() if re.search(rf"\bkvxfer\.\S+ {event} ", line)]

    def cpu_seconds(self) -> float:
        """That all of its processes have used so far."""
        assert self.process is not None
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                fields = stat.read_text().rpartition(")")[2].split()
                ticks += (int(fields[11]) + int(fields[12])) * (int(fields[2]) == self.process.pid)
        return ticks / os.sysconf("SC_CLK_TCK")

    def folders(self) -> list[bool]:
        """Whether the folder of its socket is there, of each time that it was started."""
        return [Path(one).exists() for line in self.kvxfer("worker_opened") for one in re.findall("unix:(.+)/", line)]

    def metrics(self) -> dict[str, float]:
        """Sums over labels of vLLM's counters, and prompt tokens by their source."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            if name.endswith(("_created", "_bucket")):
                continue
            source = re.search(r'source="([^"]*)"', labels)
            key = source[1] if source else name
            found[key] = found.get(key, 0.0) + float(value)
        return found


def connected(name: str, model: Path, logs: Path, *args: str, **extra: Any) -> Engine:
    """An engine with kvxfer's connector, for the side that its name begins with; `extra` is the connector's own."""
    transfer: dict[str, Any] = {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.integrations.vllm",
        "kv_role": "kv_producer" if name.startswith("prefill") else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return Engine(name, model, logs, args, transfer)


def with_nixl(name: str, model: Path, logs: Path, *args: str) -> Engine:
    """The same with vLLM's own connector."""
    engine = connected(name, model, logs, *args)
    changed = {"kv_connector": "NixlConnector", "kv_connector_module_path": None, "kv_buffer_device": "cpu"}
    engine.transfer = (engine.transfer or {}) | changed
    engine.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    return engine


@dataclass
class Router:
    """Sends each prompt to the prefill engine and then, with what its reply has, to one of the decode engines."""

    session: aiohttp.ClientSession
    prefill: Engine
    decodes: Sequence[Engine]
    key: bytes | None = None  # the prefill engine's: tickets are made here, and both engines get the prompt at once
    model: str = "tiny"  # or an adapter's name

    def __post_init__(self) -> None:
        self._turns = itertools.cycle(self.decodes)
        self._issuer: Issuer | None = None

    async def complete(self, engine: Engine, prompt: list[int], tokens: int, **params: Any) -> dict[str, Any]:
        """The reply of an engine, whatever it would rather have done than all these tokens."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "kv_transfer_params": params or None}
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise EngineError(f"{engine.name}: {reply.status}: {text[:300]}")
            return json.loads(text)

    async def ticket(self, prompt: list[int], **params: Any) -> dict[str, Any]:
        """Have a prompt computed by the prefill engine: what a decode engine needs."""
        return (await self.complete(self.prefill, prompt, 1, **PREFILL, **params))["kv_transfer_params"]

    async def decode(self, prompt: list[int], **params: Any) -> list[int]:
        """The next decode engine's answer; without parameters it computes everything."""
        return (await self.complete(next(self._turns), prompt, TOKENS, **params))["choices"][0]["token_ids"]

    async def ask(self, prompt: list[int]) -> list[int]:
        """The answer. A decode engine computes what the prefill engine could not, since that one has gone."""
        if self.key is not None:
            return await self._at_once(prompt, self.key)
        try:
            params = await self.ticket(prompt)
        except aiohttp.ClientConnectionError:
            params = {}
        return await self.decode(prompt, **params)

    async def _at_once(self, prompt: list[int], key: bytes) -> list[int]:
        if self._issuer is None:
            params = await self.ticket(prompt)
            self._issuer = Issuer(Ticket.parse(params["ticket"]).card, key)
            return await self.decode(prompt, **params)
        name = uuid.uuid4().hex
        to_decode = {"do_remote_prefill": True, "ticket": self._issuer.ticket(name), "remote_num_tokens": len(prompt)}
        _, tokens = await asyncio.gather(self.ticket(prompt, transfer_id=name), self.decode(prompt, **to_decode))
        return tokens

    async def free(self, engine: Engine, seconds: float) -> None:
        """Wait until an engine has no block taken.

        Raises:
            TimeoutError: If it has some after that time.
        """
        async with asyncio.timeout(seconds):
            while True:
                await self.complete(engine, [3], 1)  # the engine counts, and gives back, with a step alone
                if engine.metrics()["kv_cache_usage_perc"] == 0:
                    return
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def routed(
    prefill: Engine, *decodes: Engine, key: bytes | None = None, kind: type[R] = Router
) -> AsyncIterator[R]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a server may close a connection as it is used again
    async with aiohttp.ClientSession(timeout=PATIENCE, connector=connector) as session:
        yield kind(session, prefill, decodes, key)


async def gathered(jobs: Iterable[Awaitable[T]], concurrency: int) -> list[T]:
    """What each gave, some at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(job: Awaitable[T]) -> T:
        async with gate:
            return await job

    return await asyncio.gather(*map(one, jobs))


@dataclass
class Alone:
    """An engine that does everything itself, and is asked one thing at a time. It goes on until another one is asked.

    Args:
        make: Makes an engine, by what it is asked as.
        kind: How it is asked.
    """

    make: Callable[..., Engine]
    kind: type[Router] = Router
    _engine: Engine | None = None
    _which: tuple[str, ...] = ()
    _said: dict[tuple[str, ...], dict[tuple[int, ...], list[int]]] = field(default_factory=dict)

    def begin(self, *which: str) -> None:
        """Start it, beside others."""
        if self._engine is None or which != self._which:
            self.stop()
            self._engine, self._which = self.make(*which), which
            self._engine.start()

    async def ask(self, asked: Iterable[list[int]], *which: str) -> list[list[int]]:
        """Its answers, which it is asked for once only."""
        asked, said = list(asked), self._said.setdefault(which, {})
        new = [prompt for prompt in asked if tuple(prompt) not in said]
        if new:
            self.begin(*which)
            assert self._engine is not None
            self._engine.wait()
            async with routed(self._engine, self._engine, kind=self.kind) as router:
                answers = await gathered(map(router.decode, new), 1)
            said.update(zip(map(tuple, new), answers, strict=True))
        return [said[tuple(prompt)] for prompt in asked]

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()


def shorter(those: Iterable[list[int]]) -> list[list[int]]:
    """The beginnings of long prompts."""
    return [prompt[:-10] for prompt in those if len(prompt) >= 200]
