"""A process is frozen after its lease check and before its post, for more than three leases, and thawed.

Memory that it may still write is not used again meanwhile; what may be used again is, and holds a canary afterwards.
"""

import asyncio
from functools import partial

import pytest
from company import Company
from faults import EVERYTHING, SENDER_SEED, Case, HarmError, ReceiverStruck, Scene, SenderStruck, same_bytes, unharmed

pytestmark = pytest.mark.timeout(240)

LEASE_SECONDS = 1.0
LEASES = 3
WRITERS = [
    Case("sender", "lease checked", "staged", "stop", "cma"),
    Case("sender", "lease checked", "staged", "stop", "tcp"),
    Case("sender", "lease checked", "direct", "stop", "cma"),
    Case("sender", "lease checked", "direct", "stop", "tcp"),
    Case("sender", "lease checked, mapped", "mapped", "stop", "cma"),
]
FEWER = WRITERS if EVERYTHING else [WRITERS[0], WRITERS[3], WRITERS[4]]
"""Each route, each lane."""
READERS = [
    Case("receiver", "lease checked, to read", "pull", "stop", "cma"),
    Case("receiver", "lease checked, to read", "pull", "stop", "tcp"),
]


class Frozen(Scene):
    """What both sides have in common."""

    acquainted = True
    may_lapse = 5

    def __init__(self, *given, patience=1.0, **settings):
        super().__init__(*given, patience=patience, **{"grant_lease": LEASE_SECONDS * patience, **settings})

    async def leases_end(self, struck):
        """Time passes: it is what the test is about."""
        ended = struck + LEASES * self.settings["grant_lease"]
        await asyncio.sleep(max(0.0, ended - asyncio.get_running_loop().time()))


class FrozenWriter(Frozen, SenderStruck):
    """The prefill process is frozen; the decode process uses all that it may for something else."""

    async def hear(self, struck):
        await super().hear(struck)
        assert self.content != "fetched"
        await self.leases_end(struck)
        await self.stop_beside()
        await self.survivor.fill_arena("decode")
        unharmed(await self.survivor.arena_intact("decode"), "staging memory was written that was free")
        await self.survivor.stay_awake("decode")

    async def thawed(self):
        await super().thawed()
        unharmed(await self.survivor.arena_intact("decode"), "staging memory was written that others had by then")
        await same_bytes(self.survivor, "decode", self.content, SENDER_SEED)
        await self.survivor.empty_arena("decode")
        await self.move_beside("after-")


class FrozenReader(Frozen, ReceiverStruck):
    """The decode process is frozen before it reads; the prefill process uses the blocks again if it may."""

    async def hear(self, struck):
        await super().hear(struck)
        await self.leases_end(struck)
        await self.stop_beside()  # else it would make progress for others, from which this read profits

    async def thawed(self):
        await super().thawed()
        await self.is_whole()
        await self.move_beside("after-")


async def play(scene, case, company, *, careless=False):
    class Careless(scene):
        async def raise_curtain(self):
            await self.survivor.forget_doubts()
            await super().raise_curtain()

    await company.play(case.lane, partial(Careless if careless else scene, case))


@pytest.mark.parametrize("case", FEWER, ids=str)
async def test_a_frozen_writer(company, case):
    await play(FrozenWriter, case, company)


@pytest.mark.parametrize("case", READERS, ids=str)
async def test_a_frozen_reader(company, case):
    await play(FrozenReader, case, company)


@pytest.mark.parametrize("case", WRITERS if EVERYTHING else [WRITERS[0], WRITERS[2]], ids=str)
async def test_who_gives_memory_back_when_a_peer_is_silent_is_found_out(case):
    company = Company()
    try:
        with pytest.raises(HarmError, match=r"staging memory was written that others|differs in"):
            await play(FrozenWriter, case, company, careless=True)
    finally:
        company.end()
