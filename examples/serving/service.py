"""The servers as processes of this one, which end with it, and the options that they are started with."""

import argparse
import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx

from examples.serving.servers import SILENT_SECONDS

SIZES = {
    "layers": (4, "decoder layers"),
    "kv-heads": (4, "heads of K and V; there are twice as many query heads"),
    "head-dim": (32, "size of a head"),
    "hidden": (128, "width of the model"),
    "blocks": (512, "blocks in a server's pool: of 16 tokens for prefill, of 32 for decode"),
    "batch": (8, "generations in one pass at most"),
    "chunk": (256, "tokens of a prompt in one pass at most"),
}
"""Of the model and its pool: the usual one, and what it means."""
_STOP_SECONDS = 20.0


def parser(**about: Any) -> argparse.ArgumentParser:
    """The options of all servers, and of each."""
    parser = argparse.ArgumentParser(**about)
    roles, usual = ["all", "prefill", "decode", "router"], "(default: %(default)s)"
    parser.add_argument("role", nargs="?", choices=roles, default="all", help=f"which servers to start {usual}")
    parser.add_argument("--host", default="127.0.0.1", help=f"address to listen on {usual}")
    port = _from(0, 65535)
    parser.add_argument(
        "--port", type=port, default=8000, help=f"of one server, or the router; 0: any free one {usual}"
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        help=f"cpu, cuda:1, or cuda: prefill on the first, decode on others; cuda:1,cuda:2: a rank each {usual}",
    )
    parser.add_argument(
        "--prefills", type=_from(0, 64), default=1, help=f"prefill servers; 0: decode does it all {usual}"
    )
    parser.add_argument("--decodes", type=_from(1, 64), default=1, help=f"decode servers {usual}")
    parser.add_argument(
        "--tp", type=_pair, default="1:1", metavar="P:D", help=f"ranks of a prefill, a decode server {usual}"
    )
    parser.add_argument("--gpus", type=_from(1), help="GPUs there are, where ranks of a server may have to share one")
    parser.add_argument("--prefill", action="append", default=[], metavar="URL", help="of a router: prefill servers")
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="of a router: decode servers")
    parser.add_argument(
        "--on-failure", choices=["recompute", "fail"], default="recompute", help=f"if no cache comes {usual}"
    )
    parser.add_argument(
        "--silent-after",
        type=_from(1),
        default=SILENT_SECONDS,
        metavar="SECONDS",
        help=f"till the router asks others {usual}",
    )
    parser.add_argument(
        "--offer-by", choices=["layers", "whole"], default="layers", help=f"when prefill offers K and V {usual}"
    )
    parser.add_argument("--verify", action="store_true", help="compare digests of K and V of every prompt")
    parser.add_argument(
        "--admin",
        default="",
        metavar="HOST:PORT",
        help="kvxfer's page, metrics, health; of several servers the first is there, others at the ports behind it",
    )
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log", choices=levels, default="warning", help=f"what is worth a line {usual}")
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)  # what log lines begin with
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)  # the socket to listen on, from the parent
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    _add_model(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--draw-on-device", action="store_true", help="make weights there; for large models")
    parser.add_argument("--cross-layer", action="store_true", help="blocks hold all layers, not a tensor a layer")
    for name, (value, what) in SIZES.items():
        parser.add_argument(f"--{name}", type=_from(1), default=value, help=f"{what} (default: %(default)s)")


def _device(text: str) -> str:
    if not all(re.fullmatch(r"cpu|cuda(:\d+)?", each) for each in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu, cuda nor cuda:N, nor a list of those")
    return text


def _pair(text: str) -> tuple[int, int]:
    if not (found := re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not P:D, ranks of a prefill and of a decode server, such as 1:2")
    return int(found[1]), int(found[2])


def _from(least: int, most: int = 2**31) -> Callable[[str], int]:
    """Reads a number within bounds."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return number


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse options that nobody would read, and servers that nobody could use."""
    role: str = arguments.role
    if arguments.admin and role == "router":
        parser.error("--admin is of prefill and decode servers: a router has no worker")
    if arguments.admin:
        least, servers = (1, arguments.prefills + arguments.decodes) if role == "all" else (0, 1)
        found, last = re.fullmatch(r".+:(\d{1,5})", arguments.admin), 65536 - servers
        if not found or not least <= int(found[1]) <= last:
            which = f"the port of the first of {servers} servers" if role == "all" else "the port"
            parser.error(f"--admin {arguments.admin}: it is HOST:PORT, {which} from {least} to {last}")
    if role != "router" and (arguments.prefill or arguments.decode):
        parser.error("--prefill and --decode are of a router; --prefills and --decodes are numbers")
    if role == "router" and not arguments.decode:
        parser.error("a router needs --decode")
    if role != "router":
        _check_model(parser, arguments, _places(arguments) if role == "all" else [arguments.device])


def _check_model(parser: argparse.ArgumentParser, arguments: argparse.Namespace, places: list[str]) -> None:
    """Refuse a model that cannot be built, or not there."""
    heads: int = arguments.kv_heads
    if arguments.hidden % (2 * heads):
        parser.error(f"--hidden {arguments.hidden} is no multiple of {2 * heads}, the query heads: twice --kv-heads")
    if arguments.head_dim % 2:
        parser.error(f"--head-dim {arguments.head_dim} is odd, and a head is turned by pairs")
    devices = [place.split(",") for place in places]
    for ranks in map(len, devices):
        if heads % ranks:
            parser.error(f"--kv-heads {heads} cannot be divided equally among {ranks} ranks")
    gpus = {each for ranks in devices for each in ranks if each != "cpu"}
    if gpus:
        import torch  # takes seconds, which a CPU need not wait for

        there = torch.cuda.device_count()
        if missing := sorted(each for each in gpus if int(each.partition(":")[2] or 0) >= there):
            parser.error(f"--device: there is no {', '.join(missing)} here: torch finds {there} GPUs")


def bound(host: str, port: int) -> socket.socket:
    """A socket on which a server may listen; where there can be none, the program ends and says why."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise SystemExit(f"{host}:{port} cannot be listened on: {error}") from error
    return listening


class Service:
    """The servers.

    Attributes:
        processes: By name: `prefill 0`, `decode 0`, ..., `router`.
        urls: Likewise.
        pages: Likewise, addresses of admin pages; of no router.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._missing: set[str] = set()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}
        self.pages: dict[str, str] = {}

    def start(self) -> None:
        """Start all of them; `end` ends them, also if this fails."""
        arguments = self._arguments
        places = _places(arguments)
        with bound(arguments.host, arguments.port) as listening:  # first, as its port is the one that somebody chose
            for role, count in (("prefill", arguments.prefills), ("decode", arguments.decodes)):
                for number in range(count):
                    with bound(arguments.host, 0) as its:  # the port is known before the server is there
                        name = f"{role} {number}"
                        self._start(name, role, its, *self._page(name), *self._model(places.pop(0)))
            others = [(f"--{name.split()[0]}", url) for name, url in self.urls.items()]
            policy = ("--on-failure", arguments.on_failure, "--silent-after", str(arguments.silent_after))
            self._start("router", "router", listening, *policy, *(part for pair in others for part in pair))
        self._missing = set(self.urls)

    async def ready(self, client: httpx.AsyncClient) -> bool:
        """Whether all have said by now that they can serve."""
        for name in sorted(self._missing):
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{self.urls[name]}/stats")).json()["ok"]:
                    self._missing.discard(name)
        return not self._missing

    def ended(self) -> dict[str, int]:
        """Servers that have ended, with their codes."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def end(self) -> None:
        """End them, and wait for it."""
        for process in reversed(self.processes.values()):  # the router first, so that it sees nobody die
            process.terminate()
            with process:  # closes its standard input
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _page(self, name: str) -> list[str]:
        """Options for the admin page of the next server."""
        if not self._arguments.admin:
            return []
        host, _, port = self._arguments.admin.rpartition(":")
        self.pages[name] = f"{host}:{int(port) + len(self.pages)}"
        return ["--admin", self.pages[name]]

    def _model(self, device: str) -> list[str]:
        """Options of a server that has a model."""
        arguments = self._arguments
        options = ["--device", device, "--on-failure", arguments.on_failure, "--offer-by", arguments.offer_by]
        for name in SIZES:
            options += [f"--{name}", str(getattr(arguments, name.replace("-", "_")))]
        if arguments.dtype is not None:
            options += ["--dtype", arguments.dtype]
        flags = ("--cross-layer", "--draw-on-device", "--verify")
        return [*options, *(flag for flag in flags if getattr(arguments, flag[2:].replace("-", "_")))]

    def _start(self, name: str, role: str, listening: socket.socket, *options: str) -> None:
        host, port = listening.getsockname()[:2]
        command = [sys.executable, "-m", "examples.serving", role, "--with-parent", "--fd", str(listening.fileno())]
        self.processes[name] = subprocess.Popen(
            [*command, "--name", name, "--log", self._arguments.log, *options],
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            process_group=0,  # a Ctrl-C is for this process, which ends the others in order
        )
        self.urls[name] = f"http://{host}:{port}"


def _places(arguments: argparse.Namespace) -> list[str]:
    """Devices of each server that has a model, prefill servers first."""
    ranks = [arguments.tp[0]] * arguments.prefills + [arguments.tp[1]] * arguments.decodes
    if arguments.device != "cuda":
        return [",".join([arguments.device] * each) for each in ranks]
    prefill = arguments.tp[0] * arguments.prefills
    decode = arguments.tp[1] * arguments.decodes
    gpus = arguments.gpus or prefill + decode
    above = min(decode, max(1, gpus - prefill))  # GPUs for decode servers, behind those for prefill servers
    below = min(prefill, max(1, gpus - above))
    start = min(below, gpus - above)
    numbers = [i % below for i in range(prefill)] + [start + i % above for i in range(decode)]
    taken = iter(f"cuda:{number}" for number in numbers)
    return [",".join(next(taken) for _ in range(each)) for each in ranks]
