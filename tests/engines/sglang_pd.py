"""Engines of sglang as child processes, and a router that gives each prompt to both at once, as sglang's own does."""

# neither sglang nor what comes with it is installed where types are checked
# pyright: reportMissingImports=false

import asyncio
import itertools
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd import TOKENS, Engine, EngineError, Router, free_port

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("stubs")), os.environ.get("PYTHONPATH", "")]),
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # for two ranks on one host
    "SGLANG_PLUGINS": "kvxfer",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
SERVED = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch")
SERVED += ("--disable-overlap-schedule", "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "8192")
SERVED += ("--enable-metrics",)
SIDES = {
    "prefill": (),
    "decode": ("--disaggregation-decode-retraction-backup", "cpu_tensor"),  # the other kind wants a GPU
}


@dataclass
class Sglang(Engine):
    """`sglang.launch_server`, for the side that its name begins with."""

    meeting: int = field(default_factory=free_port)  # the bootstrap server's port

    def start(self) -> None:
        side = next((side for side in SIDES if self.name.startswith(side)), "")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), *SERVED]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.args]
        if side:
            command += ["--disaggregation-mode", side, "--disaggregation-transfer-backend", "nixl", *SIDES[side]]
            command += ["--disaggregation-bootstrap-port", str(self.meeting)] if side == "prefill" else []
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, start_new_session=True
            )

    def metrics(self) -> dict[str, float]:
        """Sums over labels of sglang's counters."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^sglang:(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found


class Rooms(Router):
    """As `Router`, by sglang's protocol."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rooms = itertools.count(1)

    async def complete(self, engine: Engine, prompt: list[int], tokens: int, **params: Any) -> dict[str, Any]:
        body = {"input_ids": prompt, **params}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        async with self.session.post(f"{engine.url}/generate", json=body) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise EngineError(f"{engine.name}: {reply.status}: {text[:300]}")
            return await reply.json()

    async def decode(self, prompt: list[int], **params: Any) -> list[int]:
        return (await self.complete(next(self._turns), prompt, TOKENS, **params))["output_ids"]

    async def ask(self, prompt: list[int]) -> list[int]:
        assert isinstance(self.prefill, Sglang)
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.meeting}
        where["bootstrap_room"] = next(self._rooms)
        _, tokens = await asyncio.gather(
            self.complete(self.prefill, prompt, TOKENS, **where), self.decode(prompt, **where)
        )
        return tokens
