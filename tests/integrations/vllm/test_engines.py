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


def test_layers_arrive_while_others_are_computed(stage):
    facts = stage.play("layers_overlap")
    assert facts["sampled"] == {"d-first": 1, "d": 1}
    assert reported(facts, "prefill", "send") == {"p-first", "p"}
    assert reported(facts, "decode", "recv") == set(), "vLLM waits for none of them"


def test_an_offer_that_is_aborted_keeps_its_blocks_until_nobody_reads_them(stage):
    facts = stage.play("aborted_while_prefilling")
    assert facts["ended"] == {"p": ABORTED, "d": COMPLETE}
    assert reported(facts, "prefill", "send") == {"p"}
    assert reported(facts, "decode", "recv") == {"d"}


def test_a_preempted_prompt_is_offered_anew(stage):
    facts = stage.play("preempted")
    assert facts["attempts"] == {"p": 1, "other": 0}
    assert facts["sampled"] == {"d": 1, "d-2": 1, "d-other": 1}
    assert reported(facts, "prefill", "send") == {"p", "other"}


def test_who_waits_for_a_prompt_that_was_aborted_before_its_first_step_computes_it(stage):
    facts = stage.play("aborted_before_it_is_computed")
    assert facts["ended"] == {"p": ABORTED, "d": COMPLETE}
    assert facts["sampled"] == {"d": 1}
    assert reported(facts, "prefill", "send") == set()


def test_a_load_that_fails_on_one_rank_waits_for_the_other(stage):
    facts = stage.play("load_fails_on_one_rank")
    assert facts["sampled"] == {"d": 1}
    assert facts["failed_together"] == [True]
    assert reported(facts, "decode", "recv") == {"d"}
    assert reported(facts, "prefill", "send") == {"p"}


def test_engines_sleep_and_wake(stage):
    facts = stage.play("slept")
    assert facts["sampled"] == {"d": 1, "d-2": 1, "d-early": 1}
    assert reported(facts, "prefill", "send") == {"p", "p-2"}


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
