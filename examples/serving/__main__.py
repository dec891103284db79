"""Starts the servers: all of them, or one.

    python -m examples.serving                                        # a prefill server, a decode server, the router
    python -m examples.serving --decodes 2 --device cuda              # prefill on cuda:0, decode on cuda:1, cuda:2
    python -m examples.serving --admin 127.0.0.1:9471                 # admin pages: prefill at 9471, decode at 9472
    python -m examples.serving --tp 1:2 --device cuda                 # one decode server, half of the heads on each
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
import sys
import threading
from typing import Any

import httpx
from starlette.applications import Starlette

from examples.serving import router
from examples.serving.api import MODEL
from examples.serving.server import Server
from examples.serving.service import SIZES, Service, bound, check, parser

log = logging.getLogger("serving.start")

_POLL_SECONDS = 0.2
_PREFILL = {"layout": "NHD", "block_tokens": 16}
_DECODE = {"layout": "HND", "block_tokens": 32}  # another layout on purpose: neither side knows the other's


def main() -> None:
    """Run what the command line says."""
    options = parser(prog="python -m examples.serving", description="Serve a model, in two halves.")
    arguments = options.parse_args()
    check(options, arguments)
    name = "serving" if arguments.role == "all" else arguments.name or arguments.role
    logging.basicConfig(level=arguments.log.upper(), format=f"%(asctime)s {name}: %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")  # it has a line for each request, and the router looks every second
    if arguments.log != "error":
        log.setLevel("INFO")  # a start takes long, and is not to look like nothing
    if arguments.role == "all":
        sys.exit(asyncio.run(_run(Service(arguments))))
    if arguments.with_parent:
        threading.Thread(target=_follow_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises again what it has dealt with
        _serve(_application(arguments), arguments)


# one server


def _application(arguments: argparse.Namespace) -> Starlette:
    if arguments.role == "router":
        return router.app(
            prefill=arguments.prefill,
            decode=arguments.decode,
            on_failure=arguments.on_failure,
            silent_after=arguments.silent_after,
        )
    log.info("loading torch and transformers")
    import torch

    from examples.serving import decode, prefill  # a router does without torch
    from examples.serving.engine import EngineSettings

    devices = tuple(arguments.device.split(","))
    if devices[0] == "cpu":
        torch.set_num_threads(1)  # the model is small, and the servers share the machine
    common: dict[str, Any] = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in SIZES}
    common |= {
        "devices": devices,
        "dtype": arguments.dtype or ("float32" if devices[0] == "cpu" else "bfloat16"),
        "draw_on": devices[0] if arguments.draw_on_device else "cpu",
        "cross_layer": arguments.cross_layer,
    }
    if arguments.role == "prefill":
        settings = EngineSettings(**common, **_PREFILL)
        return prefill.app(settings, offer_by=arguments.offer_by, verify=arguments.verify, admin=arguments.admin)
    settings = EngineSettings(**common, **_DECODE)
    return decode.app(settings, on_failure=arguments.on_failure, verify=arguments.verify, admin=arguments.admin)


def _serve(application: Starlette, arguments: argparse.Namespace) -> None:
    listening = (
        socket.socket(fileno=arguments.fd) if arguments.fd is not None else bound(arguments.host, arguments.port)
    )
    server = Server(application, log_level=arguments.log, log_config=None)  # logs as set up here, with the role
    gc.collect()  # with torch loaded, a full collection would stop everything for 100 ms, again and again
    gc.freeze()
    try:
        server.run(sockets=[listening])
    except SystemExit as failed:  # it could not start, and has said why
        logging.shutdown()
        os._exit(int(failed.code or 0))  # at a usual end with triton loaded, nanobind lists all that it has leaked


def _follow_parent() -> None:
    """End when the parent is gone, which holds the other end of our standard input."""
    while os.read(0, 4096):  # not by `sys.stdin`, whose lock would be held when a server fails, and break its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


# all of them


async def _run(service: Service) -> int:
    """Start everything, say where it is, and wait; the exit code."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        service.start()
        log.info("starting %s; on a machine's first start kvxfer also compiles", ", ".join(service.processes))
        return await _watch(service, stopped)
    finally:
        await asyncio.to_thread(service.end)


async def _watch(service: Service, stopped: asyncio.Event) -> int:
    announced, ended = False, dict[str, int]()
    async with httpx.AsyncClient(trust_env=False) as client:
        while not stopped.is_set():
            before, ended = ended, service.ended()
            for name in ended.keys() - before.keys():
                print(f"{name} has ended with code {ended[name]}", flush=True)
            if "router" in ended or (ended and not announced):
                return 1
            if not announced and await service.ready(client):
                announced = True
                _announce(service)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _POLL_SECONDS)
    return 0


def _announce(service: Service) -> None:
    for name, url in service.urls.items():
        page = f", admin page http://{service.pages[name]}/" if name in service.pages else ""
        print(f"{name:10} {url}  (process {service.processes[name].pid}){page}")
    asked = f'{{"model": "{MODEL}", "prompt": "Hello", "max_tokens": 32, "stream": true}}'
    print(f"\ncurl -N {service.urls['router']}/v1/completions -H 'Content-Type: application/json' -d '{asked}'\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
