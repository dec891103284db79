"""The steps of a transfer at which a fault may strike, by name, and how a process is made to stand still there.

Each is reached by a hook around one function of the product, put there in the process that is to stand still: no time
passes in reaching it, and nothing else differs. A hook holds up the very thread in which the step is taken.
"""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apart import Apart, knows_apart
from inside import call_agent_by
from msgspec.structs import replace
from opened import opened
from packing import copy_parts, parts_of
from passing import enter

from kvxfer.copy.mover import Flow, Mover
from kvxfer.copy.port import READY, CopyOutcome, Direction, Operation
from kvxfer.copy.records import BEGIN, MAKE
from kvxfer.decode.fetch import Fetch
from kvxfer.decode.receiver import Receiver
from kvxfer.peers.link import Link
from kvxfer.prefill.role import Prefill
from kvxfer.prefill.sender import Sender
from kvxfer.protocol.session import Role
from kvxfer.protocol.transfer import Receiving
from kvxfer.worker import Service

ROUTES = ("staged", "direct", "pull", "mapped")
PUSHED = frozenset({"staged", "direct", "mapped"})
EVERY = frozenset(ROUTES)
Halt = Callable[[], None]
Hook = Callable[[Halt], None]


@dataclass(frozen=True)
class Step:
    """One step."""

    side: str  # `sender` or `receiver`: who stands still
    routes: frozenset[str]  # on which it exists
    hook: Hook  # puts the hook there; given what to call at the step
    # `whole`: all is on offer before it is fetched; `parked`: it is fetched before; `streamed`: layer by layer; `late`:
    # the blocks may be written only a while after they were asked for, so chunks are granted one by one
    how: str = "whole"
    # the receiver's memory is in the sender's hands (on `pull`: the other way round), and nobody has said it is not
    exposed: bool = False


def _before(owner: Any, name: str, only: Callable[..., bool] = lambda *_: True) -> Hook:
    def put(halt: Halt) -> None:
        original = getattr(owner, name)

        def hooked(*arguments: Any, **options: Any) -> Any:
            if only(*arguments):
                halt()
            return original(*arguments, **options)

        setattr(owner, name, hooked)

    return put


def _after(owner: Any, name: str, only: Callable[..., bool] = lambda *_: True) -> Hook:
    """In the next turn of the loop: what the function says has been sent by then."""

    def put(halt: Halt) -> None:
        original = getattr(owner, name)

        def hooked(*arguments: Any, **options: Any) -> Any:
            value = original(*arguments, **options)
            if only(*arguments):
                asyncio.get_running_loop().call_soon(halt)
            return value

        setattr(owner, name, hooked)

    return put


def _as(role: Role) -> Callable[..., bool]:
    """On a stream on which this process has this role."""
    return lambda *given: any(isinstance(one, Link) and one.role is role for one in given)


def _post(operation: Operation, part: int, *, posted: bool = False) -> Hook:
    """Around the post of a chunk's n-th part: its lease has been checked, and the gate was passed."""

    def put(halt: Halt) -> None:
        way = {Operation.READ: 0, Operation.WRITE: 1}[operation]
        parts, requests = 0, dict[int, int]()

        def made(make: Callable[..., int], *arguments: int) -> int:
            status = make(*arguments)
            requests[ctypes.c_int64.from_address(arguments[5]).value] = arguments[1]
            return status

        def begun(begin: Callable[..., int], agent: int, request: int, options: int) -> int:
            nonlocal parts
            mine = requests.get(request) == way
            parts += mine
            strikes = mine and parts == part
            if strikes and not posted:
                halt()
            status = begin(agent, request, options)
            if strikes and posted:
                halt()
            return status

        call_agent_by(MAKE, 7, made)
        call_agent_by(BEGIN, 3, begun)

    return put


def _copy(direction: Direction, *, half: bool = True) -> Hook:
    """Before a copy, or in the midst of it: in a thread, as the mover makes it, past its lease and its gate."""

    def put(halt: Halt) -> None:
        original = Mover.submit

        def hooked(mover: Mover, job: Any, where: Direction) -> Any:
            (tables,) = opened(job.tables)
            if not tables.launches or where is not direction:
                return original(mover, job, where)
            loop = asyncio.get_running_loop()

            def copy() -> None:
                began = time.monotonic()
                passage: Any = job.passage
                guarded = passage is not None and job.post is None
                passed = enter(passage) if guarded and began < job.until else None
                stopped = began >= job.until or (guarded and passed is None)
                if not stopped:
                    parts, count = parts_of(tables, part_bytes=1)
                    copy_parts(parts.ctypes.data, 0, count // 2 if half else 0)
                    halt()
                    copy_parts(parts.ctypes.data, count // 2 if half else 0, count)
                    if passed is not None:
                        passed.leave()
                took = time.monotonic() - began
                if job.post is not None and not stopped:
                    loop.call_soon_threadsafe(original, mover, replace(job, tables=None, after=READY), where)
                else:
                    loop.call_soon_threadsafe(job.done, CopyOutcome(None, began, stopped, copying=took))

            def wait() -> None:
                if job.after.query():
                    threading.Thread(target=copy, name="kvxfer-mover", daemon=True).start()
                else:
                    loop.call_later(0.001, wait)

            wait()
            return Flow(job, 0)

        def apart(mover: Mover, *given: Any, **more: Any) -> Any:
            return Apart(mover, *given, **more)

        knows_apart(Mover)
        Mover.submit = hooked  # type: ignore[method-assign]
        Mover.flow = apart  # type: ignore[method-assign]

    return put


_NOT_MAPPED = frozenset({"staged", "direct"})
_MAPPED = frozenset({"mapped"})
_STAGED = frozenset({"staged"})
_PULL = frozenset({"pull"})

SENDER = {
    "hello came": Step("sender", EVERY, _before(Link, "data_received", _as(Role.SERVER))),
    "agent came": Step("sender", EVERY, _before(Service, "on_opened", _as(Role.SERVER))),
    "fetch parked": Step("sender", EVERY, _after(Prefill, "on_fetch"), "parked"),
    "planned": Step("sender", EVERY, _before(Sender, "_accept"), exposed=True),
    "accept sent": Step("sender", EVERY, _after(Sender, "_accept"), exposed=True),
    "announced": Step("sender", _PULL, _after(Sender, "_send_ready"), exposed=True),
    "layer announced": Step("sender", PUSHED, _after(Sender, "_send_ready"), "streamed", exposed=True),
    "granted": Step("sender", PUSHED, _before(Sender, "_submit"), exposed=True),
    "in the midst of the gather": Step("sender", _STAGED, _copy(Direction.GATHER), exposed=True),
    "lease checked": Step("sender", _NOT_MAPPED, _post(Operation.WRITE, 1), exposed=True),
    "lease checked, mapped": Step("sender", _MAPPED, _copy(Direction.GATHER, half=False), exposed=True),
    "in the midst of the write": Step("sender", _NOT_MAPPED, _post(Operation.WRITE, 2), exposed=True),
    "in the midst of the write, mapped": Step("sender", _MAPPED, _copy(Direction.GATHER), exposed=True),
    "posted": Step("sender", _NOT_MAPPED, _post(Operation.WRITE, 2, posted=True), exposed=True),
    "written": Step("sender", _NOT_MAPPED, _before(Sender, "_count_arrived"), exposed=True),
    "written, mapped": Step("sender", _MAPPED, _before(Sender, "_count_arrived"), exposed=True),
    "first result sent": Step("sender", PUSHED, _after(Sender, "_count_arrived"), exposed=True),
    "read, not confirmed": Step("sender", _PULL, _before(Sender, "on_read")),
    "last result sent": Step("sender", EVERY, _after(Sender, "_finish")),
    "release came": Step("sender", EVERY, _before(Prefill, "on_release")),
}

RECEIVER = {
    "hello sent": Step("receiver", EVERY, _after(Link, "connection_made", _as(Role.CLIENT))),
    "welcome came": Step("receiver", EVERY, _before(Service, "on_opened", _as(Role.CLIENT))),
    "fetch sent": Step("receiver", EVERY, _after(Receiver, "send_fetch"), exposed=True),
    "fetch sent, to wait": Step("receiver", EVERY, _after(Receiver, "send_fetch"), "parked"),
    "accept came": Step("receiver", EVERY, _before(Receiver, "on_accept"), exposed=True),
    "chunks announced": Step("receiver", frozenset({"staged", "pull"}), _before(Receiver, "on_ready"), exposed=True),
    "granted": Step("receiver", PUSHED, _after(Receiving, "grant"), "late", exposed=True),
    "lease checked, to read": Step("receiver", _PULL, _post(Operation.READ, 1), exposed=True),
    "in the midst of the read": Step("receiver", _PULL, _post(Operation.READ, 2), exposed=True),
    "read posted": Step("receiver", _PULL, _post(Operation.READ, 2, posted=True), exposed=True),
    "read": Step("receiver", _PULL, _before(Receiving, "chunks_read"), exposed=True),
    "landed sent": Step("receiver", _PULL, _after(Receiving, "chunks_read"), exposed=True),
    "first result came": Step("receiver", EVERY, _before(Receiver, "on_result"), exposed=True),
    "in the midst of the scatter": Step("receiver", _STAGED, _copy(Direction.SCATTER)),
    "scattered": Step("receiver", _STAGED, _before(Receiver, "_on_progress")),
    "to be released": Step("receiver", EVERY, _before(Fetch, "finish_success")),
    "release sent": Step("receiver", EVERY, _after(Fetch, "finish_success")),
}

STEPS = {("sender", name): step for name, step in SENDER.items()} | {
    ("receiver", name): step for name, step in RECEIVER.items()
}
