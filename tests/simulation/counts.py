"""How many schedules a run plays; all of them are numbered, and a number alone replays one.

make test                       # 5,000: SIMULATIONS of whole workers, the rest models
make simulate                   # forty times as many
make simulate SEED=1234         # that one of each, with everything that was done in it
"""

import os

TIMES = int(os.environ.get("SIMULATE_TIMES", "1"))
SEED = os.environ.get("SIMULATE_SEED")

CROWDS = 25 * TIMES
"""Models that hypothesis draws, and shrinks what it finds."""
SIMULATIONS = 400
MODELS = 5_000 - SIMULATIONS
"""Models that a number draws."""
BATCH = 100
"""Simulations in one test: a batch takes some seconds."""


def batches(count, size):
    """Ranges of numbers; one of a single number if `SEED` says which."""
    if SEED is not None:
        return [range(int(SEED), int(SEED) + 1)]
    return [range(first, min(first + size, count * TIMES)) for first in range(0, count * TIMES, size)]
