"""Every kind of failure says the same things, in attributes and in one line of the log on each side that took part."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
from inside import before_connecting, begin_copies_by, cut, mover, take_all
from stage import Cache, Gate, eventually, frames

from kvxfer import Code, FailureReport, KvxferError, MemoryInDoubt, Step, TransferFailedError

TOKENS = range(8)
INTO = [3, 4]
PAIR = {"route": "staged", "revoke_timeout": 0.2, "window": 1, "chunk_bytes": "1KiB"}
CASES = {}


@dataclass(frozen=True)
class Said:
    """What must be said of a failure."""

    step: Step  # what was waited for, at the decode side
    code: Code  # why
    there: Step | None = None  # the step at the prefill side; None if it says nothing, since it was not asked
    why: Code | None = None  # the code there, if it is another one
    route: str = "staged"  # as it was chosen
    chunks: tuple[int, int] = (0, 4)  # how many had landed, at least, and how many there were; none if it was never cut
    safe: tuple[bool, bool] = (True, True)  # whether the caller's blocks are, and those of the offer
    peer: str = "prefill[0/1]@"  # a part of its name


UNMOVED = {"chunks": (0, 0), "route": ""}


def says(said, **config):
    """What a scene must say; its workers have these settings."""

    def register(scene):
        CASES[scene.__name__] = (scene, said, config)
        return scene

    return register


class Scene:
    """A pair of workers and one fetch between them."""

    def __init__(self, stage, prefill, decode):
        self.stage, self.prefill, self.decode = stage, prefill, decode
        self.offer: Any = None
        self.offered = [1, 2]  # blocks on offer

    @property
    def ticket(self):
        return self.prefill.engine.ticket("r")

    def offers(self, ids=(1, 2)):
        self.offered = list(ids)
        self.offer = self.prefill.offer("r", self.offered, tokens=4 * len(ids))

    def start(self, ticket=None, **options):
        return self.decode.start_fetch(ticket or self.ticket, INTO, tokens=TOKENS, **options)

    async def heard(self, kind):
        await eventually(lambda: frames(self.decode, kind))

    async def moving(self, to="decode", **options):
        """The same once its first bytes are on their way."""
        self.stage.network.hold(to)
        self.offers()
        transfer = self.start(**options)
        await self.held()
        return transfer

    async def held(self):
        await eventually(lambda: self.stage.network.held("*"))

    async def ended(self, transfer):
        """It has, and what the network held goes on."""
        await asyncio.wait([transfer.outcome])
        self.stage.network.release("decode")
        return transfer


# --- nothing was asked


@says(Said(Step.CONNECTING, Code.UNREACHABLE, peer="unix:/nowhere", **UNMOVED))
async def nobody_is_there(scene):
    return scene.start({**scene.ticket, "endpoints": {"prefix": "unix:/nowhere"}})


@says(Said(Step.CONNECTING, Code.MISMATCH, **UNMOVED))
async def a_ticket_of_an_engine_that_restarted(scene):
    return scene.start({**scene.ticket, "epoch": "00" * 32})


@says(Said(Step.CONNECTING, Code.TIMEOUT, **UNMOVED, peer=""), connect_timeout=5)
async def no_time_to_connect(scene):
    async def never(*_):
        await asyncio.get_running_loop().create_future()

    before_connecting(scene.decode, never)
    return scene.start(timeout=0.05)


# --- asked, and not answered, or refused


@says(Said(Step.ASKING, Code.TICKET_FORGED, **UNMOVED))
async def a_forged_ticket(scene):
    return scene.start({**scene.ticket, "mac": "00" * 32})


@says(Said(Step.ASKING, Code.TIMEOUT, Step.ASKING, **UNMOVED))
async def an_offer_that_does_not_come_in_time(scene):
    return scene.start(timeout=1)


@says(Said(Step.ASKING, Code.NEVER_OFFERED, Step.ASKING, **UNMOVED), unclaimed_timeout=0.1)
async def an_offer_that_never_comes(scene):
    return scene.start()


@says(Said(Step.ASKING, Code.TOKENS_OUTSIDE_OFFER, Step.PLANNING, **UNMOVED))
async def more_than_is_on_offer(scene):
    scene.offers([1])
    return scene.start()


@says(Said(Step.ASKING, Code.PEER_LOST, Step.ASKING, **UNMOVED))
async def the_stream_is_cut_before_the_offer(scene):
    transfer = scene.start()
    await eventually(lambda: scene.prefill.describe()["sending"])
    cut(scene.decode)
    return transfer


@says(Said(Step.ASKING, Code.CANCELLED, Step.ASKING, **UNMOVED))
async def a_cancel_before_the_offer(scene):
    transfer = scene.start()
    await eventually(lambda: scene.prefill.describe()["sending"])
    transfer.cancel()
    return transfer


# --- accepted


@says(Said(Step.WAITING, Code.OFFER_WITHDRAWN, Step.WAITING))
async def a_withdrawal_before_anything_is_ready(scene):
    offer = scene.prefill.offer("r", streaming=True)
    offer.extend([1, 2], tokens=TOKENS)
    transfer = scene.start()
    await scene.heard("Accept")
    await offer.withdraw()
    return transfer


@says(Said(Step.RESERVING, Code.TIMEOUT, Step.RESERVING))
async def no_memory_in_time(scene):
    take_all(scene.decode, "receive")
    scene.offers()
    return scene.start(timeout=1)  # enough to connect and to be answered


@says(Said(Step.RESERVING, Code.CANCELLED, Step.RESERVING))
async def blocks_that_may_not_be_written_yet(scene):
    scene.offers()
    transfer = scene.start(after=Gate())
    take_all(scene.decode, "receive")
    await scene.heard("Ready")
    transfer.cancel()
    return transfer


@says(Said(Step.MOVING, Code.FABRIC, Step.MOVING))
async def a_post_that_is_refused(scene):
    scene.stage.network.refuse_next("decode")
    scene.offers()
    return scene.start()


@says(Said(Step.MOVING, Code.FABRIC, Step.MOVING, chunks=(1, 4)))
async def a_later_post_that_is_refused(scene):
    transfer = await scene.moving()
    scene.stage.network.release("decode", posts=1)
    await eventually(lambda: [one for one in scene.decode.describe()["transfers"] if one["chunks_done"]])
    await scene.held()
    scene.stage.network.refuse_next("decode")
    scene.stage.network.release("decode")
    return transfer


@says(Said(Step.MOVING, Code.FABRIC, Step.MOVING, route="direct", chunks=(3, 4)), route="direct")
async def a_later_post_in_place_that_is_refused(scene):
    scene.stage.network.refuse_next("decode", skip=3)
    scene.offers()
    return scene.start()


@says(Said(Step.MOVING, Code.TIMEOUT, Step.MOVING, why=Code.TIMEOUT), revoke_timeout=1)
async def bytes_that_do_not_arrive_in_time(scene):
    transfer = await scene.moving(timeout=1)
    await eventually(lambda: frames(scene.prefill, "Cancel"))
    scene.stage.network.release("decode")
    return transfer


@says(Said(Step.MOVING, Code.PEER_LOST, Step.MOVING))
async def the_stream_is_cut_while_bytes_move(scene):
    transfer = await scene.moving()
    cut(scene.decode)
    return await scene.ended(transfer)


@says(Said(Step.MOVING, Code.CLOSED, Step.MOVING, why=Code.CLOSED))
async def the_decode_worker_closes(scene):
    transfer = await scene.moving()
    closing = asyncio.create_task(scene.decode.aclose(drain=False))
    await scene.ended(transfer)
    await closing
    return transfer


@says(Said(Step.MOVING, Code.IN_DOUBT, Step.MOVING, Code.CANCELLED, "direct", safe=(False, True)), route="direct")
async def a_write_that_may_still_land(scene):
    transfer = await scene.moving()
    transfer.cancel()
    return await scene.ended(transfer)


@says(
    Said(Step.MOVING, Code.IN_DOUBT, Step.MOVING, Code.OFFER_WITHDRAWN, "pull", safe=(False, False)),
    route="pull",
    decode={"revoke_timeout": 0.5},
)
async def a_read_that_does_not_end(scene):
    transfer = await scene.moving("*")
    withdrawing = asyncio.create_task(scene.offer.withdraw())
    transfer.cancel()
    with pytest.raises(MemoryInDoubt) as caught:
        await withdrawing
    report = caught.value.report
    assert (report.memory_safe, report.blocks, report.request) == (False, {"default": (1, 2)}, "r")
    assert report.peer.startswith("decode[0/1]@")
    return transfer


@says(Said(Step.SCATTERING, Code.FAILED, Step.RESERVING, Code.FAILED))
async def a_copy_that_fails(scene):
    def broken(submit, job, direction):
        if job.tables is not None:
            raise TransferFailedError("a broken device")
        return submit(job, direction)

    begin_copies_by(scene.decode, broken)
    scene.offers()
    return scene.start()


def lines(caplog, event):
    """The data of every line of this event."""
    data = (getattr(record, "kvxfer", {}) for record in caplog.records)
    return [line for line in data if line.get("event") == event]


@pytest.mark.parametrize("case", CASES)
async def test_it_says_all_that_is_known(stage, caplog, case):
    caplog.set_level(logging.INFO, logger="kvxfer")
    scene, said, config = CASES[case]
    of = Scene(stage, *await stage.pair(Cache(), Cache(), **{**PAIR, **config}))
    transfer = await scene(of)
    (error,) = await asyncio.gather(transfer.outcome, return_exceptions=True)
    report = transfer.report
    if said.code is Code.CANCELLED:
        assert isinstance(error, asyncio.CancelledError)
    else:
        assert isinstance(error, KvxferError)
        assert error.report is report
        assert report.peer in str(error) or said.code is not Code.TIMEOUT
    landed, chunks = said.chunks
    assert replace(report, peer="", elapsed=0, reason="", bytes=0, chunks_done=0) == FailureReport(
        request="r",
        transfer=transfer.id,
        peer="",
        step=said.step,
        elapsed=0,
        code=said.code,
        reason="",
        route=said.route,
        chunks=chunks,
        blocks={"default": tuple(INTO)},
        memory_safe=said.safe[0],
    )
    assert said.peer in report.peer
    assert 0 <= report.elapsed < 10
    assert report.reason
    assert landed <= report.chunks_done < max(chunks, 1)
    assert report.bytes == report.chunks_done * 1024
    (line,) = lines(caplog, "fetch_failed")
    (level,) = (record.levelno for record in caplog.records if getattr(record, "kvxfer", None) is line)
    assert level == (logging.INFO if said.code is Code.CANCELLED else logging.WARNING)
    assert line.items() >= {**report.log_fields(), "route": said.route, "chunks": chunks}.items()
    assert line["blocks"] == len(INTO)
    assert of.decode.describe()["metrics"]["receive"]["transfers"] == {line["code"]: 1}
    if said.there is None:
        await asyncio.sleep(0)
        assert not lines(caplog, "transfer_failed")
        return
    await eventually(lambda: lines(caplog, "transfer_failed"))
    (there,) = lines(caplog, "transfer_failed")
    assert (there["request"], there["transfer"]) == ("r", transfer.id)
    assert there["peer"].startswith("decode[0/1]@")
    assert (there["step"], there["route"]) == (said.there.value, said.route)
    assert there["code"] == (said.why or said.code).name.lower()
    assert of.prefill.describe()["metrics"]["send"]["transfers"] == {there["code"]: 1}
    assert there["memory_safe"] is said.safe[1]
    assert there["reason"]
    assert landed <= there["chunks_done"] <= there["chunks"] == chunks
    assert there["blocks"] == (0 if said.there is Step.ASKING else len(of.offered))


async def test_each_of_many_has_a_report_of_its_own(stage):
    """They wait for one stream, which fails them all with one error."""
    prefill, decode = await stage.pair(Cache(), Cache())
    nowhere = {"endpoints": {"prefix": "unix:/nowhere"}}
    transfers = [
        decode.start_fetch({**prefill.engine.ticket(f"r{n}"), **nowhere}, [n], tokens=range(4)) for n in range(5)
    ]
    errors = await asyncio.gather(*(transfer.outcome for transfer in transfers), return_exceptions=True)
    assert [error.report.request for error in errors if isinstance(error, KvxferError)] == [f"r{n}" for n in range(5)]


async def test_a_success_has_no_report(stage, caplog):
    caplog.set_level(logging.INFO, logger="kvxfer")
    prefill, decode = await stage.pair(Cache(), Cache())
    offer, transfer = stage.begin(prefill, decode)
    await transfer
    await offer.released()
    assert transfer.report is None
    assert not lines(caplog, "fetch_failed")
    assert not lines(caplog, "transfer_failed")
    (here,), (there,) = lines(caplog, "fetch_ended"), lines(caplog, "transfer_sent")
    assert here["transfer"] == there["transfer"] == transfer.id


async def test_a_mover_that_breaks_as_nobody_foresaw_ends_the_fetch_and_is_named(stage, caplog):
    scene = Scene(stage, *await stage.pair(Cache(), Cache(), **PAIR))

    def broken(*_, **__):
        raise RuntimeError("a broken device")

    mover(scene.decode).flow = broken
    scene.offers()
    transfer = scene.start()
    with pytest.raises(TransferFailedError, match=r"a step of the transfer failed: RuntimeError\('a broken device'\)"):
        await transfer
    assert transfer.memory_safe
    (line,) = lines(caplog, "task_failed")
    assert "a broken device" in line["error"]
