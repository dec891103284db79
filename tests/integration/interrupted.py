"""A process that presses Ctrl-C on itself: in every scene of `test_cancel_awaits`, and in calls that block.

python interrupted.py awaits      # each await of the API under asyncio.run, at a few points or at all
python interrupted.py calls       # what blocks in a BlockingWorker
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("copy", "geometry", "integration"))

from awaits import interrupt, once
from stage import Cache, Copied
from test_cancel_awaits import EVERYTHING, HERE, MAX_TURNS, SCENES, TURN_SECONDS, play, routes_for

import kvxfer.testing
from kvxfer import BlockingWorker, Config, Fetched, OfferReleased
from kvxfer.testing import LoopbackNetwork, LoopbackTransport

FEW = 1
SOON_SECONDS = 0.1


def awaits() -> int:
    """How often Ctrl-C came while a call was under way."""
    pressed = 0
    for key in HERE:
        for route in routes_for("interrupt", key):
            length = play(SCENES[key], once, MAX_TURNS, route, late=False).turns
            drawn = random.Random(str(key)).sample(range(length + 1), min(FEW, length + 1))
            for turn in range(length + 1) if EVERYTHING else drawn:
                pressed += not play(SCENES[key], interrupt, turn, route, late=turn % 2 == 1).late
    return pressed


def interrupted(call: Callable[[], Any]) -> bool:
    """Whether a call that blocks let Ctrl-C through."""
    timer = threading.Timer(SOON_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        timer.cancel()
        timer.join()
    return False


def calls() -> int:
    """Interrupt what blocks, one call after the other; all works afterwards, and closing leaves nothing."""
    network, caches = LoopbackNetwork(), {name: Cache() for name in ("prefill", "decode")}
    pressed = 0
    workers = {
        name: BlockingWorker(
            Config(engine=name, arena_bytes="64KiB", chunk_bytes="2KiB", drain_timeout=5.0, revoke_timeout=0.2),
            transport=lambda name=name: LoopbackTransport(name, network),
        )
        for name in caches
    }
    for name, worker in workers.items():
        worker.register(caches[name].tensors)
    prefill, decode = workers["prefill"], workers["decode"]
    pressed += interrupted(lambda: decode.poll(30))
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8))
    pressed += interrupted(lambda: transfer.wait_layer(0))
    copied = Copied(caches["decode"]).bring(caches["prefill"], [1, 2], [3, 4], range(8))
    prefill.offer("r", [1, 2], tokens=8)
    assert [type(event) for event in decode.poll(10)] == [Fetched]
    assert [type(event) for event in prefill.poll(10)] == [OfferReleased]
    copied.check()
    prefill.offer("never", [1], tokens=4)
    pressed += interrupted(prefill.unregister)  # it would drain for five seconds
    prefill.close()
    decode.close()
    assert not network.agents
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvxfer")]
    return pressed


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
    kvxfer.testing._STEP_SECONDS = TURN_SECONDS  # type: ignore[misc]
    for what in sys.argv[1:]:
        print({"awaits": awaits, "calls": calls}[what]())
