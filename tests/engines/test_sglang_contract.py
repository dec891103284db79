"""Whatever a released sglang asks of the four classes, they have, and take as it is passed.

What it asks is looked for in its schedulers, by the names under which they keep our objects: a name that is new in a
release is a row of `HELD`, and what they ask of others alone is one of `NOT_OURS`.
"""

import ast
import importlib.util
import inspect
import re
from collections import defaultdict
from pathlib import Path

import pytest

import kvxfer.integrations.sglang as integration
from kvxfer.integrations.sglang.rooms import Poll

OURS = {path.name: path.read_text() for path in Path(integration.__file__).parent.glob("*.py")}
TREE = ast.parse(OURS["conn.py"])
BASES = {
    "BaseKVManager": "manager",
    "BaseKVSender": "sender",
    "BaseKVReceiver": "receiver",
    "BaseKVBootstrapServer": "server",
}
MADE = {
    "kv_manager_class": "manager",
    "kv_sender_class": "sender",
    "kv_receiver_class": "receiver",
    "kv_bootstrap_server_class": "server",
}
"""What variables are called that hold our classes."""
HELD = {
    "kv_manager": ["manager"],
    "kv_mgr": ["manager"],
    "km": ["manager"],
    "disagg_kv_sender": ["sender"],
    "sender": ["sender"],
    "kv_receiver": ["receiver"],
    "poller": ["sender", "receiver"],
    "prefill_info": ["directory"],
    "bootstrap_server": ["server"],
}
"""And those that hold our objects, as attributes are."""
NOT_OURS = {
    # of backends that stage heads, which `SGLANG_DISAGG_STAGING_BUFFER` asks for: our manager refuses it
    *(("manager", name) for name in ("_prefetch_staging_reqs", "_staging_handler", "enable_staging", "transfer_infos")),
    ("manager", "set_kv_buffer_tensors"),
    ("receiver", "require_staging"),
    # of backends whose ranks of a context some are dummies, and of the one whose metadata knows of ranks
    *(("manager", name) for name in ("enable_all_cp_ranks_for_transfer", "is_dummy_cp_rank")),
    *(("manager", name) for name in ("attn_cp_rank", "attn_cp_size")),
    # of those that say that they take indices where they are, with an event
    *(("sender", name) for name in ("supports_host_tensor_indices", "indices_event")),
    ("receiver", "device_kv_indices"),  # of those that say that they bring pages to the host
    ("receiver", "poll_pp_consensus"),  # senders are polled so
}


def last(node):
    """The last name of an expression."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Constant(str(name)):
            return name
    return ""


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
def modules(root):
    """Those of sglang's in which schedulers have to do with transfers, whatever the backend."""
    managers = [root / f"managers/{name}.py" for name in ("scheduler", "disagg_service")]
    return [ast.parse(path.read_text()) for path in [*(root / "disaggregation").glob("*.py"), *managers]]


def members(node):
    """Methods, and attributes of a class or of its objects."""
    found = {}
    for item in ast.walk(node):
        match item:
            case ast.FunctionDef(name):
                found[name] = item
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                found[name] = None
    for item in node.body:
        match item:
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                found[name] = None
    return found


def is_missing(what):
    """Whether it is a method that a backend is to write."""
    return isinstance(what, ast.FunctionDef) and (is_abstract(what) or isinstance(what.body[-1], ast.Raise))


def is_abstract(what):
    return any(last(mark) == "abstractmethod" for mark in what.decorator_list)


def bases_of(base):
    """What those of ours inherit, by kind."""
    classes = (node for node in ast.parse(base).body if isinstance(node, ast.ClassDef))
    return {BASES[node.name]: members(node) for node in classes if node.name in BASES}


@pytest.fixture(scope="module")
def ours(base):
    """What our objects have, by kind: methods, and None for any other attribute."""
    found = {}
    for node in (node for text in OURS.values() for node in ast.walk(ast.parse(text))):
        match node:
            case ast.ClassDef("Directory"):
                found["directory"] = members(node)
            case ast.ClassDef(_, [inherits]) if kind := BASES.get(last(inherits)):
                inherited = {name: what for name, what in bases_of(base)[kind].items() if not is_missing(what)}
                found[kind] = inherited | members(node)
    return found


@pytest.fixture(scope="module")
def asked(modules):
    """What sglang asks of our objects, and the calls in which it does: by kind and name."""
    found = defaultdict(list)
    for node in (node for module in modules for node in ast.walk(module)):
        match node:
            case ast.Call(ast.Attribute(of, name)):
                uses = [(kind, name) for kind in HELD.get(last(of), [])]
            case ast.Call(ast.Name("getattr" | "hasattr"), [of, ast.Constant(name), *_]):
                uses = [(kind, name) for kind in HELD.get(last(of), [])]
                node = None  # noqa: PLW2901
            case ast.Call(function) if kind := MADE.get(last(function)):
                uses = [(kind, "__init__")]
            case ast.Attribute(of, name):
                uses, node = [(kind, name) for kind in HELD.get(last(of), [])], None  # noqa: PLW2901
            case _:
                continue
        for use in uses:
            found[use].append(node)
    return {
        (kind, name): [call for call in calls if call and not any((kind, one.arg) in NOT_OURS for one in call.keywords)]
        for (kind, name), calls in found.items()
        if (kind, name) not in NOT_OURS
    }


def spread(modules, name):
    """Keywords that a mapping of this name may hold: one that is built, or of functions that take it with `**`."""
    nodes = [node for module in modules for node in ast.walk(module)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    takes = {
        one.name: {arg.arg for arg in one.args.args}
        for one in functions
        if one.args.kwarg and one.args.kwarg.arg == name
    }
    for node in nodes:
        match node:
            case ast.Assign([ast.Name(target)], ast.Dict(keys)) if target == name:
                yield from map(last, keys)
            case ast.Assign([ast.Subscript(ast.Name(target), key)]) if target == name:
                yield last(key)
            case ast.Call(function) if last(function) in takes:
                yield from {one.arg for one in node.keywords if one.arg} - takes[last(function)]


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


def fits(function, kind, call, modules):
    """Whether a call can be made; how much is passed with a star cannot be told, and does not fit."""
    named = {one.arg for one in call.keywords if one.arg}
    more = {key for one in call.keywords if not one.arg for key in spread(modules, last(one.value))}
    try:
        for keywords in (named, *(named | {key} for key in more if (kind, key) not in NOT_OURS)):
            signature(function).bind(None, *(None for _ in call.args), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return not any(isinstance(arg, ast.Starred) for arg in call.args)


def test_our_objects_have_what_is_asked_of_them(asked, ours, modules):
    assert [(kind, name) for kind, name in asked if name not in ours[kind]] == []
    for (kind, name), calls in asked.items():
        if isinstance(what := ours[kind][name], ast.FunctionDef):
            assert [ast.unparse(call) for call in calls if not fits(what, kind, call, modules)] == [], (kind, name)


def test_our_objects_are_kept_under_these_names(asked, modules):
    kept = {"kv_args_class"}
    for node in (node for module in modules for node in ast.walk(module)):
        match node:
            case ast.Assign([target], ast.Call(made)) if last(made) in {"get_kv_class", *MADE}:
                kept.add(last(target))
    assert kept - HELD.keys() - MADE.keys() == {"kv_args_class", "server_class"}  # of which one is made for its errors
    assert {
        ("manager", "_ensure_prefill_recompute_executor"),
        ("manager", "prefill_info_table"),
        ("sender", "_early_send_wait_event"),
        ("sender", "send"),
        ("receiver", "send_metadata"),
        ("receiver", "bootstrap_infos"),
        ("server", "__init__"),
        ("directory", "follow_bootstrap_room"),
    } <= asked.keys()


def test_methods_are_those_of_the_bases(ours, base):
    for kind, theirs in bases_of(base).items():
        for name, method in theirs.items():
            if isinstance(method, ast.FunctionDef):
                mine = ours[kind].get(name)
                assert mine is not None or not is_abstract(method), (kind, name)
                if isinstance(mine, ast.FunctionDef):
                    assert [*signature(mine).parameters] == [*signature(method).parameters], (kind, name)


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


def test_the_bootstrap_server_answers_what_schedulers_ask_it(root, modules):
    """They call a function of another backend's receiver for it."""
    (receiver,) = (
        node
        for node in ast.walk(ast.parse((root / "disaggregation/common/conn.py").read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "CommonKVReceiver"
    )
    called = {
        node.attr
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and last(node.value) == receiver.name
    }
    paths = {
        path for name in called for path in re.findall(r"http://[^/]*(/\w+)", ast.unparse(members(receiver)[name]))
    }
    assert paths
    assert all(f'"{path}"' in OURS["meeting.py"] for path in paths)
