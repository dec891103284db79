"""Engines of vLLM as child processes, and what a router does between a prefill engine and a decode engine."""

# neither vLLM nor what comes with it is installed where types are checked
# pyright: reportMissingImports=false

import asyncio
import contextlib
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
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).resolve().parent
LENGTHS = (1, 5, 31, 32, 33, 64, 100, 127, 128, 129, 200, 256, 300, 400)
PATIENCE = aiohttp.ClientTimeout(total=300)
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_CONFIG_PATH": str(HERE / "logging.json"),
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def prompts(lengths: Iterable[int], *, seed: int, vocabulary: int) -> list[list[int]]:
    """Token ids of each length, without special ones."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


class EngineError(Exception):
    """An engine ended, or did not start."""


@dataclass
class Engine:
    """`vllm serve` in a process group of its own."""

    name: str  # of its log
    model: Path  # folder
    logs: Path  # folder
    args: tuple[str, ...] = ()  # more of the command line
    transfer: dict[str, Any] | None = None  # what stands in `--kv-transfer-config`, if anything
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
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, start_new_session=True
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
            time.sleep(0.5)
        raise EngineError(f"{self.name} did not start in {seconds} s: see {self.log}")

    def stop(self) -> None:
        """End it and whatever it has started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def metrics(self) -> dict[str, float]:
        """Sums over labels of vLLM's counters, and prompt tokens by their source."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            if name.endswith(("_created", "_bucket")):
                continue
            source = re.search(r'source="([^"]*)"', labels)
            key = f"{name}[{source[1]}]" if source else name
            found[key] = found.get(key, 0.0) + float(value)
        return found


async def complete(
    session: aiohttp.ClientSession, engine: Engine, prompt: list[int], tokens: int, **more: Any
) -> dict[str, Any]:
    """The reply of an engine, whatever it would rather have done than all these tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{engine.url}/v1/completions", json=body | {"return_token_ids": True} | more) as reply:
        text = await reply.text()
        if reply.status != 200:
            raise EngineError(f"{engine.name}: {reply.status}: {text[:300]}")
        return json.loads(text)


def token_ids(reply: dict[str, Any]) -> list[int]:
    return reply["choices"][0]["token_ids"]


async def prefill(session: aiohttp.ClientSession, engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Have a prompt computed by a prefill engine: what the decode engine needs."""
    reply = await complete(session, engine, prompt, 1, kv_transfer_params=PREFILL)
    if not reply.get("kv_transfer_params"):
        raise EngineError(f"{engine.name} gave no kv_transfer_params")
    return reply["kv_transfer_params"]


async def one_after_the_other(
    session: aiohttp.ClientSession, first: Engine, second: Engine, prompt: list[int], tokens: int
) -> list[int]:
    """A request whose ticket comes with the reply of the prefill engine."""
    params = await prefill(session, first, prompt)
    return token_ids(await complete(session, second, prompt, tokens, kv_transfer_params=params))


async def both_at_once(
    session: aiohttp.ClientSession, issuer: Any, first: Engine, second: Engine, prompt: list[int], tokens: int
) -> list[int]:
    """A request whose ticket is made before: the decode engine fetches while the prompt is computed."""
    name = uuid.uuid4().hex
    to_decode = {"do_remote_prefill": True, "ticket": issuer.ticket(name), "remote_num_tokens": len(prompt)}
    _, reply = await asyncio.gather(
        complete(session, first, prompt, 1, kv_transfer_params=PREFILL | {"transfer_id": name}),
        complete(session, second, prompt, tokens, kv_transfer_params=to_decode),
    )
    return token_ids(reply)


async def gathered(jobs: Iterable[Awaitable[list[int]]], concurrency: int) -> list[list[int] | BaseException]:
    """What each gave or raised, some at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(job: Awaitable[list[int]]) -> list[int]:
        async with gate:
            return await job

    return await asyncio.gather(*map(one, jobs), return_exceptions=True)
