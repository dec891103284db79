"""`kvxfer bench interference` at its smallest; its processes are spawned, as those of every benchmark are outside."""

import threading
import time

import pytest

from kvxfer.errors import UsageError
from kvxfer.tools.bench.interference import CTAS, Interference
from kvxfer.tools.bench.victims import KINDS, Victim, beside


def test_a_busy_thread_on_either_side(bench):
    arguments = ["--routes", "staged", "--size", "2MiB", "--seconds", "0.05", "--turns", "1"]
    code, output, found = bench("interference", "--device", "cpu", *arguments)
    assert code == 0
    victims = [("python", "prefill"), ("python", "decode"), ("engine", "prefill"), ("engine", "decode")]
    assert [(one["victim"], one["side"]) for one in found["cells"]] == victims
    for one in found["cells"]:
        assert one["verified"] is True
        assert one["route_taken"] == "staged"
        assert one["ctas"] is None
        assert one["request_bytes"] == 2 << 20
        assert one["slow_down"] == one["rounds_per_s"] / max(one["rounds_per_s_with_transfers"], 1e-9)
        assert min(one["gbps"], one["gbps_with_victim"]) > 0
    assert output.count("yes") == 4


def test_on_a_gpu_matrices_suffer_too_at_each_number_of_thread_blocks():
    spec = Interference("cuda", ("mapped",))
    assert spec.settings == CTAS
    assert spec.victims[0] == ("matmul", "prefill")
    assert Interference("cpu", ("staged",)).settings == (None,)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_victim_goes_round_until_it_is_stopped(kind):
    victim = Victim(kind, "cpu")
    until = time.monotonic() + 30
    while not await victim.rate(0.01):
        assert time.monotonic() < until
    await victim.stop()
    assert await victim.rate(0.0) == 0.0


@pytest.mark.parametrize("kind", ["", *KINDS])
async def test_it_goes_round_beside_what_is_timed(kind):
    def running():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvxfer-bench-")]

    async with beside(kind, "cpu"):
        assert running() == [f"kvxfer-bench-{kind}"] * bool(kind)
    assert not running()


@pytest.mark.parametrize("command", ["matrix", "latency"])
def test_other_benchmarks_run_beside_one(bench, quick_processes, command):
    small = {"matrix": ["--sizes", "2MiB", "--pieces", "8KiB", "--repetitions", "1"], "latency": ["--fetches", "3"]}
    arguments = ["--device", "cpu", "--routes", "staged", *small[command], "--beside"]
    code, output, found = bench(command, *arguments, "engine")
    assert code == 0
    assert found["arguments"]["beside"] == "engine"
    assert "yes" in output
    with pytest.raises(UsageError, match="python, engine"):
        bench(command, *arguments, "nobody")
