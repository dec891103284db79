"""Figures of samples: by hand, and as properties."""

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.tools.bench.samples import Samples


def test_figures_of_a_few():
    samples = Samples([3.0, 1.0, 2.0, 10.0], warmups=2)
    assert samples.median == 2.5
    assert [samples.percentile(p) for p in (0, 25, 50, 51, 99, 100)] == [1.0, 1.0, 2.0, 3.0, 10.0, 10.0]
    assert samples.spread == 9 / 2.5
    assert samples.gbps(5_000_000_000) == 2.0
    assert samples.to_json() == {"median_s": 2.5, "min_s": 1.0, "max_s": 10.0, "repetitions": 4, "warmups": 2}
    assert samples.percentiles()["p90_s"] == 10.0


@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=20), st.integers(0, 100))
def test_a_percentile_is_a_sample_with_so_many_not_above_it(seconds, percent):
    found = Samples(seconds).percentile(percent)
    assert found in seconds
    assert sum(one <= found for one in seconds) >= percent / 100 * len(seconds) - 1e-6
    assert sum(one < found for one in seconds) <= percent / 100 * len(seconds) + 1e-6
