"""Random sequences of all that can happen to the machine, against a model of it: see `model.py`.

MACHINE_STEPS=1000000 python -m pytest -n 0 tests/copy/test_model.py -s      so many steps
MACHINE_SEED=7 python -m pytest -n 0 tests/copy/test_model.py -s             that seed alone
"""

import os
import time

import pytest
from model import GpuModel, HostModel
from post_model import PostModel

STEPS = int(os.environ.get("MACHINE_STEPS", "12000"))
SEED = os.environ.get("MACHINE_SEED")
AT_ONCE = 2500

KINDS = {
    "gpu": (GpuModel, {}, 0.6),
    "gpu with a large ring": (GpuModel, {"ring_bytes": 1 << 16}, 0.2),
    "cpu": (HostModel, {}, 0.1),
    "cpu with helpers": (HostModel, {"threads": 3}, 0.1),
    "posts": (PostModel, {}, 0.5),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_the_machine_does_what_its_model_says(name):
    kind, options, share = KINDS[name]
    steps, began, told = int(STEPS * share), time.monotonic(), {}
    seeds = [int(SEED)] if SEED else range(-(-steps // AT_ONCE))
    for seed in seeds:
        model = kind(seed, **options)
        try:
            model.play(min(steps, AT_ONCE))
        except Exception as error:
            error.add_note(f"MACHINE_SEED={seed}, after {model.steps} steps")
            raise
        for outcome, count in model.outcomes.items():
            told[outcome] = told.get(outcome, 0) + count
        model.close()
    print(f"\n{name}: {len(seeds) * AT_ONCE} steps, outcomes {told}, {time.monotonic() - began:.1f} s")
