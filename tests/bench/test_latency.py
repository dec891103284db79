"""`kvxfer bench latency` at its smallest."""

import pytest

from kvxfer.tools.bench import latency

pytestmark = pytest.mark.usefixtures("quick_processes")


@pytest.mark.parametrize("loop", [[], ["--uvloop"]], ids=str)
def test_one_block_at_a_time(bench, loop):
    code, output, found = bench("latency", "--device", "cpu", "--routes", "staged,direct", "--fetches", "3", *loop)
    assert code == 0
    cells = found["cells"]
    assert [(cell["request_bytes"] >> 10, cell["route"]) for cell in cells] == [
        (64, "staged"), (64, "direct"), (2048, "staged"), (2048, "direct"),
    ]  # fmt: skip
    for cell in cells:
        assert cell["verified"] is True
        assert cell["route_taken"] == cell["route"]
        assert cell["uvloop"] is bool(loop)
        assert cell["repetitions"] == 3
        assert 0 < cell["min_s"] <= cell["p50_s"] <= cell["p90_s"] <= cell["p99_s"] == cell["max_s"]
        assert set(cell["loop_cpu_s"]) == {"decode", "prefill"}
        assert min(cell["loop_cpu_s"].values()) > 0
        assert cell["reference"]["kind"] == "nixl_write"
        assert cell["reference"]["repetitions"] == latency._REFERENCES
        assert cell["offer_s"] > 0
    assert output.count("yes") == 4
