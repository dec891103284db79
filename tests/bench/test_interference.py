"""`kvxfer bench interference` at its smallest; its processes are spawned, as those of every benchmark are outside."""

import pytest


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


@pytest.mark.parametrize("command", ["matrix", "latency"])
def test_other_benchmarks_run_beside_one(bench, quick_processes, command):
    small = {"matrix": ["--sizes", "2MiB", "--pieces", "8KiB", "--repetitions", "1"], "latency": ["--fetches", "3"]}
    arguments = ["--device", "cpu", "--routes", "staged", *small[command], "--beside"]
    code, output, found = bench(command, *arguments, "engine")
    assert code == 0
    assert found["arguments"]["beside"] == "engine"
    assert "yes" in output
