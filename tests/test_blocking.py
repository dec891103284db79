"""The polling face: nothing blocks, every fetch and offer ends with one event, and nothing is left behind."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from stage import Cache

from kvxfer import blocking, errors
from kvxfer.config import Config
from kvxfer.copy.port import READY
from kvxfer.geometry import Group, Span
from kvxfer.prefill.offers import Awaited
from kvxfer.testing import LoopbackNetwork, LoopbackTransport
from kvxfer.tickets import EngineCard
from kvxfer.transfers import TransferState

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS = 4, 32, 16, 2
PATIENCE = 20.0


def cache():
    """Tensors of one rank."""
    return Cache(blocks=BLOCKS, block_tokens=BLOCK_TOKENS, layers=range(LAYERS), heads=range(HEADS))


def alone(name="a", network=None, groups=(), **settings):
    """A worker that has no tensors yet."""
    config = Config(**{"arena_bytes": "1MiB", "chunk_bytes": "16KiB", "revoke_timeout": "5s", **settings})
    shared = network or LoopbackNetwork()
    return blocking.BlockingWorker(config, groups, lambda: LoopbackTransport(name, shared))


class Pair:
    """A prefill and a decode worker of one process."""

    def __init__(self, **settings):
        self.network = LoopbackNetwork()
        self.prefill = alone("prefill", self.network, **settings)
        self.decode = alone("decode", self.network, **settings)
        self.source, self.sink = cache(), cache()

    def __enter__(self):
        self.prefill.register(self.source.tensors)
        self.decode.register(self.sink.tensors)
        return self

    def __exit__(self, *_):
        self.network.release("*")
        self.decode.close(drain=False)
        self.prefill.close(drain=False)

    def fetch(self, request, blocks, tokens, **more):
        ticket = self.prefill.engine.ticket(request)
        return self.decode.start_fetch(ticket, blocks, tokens=range(tokens), **more)

    def held(self):
        """A transfer of block 3 to 2, of which a write stands still."""
        self.network.hold("decode")
        self.prefill.offer("r", [3], tokens=16)
        transfer = self.fetch("r", [2], 16)
        while not self.network.held("decode"):
            with pytest.raises(TimeoutError):
                transfer.wait_layer(0, timeout=0.01)
        return transfer

    def landed(self, blocks, others, tokens, layers=range(LAYERS)):
        there, here = (one.logical(ids, range(tokens)) for one, ids in ((self.sink, blocks), (self.source, others)))
        return torch.equal(there[list(layers)], here[list(layers)])

    def streamed(self, request, layers=(), **more):
        """A transfer of blocks 3 and 5 to 2 and 7, of which these layers are ready so far, and its offer."""
        offer = self.prefill.offer(request, [3, 5], tokens=32, streaming=True)
        if layers:
            offer.ready(layers=layers)
        return offer, self.fetch(request, [2, 7], 32, **more)


@pytest.fixture
def pair():
    with Pair() as pair:
        yield pair


def events(worker, count=1):
    """The next `count` events, and proof that there are no more right now."""
    got, deadline = [], time.monotonic() + PATIENCE
    while len(got) < count:
        assert time.monotonic() < deadline, got
        got += worker.poll(timeout=1.0)
    got += worker.poll()
    assert len(got) == count
    return got


def event(worker, kind):
    (got,) = events(worker)
    assert type(got) is kind, got
    return got


def no_new_threads(before):
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(PATIENCE)
    return not any(thread.is_alive() for thread in left)


# --- a transfer


def test_a_fetch_and_its_offer_end_with_one_event_each(pair):
    offer = pair.prefill.offer("r", [3, 5], tokens=30, payload=b"first token")
    transfer = pair.decode.start_fetch(offer.ticket, [2, 7], tokens=range(30))
    fetched = event(pair.decode, blocking.Fetched)
    assert fetched == blocking.Fetched("r", transfer, transfer.result())
    assert fetched.result.payload == b"first token"
    assert (transfer.done, transfer.state, transfer.error) == (True, TransferState.DONE, None)
    assert transfer.memory_safe
    assert transfer.failed_blocks == {}
    assert transfer.id
    assert pair.landed([2, 7], [3, 5], 30)
    released = event(pair.prefill, blocking.OfferReleased)
    assert (released.request, released.offer, offer.done) == ("r", offer, True)
    assert released.stats[0].bytes == fetched.result.stats.bytes


def test_calls_from_many_threads_give_each_event_once(pair):
    threads, each = 4, 6
    transfers, polled, stop = [], [], threading.Event()

    def poll():
        while not stop.is_set():
            polled.extend(pair.decode.poll(timeout=0.01))

    def start(number):
        for n in range(each):
            name, block = f"{number}-{n}", number * each + n
            pair.prefill.offer(name, [block], tokens=16)
            transfers.append(pair.fetch(name, [block], 16))

    pollers = [threading.Thread(target=poll) for _ in range(3)]
    starters = [threading.Thread(target=start, args=(number,)) for number in range(threads)]
    for thread in pollers + starters:
        thread.start()
    for thread in starters:
        thread.join(PATIENCE)
    for transfer in transfers:
        transfer.wait_layer(-1, timeout=PATIENCE)  # a layer that there is not: the whole fetch
    stop.set()
    for thread in pollers:
        thread.join(PATIENCE)
    assert all(type(got) is blocking.Fetched for got in polled)
    assert Counter(got.transfer for got in polled) == Counter(transfers)
    assert len(transfers) == threads * each
    assert pair.decode.poll() == []
    assert len(events(pair.prefill, threads * each)) == threads * each
    blocks = list(range(threads * each))
    assert pair.landed(blocks, blocks, 16 * len(blocks))


def test_block_lists_are_copied(pair):
    source, sink = np.array([3, 5]), np.array([2, 7])
    offer = pair.prefill.offer("r", source, tokens=32, streaming=True)
    transfer = pair.fetch("r", sink, 32)
    source[:], sink[:] = 0, 0
    offer.ready()
    offer.finish()
    event(pair.decode, blocking.Fetched)
    assert transfer.done
    assert pair.landed([2, 7], [3, 5], 32)


class Stream:
    """What kvxfer needs of a CUDA stream."""

    def __init__(self):
        self.threads = []

    def record_event(self):
        self.threads.append(threading.current_thread())
        return READY


def test_a_stream_is_recorded_by_the_calling_thread(pair):
    streams = [Stream() for _ in range(3)]
    pair.prefill.offer("a", [3], tokens=16, after=streams[0])
    pair.fetch("a", [2], 16, after=streams[1])
    event(pair.decode, blocking.Fetched)
    pair.prefill.offer("b", [3], tokens=16, streaming=True).ready(after=streams[2])
    assert [stream.threads for stream in streams] == [[threading.current_thread()]] * 3


# --- errors of arguments


@pytest.mark.parametrize(("blocks", "tokens", "error"), [
    ([BLOCKS], range(16), errors.BlocksError), ([-1], range(16), errors.BlocksError),
    ([2], range(32), errors.BlocksError), ([], range(16), errors.BlocksError), (["a"], range(16), errors.BlocksError),
    ({"other": [1]}, range(16), errors.BlocksError), ([2, 2], range(32), errors.BlocksError),
    ([2], range(0), errors.TokensError), ([2], range(0, 16, 2), errors.TokensError),
])  # fmt: skip
def test_a_wrong_fetch_is_refused_at_once(pair, blocks, tokens, error):
    with pytest.raises(error):
        pair.decode.start_fetch(pair.prefill.engine.ticket("r"), blocks, tokens=tokens)
    assert pair.decode.poll() == []


@pytest.mark.parametrize(("blocks", "tokens", "more", "error"), [
    ([BLOCKS], 16, {}, errors.BlocksError), ([1], 17, {}, errors.BlocksError), ([1], 0, {}, errors.TokensError),
    (None, 16, {}, errors.RequestError), ([1], None, {}, errors.RequestError),
    ([1], None, {"streaming": True}, errors.RequestError),
    ([1], 16, {"streaming": True, "after": READY}, errors.RequestError),
    ([1], 16, {"streaming": True, "payload": b"first token"}, errors.RequestError),
])  # fmt: skip
def test_a_wrong_offer_is_refused_at_once(pair, blocks, tokens, more, error):
    with pytest.raises(error):
        pair.prefill.offer("r", blocks, tokens=tokens, **more)
    pair.prefill.offer("r", [1], tokens=16)  # the id was not used up
    assert pair.prefill.poll() == []


def test_a_wrong_step_is_refused_at_once(pair):
    offer = pair.prefill.offer("r", streaming=True)
    with pytest.raises(errors.BlocksError):
        offer.extend([BLOCKS], tokens=range(16))
    with pytest.raises(errors.TokensError):
        offer.extend([1], tokens=range(0))
    with pytest.raises(errors.EventError):
        offer.ready(after="soon")
    for layers in [4], [0, -1], range(10**30):
        with pytest.raises(errors.TokensError, match="is not held here"):
            offer.ready(layers=layers)
    offer.extend([3], tokens=range(16))
    offer.ready()
    offer.finish()
    for step in (lambda: offer.extend([4], tokens=range(16, 32)), offer.ready, offer.finish):
        with pytest.raises(errors.RequestError, match="finished"):
            step()
    pair.fetch("r", [2], 16)
    event(pair.decode, blocking.Fetched)
    event(pair.prefill, blocking.OfferReleased)


def test_an_id_in_use_comes_by_poll(pair):
    pair.prefill.offer("r", [1], tokens=16)
    second = pair.prefill.offer("r", [2], tokens=16)
    failed = event(pair.prefill, blocking.OfferFailed)
    assert failed.offer is second
    assert isinstance(failed.error, errors.RequestError)
    assert second.done
    second.withdraw()  # changes nothing, as everything else
    second.ready()
    pair.prefill.offer("r", [2], tokens=16, attempt=1).withdraw()
    assert event(pair.prefill, blocking.OfferWithdrawn).offer.attempt == 1


def test_blocks_in_use_come_by_poll(pair):
    _, first = pair.streamed("a", layers=())
    second = pair.fetch("b", [7], 16)
    failed = event(pair.decode, blocking.FetchFailed)
    assert failed.transfer is second
    assert isinstance(failed.error, errors.BlocksError)
    assert second.memory_safe  # this fetch wrote nothing
    assert second.failed_blocks == {"default": [7]}
    assert not first.done
    with pytest.raises(errors.BlocksError):
        second.wait_layer(0)


def test_a_step_that_does_not_fit_takes_the_offer_back(pair):
    offer = pair.prefill.offer("r", streaming=True)
    offer.extend([1], tokens=range(16))
    offer.extend([2], tokens=range(32, 48))
    offer.extend([2], tokens=range(16, 32))
    failed = event(pair.prefill, blocking.OfferFailed)
    assert failed.offer is offer
    assert isinstance(failed.error, errors.TokensError)
    assert "do not continue" in str(failed.error)


# --- Ctrl-C


@pytest.mark.parametrize(
    ("what", "name", "closes", "times"),
    [
        (threading.Thread, "start", False, 1),
        (blocking.LoopThread, "submit", False, 1),
        (blocking.LoopThread, "submit", False, 3),
        (blocking.LoopThread, "wait", False, 1),
        (blocking.LoopThread, "submit", True, 1),
    ],
    ids=["its loop has begun", "it is to open", "it is to open, and to close", "it has opened", "it is to close"],
)
def test_ctrl_c_where_nobody_can_tell_what_is_done_leaves_nothing(monkeypatch, what, name, closes, times):
    network, tensors, threads = LoopbackNetwork(), cache().tensors, set(threading.enumerate())
    worker, does, pressed = alone(network=network), getattr(what, name), []

    def interrupted(self, *given):
        done = does(self, *given)
        if len(pressed) == times:
            return done
        pressed.append(True)
        raise KeyboardInterrupt

    if closes:
        worker.register(tensors)
    monkeypatch.setattr(what, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.unregister() if closes else worker.register(tensors)
    monkeypatch.undo()
    eventually(lambda: not [one for one in set(threading.enumerate()) - threads if one.name.startswith("kvxfer")])
    assert not network.agents
    worker.register(tensors)
    worker.close()


def test_what_is_to_finish_comes_to_its_end_though_the_wait_is_interrupted_and_the_loop_closed(monkeypatch):
    thread, may_end, ended, submit = blocking.LoopThread(), threading.Event(), [], blocking.LoopThread.submit

    async def work():
        await asyncio.to_thread(may_end.wait)
        ended.append(True)

    def interrupted(self, *given):
        submit(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(blocking.LoopThread, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.finish(work, lambda: None)
    assert not thread.close(0)
    may_end.set()
    assert thread.close(PATIENCE)
    assert ended == [True, True]


# --- failures


def test_a_refused_fetch_comes_by_poll(pair):
    ticket = pair.prefill.engine.ticket("r")
    transfer = pair.decode.start_fetch(ticket | {"mac": "0" * 32}, [2, 7], tokens=range(20))
    failed = event(pair.decode, blocking.FetchFailed)
    assert failed.error is transfer.error
    assert isinstance(failed.error, errors.RefusedError)
    assert transfer.state is TransferState.FAILED
    assert transfer.memory_safe
    assert transfer.failed_blocks == {"default": [2, 7]}
    with pytest.raises(errors.RefusedError):
        transfer.result()


def test_a_result_is_not_waited_for(pair):
    transfer = pair.fetch("never offered", [2], 16)
    with pytest.raises(errors.RequestError, match="not done"):
        transfer.result()
    assert (transfer.done, transfer.memory_safe, transfer.failed_blocks) == (False, False, {})


def test_cancel(pair):
    _, transfer = pair.streamed("r", layers=[0])
    transfer.wait_layer(0, timeout=PATIENCE)
    assert transfer.state is TransferState.MOVING
    transfer.cancel()
    transfer.cancel()
    failed = event(pair.decode, blocking.FetchFailed)
    assert isinstance(failed.error, errors.TransferFailedError)
    assert failed.error.reason is errors.Code.CANCELLED
    assert transfer.memory_safe
    transfer.cancel()
    event(pair.prefill, blocking.OfferReleased)  # nobody waits for its lease
    again = pair.fetch("other", [2, 7], 32)  # they are free again
    assert again is not transfer
    assert pair.decode.poll() == []


@pytest.mark.parametrize("by", ["keep", "claim"])
def test_what_is_cancelled_and_kept_can_be_tried_again(pair, by):
    ticket = pair.prefill.engine.ticket("r")
    claim = pair.decode.claim(ticket) if by == "claim" else None
    offer, transfer = pair.streamed("r", layers=[0], keep=by == "keep")
    transfer.wait_layer(0, timeout=PATIENCE)
    transfer.cancel()
    event(pair.decode, blocking.FetchFailed)
    pair.fetch("r", [2, 7], 32)
    offer.ready()
    offer.finish()
    event(pair.decode, blocking.Fetched)
    event(pair.prefill, blocking.OfferReleased)
    if claim is not None:
        claim.close()


def test_memory_in_doubt_settles_later():
    with Pair(route="direct", trust="full", revoke_timeout="200ms") as pair:
        transfer = pair.held()
        transfer.cancel()
        failed = event(pair.decode, blocking.FetchFailed)
        assert isinstance(failed.error, errors.MemoryInDoubtError)
        assert (transfer.done, transfer.memory_safe) == (True, False)
        pair.fetch("other", [2], 16)
        assert isinstance(event(pair.decode, blocking.FetchFailed).error, errors.BlocksError)  # in custody
        pair.network.release("decode")
        assert event(pair.decode, blocking.Settled) == blocking.Settled("r", transfer)
        assert transfer.memory_safe
        pair.fetch("other", [2], 16).cancel()
        assert isinstance(event(pair.decode, blocking.FetchFailed).error, errors.TransferFailedError)  # it could begin


@pytest.mark.parametrize("granted", [False, True], ids=["not granted", "granted"])
def test_who_gives_up_has_his_blocks_though_a_peer_is_silent(granted):
    with Pair(route="staged") as pair:
        transfer = pair.held() if granted else pair.fetch("r", [2], 16)
        while transfer.state is TransferState.CONNECTING:  # one of which nobody was asked yet ends at once
            with pytest.raises(TimeoutError):
                transfer.wait_layer(0, timeout=0.01)
        asleep, awake = threading.Event(), threading.Event()

        def stand_still():
            asleep.set()
            awake.wait(PATIENCE)

        stopped = threading.Thread(target=lambda: pair.prefill._open.thread.call(stand_still))
        stopped.start()
        assert asleep.wait(PATIENCE)
        assert transfer.give_up()
        other = pair.fetch("other", [2], 16)
        assert other.give_up()
        assert pair.decode.poll() == [], "neither has ended, nor was a block in custody"
        awake.set()
        stopped.join()
        pair.network.release("decode")
        assert {failed.transfer for failed in events(pair.decode, 2)} == {transfer, other}
        assert transfer.memory_safe


def test_who_gives_up_while_a_peer_may_write_waits_for_the_doubt():
    with Pair(route="direct", trust="full", revoke_timeout="200ms") as pair:
        transfer = pair.held()
        assert not transfer.give_up()
        assert isinstance(event(pair.decode, blocking.FetchFailed).error, errors.MemoryInDoubtError)


# --- layers


def test_waiting_for_layers_while_prefill_computes(pair):
    offer, transfer = pair.streamed("r", layers=())
    for layer in range(LAYERS):
        with pytest.raises(TimeoutError, match=f"layer {layer}"):
            transfer.wait_layer(layer, timeout=0.02)
        offer.ready(layers=[layer])
        transfer.wait_layer(layer, stream="any", timeout=PATIENCE)
        transfer.wait_layer(layer)  # again, at once
        assert pair.landed([2, 7], [3, 5], 32, layers=[layer])
        assert not transfer.done
    offer.finish(b"done")
    assert event(pair.decode, blocking.Fetched).result.payload == b"done"
    for layer in range(LAYERS):
        transfer.wait_layer(layer)


# --- offers


def test_withdrawing_an_offer(pair):
    offer, transfer = pair.streamed("r", layers=[0])
    transfer.wait_layer(0, timeout=PATIENCE)
    offer.withdraw()
    offer.withdraw()
    assert event(pair.prefill, blocking.OfferWithdrawn).offer is offer
    event(pair.decode, blocking.FetchFailed)
    offer.ready(layers=[1])  # too late, and harmless
    offer.withdraw()
    assert pair.prefill.poll() == []


def test_an_offer_that_nobody_claims_expires():
    with Pair(unclaimed_timeout="100ms") as pair:
        pair.prefill.offer("r", [3], tokens=16)
        assert "nobody claimed" in event(pair.prefill, blocking.OfferExpired).reason


def eventually(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kept(worker):
    return worker.describe_soon().result(PATIENCE)["claims"]


def test_a_claim_that_is_declined_at_once_is_kept_no_more(pair):
    """Calls of one thread take effect in their order, however much the worker's loop has to do."""
    service, free, done = pair.decode._open, threading.Event(), threading.Event()
    service.thread.post(lambda: free.wait(PATIENCE))
    for number in range(5):
        ticket = pair.prefill.engine.ticket(f"r{number}")
        service.thread.post(lambda: time.sleep(0.002))
        pair.decode.claim(ticket)
        pair.decode.decline(ticket)
    service.thread.post(done.set)
    free.set()
    assert done.wait(PATIENCE)
    eventually(lambda: kept(pair.decode) == 0)


@pytest.mark.parametrize("drain", [True, False])
def test_what_is_declined_as_the_worker_closes_is_released(drain):
    with Pair() as pair:
        pair.prefill.offer("first", [3], tokens=16)
        pair.fetch("first", [3], 16)
        event(pair.decode, blocking.Fetched)
        event(pair.prefill, blocking.OfferReleased)
        pair.prefill.offer("r", [3], tokens=16)
        pair.decode.decline(pair.prefill.engine.ticket("r"))
        pair.decode.close(drain=drain)
        event(pair.prefill, blocking.OfferReleased)


def test_an_engine_sees_from_where_on_a_request_is_wanted_before_it_offers_it(pair):
    assert pair.prefill.awaited("r") is None
    ticket = pair.prefill.engine.ticket("r")
    transfer = pair.decode.start_fetch(ticket, Span([7], 16), tokens=range(16, 32))
    eventually(lambda: pair.prefill.awaited("r") is not None)
    assert pair.prefill.awaited("r") == Awaited(first_token=16)
    assert pair.prefill.awaited("r", attempt=1) is None
    with pytest.raises(errors.RequestError, match="no request has the id"):
        pair.prefill.awaited(["r"])
    pair.prefill.offer("r", Span([5], 16), tokens=32)
    event(pair.decode, blocking.Fetched)
    assert transfer.done
    assert pair.prefill.awaited("r") is None, "it is on offer"


def test_an_engine_sees_that_a_request_is_not_wanted_any_more(pair):
    transfer = pair.fetch("r", [2], 16)
    eventually(lambda: pair.prefill.awaited("r") is not None)
    transfer.cancel()
    event(pair.decode, blocking.FetchFailed)
    eventually(lambda: pair.prefill.awaited("r") == Awaited(first_token=None, declined=True))
    pair.fetch("other", [2], 16, keep=True).cancel()
    event(pair.decode, blocking.FetchFailed)
    eventually(lambda: pair.prefill.awaited("other") is None)
    pair.decode.decline(pair.prefill.engine.ticket("other"))
    eventually(lambda: pair.prefill.awaited("other") == Awaited(first_token=None, declined=True))


def test_before_its_rank_has_joined_it_says_that_it_neither_claims_nor_declines(pair, caplog):
    with alone(world=2) as worker:
        worker.register(cache().tensors)
        ticket = pair.prefill.engine.ticket("r")
        worker.claim(ticket)
        worker.decline(ticket)
        heard = {"claim_failed", "decline_failed"}
        eventually(lambda: heard <= {record.kvxfer["event"] for record in caplog.records})
    assert all("call worker.join" in record.kvxfer["error"] for record in caplog.records if record.levelname != "INFO")


# --- life


def test_one_that_could_not_be_made_says_so_once():
    with pytest.raises(TypeError, match="runtime"):
        blocking.BlockingWorker(runtime=None)  # pyright: ignore[reportCallIssue]
    gc.collect()  # what is raised as it is dropped fails the test


def test_nothing_works_before_register():
    worker = blocking.BlockingWorker(Config(arena_bytes=0))
    for call in (
        lambda: worker.card,
        lambda: worker.engine,
        lambda: worker.offer("r", [1], tokens=16),
        lambda: worker.start_fetch({}, [1], tokens=range(16)),
        lambda: worker.claim({}),
        lambda: worker.decline({}),
        lambda: worker.occupy(24),
        lambda: worker.awaited("r"),
        worker.describe_soon,
    ):
        with pytest.raises(errors.ClosedError, match="register"):
            call()
    assert worker.poll() == []
    assert worker.unregister()
    worker.close()
    worker.close()
    with pytest.raises(errors.ClosedError):
        worker.register(cache().tensors)


def test_registering_twice_is_refused(pair):
    with pytest.raises(errors.RequestError):
        pair.decode.register(pair.sink.tensors)


def test_what_cannot_be_registered_leaves_nothing_behind():
    before, worker = threading.enumerate(), alone(listen="unix:/nowhere/at/all.sock")
    with pytest.raises(errors.GeometryError):
        worker.register([])
    with pytest.raises(errors.ConfigError):
        worker.register(cache().tensors)
    assert "not registered" in repr(worker)
    assert no_new_threads(before)


def test_one_that_is_closed_while_it_opens_is_not_open_afterwards(monkeypatch):
    network, before, does = LoopbackNetwork(), threading.enumerate(), blocking.LoopThread.wait
    worker = alone(network=network)
    closing = threading.Thread(target=worker.close)

    def slowly(self, work):
        if not worker._closed:  # it waits again, until what had begun to open is closed
            closing.start()
            eventually(lambda: worker._closed)
        return does(self, work)

    monkeypatch.setattr(blocking.LoopThread, "wait", slowly)
    with pytest.raises(errors.ClosedError, match="closed while it opened"):
        worker.register(cache().tensors)
    closing.join()
    assert "closed" in repr(worker)
    assert not network.agents
    assert no_new_threads(before)


def test_groups_are_known():
    with alone(groups=[Group("default", null_block=0)]) as worker:
        worker.register(cache().tensors)
        with pytest.raises(errors.BlocksError, match="null block"):
            worker.start_fetch(worker.engine.ticket("r"), [0], tokens=range(16))


def test_sleep_and_wake(pair):
    first = pair.decode.card
    pair.prefill.offer("a", [3], tokens=16)
    pair.fetch("a", [2], 16)
    event(pair.decode, blocking.Fetched)
    assert pair.decode.unregister()
    assert pair.decode.unregister()
    with pytest.raises(errors.ClosedError):
        pair.fetch("b", [2], 16)
    pair.sink = cache()
    pair.decode.register(pair.sink.tensors)
    assert pair.decode.card.incarnation != first.incarnation
    pair.prefill.offer("b", [4], tokens=16)
    pair.fetch("b", [9], 16)
    event(pair.decode, blocking.Fetched)
    assert pair.landed([9], [4], 16)


def test_unregister_drains(pair):
    offer, transfer = pair.streamed("r", layers=[0])
    transfer.wait_layer(0, timeout=PATIENCE)
    done = []
    thread = threading.Thread(target=lambda: done.append(pair.decode.unregister()))
    thread.start()
    offer.ready(layers=[1, 2, 3])
    offer.finish()
    thread.join(PATIENCE)
    assert done == [True]
    assert event(pair.decode, blocking.Fetched).transfer is transfer
    transfer.wait_layer(2)
    assert pair.landed([2, 7], [3, 5], 32)


def test_who_polls_as_it_closes_waits_no_longer(pair):
    polled = []
    waiter = threading.Thread(target=lambda: polled.append(pair.decode.poll(PATIENCE)))
    waiter.start()
    eventually(lambda: pair.decode._outbox._changed._waiters)
    began = time.monotonic()
    pair.decode.close()
    waiter.join(PATIENCE)
    assert polled == [[]]
    assert time.monotonic() - began < PATIENCE / 2


def test_close_with_work_under_way():
    before = threading.enumerate()
    with Pair(drain_timeout="100ms") as pair:
        offer, transfer = pair.streamed("r", layers=[0])
        transfer.wait_layer(0, timeout=PATIENCE)
        unclaimed = pair.prefill.offer("other", [9], tokens=16)
        raised = []

        def wait():
            try:
                transfer.wait_layer(3)
            except errors.KvxferError as error:
                raised.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        pair.decode.close()
        waiter.join(PATIENCE)
        failed = event(pair.decode, blocking.FetchFailed)
        assert raised == [failed.error]
        assert transfer.memory_safe
        pair.prefill.close()
        ended = events(pair.prefill, 2)
        assert {(type(got), got.offer) for got in ended} == {
            (blocking.OfferWithdrawn, offer),
            (blocking.OfferWithdrawn, unclaimed),
        }
        with pytest.raises(errors.ClosedError):
            pair.prefill.describe_soon()
        transfer.cancel()
        offer.withdraw()
        offer.finish()
        with pytest.raises(errors.KvxferError):
            transfer.wait_layer(0)
    assert no_new_threads(before)


def test_memory_that_a_silent_peer_may_write_is_kept(caplog):
    quick = {"revoke_timeout": "100ms", "drain_timeout": "50ms"}
    with Pair(route="direct", trust="full", **quick) as pair:
        transfer = pair.held()
        assert not pair.decode.unregister()
        assert isinstance(event(pair.decode, blocking.FetchFailed).error, errors.MemoryInDoubtError)
        assert not transfer.memory_safe
    assert any(record.kvxfer["event"] == "memory_leaked" for record in caplog.records)


def test_an_engine_of_several_ranks_must_join():
    key, network = bytes(32), LoopbackNetwork()
    with alone("p0", network, world=2, rank=0) as first, alone("p1", network, world=2, rank=1) as second:
        ranks = [first, second]
        for rank in ranks:
            rank.register(cache().tensors)
        with pytest.raises(errors.TicketError):
            _ = ranks[0].engine
        card = EngineCard.of([rank.card for rank in ranks])
        for rank in ranks:
            rank.join(card.to_dict(), key=key)
        with pytest.raises(errors.TicketError):
            ranks[0].join(card, key=b"short")
        assert ranks[0].engine.ticket("r") == ranks[1].engine.ticket("r")


def test_a_worker_that_was_never_closed_is_a_warning():
    worker = alone()
    worker.register(cache().tensors)
    with pytest.warns(ResourceWarning, match="never closed"):
        worker.__del__()
    worker._open.__del__()  # which goes with it: not a word more
    worker.close()
    worker.__del__()


def test_what_never_ended_is_given_up_once():
    with alone() as worker:
        worker.register(cache().tensors)
        thread, outbox = worker._open.thread, blocking.Outbox()
        transfer = blocking.BlockingTransfer("r", {"default": [2]}, thread, outbox)
        offer = blocking.BlockingOffer("r", 0, worker._open, outbox)
        for handle in (transfer, offer):
            outbox.add(handle)
    for _ in range(2):
        outbox.abandon()
    outbox.end(offer, blocking.OfferWithdrawn("r", offer))  # too late
    got = outbox.take(0)
    assert {type(each) for each in got} == {blocking.FetchFailed, blocking.OfferInDoubt}
    failed = next(each for each in got if isinstance(each, blocking.FetchFailed))
    assert len(got) == 2
    assert isinstance(failed.error, errors.MemoryInDoubtError)
    assert (transfer.done, transfer.memory_safe, offer.done) == (True, False, True)
    with pytest.raises(errors.ClosedError):
        asyncio.run(failed.error.settled())
    with pytest.raises(errors.MemoryInDoubtError):
        transfer.wait_layer(0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_payload_is_copied(pair, streaming):
    payload, go = bytearray(b"first token"), threading.Event()
    pair.prefill._worker.thread.post(go.wait)  # so that the offer is made after that
    offer = pair.prefill.offer("r", [3], tokens=16, **({"streaming": True} if streaming else {"payload": payload}))
    if streaming:
        offer.ready()
        offer.finish(payload)
    payload[:] = b"of the next"
    go.set()
    transfer = pair.fetch("r", [2], 16)
    assert event(pair.decode, blocking.Fetched).transfer is transfer
    assert transfer.result().payload == b"first token"


def test_a_payload_that_is_none_is_refused_at_once(pair):
    for payload, error in (("text", errors.RequestError), (bytes(65537), errors.TokensError)):
        with pytest.raises(error):
            pair.prefill.offer("r", [3], tokens=16, payload=payload)
    offer = pair.prefill.offer("r", [3], tokens=16, streaming=True)
    offer.ready()
    with pytest.raises(errors.RequestError, match="a payload is bytes"):
        offer.finish(object())
    with pytest.raises(errors.RequestError, match="payload= belongs to Offer"):
        pair.prefill.offer("s", [3], tokens=16, streaming=True, payload=np.zeros(2))
    offer.finish(np.arange(2, dtype=np.uint8))
    pair.fetch("r", [2], 16)
    assert event(pair.decode, blocking.Fetched).result.payload == b"\0\1"


def test_who_waits_for_ever_may_say_so_in_seconds(pair):
    _, transfer = pair.streamed("r", layers=[0])
    for seconds in (1e10, 1e300, 1 << 64):
        transfer.wait_layer(0, timeout=seconds)
    transfer.cancel()
    assert [type(one) for one in pair.decode.poll(1e300)] == [blocking.FetchFailed]


def test_what_blocks_is_refused_in_the_thread_of_its_loop(pair):
    """Where a callback or a finaliser of the caller's runs: it would wait for itself."""
    _, transfer = pair.streamed("r")
    calls = [
        pair.decode.close,
        pair.decode.unregister,
        pair.prefill.close,
        transfer.give_up,
        lambda: transfer.wait_layer(0),
        lambda: pair.decode.poll(PATIENCE),
        lambda: alone().register([]),
    ]
    said, over = [], threading.Event()

    def callback(_):
        for call in calls:
            try:
                call()
            except errors.UsageError as error:
                said.append(str(error))
        over.set()

    go = threading.Event()
    pair.decode._worker.thread.post(go.wait)  # so that the answer comes later
    pair.decode.describe_soon().add_done_callback(callback)
    go.set()
    assert over.wait(PATIENCE)
    assert len(said) == len(calls)
    assert all("in the thread of such a loop" in text for text in said)
    assert pair.decode.card
    transfer.cancel()
    event(pair.decode, blocking.FetchFailed)


def test_whether_to_keep_a_request_is_asked_when_its_fetch_begins(pair):
    """Else a fetch could not be cancelled: who wants to know then has nobody to tell."""
    with pytest.raises(ValueError, match="truth value"):
        pair.fetch("r", [2], 16, keep=np.zeros(2))
    assert pair.decode.idle
    transfer = pair.fetch("r", [2], 16, keep=np.ones(1))
    transfer.cancel()
    assert event(pair.decode, blocking.FetchFailed).transfer is transfer


@pytest.mark.parametrize("listen", ["unix", "unix:/nowhere/at/all.sock"], ids=["opened", "not opened"])
def test_tensors_that_were_given_back_are_not_kept_until_garbage_is_collected(listen):
    """Which may be late, or never: an engine may have frozen what it finds."""
    with alone(listen=listen) as worker:
        held = cache().tensors
        kept = [weakref.ref(one.tensor) for one in held]
        gc.disable()
        try:
            with contextlib.suppress(errors.ConfigError):
                worker.register(held)
            worker.unregister()
            del held
            assert not any(one() is not None for one in kept)
        finally:
            gc.enable()
