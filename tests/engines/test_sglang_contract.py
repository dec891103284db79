"""Whatever a released sglang asks of the four classes, they have, and take as it is passed."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from sglang_uses import BASES, Ours, Sources, Uses, is_abstract, last

import kvxfer.integrations.sglang as integration
from kvxfer.integrations.sglang.rooms import Poll

OURS = {path.name: path.read_text() for path in Path(integration.__file__).parent.glob("*.py")}
TREE = ast.parse(OURS["conn.py"])


@pytest.fixture(scope="module")
def root():
    found = importlib.util.find_spec("sglang")
    assert found is not None, "`make engines` has it"
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0], "srt")


@pytest.fixture(scope="module")
def base(root):
    return (root / "disaggregation/base/conn.py").read_text()


@pytest.fixture(scope="module")
def sources(root):
    return Sources(root)


@pytest.fixture(scope="module")
def ours(base):
    return Ours([*OURS.values()], base)


@pytest.fixture(scope="module")
def uses(sources, ours):
    return Uses(sources, ours)


def signature(function):
    """As Python has it, with None for each default."""
    given = function.args
    lambda_ = ast.parse("lambda: 0", mode="eval")
    plain = {name: [ast.arg(arg.arg) for arg in getattr(given, name)] for name in ("posonlyargs", "args", "kwonlyargs")}
    none = ast.Constant(None)
    assert isinstance(lambda_.body, ast.Lambda)
    lambda_.body.args = ast.arguments(
        **plain,
        vararg=given.vararg and ast.arg(given.vararg.arg),
        kwarg=given.kwarg and ast.arg(given.kwarg.arg),
        defaults=[none for _ in given.defaults],
        kw_defaults=[default and none for default in given.kw_defaults],
    )
    return inspect.signature(eval(compile(ast.fix_missing_locations(lambda_), "", "eval")))


def fits(function, use):
    """Whether a call can be made; how much is passed with a star cannot be told, and does not fit."""
    named = {one.arg: None for one in use.call.keywords if one.arg}
    try:
        for more in ((), *((name,) for name in use.more)):
            signature(function).bind(None, *(None for _ in use.call.args), **named, **dict.fromkeys(more))
    except TypeError:
        return False
    return not any(isinstance(arg, ast.Starred) for arg in use.call.args)


def complaints(found, members):
    """Uses that our objects do not bear, with where they are."""
    for use, place in found:
        if use.name not in members[use.kind]:
            yield f"{use.where}: {use.kind}.{use.name} is not there", place
        elif use.call and isinstance(what := members[use.kind][use.name], ast.FunctionDef) and not fits(what, use):
            yield f"{use.where}: {ast.unparse(use.call)} does not fit {use.kind}.{use.name}", place


def in_all(uses):
    return [said for said, place in complaints(uses.all(), uses.ours.members) if not uses.is_dead(place)]


def test_our_objects_have_what_is_asked_of_them(uses):
    assert in_all(uses) == []


def test_whatever_is_taken_away_is_missed(uses, ours):
    found = [(use, place) for use, place in uses.all() if not uses.is_dead(place)]
    named = {(use.kind, use.name) for use, _ in found}
    assert {
        ("manager", "_ensure_prefill_recompute_executor"),
        ("manager", "prefill_info_table"),
        ("sender", "_early_send_wait_event"),
        ("sender", "send"),
        ("receiver", "send_metadata"),
        ("receiver", "bootstrap_infos"),
        ("server", "__init__"),
        ("directory", "follow_bootstrap_room"),
    } <= named
    for kind, name in named:
        left = ours.members | {kind: {one: what for one, what in ours.members[kind].items() if one != name}}
        assert [*complaints(found, left)], (kind, name)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("def _ensure_prefill_recompute_executor", "def _ensured", "_ensure_prefill_recompute_executor is not there"),
        ("num_kv_tokens: Any = None", "tokens: Any = None", "does not fit sender.send"),
        ("def conclude_state", "def state", "receiver.conclude_state is not there"),
        ("if envs.SGLANG_DISAGG_STAGING_BUFFER.get()", "if False", "staging_handler"),
    ],
)
def test_a_change_of_ours_is_seen(sources, base, before, after, said):
    assert before in OURS["conn.py"]
    changed = OURS | {"conn.py": OURS["conn.py"].replace(before, after)}
    assert said in "\n".join(in_all(Uses(sources, Ours([*changed.values()], base))))


def test_methods_are_those_of_the_bases(ours):
    for kind, base in ours.bases.items():
        for name, theirs in base.items():
            if isinstance(theirs, ast.FunctionDef):
                mine = ours.members[kind].get(name)
                assert mine is not None or not is_abstract(theirs), (kind, name)
                if isinstance(mine, ast.FunctionDef):
                    assert [*signature(mine).parameters] == [*signature(theirs).parameters], (kind, name)


def test_what_ours_takes_from_sglang_is_there(root, base):
    for node in ast.walk(TREE):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sglang.srt."):
            text = root.joinpath(*node.module.split(".")[2:]).with_suffix(".py").read_text()
            for name in node.names:
                assert re.search(rf"^(class |def )?{name.name}\b", text, re.MULTILINE), (node.module, name.name)
    environment = (root / "environ.py").read_text()
    for name in re.findall(r"envs\.(\w+)", OURS["conn.py"]):
        assert f"    {name} = " in environment
    given = "".join((root / f"disaggregation/{name}.py").read_text() for name in ("prefill", "decode", "utils")) + base
    for name in re.findall(r"\bargs\.(\w+)|getattr\(args, \"(\w+)\"", OURS["conn.py"] + OURS["caches.py"]):
        assert re.search(rf"kv_args\.{max(name)}\b.* = |^    {max(name)}: ", given, re.MULTILINE), name


def test_an_event_of_a_decode_schedulers_stream_is_behind_the_pass_under_way(root):
    """A pass that goes on while the results before it are read may write pages that others were given since."""
    loop, barrier = (
        re.findall(rf"def {name}\b.*?\n    def ", (root / f"{of}.py").read_text(), re.DOTALL)[0]
        for name, of in (
            ("event_loop_overlap_disagg_decode", "disaggregation/decode"),
            ("_apply_war_barrier", "managers/scheduler"),
        )
    )
    assert loop.index("process_decode_queue()") < loop.index("run_batch(batch)") < loop.index("_apply_war_barrier()")
    fine, coarse = barrier.split("else:")
    assert "not envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get()" in fine
    assert "self.schedule_stream.wait_stream(self.forward_stream)" in coarse


def test_states_are_those_of_sglang(base):
    names = {"FAILED": "Failed", "BOOTSTRAPPING": "Bootstrapping", "WAITING": "WaitingForInput"}
    names |= {"TRANSFERRING": "Transferring", "SUCCESS": "Success"}
    (theirs,) = (node for node in ast.parse(base).body if isinstance(node, ast.ClassDef) and node.name == "KVPoll")
    known = {
        last(line.targets[0]): ast.literal_eval(line.value) for line in theirs.body if isinstance(line, ast.Assign)
    }
    assert known == {names[state.name]: state.value for state in Poll}


def test_the_bootstrap_server_answers_what_schedulers_ask_it(sources, uses):
    """They call functions of other backends' receivers for it."""
    called = set()
    for place in sources.concerned():
        for node in uses.live(place):
            match node:
                case ast.Attribute(ast.Name(cls), name, ast.Load()) if cls in sources.backends and cls not in BASES:
                    called |= {item for item in sources.backends[cls].body if getattr(item, "name", "") == name}
    paths = {path for item in called for path in re.findall(r"http://[^/]*(/\w+)", ast.unparse(item))}
    assert paths
    assert all(f'"{path}"' in OURS["meeting.py"] for path in paths)
