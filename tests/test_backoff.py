"""Waits that double, with jitter."""

from kvxfer.peers.connections import Backoff


class Drawing:
    """A runtime that draws what it is told to."""

    def __init__(self, draws):
        self.draws = iter(draws)

    def token(self, nbytes):
        return next(self.draws).to_bytes(nbytes, "little")


def test_the_bounds_of_each_wait():
    low, high = 0, (1 << 32) - 1
    lowest = Backoff(Drawing([low] * 6).token, least=0.5, most=10.0)
    assert [lowest.wait() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    highest = Backoff(Drawing([high] * 6).token, least=0.5, most=10.0)
    assert [round(highest.wait(), 6) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
