"""Starts the servers: all of them, or one.

    python -m examples.serving                                        # a prefill server, a decode server, the router
    python -m examples.serving --decodes 2 --device cuda              # prefill on cuda:0, decode on cuda:1, cuda:2
    python -m examples.serving prefill --port 8101 --device cuda:0
    python -m examples.serving decode --port 8102 --device cuda:1
    python -m examples.serving router --port 8000 --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102

`KVXFER_*` variables set what workers do, as everywhere (`kvxfer config` lists them).
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from examples.serving import router
from examples.serving.api import MODEL

_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.2
_PREFILL = {"layout": "NHD", "block_tokens": 16}
_DECODE = {"layout": "HND", "block_tokens": 32}  # another layout on purpose: neither side knows the other's


def main() -> None:
    """Run what the command line says."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=arguments.log.upper(), format=f"{arguments.role}: %(message)s")
    if arguments.role == "all":
        sys.exit(asyncio.run(_Service(arguments).run()))
    if arguments.with_parent:
        threading.Thread(target=_follow_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises again what it has dealt with
        _serve(_application(arguments), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description="Serve a model, in two halves.")
    parser.add_argument("role", nargs="?", choices=["all", "prefill", "decode", "router"], default="all")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="of one server, or of the router; 0: any free one")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:1, or cuda: prefill on the first, decode on others")
    parser.add_argument("--decodes", type=int, default=1, help="decode servers")
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="of a router: prefill servers")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="of a router: decode servers")
    parser.add_argument("--on-failure", choices=["recompute", "fail"], default="recompute", help="if no cache comes")
    parser.add_argument("--verify", action="store_true", help="compare digests of K and V of every prompt")
    parser.add_argument(
        "--admin", default="", metavar="HOST:PORT", help="of one server: kvxfer's page, metrics, health"
    )
    parser.add_argument("--log", choices=["debug", "info", "warning", "error"], default="warning")
    for name, value in {"layers": 4, "kv-heads": 4, "head-dim": 32, "hidden": 128, "blocks": 512, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prompt in one pass")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)  # the socket to listen on, from the parent
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


# one server


def _application(arguments: argparse.Namespace) -> Starlette:
    if arguments.role == "router":
        return router.app(prefill=arguments.prefill, decode=arguments.decode, on_failure=arguments.on_failure)
    import torch

    from examples.serving import decode, prefill  # a router does without torch
    from examples.serving.engine import EngineSettings

    if arguments.device == "cpu":
        torch.set_num_threads(1)  # the model is small, and the servers share the machine
    names = ("device", "layers", "kv_heads", "head_dim", "hidden", "blocks", "batch", "chunk")
    common: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    if arguments.role == "prefill":
        return prefill.app(EngineSettings(**common, **_PREFILL), verify=arguments.verify, admin=arguments.admin)
    settings = EngineSettings(**common, **_DECODE)
    return decode.app(settings, on_failure=arguments.on_failure, verify=arguments.verify, admin=arguments.admin)


def _serve(application: Starlette, arguments: argparse.Namespace) -> None:
    listening = (
        socket.socket(fileno=arguments.fd) if arguments.fd is not None else _bound(arguments.host, arguments.port)
    )
    config = uvicorn.Config(
        application, log_level=arguments.log, access_log=False, ws="none", lifespan="on", timeout_graceful_shutdown=10
    )
    gc.collect()  # with torch loaded, a full collection would stop everything for 100 ms, again and again
    gc.freeze()
    uvicorn.Server(config).run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    return listening


def _follow_parent() -> None:
    """End when the parent is gone, which holds the other end of our standard input."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


# all of them


class _Service:
    """The servers as processes, which end with this one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._urls: dict[str, str] = {}

    async def run(self) -> int:
        """Start everything, say where it is, and wait; the exit code."""
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        try:
            self._start_all()
            return await self._watch(stopped)
        finally:
            await asyncio.to_thread(self._end)

    def _start_all(self) -> None:
        arguments = self._arguments
        self._start("prefill", "prefill", 0, *self._model(0))
        for number in range(arguments.decodes):
            self._start(f"decode {number}", "decode", 0, *self._model(1 + number))
        others = [(f"--{name.split()[0]}", url) for name, url in self._urls.items()]
        policy = ("--on-failure", arguments.on_failure)
        self._start("router", "router", arguments.port, *policy, *(part for pair in others for part in pair))

    def _model(self, index: int) -> list[str]:
        """Options of a server that has a model, the one with this number."""
        arguments = self._arguments
        device = f"cuda:{index}" if arguments.device == "cuda" else arguments.device
        options = ["--device", device, "--on-failure", arguments.on_failure]
        for name in ("layers", "kv_heads", "head_dim", "hidden", "blocks", "batch", "chunk"):
            options += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        return [*options, "--verify"] if arguments.verify else options

    def _start(self, name: str, role: str, port: int, *options: str) -> None:
        with _bound(self._arguments.host, port) as listening:  # the port is known before the server is there
            host, port = listening.getsockname()[:2]
            command = [sys.executable, "-m", "examples.serving", role, "--with-parent", "--fd", str(listening.fileno())]
            self._processes[name] = subprocess.Popen(
                [*command, "--log", self._arguments.log, *options],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
            )
        self._urls[name] = f"http://{host}:{port}"

    async def _watch(self, stopped: asyncio.Event) -> int:
        missing, ended = dict(self._urls), set[str]()
        async with httpx.AsyncClient(trust_env=False) as client:
            while not stopped.is_set():
                for name, process in self._processes.items():
                    if process.poll() is not None and name not in ended:
                        ended.add(name)
                        print(f"{name} has ended with code {process.returncode}", flush=True)
                if "router" in ended or (missing and ended):
                    return 1
                for name, url in list(missing.items()):
                    with contextlib.suppress(httpx.TransportError):
                        await client.get(f"{url}/stats")
                        del missing[name]
                        if not missing:
                            self._announce()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), _POLL_SECONDS)
        return 0

    def _announce(self) -> None:
        for name, url in self._urls.items():
            print(f"{name:10} {url}  (process {self._processes[name].pid})")
        asked = f'{{"model": "{MODEL}", "prompt": "Hello", "max_tokens": 32, "stream": true}}'
        print(f"\ncurl -N {self._urls['router']}/v1/completions -H 'Content-Type: application/json' -d '{asked}'\n")
        sys.stdout.flush()

    def _end(self) -> None:
        for process in reversed(self._processes.values()):  # the router first, so that it sees nobody die
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
