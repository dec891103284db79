"""What protects memory, one row a guard: how to take it away, and the scene that then goes wrong.

A new guard is a new row; `test_guards` plays every scene with the guard in its place and without it. Take away what
makes the decision, and nothing else: a scene that fails because something else breaks proves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
import scenes
from msgspec.structs import replace
from test_fuzz_transfers import one_receiver  # pyright: ignore[reportMissingImports]

from kvxfer.copy import mover, records
from kvxfer.copy.mover import Mover
from kvxfer.copy.port import FOREVER, READY, CopyOutcome, Direction
from kvxfer.decode.receiver import Grants, Receiver
from kvxfer.decode.role import Decode
from kvxfer.errors import ProtocolError
from kvxfer.fabric.loopback import LoopbackTransport
from kvxfer.memory.books import Custody, ExtentState
from kvxfer.prefill.offers import Entry
from kvxfer.prefill.role import Prefill
from kvxfer.prefill.sender import Sender
from kvxfer.protocol.messages import WHOLE, KvAgentResult, Route, Status
from kvxfer.protocol.session import Session
from kvxfer.protocol.transfer import ReceiveState, Receiving, Sending, SendState
from kvxfer.safety.doubt import Exposure
from kvxfer.safety.fence import FIRST_GENERATION, LockFile, PeerGate, Revoked
from kvxfer.site import Desk

Patch = pytest.MonkeyPatch
FREE = ExtentState.FREE
_ALWAYS_FIRST = np.zeros(2, np.uint32)
"""Words of a gate whose generation never changes."""


@dataclass(frozen=True)
class Guard:
    """One row."""

    name: str  # what it is
    remove: Callable[[Patch], None]  # takes it away
    check: Callable[[Path, int], None]  # goes wrong without it, for some seed of `SEEDS`: gets a folder and the seed


@cache
def scene(one, **settings):
    """A scene with workers of these settings; two guards that name the same one share it."""
    return lambda folder, seed: scenes.play(one, folder, seed=seed, **settings)


def receiving(folder, seed):
    """The machine of a decode rank, whatever its peer says."""
    del folder
    for number in range(seed * 200, seed * 200 + 200):
        one_receiver(Random(number))


def _whenever(patch, *, posts):
    """What is posted, or else what is copied into memory of a peer that is mapped here, may begin at any time."""
    submit, begin, allow = Mover.submit, Mover.flow, Mover.allow

    def free(job):
        if (job.post is not None) is not posts:
            return job
        return replace(job, until=FOREVER, passage=job.passage if posts else None)

    def let(mover, flow, steps, until=None):
        allow(mover, flow, steps, until if (flow.job.post is not None) is not posts else None)

    patch.setattr(Mover, "submit", lambda mover, job, direction: submit(mover, free(job), direction))
    patch.setattr(Mover, "flow", lambda mover, job, *rest, **options: begin(mover, free(job), *rest, **options))
    patch.setattr(Mover, "allow", let)


def no_lease(patch):
    """Of what is posted."""
    _whenever(patch, posts=True)


def no_cancel(patch):
    """What is said to be stopped is posted all the same."""
    stop, ran, progressed = Sender.stop, Sender._on_flow_end, Sender._on_progress
    forgotten = []

    def end(one, failure):
        run = one._active
        stop(one, failure)
        if run is not None and run.flow is not None and run not in forgotten:
            forgotten.append(run)
            if one.protocol.moving:
                one._send(one.protocol.chunks_dropped(one.protocol.moving))

    def told(one, run, outcome):
        if run in forgotten:
            one._release_staging(run)
            one._end_flow(run)
        else:
            ran(one, run, outcome)

    def more(one, run, outcome):
        if run not in forgotten:
            progressed(one, run, outcome)

    patch.setattr(Sender, "stop", end)
    patch.setattr(Sender, "_on_flow_end", told)
    patch.setattr(Sender, "_on_progress", more)
    patch.setattr(Mover, "cancel", lambda mover, copy: None)


def no_permit(patch):
    """Of copies into memory of a peer that is mapped here."""
    _whenever(patch, posts=False)


def no_quarantine(patch):
    settle_extent = Desk.settle
    patch.setattr(Desk, "quarantine", lambda desk, extent, reason: desk.release(extent))
    patch.setattr(Desk, "settle", lambda desk, extent: extent.state is not FREE and settle_extent(desk, extent))
    patch.setattr(Grants, "quarantine", lambda one, hands: one.release())


def _with_empty_hands(patch, state):
    """In this state a sending machine takes its shell's hands for empty."""
    complete = Sending._complete

    def at_once(sending):
        dropped = sending._dropped
        if sending.state is not state:
            return complete(sending)
        sending._dropped = sending.granted - sending.arrived
        try:
            return complete(sending)
        finally:
            sending._dropped = dropped

    patch.setattr(Sending, "_complete", at_once)


def early_terminal(patch):
    _with_empty_hands(patch, SendState.STOPPING)


def early_last(patch):
    """A prefill rank tells of its success when all is granted, and not when all has arrived."""
    _with_empty_hands(patch, SendState.MOVING)


def forgotten_transfers(patch):
    lost = Prefill.on_link_lost

    def forget(prefill, link):
        lost(prefill, link)
        prefill.transfers.clear()

    patch.setattr(Prefill, "on_link_lost", forget)


def forgotten_doubts(patch):
    ended = Prefill._on_end

    def forget(prefill, one):
        ended(prefill, one)
        prefill.doubts._doubts.clear()

    patch.setattr(Prefill, "_on_end", forget)


def any_incarnation(patch):
    opened = Decode.on_link_opened

    def resume(role, link):
        opened(role, link)
        for one in list(role.incoming.values()):
            if one.is_lost:
                one.resume(link)

    patch.setattr(Decode, "on_link_opened", resume)


def any_process(patch):
    """Whoever says to be somebody is believed."""
    patch.setattr(Session, "_check_same", lambda *_: None)


def any_place(patch):
    """A rank proves who it is to whoever says to be one with which it has something under way."""
    patch.setattr(Session, "_check_place", lambda *_: None)


def answered_grants_only(patch):
    patch.setattr(Receiving, "exposed", property(lambda one: one.arrived < one.granted))


def no_doubt_of_reads(patch):
    patch.setattr(CopyOutcome, "may_move", property(lambda outcome: False))


def no_flush(patch):
    """What a post that failed has left in flight is taken to have landed."""

    native, made = LoopbackTransport.native, mover.CopyOutcome
    patch.setattr(LoopbackTransport, "native", lambda transport: replace(native(transport), orderly=False))
    patch.setattr(mover, "CopyOutcome", lambda *given, **options: made(*given, **{**options, "in_doubt": False}))


def ends_with_its_process(patch):
    """What a process that died had left to a socket is taken to have ended with it."""
    patch.setattr(Exposure, "ends_with_process", property(lambda one: True))


def no_doubt_of_offers(patch):
    left = Entry.on_transfer_end
    patch.setattr(Entry, "on_transfer_end", lambda *given, in_doubt=False, moved=False: left(*given, moved=moved))


def cancel_at_once(patch):
    part = Receiving._release_peer
    patch.setattr(Receiving, "_release_peer", lambda machine, code, *, reading: part(machine, code, reading=False))


def no_confirmation(patch):
    """What was read counts as confirmed."""
    read = Receiver._submit_reads

    async def confirm(one, bound):
        await read(one, bound)
        if one.protocol.granted == one.protocol.chunks:
            nbytes = bound.carried(0, one.protocol.chunks)
            one.on_result(KvAgentResult(one.protocol.transfer, WHOLE, Status.OK, nbytes, last=True))

    patch.setattr(Receiver, "_submit_reads", confirm)


def no_custody(patch):
    patch.setattr(Custody, "doubt", lambda custody, holder, blocks=None: custody.release(holder))
    patch.setattr(Custody, "settle", lambda custody, holder: None)


def no_holding(patch):
    patch.setattr(Custody, "_refuse", lambda *_: None)


def unwatched_copies(patch):
    def theirs(one):
        return one.reading or (one.protocol.exposed and not one.protocol.ended and one.route is not Route.STAGED)

    patch.setattr(Receiver, "in_doubt", property(theirs))


def unchecked_ends(patch):
    """A fetch is told as over when the peer has not said so."""
    quiet = {ReceiveState.STOPPING, ReceiveState.STOPPED, ReceiveState.DONE, ReceiveState.LOST}
    patch.setattr(Receiver, "blocks_safe", property(lambda one: one.protocol.state in quiet))
    patch.setattr(Receiver, "in_doubt", property(lambda one: False))


def stale_arrivals(patch):
    """Whatever is said to have arrived counts, also what is no news, or comes too late."""
    came = Receiving.on_arrived

    def take(receiving, message):
        fresh = came(receiving, message)
        if not fresh:
            receiving.arrived = message.chunks
        return fresh

    patch.setattr(Receiving, "on_arrived", take)


def early_success(patch):
    complete = Receiving._complete

    def at_once(receiving):
        done, receiving.chunks_done = receiving.chunks_done, receiving.chunks
        complete(receiving)
        receiving.chunks_done = done

    patch.setattr(Receiving, "_complete", at_once)


def _taken_all_the_same(patch, why):
    """A prefill rank takes a grant that it refuses for this reason."""
    reserve = Sending.on_reserve

    def take(sending, message):
        try:
            return reserve(sending, message)
        except ProtocolError as error:
            if why not in str(error):
                raise
        fresh = range(sending.granted, message.chunks)
        if message.ring:
            sending.ring, sending.token, sending._ring_at = message.ring, message.token, sending.granted
        sending.granted, sending.copied = message.chunks, message.copied
        return fresh

    patch.setattr(Sending, "on_reserve", take)


def early_ring(patch):
    _taken_all_the_same(patch, "another ring while chunks are under way")


def unannounced_chunks(patch):
    """Nor is it seen then that they are not ready."""
    _taken_all_the_same(patch, "chunks that were announced")
    patch.setattr(Sender, "_event_of", lambda *_: READY)


def early_turn(patch):
    """A place of a ring is used again when its chunk has arrived, and not when it has been scattered."""
    flow = Mover.flow

    def doubled(one, *how, turns=None, **more):
        return flow(one, *how, turns=turns and replace(turns, places=2 * turns.places), **more)

    patch.setattr(Mover, "flow", doubled)


def empty_hands(patch):
    """Of a ring nothing is taken to be in the hands of a peer that is lost."""
    settle = Grants.quarantine
    patch.setattr(Grants, "quarantine", lambda one, hands: settle(one, range(0)))


def full_hands(patch):
    """All places of a ring are taken to be in the hands of a peer that is lost."""
    settle = Grants.quarantine
    whole = lambda one, hands: settle(one, hands and range(hands.start, hands.start + len(one.ring)))  # noqa: E731
    patch.setattr(Grants, "quarantine", whole)


def mixed_up_hands(patch):
    """Once a part of a ring was given back, nobody knows any more in which place a chunk is."""
    settle = Grants.quarantine

    def forget(one, hands):
        first = one._first
        settle(one, hands)
        one._first = first

    patch.setattr(Grants, "quarantine", forget)


def back_without_evidence(patch):
    """A ring is given back when the transfer is given up."""
    settle = Receiver._reclaim

    def at_once(one):
        if one.protocol.state is ReceiveState.STOPPING:
            one.grants.release()
        settle(one)

    patch.setattr(Receiver, "_reclaim", at_once)


def unread_places(patch):
    """A place is given back though a copy of ours reads it."""
    _blind(patch, "_reclaim")


def _blind(patch, name):
    """A method of receivers does not see what the mover has of theirs."""
    called = getattr(Receiver, name)

    def blind(one):
        run, one._active = one._active, None
        called(one)
        one._active = run

    patch.setattr(Receiver, name, blind)


def any_generation(patch):
    """Whoever was granted a gate once gets in for ever."""
    lend = PeerGate.lend

    def lent(key, number, generation):
        descriptor, byte, _, _, users = lend(key, number, generation)
        return descriptor, byte, 1, _ALWAYS_FIRST.ctypes.data, users

    patch.setattr(PeerGate, "lend", lent)


def no_lock(patch):
    """A gate is closed though somebody is inside."""

    def revoke(file, number):
        file.words[2 * number] += 1
        return Revoked.IDLE

    patch.setattr(LockFile, "revoke", revoke)


def short_lock(patch):
    """Whether a gate is open is looked at before, and its lock is not held while anything is under way."""
    lend = PeerGate.lend

    def lent(key, number, generation):
        lock = lend(key, number, generation)
        return (-1, 0, 0, 0, 0) if key._words[2 * number] + FIRST_GENERATION == generation else lock

    patch.setattr(PeerGate, "lend", lent)


def unread_at_once(patch):
    """A prefill rank that stops does not wait until nothing is read any more."""
    stop = Sending.stop

    def forget(sending, failure):
        sending._unread = True
        return stop(sending, failure)

    patch.setattr(Sending, "stop", forget)


def early_scatter(patch):
    """Whatever was granted may be copied out of staging memory, as if it had arrived."""
    begin = Mover.flow

    def at_once(one, job, direction, steps, *, turns=None, **options):
        return begin(one, job, direction, steps, turns=turns if direction is Direction.GATHER else None, **options)

    patch.setattr(Mover, "flow", at_once)


def idle_places(patch):
    """What a flow in doubt takes turns in is given back, as if no post of it read there."""
    doubt = Sender._keep_in_doubt

    def at_once(one, run, outcome):
        one._release_staging(run)
        doubt(one, run, outcome)

    patch.setattr(Sender, "_keep_in_doubt", at_once)


def first_end(patch):
    """What is in doubt of a flow is over when one step of it is."""
    news = Mover._on_step

    def told(mover, slot, flow_at, flags, outcome, code, finished):
        if outcome == records.OVER:
            mover._flows[slot].lefts.update(dict.fromkeys(mover._flows[slot].lefts, (False, 0)))
        news(mover, slot, flow_at, flags, outcome, code, finished)

    patch.setattr(Mover, "_on_step", told)


def nothing_lands(patch):
    """What has left this side is taken to be over."""
    settle = Mover._settle_steps

    def told(mover, flow):
        flow.doubtful, flow.severed = flow.doubtful or flow.severed, False
        settle(mover, flow)

    patch.setattr(Mover, "_settle_steps", told)


def kept_flow(patch):
    """A transfer that is given up leaves its own copies alone."""
    _blind(patch, "_give_up")


def kept_run(patch):
    """Chunks that were granted in another ring go on as those before them."""
    take = Sender._on_granted
    patch.setattr(Sender, "_on_granted", lambda *given, fresh: take(*given, fresh=False))


def kept_agent(patch):
    """It is said to be another one."""
    patch.setattr(LoopbackTransport, "renew", lambda transport: True)


SEEDS = range(3)
RING = {"route": "staged", "chunk_bytes": 512, "window": 4, "arena_bytes": "32KiB"}
"""Settings under which a fetch of a scene has four chunks, and takes a ring of as many places."""


def on(routes, name, remove, played, **settings):
    """The same guard on each of these routes."""
    return [Guard(f"{name}, {route}", remove, scene(played, route=route, **settings)) for route in routes]


BOTH = "staged", "direct"

GUARDS = [
    Guard(
        "lease before the post",
        no_lease,
        scene(scenes.its_event_fires_after_the_lease, route="staged", grant_lease=0.02),
    ),
    Guard("lease, direct", no_lease, scene(scenes.its_event_fires_after_the_lease, route="direct", grant_lease=0.02)),
    *on(("staged", "direct", "mapped"), "cell", no_cancel, scenes.cancelled_before_its_post),
    Guard("lease, mapped", no_permit, scene(scenes.its_event_fires_after_the_lease, route="mapped", grant_lease=0.02)),
    Guard("quarantine", no_quarantine, scene(scenes.bytes_of_a_silent_peer, route="staged")),
    *on(BOTH, "terminal result last", early_terminal, scenes.cancelled_while_bytes_are_in_flight),
    Guard(
        "transfers outlive sessions", forgotten_transfers, scene(scenes.asked_again_after_a_lost_stream, route="direct")
    ),
    Guard("doubts outlive transfers", forgotten_doubts, scene(scenes.asked_again_after_a_doubt, route="staged")),
    Guard("incarnation", any_incarnation, scene(scenes.another_incarnation_answers, route="direct", locks=False)),
    Guard(
        "identity, of a writer", any_process, scene(scenes.somebody_answers_in_its_name, route="direct", locks=False)
    ),
    Guard("identity, of a reader", any_process, scene(scenes.somebody_speaks_in_the_name_of_a_reader, route="pull")),
    Guard("identity, passed on", any_place, scene(scenes.somebody_stands_between, route="pull")),
    Guard("grants of Fetch", answered_grants_only, scene(scenes.granted_with_the_request, route="direct")),
    *on(BOTH, "agent destroyed", kept_agent, scenes.bytes_of_a_host_that_is_gone, apart=True, revoke_timeout=0.5),
    *on(BOTH, "own posts end with the agent", kept_agent, scenes.our_own_post_was_stuck, revoke_timeout=0.5),
    *on(BOTH, "own post reads", no_doubt_of_reads, scenes.our_own_post_is_stuck),
    *on(
        BOTH,
        "end of a process",
        ends_with_its_process,
        scenes.its_process_ends_and_bytes_wait_for_this_side,
        arena_bytes="128KiB",
    ),
    *on(BOTH, "flush", no_flush, scenes.a_post_fails_and_leaves_bytes_in_flight),
    Guard("offers in doubt", no_doubt_of_offers, scene(scenes.our_own_post_is_stuck, route="direct")),
    Guard("Cancel after our reads", cancel_at_once, scene(scenes.our_own_read_is_in_flight, route="pull")),
    Guard("confirmation of reads", no_confirmation, scene(scenes.read_from_a_peer_that_is_no_more, route="pull")),
    Guard("custody of doubts", no_custody, scene(scenes.blocks_in_doubt, route="direct")),
    Guard("custody of fetches", no_holding, scene(scenes.two_fetches_into_the_same_blocks, route="staged")),
    Guard("own scatters", unwatched_copies, scene(scenes.cancelled_while_it_is_scattered, route="staged")),
    Guard(
        "end of a fetch", unchecked_ends, scene(scenes.cancelled_while_bytes_are_in_flight, route="direct", locks=False)
    ),
    *on(
        ("staged", "direct", "mapped"),
        "generation of a gate",
        any_generation,
        scenes.posted_after_its_grant_was_taken_back,
    ),
    Guard("lock of a gate", no_lock, scene(scenes.bytes_of_a_silent_peer_behind_a_gate, route="direct")),
    Guard("lock of a gate, staged", no_lock, scene(scenes.bytes_of_a_silent_peer_behind_a_gate, route="staged")),
    Guard("lock held to the end", short_lock, scene(scenes.bytes_of_a_silent_peer_behind_a_gate, route="direct")),
    Guard(
        "ring while chunks are under way",
        early_ring,
        scene(scenes.granted_another_ring_too_early, **{**RING, "window": 2, "integrity": "full"}),
    ),
    Guard("chunks that were announced", unannounced_chunks, scene(scenes.granted_what_was_not_announced, **RING)),
    Guard("turns of a place", early_turn, scene(scenes.chunks_take_turns, **{**RING, "window": 1})),
    Guard("places of a lost peer", empty_hands, scene(scenes.a_ring_of_a_silent_peer, **RING)),
    Guard("no more places than that", full_hands, scene(scenes.a_ring_of_a_silent_peer, **RING)),
    Guard(
        "which places these are", mixed_up_hands, scene(scenes.a_silent_peer_is_heard_late, **RING, integrity="full")
    ),
    Guard("evidence for a ring", back_without_evidence, scene(scenes.cancelled_while_bytes_are_in_flight, **RING)),
    Guard("own scatters from a ring", unread_places, scene(scenes.cancelled_before_it_is_scattered, **RING)),
    Guard("last result last", early_last, scene(scenes.finished_while_bytes_are_in_flight, route="direct")),
    Guard("last result last, staged", early_last, scene(scenes.finished_while_bytes_are_in_flight, route="staged")),
    Guard("arrival before a scatter", early_scatter, scene(scenes.granted_long_before_it_arrives, **RING)),
    Guard("places of a flow in doubt", idle_places, scene(scenes.several_posts_are_stuck, **RING)),
    Guard("every step of a doubt", first_end, scene(scenes.several_posts_are_stuck, **RING)),
    Guard("a peer that is gone", nothing_lands, scene(scenes.its_peer_is_said_to_be_gone, route="staged")),
    Guard("end of own scatters", kept_flow, scene(scenes.cancelled_before_it_is_scattered, **RING)),
    Guard("steps for another ring", kept_run, scene(scenes.a_ring_is_replaced, **RING)),
    Guard("Cancel while we read", unread_at_once, scene(scenes.our_own_read_is_in_flight, route="pull")),
    Guard("stale arrivals", stale_arrivals, receiving),
    Guard("last result of a success", early_success, receiving),
]
