"""One schedule: requests between engines, troubles at any moment, and what must hold in the end."""

import asyncio
import logging
import random
from pathlib import Path

import inside
import pytest
from exchange import Plan, Request
from inside import sessions
from ownership import Ledger, watch
from world import World

from kvxfer.runtime import resolve
from kvxfer.testing import simulate

LIMIT = 60.0
"""Virtual seconds; a schedule that takes longer is stuck."""


class Broken(AssertionError):
    """A schedule that saw what must not be."""


def play(seed, folder: Path, *, trail):
    """Run the schedule of a seed.

    Args:
        seed: Decides everything.
        folder: For sockets.
        trail: Gets the world's.

    Raises:
        Broken: With everything that was wrong, and what had been done.
    """
    for old in folder.iterdir():
        old.unlink()
    with pytest.MonkeyPatch.context() as patch, Quiet() as logs:
        ledger = Ledger()
        watch(patch, ledger)
        worlds = []

        async def scenario(runtime):
            world = World(runtime, random.Random(seed), ledger, folder)
            worlds.append(world)
            await Schedule(world, patch).run()

        try:
            simulate(scenario, seed=seed, limit=LIMIT)
        except RuntimeError as error:
            ledger.faults.append(str(error))
    done = worlds[0].trail
    trail += done
    faults = [*ledger.faults, *logs.lines]
    if faults:
        raise Broken("\n".join([f"schedule {seed}:", *dict.fromkeys(faults[:20]), "-- after", *done]))


class Quiet(logging.Handler):
    """Keeps what is logged as an error: a defect, even where the transfer survives it."""

    NAMES = ("kvxfer", "asyncio")

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record):
        error = f"\n{logging.Formatter().formatException(record.exc_info)}" if record.exc_info else ""
        self.lines.append(f"logged: {record.getMessage()} {getattr(record, 'error', '')}{error}")

    def __enter__(self):
        for name in self.NAMES:
            log = logging.getLogger(name)
            log.addHandler(self)
            log.propagate = False
        return self

    def __exit__(self, *error):
        for name in self.NAMES:
            log = logging.getLogger(name)
            log.removeHandler(self)
            log.propagate = True


class Schedule:
    """What happens in one world."""

    def __init__(self, world: World, patch):
        self.world, self.patch = world, patch
        self.rnd = world.rnd
        self.alarm = world.loop.create_future()
        self.jobs: set[asyncio.Task] = set()
        self.hurt = False  # something that nothing can ever answer for
        world.ledger.alarmed = lambda _: resolve(self.alarm, None)
        world.loop.set_exception_handler(
            lambda _, context: world.say(f"loop: {context['message']} {context.get('exception')!r}")
        )

    async def run(self):
        """Open, play, mend, wait, judge, close."""
        world = self.world
        await world.open(self.patch)
        self._shape()
        for _ in range(self.rnd.choice([2, 3, 4, 6])):
            self._request()
            for _ in range(self.rnd.choice([1, 2] if world.judged else [0, 0, 1, 2])):
                await self._pause()
                self._trouble()
            await self._pause()
        await self._until(self.jobs, "requests")
        self._mend()
        await self._until(self.jobs, "requests after everything was mended")
        if not self.alarm.done():
            await asyncio.sleep(world.config.bounds()["released_by_lease"] + 3.0 * world.judged)
            self._judge()
        await world.end()
        self._judge_tasks()

    async def _until(self, jobs, what):
        """Wait until these end, or something is seen that must not be."""
        pending = set(jobs)
        while pending and not self.alarm.done():
            done, pending = await asyncio.wait([*pending, self.alarm], return_when=asyncio.FIRST_COMPLETED)
            pending.discard(self.alarm)
            for job in done - {self.alarm}:
                self.jobs.discard(job)
                if not job.cancelled() and (error := job.exception()) is not None:
                    self.world.say(f"{what}: {error!r}")

    def _pause(self):
        return asyncio.sleep(self.rnd.choice([0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.02, 0.1]))

    def _shape(self):
        """How fast bytes and frames are."""
        rnd, world = self.rnd, self.world
        if rnd.random() < 0.5:
            world.network.pace("*", rnd.choice([2e5, 1e6, 1e7]), lambda: world.now)
        if rnd.random() < 0.3:
            world.network.delay("*", rnd.choice([1, 3]))
        if rnd.random() < 0.3:
            rnd.choice([world.network.mute, world.network.echo])("*")
        if rnd.random() < 0.4:
            longest = rnd.choice([1e-4, 1e-3, 5e-3])
            world.streams.delay = lambda: rnd.random() * longest

    def _request(self):
        world, rnd = self.world, self.rnd
        alive = [engine for engine in world.engines if engine.alive]
        if len(alive) < 2:
            return
        source, target = rnd.sample(alive, 2)
        plan = Plan.draw(f"r{len(world.trail)}", rnd)
        job = asyncio.create_task(Request(world, plan, source, target).run())
        self.jobs.add(job)

    # --- troubles

    def _trouble(self):
        rnd = self.rnd
        troubles = [self.cut] * 4 + [self.hold] * 5 + [self.refuse] + [self.break_off] + [self.silence] * 2
        troubles += [self.disconnect, self.wedge, self.kill, self.restart, self.close, self.forge]
        if self.world.judged:  # by what is left: nothing happens that excuses it
            troubles = [self.cut] * 3 + [self.hold] * 5 + [self.silence] * 3 + [self.break_off, self.wedge, self.forge]
            troubles += [self.kill, self.restart] * (2 * (not self.world.without_locks))
        rnd.choice(troubles)()

    def _agent(self):
        return self.rnd.choice(["*", *(rank.name for rank in self.world.ranks)])

    def _later(self, choices, callback, *arguments):
        self.world.loop.call_later(self.rnd.choice(choices), callback, *arguments)

    def cut(self):
        links = [link for rank in self.world.ranks for link in sorted(sessions(rank.worker), key=lambda k: k.endpoint)]
        if links:
            self.world.note("cut")
            inside.cut_session(self.rnd.choice(links))

    def hold(self):
        agent = self._agent()
        self.world.note(f"hold {agent}")
        self.world.network.hold(agent)
        self._later([1e-3, 0.02, 0.1, 0.3], self.world.network.release, agent)

    def refuse(self):
        self.world.network.refuse_next(self._agent(), skip=self.rnd.randrange(3))

    def _harm(self):
        """Something happens that no peer can answer for: other evidence does, where there is some."""
        self.hurt = self.hurt or not self.world.judged

    def break_off(self):
        self._harm()
        self.world.note("break")
        agent, lingers = self._agent(), self.rnd.random() < 0.3
        self.world.network.break_next(
            agent,
            skip=self.rnd.randrange(3),
            after_bytes=self.rnd.choice([0, 100, 600]),
            disconnected=self.rnd.random() < 0.5,
            at_post=self.rnd.random() < 0.3,
            lingers=lingers,
        )
        if lingers:
            self._later([1e-3, 0.02, 0.1, 0.3], self.world.network.release, agent)

    def wedge(self, how="wedge"):
        self._harm()
        agent = self._agent()
        self.world.note(f"{how} {agent}")
        getattr(self.world.network, how)(agent)
        self._later([1e-3, 0.02], self.world.network.mend, agent)

    def disconnect(self):
        self.wedge("disconnect")

    def forge(self):
        """What one agent has told another is said by somebody else, and so is what nobody has said."""
        network = self.world.network
        if network.notices:
            src, dst, message = self.rnd.choice(network.notices)
            much = message[:16] + bytes([message[16] | 0xFE, *[255] * 6, 0])
            others = [agent for agent in network.agents if agent not in {src, dst}]
            for other in others[:1]:
                network.forge(other, dst, self.rnd.choice([message, much, b"", message * 2]))

    def silence(self):
        rank = self.rnd.choice(self.world.ranks)
        self.world.note(f"silence {rank.name}")
        self.world.streams.silence(rank.worker)
        self._later([0.01, 0.1, 0.5], self.world.streams.heal)

    def kill(self, rank=None):
        rank = rank or self.rnd.choice(self.world.ranks)
        if rank.alive:
            self._harm()
            self.world.kill(rank)

    def restart(self):
        """An engine of one rank dies, and another incarnation takes its place."""
        engine = self.rnd.choice(self.world.engines)
        if len(engine.ranks) == 1 and engine.alive:
            self.kill(engine.ranks[0])
            self.jobs.add(asyncio.create_task(self._again(engine)))

    async def _again(self, engine):
        await self._pause()
        number = self.world.engines.index(engine)
        self.world.engines[number] = await self.world.engine(engine.name, 1)
        self.world.note(f"{engine.name} is back")

    def close(self):
        rank = self.rnd.choice(self.world.ranks)
        if rank.alive:
            self.hurt = True  # whoever waits for its last word, and did not hear it, waits for ever
            rank.closed = True
            closing = self.world.close(rank, drain=self.rnd.random() < 0.5)
            self.jobs.add(asyncio.create_task(closing))

    def _mend(self):
        network = self.world.network
        self.world.note("mend")
        self.world.streams.heal()
        for agent in ["*", *(rank.name for rank in [*self.world.ranks, *self.world.left])]:
            network.mend(agent)
            network.release(agent)

    # --- the end

    def _judge(self):
        """Everything is whole, or in doubt by name and reason."""
        world = self.world
        alive = [rank for rank in world.ranks if rank.alive]
        # a post that was given up may land at any later time, so what depends on it stays in doubt; a new agent ends
        # that for who posted it, and for its living peer if they are on one host
        self.hurt = self.hurt or (
            not world.judged
            and any(
                seen["fabric"]["lingering"] or seen["sent_in_doubt"] or seen["agent"]["rebuilt"]
                for seen in (rank.worker.describe() for rank in world.ranks)
            )
        )
        for rank in alive:
            seen = rank.worker.describe()
            for share in (seen["arena"]["send"], seen["arena"]["receive"]):
                used = share.capacity_bytes - share.free_bytes
                if used != share.quarantined_bytes or not all(extent.reason for extent in share.extents):
                    world.say(f"{rank.name}: {share.name} memory is neither free nor in doubt: {share.extents}")
                if used and not self.hurt:
                    world.say(f"{rank.name}: {share.name} memory is in doubt for ever: {share.extents}")
                if share.waiting_requests:
                    world.say(f"{rank.name}: somebody still waits for {share.name} memory")
            for holder, row in seen["custody"].holders.items():
                if not row.in_doubt or not self.hurt:
                    world.say(f"{rank.name}: {holder} still has {row.blocks} blocks, in doubt: {row.in_doubt}")
            if not self.hurt:
                counts = ["sending", "receiving", "in_doubt", "written"]
                if not world.apart:  # else the end of a process is never seen, and its transfers are remembered
                    counts += ["sent_in_doubt", "places"]
                left = {name: seen[name] for name in counts if seen[name]}
                left |= {name: seen["fabric"][name] for name in ("awake", "lingering") if seen["fabric"][name]}
                left |= inside.kept_of_the_gone(rank.worker)
                if left or seen["agent"]["wanted"]:
                    world.say(f"{rank.name} still has {left}, and waits for {seen['agent']}")
            world.ledger.say(rank.books.untaken())

    def _judge_tasks(self):
        """Nothing runs on."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        names = sorted(task.get_name() for task in left if task.get_name().startswith("kvxfer"))
        if names:
            self.world.say(f"tasks are left: {names}")
