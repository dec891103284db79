"""The cable between two hosts that are network namespaces: a veth to each, and a process that carries every frame.

The kernel's own means (netem, packet filters) are modules that many machines lack. Here each frame passes through a few
lines of Python, which drop it, hold it back or hand it on, so what a scene does to the network is the same wherever it
runs, its losses are drawn from a seed, and it can begin at a byte.

No namespace has a name: each lives as long as the process that made it, and its interfaces with it. Such a process ends
with the pipe to the one that started it, so nothing is left behind, however that one ended.
"""

import ctypes
import heapq
import itertools
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

Way: TypeAlias = Literal["prefill", "decode"]
"""A direction, by the host that sends."""

HOSTS: Final[tuple[Way, Way]] = ("prefill", "decode")
ADDRESSES: Final[dict[Way, str]] = {"prefill": "10.77.0.1", "decode": "10.77.0.2"}
DEVICE: Final = "veth0"
"""Its name on both hosts."""
CONTROL_PORT: Final = 7410
"""Where workers listen for control streams; every other port is the transport's."""

_CLONE_NEWNET: Final = 0x40000000
_CLONE_NEWNS: Final = 0x00020000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 0x40000
_SOL_PACKET: Final = 263
_PACKET_VNET_HDR: Final = 15
_VNET_HDR_BYTES: Final = 10
"""In front of each frame: where its checksum is still to be filled in."""
_CARRIER_SECONDS: Final = 10.0
_EVERY_PROTOCOL: Final = 0x0003
_SO_RCVBUFFORCE: Final = 33
_BUFFER_BYTES: Final = 64 << 20
_PORTS: Final = struct.Struct("!HH")
_SYN, _ACK = 0x02, 0x10


def own_network() -> None:
    """Give this process a network namespace of its own, and the `/sys` that shows it, where UCX looks for devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        lambda: libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    )
    for step in steps:
        if step():
            raise OSError(ctypes.get_errno(), "this process may not have a network namespace of its own")


def ip(command: str) -> None:
    """Run `ip` in the namespace of this process."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {command}: {done.stderr.strip()}")


def why_not() -> str:
    """Why namespaces with a cable between them cannot be had here; empty if they can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network scenes need the commands ip and unshare"
    probe = ["unshare", "--net", "ip", "link", "add", "left", "type", "veth", "peer", "name", "right"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        return f"network scenes need root, namespaces and veth: {done.stderr.strip()}"
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    except OSError as error:
        return f"network scenes need packet sockets: {error}"
    return ""


@dataclass(frozen=True)
class Impairment:
    """What happens to frames of one direction."""

    loss: float = 0.0  # part of them that is lost
    delay: float = 0.0  # seconds that each takes
    # which are always lost: none, all, those of control streams, those of the transport (`bulk`), or those with which
    # the transport opens a connection (`bulk_syn`)
    drop: Literal["none", "all", "control", "bulk", "bulk_syn"] = "none"


@dataclass
class _Lane:
    """One direction."""

    impairment: Impairment = field(default_factory=Impairment)
    passed: int = 0
    lost: int = 0
    fuse: int | None = None  # bytes of the transport until it burns through


class Cable:
    """Two ends and what lies between them; for a process of its own, driven over its pipe."""

    def __init__(self) -> None:
        own_network()
        self._random = random.Random(7)
        self._lanes: dict[Way, _Lane] = {way: _Lane() for way in HOSTS}
        self._armed: dict[Way, Impairment] = {}
        self._transported = 0
        self._late: list[tuple[float, int, Way, bytes]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ends: dict[Way, socket.socket] = {}

    def plug(self, pids: dict[Way, int]) -> None:
        """Give each host, named by its process, its end, and begin to carry."""
        for way in HOSTS:
            ip(f"link add {way} type veth peer name {DEVICE} netns {pids[way]}")
            _without_ipv6(way)
            end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
            end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
            end.bind((way, _EVERY_PROTOCOL))
            end.setblocking(False)
            self._ends[way] = end
        self.mend()
        threading.Thread(target=self._carry, name="cable", daemon=True).start()

    # --- what scenes ask for

    def cut(self) -> None:
        """Pull the plug: neither host has a carrier."""
        for way in HOSTS:
            ip(f"link set {way} down")

    def impair(self, **impairments: Impairment) -> None:
        """From now on frames fare like this, by the host that sends them."""
        with self._lock:
            for way in HOSTS:
                self._lanes[way].impairment = impairments.get(way, self._lanes[way].impairment)

    def impair_after(self, sender: Way, nbytes: int, **impairments: Impairment) -> None:
        """The same, once `sender` has sent so many bytes more over the transport."""
        with self._lock:
            self._armed = {way: impairments[way] for way in HOSTS if way in impairments}
            self._lanes[sender].fuse = nbytes

    def burnt(self) -> bool:
        """Whether what was armed has come about."""
        with self._lock:
            return not self._armed

    def mend(self) -> None:
        """Everything passes again, at once."""
        for way in HOSTS:
            ip(f"link set {way} up")
        with self._lock:
            self._armed = {}
            self._transported = 0
            for lane in self._lanes.values():
                lane.impairment, lane.fuse = Impairment(), None

    def carried(self) -> dict[Way, tuple[int, int]]:
        """Frames that passed and that were lost, by the host that sent them."""
        with self._lock:
            return {way: (lane.passed, lane.lost) for way, lane in self._lanes.items()}

    def transported(self) -> int:
        """Frames of the transport that passed since the cable was last mended."""
        with self._lock:
            return self._transported

    # --- the thread that carries

    def _carry(self) -> None:
        readers: dict[int, Way] = {end.fileno(): way for way, end in self._ends.items()}
        poller = select.poll()
        for number in readers:
            poller.register(number, select.POLLIN)
        buffer = bytearray(_VNET_HDR_BYTES + (1 << 17))
        while True:
            wait = None if not self._late else max(0.0, self._late[0][0] - time.monotonic()) * 1000
            for number, _ in poller.poll(wait):
                self._take(readers[number], buffer)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, way, frame = heapq.heappop(self._late)
                self._send(way, frame)

    def _take(self, way: Way, buffer: bytearray) -> None:
        """Carry what one host has sent, a bounded number of frames."""
        end = self._ends[way]
        for _ in range(64):
            try:
                length, origin = end.recvfrom_into(buffer)
            except OSError:  # nothing more, or the plug is out
                return
            if origin[2] == socket.PACKET_OUTGOING:
                continue
            frame = memoryview(buffer)[:length]
            delay = self._judge(way, frame)
            if delay == 0.0:
                self._send(way, frame)
            elif delay is not None:
                heapq.heappush(self._late, (time.monotonic() + delay, next(self._numbers), way, bytes(frame)))

    def _send(self, way: Way, frame: bytes | memoryview) -> None:
        other = HOSTS[1 - HOSTS.index(way)]
        try:
            self._ends[other].send(frame)
        except OSError:  # a full queue, or no carrier: as lost as on any wire
            with self._lock:
                self._lanes[way].lost += 1

    def _judge(self, way: Way, frame: memoryview) -> float | None:
        """Seconds after which a frame is handed on; None if it is lost."""
        with self._lock:
            lane = self._lanes[way]
            tcp = _tcp(frame[_VNET_HDR_BYTES:])
            if lane.fuse is not None and tcp is not None and not tcp.control:
                lane.fuse -= len(frame)
                if lane.fuse <= 0:
                    lane.fuse = None
                    for each, impairment in self._armed.items():
                        self._lanes[each].impairment = impairment
                    self._armed = {}
            impairment = lane.impairment
            if _RULES[impairment.drop](tcp) or (impairment.loss and self._random.random() < impairment.loss):
                lane.lost += 1
                return None
            lane.passed += 1
            self._transported += tcp is not None and not tcp.control
            return impairment.delay


@dataclass(frozen=True, slots=True)
class _Tcp:
    """What rules look at."""

    control: bool
    opens: bool


def _tcp(frame: memoryview) -> _Tcp | None:
    """The head of a frame that carries TCP."""
    if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    start = 14 + 4 * (frame[14] & 15)
    return _Tcp(CONTROL_PORT in _PORTS.unpack_from(frame, start), frame[start + 13] & (_SYN | _ACK) == _SYN)


_RULES: Final[dict[str, Callable[[_Tcp | None], bool]]] = {
    "none": lambda _: False,
    "all": lambda _: True,
    "control": lambda tcp: tcp is not None and tcp.control,
    "bulk": lambda tcp: tcp is not None and not tcp.control,
    "bulk_syn": lambda tcp: tcp is not None and not tcp.control and tcp.opens,
}


def join_cable(way: Way) -> None:
    """Set up this host's end, once it is there: one frame a segment, as on a wire, and no IPv6.

    BBR would take the cable for the fast one that it was before a scene for ten seconds; Reno is in every kernel.
    """
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    _without_ipv6(DEVICE)
    ip("link set lo up")
    ip(f"link set {DEVICE} gso_max_segs 1")
    ip(f"addr add {ADDRESSES[way]}/24 dev {DEVICE}")
    ip(f"link set {DEVICE} up")
    state = Path(f"/sys/class/net/{DEVICE}/operstate")
    until = time.monotonic() + _CARRIER_SECONDS
    while state.read_text().strip() != "up":  # the kernel takes note of a carrier within a second; UCX needs it
        if time.monotonic() > until:
            raise OSError(f"{DEVICE} has no carrier")
        time.sleep(0.01)


def crossed() -> dict[str, int]:
    """Bytes that came in and went out over the cable, as this host's kernel counts them."""
    counts = Path(f"/sys/class/net/{DEVICE}/statistics")
    return {"in": int((counts / "rx_bytes").read_text()), "out": int((counts / "tx_bytes").read_text())}


def _without_ipv6(device: str) -> None:
    switch = Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6")
    if switch.exists():
        switch.write_text("1")
