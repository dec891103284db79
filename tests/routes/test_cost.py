"""Predicted times, against the measurements that the profiles name."""

import pytest

from kvxfer.plans.routes import PROFILES, Costs, Profile
from kvxfer.protocol.messages import Route

MIB = 1 << 20


def test_the_formula():
    profile = Profile("p", "h", {Route.DIRECT: Costs(fixed_s=1.0, chunk_s=0.1, piece_s=0.01, bytes_per_s=100.0)})
    assert profile.routes[Route.DIRECT].seconds(nbytes=500, chunks=3, pieces=7) == pytest.approx(1 + 0.3 + 0.07 + 5)


@pytest.mark.parametrize(
    ("profile", "route", "mib", "chunks", "pieces", "measured_s"),
    [
        ("h200-nvlink", Route.MAPPED, 2, 1, 64, 1.1e-3),
        ("h200-nvlink", Route.MAPPED, 512, 2, 16384, 3.6e-3),
        ("h200-nvlink", Route.MAPPED, 2048, 8, 65536, 10.2e-3),
        ("h200-nvlink", Route.STAGED, 2, 1, 64, 2.8e-3),
        ("h200-nvlink", Route.STAGED, 512, 8, 16384, 10.8e-3),
        ("h200-nvlink", Route.STAGED, 2048, 32, 65536, 32e-3),
        ("h200-nvlink", Route.DIRECT, 512, 2, 65536, 281e-3),
        ("h200-nvlink", Route.DIRECT, 512, 2, 16384, 67e-3),
        ("h200-nvlink", Route.DIRECT, 512, 2, 256, 5.4e-3),
        ("h200-nvlink", Route.PULL, 512, 2, 65536, 240e-3),
        ("h200-nvlink", Route.PULL, 512, 2, 16384, 63e-3),
        ("h200-nvlink", Route.PULL, 512, 2, 256, 6.9e-3),
        ("cpu", Route.MAPPED, 2, 1, 64, 2.57e-3),
        ("cpu", Route.MAPPED, 16, 1, 512, 4.9e-3),
        ("cpu", Route.MAPPED, 64, 1, 2048, 12.7e-3),
        ("cpu", Route.MAPPED, 64, 1, 131072, 23.2e-3),
        ("cpu", Route.STAGED, 2, 1, 64, 5.4e-3),
        ("cpu", Route.STAGED, 16, 1, 512, 15.5e-3),
        ("cpu", Route.STAGED, 64, 1, 8192, 55.8e-3),
        ("cpu", Route.STAGED, 64, 1, 131072, 50.3e-3),
        ("cpu", Route.DIRECT, 2, 1, 64, 3.2e-3),
        ("cpu", Route.DIRECT, 64, 1, 2048, 32.8e-3),
        ("cpu", Route.DIRECT, 64, 1, 8192, 50.5e-3),
        ("cpu", Route.DIRECT, 64, 2, 131072, 406e-3),
        ("cpu", Route.PULL, 2, 1, 64, 5.2e-3),
        ("cpu", Route.PULL, 64, 1, 2048, 32.6e-3),
        ("cpu", Route.PULL, 64, 1, 8192, 48.8e-3),
        ("cpu", Route.PULL, 64, 2, 131072, 402e-3),
    ],
)
def test_a_profile_is_near_what_was_measured(profile, route, mib, chunks, pieces, measured_s):
    predicted_s = PROFILES[profile].routes[route].seconds(nbytes=mib * MIB, chunks=chunks, pieces=pieces)
    assert predicted_s == pytest.approx(measured_s, rel=0.2)


def test_a_profile_knows_every_route_that_moves_bytes():
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert set(profile.routes) == {Route.MAPPED, Route.STAGED, Route.DIRECT, Route.PULL}
