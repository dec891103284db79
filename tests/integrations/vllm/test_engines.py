"""The connector as vLLM drives it: a process for the schedulers of both engines, and two for their ranks, over NIXL."""

import importlib.util

import pytest
from vllm_processes import BOTH, Processes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

COMPLETE, ABORTED = "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"


class Stage:
    """Processes that scenarios play in one after the other; new ones after a scenario that failed."""

    def __init__(self):
        self._found = None

    def play(self, name):
        found, self._found = self._found or Processes(), None
        try:
            (facts, error), loaded = found.play(name)
            assert not error, error
        except BaseException:
            found.end()
            raise
        self._found = found
        assert loaded == [], "the scheduler's process has loaded more than tickets and cards"
        assert facts["wrong"] == [], "a cache holds other than what was computed"
        assert facts["lost"] == {"prefill": [], "decode": []}, "blocks have leaked"
        assert set(facts["reported"].values()) <= {1}, "a rank has reported a request twice"
        return facts

    def end(self):
        if self._found is not None:
            self._found.end()


@pytest.fixture(scope="module")
def stage():
    found = Stage()
    yield found
    found.end()


def reported(facts, engine, kind, ranks=BOTH):
    """Requests that every rank of an engine has reported."""
    each = [{one for e, k, r, one in facts["reported"] if (e, k, r) == (engine, kind, rank)} for rank in ranks]
    assert all(found == each[0] for found in each), "the ranks disagree"
    return each[0]


@pytest.mark.parametrize(("name", "ranks"), [("handed_over", 2), ("one_rank_to_two", 1)])
def test_requests_are_handed_over(stage, name, ranks):
    facts = stage.play(name)
    assert facts["sampled"] == {"d-a": 3, "d-b": 3, "d-c": 3}
    assert set(facts["ended"].values()) == {COMPLETE}
    assert reported(facts, "prefill", "send", range(ranks)) == {"p-a", "p-b", "p-c"}
    assert reported(facts, "decode", "recv") == {"d-a", "d-b", "d-c"}
    assert facts["failed_together"] == []
    assert facts["stats"]["prefill"] | {"Num offers released": 3 * ranks} == facts["stats"]["prefill"]
    told = facts["stats"]["decode"]
    assert (told["Num loads"], told["Num failed loads"]) == (6, 0), "of three requests, by two ranks"
    assert min(told["Avg load time (ms)"], told["Avg MB per load"]) > 0
    for one, params in facts["params"].items():
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert params["ticket"]["request"] == f"p-{one}"


@pytest.mark.parametrize(
    ("name", "facts", "sent", "received"),
    [
        ("layers_overlap", {"sampled": {"d-first": 1, "d": 1}}, {"p-first", "p"}, set()),  # vLLM waits for none of them
        # blocks are kept until nobody reads them
        ("aborted_while_prefilling", {"ended": {"p": ABORTED, "d": COMPLETE}}, {"p"}, {"d"}),
        (
            "preempted",
            {"attempts": {"p": 1, "other": 0}, "sampled": {"d": 1, "d-2": 1, "d-other": 1}},
            {"p", "other"},
            None,
        ),
        # who waits for it computes it
        (
            "aborted_before_it_is_computed",
            {"ended": {"p": ABORTED, "d": COMPLETE}, "sampled": {"d": 1}},
            set(),
            None,
        ),
        # it waits for the other rank
        ("load_fails_on_one_rank", {"sampled": {"d": 1}, "failed_together": [True]}, {"p"}, {"d"}),
        ("slept", {"sampled": {"d": 1, "d-2": 1, "d-early": 1}}, {"p", "p-2"}, None),
    ],
)
def test_a_scenario_ends_as_it_should_and_every_rank_tells(stage, name, facts, sent, received):
    found = stage.play(name)
    assert {what: found[what] for what in facts} == facts
    assert reported(found, "prefill", "send") == sent
    assert received is None or reported(found, "decode", "recv") == received


def test_settings_are_those_of_vllm_and_of_the_extra_configuration(stage):
    facts = stage.play("configured_ranks")
    plain = {"engine": "prefill", "model": "model", "world": 2, "chunk_bytes": 16 << 10}
    plain |= {"unclaimed_timeout": 30, "route": "auto", "by_layer": False, "late": False}
    staged, by_layer = {"route": "staged"}, {"by_layer": True}  # peers write no blocks that a forward pass waits for
    late = {"late": True}  # a runner that overwrites blocks before it says whose they were
    foretold = {"unclaimed_timeout": 120}  # who comes first waits while the prompt queues
    assert facts["settings"] == [
        [plain | {"rank": rank} | changed for rank in BOTH]
        for changed in (
            {},
            staged | by_layer,
            {"unclaimed_timeout": 7} | by_layer,
            foretold,
            by_layer,
            staged,
            {},
            {},
            late,
            {"model": "given"},
        )
    ]
    assert len(facts["refused"]) == 11, facts["refused"]
    assert facts["graphs"] == [False, True]
    assert facts["zeroed"] == (), "nothing is loaded behind the last token, where state of others may lie"
    whole = [("fail", "only prefills"), *(("recompute", how) for how in ("overlap", "v2", "only prefills"))]
    assert [run for run, inside in facts["steps"].items() if not inside] == whole
    long = ", long factors of RoPE"  # with which vLLM turns K of all prompts otherwise
    own = ["model, revision r1", "model", "model", "model", f"model{long}", "model", f"model{long}"]
    assert facts["models"] == [*own, "given", f"given{long}"]
    assert [how for how, named in facts["named"].items() if not named] == [(False, 0)], "else some cache wants a hash"
    assert facts["dropped"] == [True, True], "what a preempted request sampled may stand on a load that failed"
