"""What tests know of the inside of a worker, all of it: what happens to one, and what it keeps without saying so.

Whatever an operator could see is looked at from outside: in `Worker.describe()`, and at the handles that users have.
What remains is here, so that a worker may be built otherwise and scenes stay as they are: each function is named after
what happens in the world. A session is an object that scenes compare with others, and ask who is at its other end.
"""

import asyncio
import contextlib
import ctypes
import gc
import math
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from apart import Apart, knows_apart
from decoded import accesses
from opened import singly

from kvxfer import worker as assembly
from kvxfer.copy import records
from kvxfer.copy.mover import _machines
from kvxfer.decode.fetch import Fetch
from kvxfer.decode.receiver import Grants, Receiver
from kvxfer.errors import BlocksError, FabricError, UnreachableError
from kvxfer.fabric import calls
from kvxfer.peers.connections import Peers
from kvxfer.peers.link import Link
from kvxfer.plans.pairs import BoundPlan
from kvxfer.prefill.sender import Sender
from kvxfer.protocol.framing import decode_body, encode_body
from kvxfer.protocol.messages import AgentBody, Capability, Message, Route
from kvxfer.protocol.session import Role
from kvxfer.protocol.transfer import Receiving
from kvxfer.safety import doubt, fence
from kvxfer.safety.fence import FIRST_GENERATION, PeerGate, Permit
from kvxfer.site import Site

# --- sessions


def service(worker: Any) -> Any:
    """What links are handed to."""
    return worker._service


def sessions(*workers: Any) -> set[Any]:
    """Sessions that are open."""
    return {link for worker in workers for link in worker._service.links}


def streams(worker: Any) -> list[Any]:
    """Those whose handshake is not complete, too."""
    return [*worker._service.links, *worker._service.greeting]


def session(worker: Any) -> Any:
    """The only one."""
    (link,) = worker._service.links
    return link


def met(worker: Any) -> Any:
    """Who is at the other end of the only one."""
    return session(worker).peer


def cut(*workers: Any) -> None:
    """Cut every control stream, without a word."""
    for link in sessions(*workers):
        cut_session(link)


def cut_session(link: Any) -> None:
    """Cut one; or a stream whose handshake is not complete."""
    if link._transport is not None:
        link._transport.abort()


def has_ended(link: Any) -> bool:
    """Whether a stream has come to its end, though what came before that may still have to be handled."""
    return link.gone.done()


def cut_unheard(worker: Any) -> int:
    """Cut its only control stream so that the peer does not hear of it, until the descriptor returned is closed."""
    link = session(worker)
    kept = os.dup(link._transport.get_extra_info("socket").fileno())
    cut_session(link)
    return kept


def lose_unheard(link: Any) -> Any:
    """This side loses a stream that stays open; returns it, for whoever closes it."""
    stream, link._transport = link._transport, None
    link.connection_lost(None)
    return stream


def shut_down(worker: Any) -> None:
    """Shut down every control stream as a network would, handshakes too; from any thread."""
    for link in streams(worker):
        if link._transport is not None:
            with contextlib.suppress(OSError):
                link._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def hang_up(worker: Any) -> None:
    """Say goodbye in every session."""
    for link in sessions(worker):
        link.close("cut")


def pause_behind_every_frame(monkeypatch: Any) -> list[Any]:
    """Workers handle one frame a turn, and read nothing meanwhile; sessions that went on to read after that."""
    resumed: list[Any] = []
    go_on = Link._resume

    def resume(link: Any, *met: Any) -> None:
        resumed.append(link)
        go_on(link, *met)

    monkeypatch.setattr("kvxfer.peers.link.TURN_SECONDS", 0.0)
    monkeypatch.setattr(Link, "_resume", resume)
    return resumed


# --- who connects, and where to


def turn_deaf(worker: Any) -> Callable[[], Awaitable[None]]:
    """Nobody connects to it, where it is still said to listen; until what is returned has been awaited."""
    listener = worker._service.listener
    listener.close()

    async def listen_again() -> None:
        path = Path(listener.endpoint.removeprefix("unix:"))
        if not path.parent.exists():
            path.parent.mkdir(0o700)
            listener._opened.callback(path.parent.rmdir)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: worker._service._link(Role.SERVER, "unix"), path)
        listener._opened.callback(path.unlink)
        listener._opened.callback(server.close)

    return listen_again


def vanish(worker: Any) -> None:
    """Its host goes: nobody hears of it any more, and what it has under way stays so."""
    turn_deaf(worker)
    cut(worker)


async def connect(worker: Any, endpoint: str) -> Any:
    """The session with whoever is there."""
    return await worker._service.peers.link(endpoint, None)


def forget_unreachable(worker: Any) -> None:
    """It tries every endpoint at once again."""
    worker._service.peers._away.clear()


def before_connecting(worker: Any, wait: Callable[[str], Awaitable[Any]]) -> None:
    """Await `wait(endpoint)` before each stream that it opens."""
    peers = worker._service.peers
    connect_to = peers._connect_to

    async def connect_later(endpoint: str) -> Any:
        await wait(endpoint)
        return await connect_to(endpoint)

    peers._connect_to = connect_later


def never_come_back(worker: Any) -> None:
    """It reaches nobody any more."""

    async def away(endpoint: str, epoch: bytes | None) -> Any:
        raise UnreachableError("nobody answers there", peer=endpoint)

    worker._service.peers.link = away


def when_connected(worker: Any, act: Callable[[Any], None]) -> None:
    """Call `act` with each session that it opens, once its decode role has it."""
    receiver = worker._service.decode
    opened = receiver.on_link_opened

    def opened_and_more(link: Any) -> None:
        opened(link)
        act(link)

    receiver.on_link_opened = opened_and_more


def hear(worker: Any, link: Any, message: Message) -> None:
    """Somebody says something; for strangers, who have no stream, `link` is what the scene makes of one."""
    take = link.on_message if isinstance(link, Link) else worker._service.prefill.on_message
    take(link, message)


def welcome(worker: Any, link: Any) -> None:
    """One of them has come."""
    worker._service.prefill.on_link_opened(link)


def lose(worker: Any, link: Any) -> None:
    """One of them is gone."""
    worker._service.prefill.on_link_lost(link)


def entry(offer: Any) -> Any:
    """What the book has of an offer: who claimed, moves and released it, and its lease."""
    return offer._entry


def renew(worker: Any, offer: Any, epoch: bytes) -> None:
    """An engine claims a request that is on offer."""
    worker._service.prefill.book.renew(entry(offer), epoch, 1)


def release(worker: Any, offer: Any, who: Any) -> None:
    """A decode rank needs it no more."""
    worker._service.prefill.book.release(offer.key, who)


def peers_by(worker: Any, connect_to: Callable[[str], Awaitable[Any]]) -> Peers:
    """Those whom a worker reaches, over streams that the scene opens."""
    return Peers(worker._service.site, connect_to)


# --- what it says of itself when it is met


def told(worker: Any, *, trusted: bool = True) -> AgentBody:
    """What peers are told, by whether they are trusted with addresses."""
    return decode_body(worker._service.site.body[trusted])


def tell(worker: Any, change: Callable[[AgentBody], AgentBody]) -> None:
    """Those who are met from now on are told something else."""
    for trusted, body in list(worker._service.site.body.items()):
        worker._service.site.body[trusted] = encode_body(change(decode_body(body)))


def ask_no_proof(worker: Any) -> None:
    """It asks nobody, who is said to be the one that it knows, to prove that."""
    made = worker._service.new_session

    def session(*arguments: Any, **options: Any) -> Any:
        one, trusted = made(*arguments, **options)
        one._check_same = lambda theirs, heard, now: None
        return one, trusted

    worker._service.new_session = session


async def look_at(worker: Any, peer: Any) -> None:
    """It looks at what a decode rank says of itself."""
    await worker._service.site.examine(peer, sending=True)


def lack(worker: Any, capability: Capability) -> None:
    """It is built without something that others can."""
    worker._service.site.capabilities &= ~capability


def geometry(worker: Any) -> Any:
    """What it holds."""
    return worker._service.site.geometry


def identity_key(worker: Any) -> Any:
    """By what it proves who it is."""
    return worker._service.site.key


def tell_the_same(worker: Any, as_another: Any) -> None:
    """They are told what another worker says of itself."""
    worker._service.site.body.update(as_another._service.site.body)


# --- the agent that is made anew


def rebuild(worker: Any, *, urgent: bool = True) -> Callable[[], None]:
    """There is a doubt that only a new agent ends, until what is returned is called."""
    leave: Callable[[], None] = worker._service.site.rebuilds.request(urgent=urgent)
    return leave


def when_rebuilt(worker: Any, then: Callable[[], None]) -> None:
    """Call `then` when the agent has been made anew."""
    worker._service.site.rebuilds.next.add_done_callback(lambda _: then())


def keep_agent(worker: Any) -> None:
    """Whatever only a new agent would end goes on, until `consider_rebuilding`."""
    worker._service.site.rebuilds.on_request = lambda: None


def consider_rebuilding(worker: Any) -> None:
    """It looks whether there is such a doubt."""
    worker._service.rebuilding._set_timer()


def rebuild_at_once(worker: Any, monkeypatch: Any) -> None:
    """It does not wait for others that might want it too."""
    rebuilds = worker._service.site.rebuilds
    monkeypatch.setattr(worker._service.rebuilding, "_due_at", lambda: 0.0 if rebuilds.requests else math.inf)


def say_that_it_is_anew_where(worker: Any, role: Any) -> None:
    """Peers hear of a new agent on the streams on which it has this role, and on no others."""
    worker._service.rebuilding._links = [link for link in sessions(worker) if link.role is role]


def pause_grants(worker: Any) -> None:
    """The agent is about to be made anew."""
    worker._service.site.pause()


def resume_grants(worker: Any) -> None:
    """It could not be."""
    worker._service.site.resume(done=False)


def timers(worker: Any, monkeypatch: Any) -> list[float]:
    """For how many seconds each of its timers is set from now on; none of them fires."""
    site = worker._service.site
    seconds: list[float] = []

    def at(_: Any, when: float, then: Callable[[], None]) -> Any:
        seconds.append(when - site.now())
        return site.loop.call_later(99, then)

    monkeypatch.setattr(type(site), "call_at", at)
    return seconds


# --- memory


class Taken:
    """Memory of one side of a worker's arena that somebody else has."""

    def __init__(self, desk: Any, extent: Any) -> None:
        self._desk, self._extent = desk, extent
        self.nbytes = extent.nbytes
        self.address = extent.address

    def release(self) -> None:
        """Give it back."""
        self._desk.release(self._extent)

    def write(self) -> None:
        """Whoever has it may write it from now on."""
        self._desk.share.begin_writing(self._extent)

    def quarantine(self, reason: str = "silent") -> None:
        """Whoever has it may write it for ever."""
        self._desk.quarantine(self._extent, reason)

    def settle(self) -> None:
        """He does not any more."""
        self._desk.settle(self._extent)


def _desk(worker: Any, side: str) -> Any:
    return {"send": worker._service.site.send_desk, "receive": worker._service.site.receive_desk}[side]


def take_if_free(worker: Any, side: str, nbytes: int, peer: str = "peer") -> Taken | None:
    """So much memory of a side ("send", "receive") is a peer's, if there is as much in one piece for this one."""
    desk = _desk(worker, side)
    return next((Taken(desk, extent) for extent in desk.take(peer, nbytes)), None)


def take(worker: Any, side: str, nbytes: int, peer: str = "peer") -> Taken:
    """The same where there is."""
    taken = take_if_free(worker, side, nbytes, peer)
    assert taken is not None
    return taken


def take_all(worker: Any, side: str) -> Taken:
    """All of it is somebody else's, as soon as there is nobody who has any."""
    extents: list[Any] = []
    desk = _desk(worker, side)
    desk.request("somebody", desk.share.capacity, 1, extents.append)
    return Taken(desk, extents[0])


def when_crowded(worker: Any, side: str, act: Callable[[], None], monkeypatch: Any) -> None:
    """Call `act` where somebody has to wait for memory."""
    desk = _desk(worker, side)
    ask = desk.request

    def asked(*given: Any, **options: Any) -> Any:
        request = ask(*given, **options)
        if request is not None:
            act()
        return request if request in desk._waiting else None

    monkeypatch.setattr(desk, "request", asked)


def arena_shares(worker: Any) -> list[Any]:
    """The books of both sides of its arena."""
    return [_desk(worker, side).share for side in ("send", "receive")]


def staging(worker: Any, side: str) -> Any:
    """Where the staging memory of a side is: `address` and `length`."""
    return worker._service.site.sending if side == "send" else worker._service.site.staging


# --- gates


def gates_of(worker: Any) -> Any:
    """What keeps peers out of its memory."""
    return worker._service.site.gates


def free_gates(worker: Any) -> list[int]:
    """Those that were allotted, and are nobody's."""
    free: list[int] = worker._service.site.gates._free
    return free


def meet_keys_again(worker: Any) -> None:
    """It opens the gates of its only peer anew."""
    worker._service.site.peer_gates.forget(met(worker))
    worker._service.site.peer_gates.on_session(met(worker))


def leaked() -> list[Any]:
    """What workers that are closed have left to the process's end, since somebody may still touch it."""
    return assembly._leaked


def free_leaked() -> None:
    """Nobody does any more."""
    calls._LEAKED.clear()
    assembly._leaked.clear()


def leaks(monkeypatch: Any) -> list[Any]:
    """What workers leave from now on, memory included; it is freed nevertheless."""
    left: list[Any] = []
    monkeypatch.setattr(assembly, "_leaked", left)
    monkeypatch.setattr(assembly.Staging, "leak", lambda staging: left.append(staging) or staging.close())
    return left


# --- copies, and what moves the bytes


def mover(worker: Any) -> Any:
    """What copies."""
    return worker._service.site.mover


def answer_late(worker: Any, monkeypatch: Any) -> Callable[[], None]:
    """Its mover answers no cancellation before what is returned is called, as where it has no turn for a while."""
    copies, late = mover(worker), list[Any]()
    cancel = copies.cancel
    monkeypatch.setattr(copies, "cancel", late.append)

    def answer() -> None:
        monkeypatch.setattr(copies, "cancel", cancel)
        for copy in late:
            cancel(copy)

    return answer


def replace_mover(worker: Any, other: Any) -> None:
    """Something else copies from now on."""
    worker._service.site.mover = other


def begin_copies_by(worker: Any, begin: Callable[[Callable[[Any, Any], Any], Any, Any], Any]) -> None:
    """Call `begin(submit, job, direction)` where a copy is to be submitted, or a step of a flow is to begin."""
    copies = mover(worker)
    submit = copies.submit
    knows_apart(copies)
    copies.submit, copies.flow = lambda job, direction: begin(submit, job, direction), partial(Apart, copies)


def call_agent_by(port: int, arguments: int, call: Callable[..., int]) -> None:
    """Call `call(function, *arguments)` where the only mover of this process calls a C function of its agent."""
    (machine,) = _machines
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * arguments)
    callback = kind(partial(call, kind(int(machine.ports[port]))))
    _called.append(callback)
    machine.ports[port] = ctypes.cast(callback, ctypes.c_void_p).value or 0


_called: list[Any] = []
"""What machines call."""


def _lane(direction: Any) -> int:
    return ["gather", "scatter"].index(direction)


def launched(mover: Any, direction: Any) -> list[Any]:
    """What was launched in a direction, and has not ended."""
    lane = _lane(direction)
    copies: list[Any] = []
    for flow in mover._flows.values():
        known = [job for one in flow.refs for job in singly([one.job])]
        first = flow.refs[-1].stop - len(known) if flow.refs else 0
        for slot in mover._machine.steps_of(flow.slot):
            step = int(mover._machine.jobs[slot, records.STEP]) - first
            copies += [(slot, flow.lane, known[step])] if 0 <= step < len(known) else []
    return [
        job
        for slot, at, job in copies
        if at == lane and mover._machine.jobs[slot][records.STATE] == records.RUNNING and any(accesses(job.tables))
    ]


def stream(mover: Any, direction: Any) -> Any:
    """The stream of a direction, as torch knows it; None where no GPU copies."""
    return None if mover._gpu is None else mover._gpu.streams[_lane(direction)]


def holds(worker: Any) -> list[bool]:
    """Each time that it is held awake from now on."""
    held: list[bool] = []
    hold_awake = mover(worker).hold_awake

    def hold(**how: bool) -> Callable[[], None]:
        held.append(True)
        release: Callable[[], None] = hold_awake(**how)
        return release

    mover(worker).hold_awake = hold
    return held


def transport(worker: Any) -> Any:
    """What moves the bytes."""
    return worker._service.site.fabric._transport


def trace_by(worker: Any, tracer: Any) -> None:
    """This makes its spans."""
    worker._service.site.metrics._observer._tracer = tracer


def traced(worker: Any) -> int:
    """How many fetches and offers its traces know."""
    listener = worker._service.site.metrics._observer
    return len(listener._fetches) + len(listener._offers)


def early_sums(worker: Any) -> int:
    """How many bytes of sums its only transfer keeps that nobody compares yet."""
    (incoming,) = worker._service.decode.incoming.values()
    return sum(map(len, incoming.checking._sums.values()))


def factor(worker: Any, route: Route) -> float:
    """How many times as long as is reckoned transfers with its only peer take on a route, as it has learnt."""
    if not sessions(worker):
        return 1.0
    known: float = worker._service.site.estimates.factor(met(worker).identity.incarnation, route)
    return known


def close_fabric_by(worker: Any, close: Callable[[], Any]) -> None:
    """This is called where the transport is closed."""
    worker._service.site.fabric.close = close


def mapped_windows(worker: Any) -> list[Any]:
    """Memory of peers that it has mapped, peer by peer."""
    return [mapping.windows for mapping in worker._service.site.mappings._mappings.values()]


def holds_arena(worker: Any) -> bool:
    """Whether the memory of its arena is still the worker's to free."""
    return worker._assembly.staging._backing is not None


def now(worker: Any) -> float:
    """Its clock, in seconds."""
    seconds: float = worker._service.site.now()
    return seconds


# --- what is under way


def unanswered(worker: Any) -> list[int]:
    """Numbers of what it asked peers for that has not ended, or is in doubt."""
    return list(worker._service.decode.incoming)


def being_read(worker: Any) -> bool:
    """Whether a decode rank may be reading its blocks, which it has been told of."""
    return bool(worker._service.prefill.exposed)


def copies_own(worker: Any) -> bool:
    """Whether copies of the only fetch's own write its blocks."""
    (receiver,) = worker._service.decode.incoming.values()
    return bool(receiver._copies or receiver.reading or _scatters(worker, receiver._active and receiver._active.flow))


def _scatters(worker: Any, flow: Any) -> bool:
    """Whether something that has arrived is not known to be copied yet."""
    if flow is None or flow.slot < 0:
        return False
    heard = int(mover(worker)._machine.jobs[flow.slot, records.HEARD])
    return max(flow.peer_steps, heard) > flow.steps_done


def in_custody(worker: Any, blocks: Any) -> bool:
    """Whether some of these blocks are not the caller's to use."""
    try:
        worker._service.site.custody.check({group: list(ids) for group, ids in blocks.items()})
    except BlocksError:
        return True
    return False


def die(worker: Any) -> None:
    """Its process is gone, without a goodbye: nothing of it runs on, and what it has posted may still land."""
    worker._service.listener.close()
    worker._service.site.draining = True
    worker._service.decode.claims.close()
    worker._service.rebuilding.close()
    worker._service.site.tasks.cancel()
    worker._service.site.lookouts.cancel()
    worker._service.site.closing.set_result(None)  # of what begins yet, nothing stays
    worker._service._watch.stop()
    worker._closing = asyncio.create_task(asyncio.sleep(0))  # it cannot be closed any more


def bury(worker: Any) -> None:
    """Give back what the system takes from a process that died."""
    worker._assembly.staging.close()
    worker._assembly.exports.close()
    worker._service.site.mappings.close()


def being_stopped(worker: Any) -> bool:
    """Whether something that is under way has failed, and its peers are yet to say that it has ended."""
    receiving, sending = worker._service.decode.incoming.values(), worker._service.prefill.transfers.values()
    return any(one.protocol.failure for one in (*receiving, *sending))


def time_out(worker: Any) -> Any:
    """The time that the caller of its only fetch gave it is over; a future of how that ends."""
    (fetch,) = worker._service.decode.fetches
    fetch._on_timeout()
    return fetch.outcome


def posted(worker: Any) -> bool:
    """Whether a write is in flight."""
    return mover(worker).under_way


def granted_by(worker: Any) -> list[int]:
    """How often decode ranks had made their agents anew when they granted what is being written to them."""
    return [sender.renewals for sender in worker._service.prefill.transfers.values()]


def waits_for_layers(transfer: Any) -> bool:
    """Whether a fetch keeps anybody who waits for layers of it, on whichever loop."""
    inner = getattr(transfer, "_inner", None) or transfer._progress
    return bool(inner.watched)


def renew_claims(worker: Any) -> None:
    """Claim everything anew, of the only engine's first rank."""
    claims = worker._service.decode.claims
    (engine,) = claims._engines.values()
    claims._send_to(engine, engine.ranks[0], list(engine.kept))


def overlook(worker: Any, offer: Any) -> None:
    """A transfer of it was at work when its lease was looked at, and is not any more when `leave` is called."""
    book = worker._service.prefill.book
    book._watched.pop(offer.key)
    book._ends.remove(next(end for end in book._ends if end[1] == offer.key))
    book._set_timer()


def leave(worker: Any, offer: Any) -> None:
    """Its transfer ends."""
    entry(offer).on_transfer_end(None)


def counters(worker: Any) -> Any:
    """What counts."""
    return worker._service.site.metrics


def borrow_thread(worker: Any, work: Callable[[], Any]) -> Awaitable[Any]:
    """Run something in a thread of the worker's."""
    waiting: Awaitable[Any] = worker._service.site.runtime.in_thread(work)
    return waiting


def look_out(worker: Any, work: Any) -> None:
    """A task of the worker's that looks for evidence begins: closing waits for it last."""
    worker._service.site.lookouts.spawn(work, "of a scene")


def early_places(worker: Any) -> int:
    """Places that requests take which peers were early for."""
    return len(worker._service.prefill.book._places)


def queues(worker: Any) -> dict[str, int]:
    """How long those are that peers could make grow, and `describe` does not tell of."""
    unsent = sum(link._transport.get_write_buffer_size() for link in worker._service.links)
    return {"timers": len(worker._service.prefill.book._ends), "unsent": unsent, "tasks": tasks(worker)}


def kept_of_peers(worker: Any) -> dict[str, int]:
    """How many things a worker keeps of its peers, by where."""
    site = worker._service.site
    books = {"plans": site.plans, "estimates": site.estimates, "lanes": site.lanes, "mappings": site.mappings}
    found = {"warming": len(site.warming), "written": len(site.written_in_place), "links": len(worker._service.links)}
    books |= {"gates": site.gates, "peers": worker._service.peers}
    for name, book in books.items():
        for field, value in vars(book).items():
            if isinstance(value, dict | set | list) and f"{name}.{field}" != "gates._free":  # the next one's
                found[f"{name}.{field}"] = len(value)
    return found


def kept_of_the_gone(worker: Any) -> dict[str, int]:
    """How much it keeps of peers to whom no link leads, or of transfers though there are none: by where, if any."""
    site = worker._service.site
    linked = {link.peer.identity.incarnation for link in worker._service.links}
    books = {"processes": site.processes._processes, "peers' gates": site.peer_gates._keys, "lanes": site.lanes._lanes}
    books |= {"mappings": site.mappings._mappings}
    found = {name: len(set(book) - linked) for name, book in books.items()}
    found["gates"] = site.gates._fresh - 1 - len(site.gates._free) - len(site.gates._retired)
    found["flows"] = len(site.mover._flows)
    found["slots"] = records.JOBS - len(site.mover._free)
    return {name: count for name, count in found.items() if count}


def watched(worker: Any) -> bool:
    """Whether it is looked whether its loop stands still."""
    return not worker._service._watch._timer.cancelled()


def tasks(worker: Any) -> int:
    """Tasks of its own that run."""
    return len(worker._service.site.tasks._tasks)


# --- what workers are made of, for all that are opened in a scene

TRANSFER_PARTS = (Fetch, Receiver, Sender)
"""What there is of a transfer, at both ends."""


def parts_kept() -> list[Any]:
    """Whatever was made for transfers, and is not freed yet."""
    return [one for one in gc.get_objects() if isinstance(one, TRANSFER_PARTS)]


def serve_chunks_by(
    side: str, act: Callable[[Callable[[], object], Callable[[], object]], None], monkeypatch: Any
) -> None:
    """Call `act(takes, serves)` where a chunk of a side gets memory: it takes it, or goes on with it as always."""
    steps, hold = Sender._steps, Grants.begin_ring

    def stepped(sender: Any, *given: Any) -> Any:
        made: list[Any] = []
        act(lambda: None, lambda: made.append(steps(sender, *given)))  # whoever calls this has it
        return made[0]

    def held(grants: Any, extent: Any, more: int, chunk: int) -> Any:
        made: list[Any] = []
        act(lambda: hold(grants, extent, 0, chunk), lambda: made.append(hold(grants, extent, more, chunk)))
        return made[0]

    if side == "send":
        monkeypatch.setattr(Sender, "_steps", stepped)
    else:
        monkeypatch.setattr(Grants, "begin_ring", held)


def watch_chunks(say: Callable[[str, int], None], monkeypatch: Any) -> None:
    """Call `say(what, chunks)` where a decode rank hears that the first so many have arrived, and where they landed."""

    def arrives(tell: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def told(machine: Any, message: Any) -> Any:
            fresh = tell(machine, message)
            if fresh:
                say("arrived", machine.arrived)
            return fresh

        return told

    def lands(machine: Any, chunks: int) -> None:
        say("landed", chunks)
        done(machine, chunks)

    done = Receiving.chunks_landed
    monkeypatch.setattr(Receiving, "on_arrived", arrives(Receiving.on_arrived))
    monkeypatch.setattr(Receiving, "on_result", arrives(Receiving.on_result))
    monkeypatch.setattr(Receiving, "chunks_landed", lands)


def keep_plans(worker: Any, monkeypatch: Any) -> list[Callable[[], None]]:
    """It plans nothing that it receives until what is in this list is called, in whichever order it is asked for."""
    plans: list[Callable[[], None]] = []
    plan = Site.offload

    async def planned(site: Any, make: Callable[[], Any], *, rows: int) -> Any:
        if site is not worker._service.site or getattr(make, "__qualname__", "").startswith("Fetch."):
            return await plan(site, make, rows=rows)
        wanted = site.loop.create_future()
        plans.append(lambda: wanted.set_result(None))
        await wanted
        return make()

    monkeypatch.setattr(Site, "offload", planned)
    monkeypatch.setattr("kvxfer.decode.receiver.SMALL_PLAN", -1)
    return plans


def plan_late(seconds: float, monkeypatch: Any) -> None:
    """Prefill ranks begin to plan so much later."""
    offered = Sender._wait_for_offer

    async def late(self: Any) -> Any:
        offer = await offered(self)
        await asyncio.sleep(seconds)
        return offer

    monkeypatch.setattr(Sender, "_wait_for_offer", late)


def keep_gathers(monkeypatch: Any) -> list[Callable[[], None]]:
    """Steps of chunks to be gathered, until the monkeypatch is undone; to call one makes them, as late as that."""
    late: list[Callable[[], None]] = []

    async def keep(sender: Any) -> None:
        wanted = sender.site.loop.create_future()
        late.append(lambda: wanted.set_result(None))
        await wanted

    before_steps(keep, monkeypatch)
    return late


def before_steps(wait: Callable[[Any], Awaitable[None]], monkeypatch: Any) -> None:
    """Where others on the loop have a turn before a prefill rank makes steps, as of many, it waits so long."""
    begin, sleep = BoundPlan.__init__, asyncio.sleep

    def many(bound: Any, *given: Any) -> None:
        begin(bound, *given)
        bound.at_once = 1

    async def turn(delay: float, *result: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code is Sender._submit_steps.__code__:
            await wait(frame.f_locals["self"])
        return await sleep(delay, *result)

    monkeypatch.setattr(BoundPlan, "__init__", many)
    monkeypatch.setattr(asyncio, "sleep", turn)


def doubt_all(monkeypatch: Any) -> None:
    """Of whatever ends at a prefill rank something may still move."""
    monkeypatch.setattr(Sender, "in_doubt", True)


def break_steps(monkeypatch: Any) -> None:
    """A step of every transfer at a prefill rank fails as nobody foresaw."""
    monkeypatch.setattr(Sender, "_is_ready", lambda *_: 1 / 0)


def is_shut(passage: Any) -> bool:
    """Whether nobody gets in by this permit any more: its gate has another generation. The mover will see that, too."""
    if not isinstance(passage, Permit):
        return False
    *_, granted, words_at, _ = passage.lend()
    passage.give_back()
    return not words_at or granted != ctypes.c_uint32.from_address(words_at).value + FIRST_GENERATION


def never_move(seconds: float, monkeypatch: Any) -> None:
    """Nobody moves what he was granted before an agent is made anew: each look whether he has takes so long."""

    async def nobody_moves(_: Any) -> bool:
        await asyncio.sleep(seconds / doubt._STEPS)
        return False

    monkeypatch.setattr(doubt.Rebuilding, "_wait_idle", nobody_moves)


def look_in_threads(monkeypatch: Any) -> None:
    """However little a peer holds, it is looked at in a thread."""
    monkeypatch.setattr("kvxfer.site._AT_ONCE_BYTES", 0)


def remember_unreachable(endpoints: int, monkeypatch: Any) -> None:
    """So many endpoints that could not be reached are known at most."""
    monkeypatch.setattr("kvxfer.peers.connections._REMEMBERED", endpoints)


def plan_steps_in_threads(rows: int, monkeypatch: Any) -> None:
    """Steps of so many rows and more are planned in threads."""
    monkeypatch.setattr("kvxfer.site.SMALL_PLAN", rows)


def open_no_gates(monkeypatch: Any) -> None:
    """Nobody can open the gates of a peer."""
    monkeypatch.setattr("kvxfer.safety.fence.PeerGate", lambda handle: PeerGate(b""))


def build_without(capability: Capability, monkeypatch: Any) -> None:
    """Workers cannot do something, as those of before."""
    known = assembly._capabilities
    monkeypatch.setattr(assembly, "_capabilities", lambda *given, **more: known(*given, **more) & ~capability)


def send_by(act: Callable[[Callable[..., bool], tuple[Message, ...]], bool], monkeypatch: Any) -> None:
    """Call `act(send, messages)` where messages are to be sent, which says whether the session is still there."""
    send = Link.send
    monkeypatch.setattr(Link, "send", lambda link, *messages, **how: act(partial(send, link, **how), messages))


def hear_later(role: Role, monkeypatch: Any) -> list[Callable[[], None]]:
    """What comes to this side of sessions waits, until the monkeypatch is undone and each of these is called."""
    heard, kept = Link.data_received, list[Callable[[], None]]()

    def receive(link: Link, data: bytes) -> None:
        if link.role is role:
            kept.append(lambda: link.data_received(data))
        else:
            heard(link, data)

    monkeypatch.setattr(Link, "data_received", receive)
    return kept


def share_no_locks(monkeypatch: Any) -> None:
    """Workers share no locks, as those on two hosts."""

    def refused(gates: int) -> None:
        raise FabricError("they are said to be on two hosts")

    monkeypatch.setattr(fence, "LockFile", refused)


def identify_by(make: Callable[[Any], Any], monkeypatch: Any) -> None:
    """This makes the key by which a worker proves who it is."""
    monkeypatch.setattr(assembly, "IdentityKey", make)


def run_on(runtime: Any, monkeypatch: Any) -> None:
    """Workers have this clock and these threads."""
    monkeypatch.setattr(assembly, "ThreadRuntime", runtime)


def live_where(here: Callable[[], str], monkeypatch: Any) -> None:
    """Workers say to be on this host, each on the one that it is given."""
    monkeypatch.setattr(assembly, "here", here)


def open_windows_by(open_window: Callable[..., Any], monkeypatch: Any) -> None:
    """This maps the memory of a peer."""
    monkeypatch.setattr(fence, "open_window", open_window)
