"""`kvxfer bench interference` at its smallest."""

import time

from kvxfer.bench.interference import CTAS, Interference, Victim


def test_a_busy_thread_on_either_side(bench):
    arguments = ["--routes", "staged", "--size", "2MiB", "--seconds", "0.05", "--turns", "1"]
    code, output, found = bench("interference", "--device", "cpu", *arguments)
    assert code == 0
    assert [(one["victim"], one["side"]) for one in found["cells"]] == [("python", "prefill"), ("python", "decode")]
    for one in found["cells"]:
        assert one["verified"] is True
        assert one["route_taken"] == "staged"
        assert one["ctas"] is None
        assert one["request_bytes"] == 2 << 20
        assert one["slow_down"] == one["rounds_per_s"] / one["rounds_per_s_with_transfers"]
        assert min(one["gbps"], one["gbps_with_victim"]) > 0
    assert output.count("yes") == 2


def test_on_a_gpu_matrices_suffer_too_at_each_number_of_thread_blocks():
    spec = Interference("cuda", ("mapped",))
    assert spec.settings == CTAS
    assert spec.victims[0] == ("matmul", "prefill")
    assert Interference("cpu", ("staged",)).settings == (None,)


async def test_a_victim_goes_round_until_it_is_stopped():
    victim = Victim("python", "cpu")
    until = time.monotonic() + 30
    while not await victim.rate(0.01):
        assert time.monotonic() < until
    await victim.stop()
    assert await victim.rate(0.0) == 0.0
