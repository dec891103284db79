"""A few things are done in one place only, and nothing is checked with `assert`."""

import ast
from collections import Counter
from pathlib import Path

from test_layers import name  # pyright: ignore[reportMissingImports]

import kvxfer

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "kvxfer").rglob("*.py"))
ENVIRONMENT = {
    "kvxfer/config.py",  # settings
    "kvxfer/copy/compiler.py",  # where caches of this user lie
    "kvxfer/fabric/nixl.py",  # UCX and NIXL are configured by the environment only
    "kvxfer/tools/doctor/machine.py",  # which shows it, and lets UCX write down its lanes
}
# broad excepts that do not raise again, and how many; the reason stands beside each of them
BROAD = {
    ("kvxfer/copy/compiler.py", "compiled.make"): 1,  # whatever is wrong with the kept code, it is compiled anew
    ("kvxfer/copy/mover.py", "_Asked._ask"): 1,  # an event of the caller's: the copy fails with it
    ("kvxfer/copy/mover.py", "Mover._prepare"): 1,  # the copy fails with it
    ("kvxfer/copy/mover.py", "Mover._sum_on_host"): 1,  # likewise
    ("kvxfer/copy/mover.py", "Mover._report"): 1,  # a callback that must not raise, and did
    ("kvxfer/copy/mover.py", "Mover._on_flow"): 1,  # likewise
    ("kvxfer/copy/mover.py", "Mover._report_late"): 1,  # likewise
    ("kvxfer/copy/port.py", "has_fired"): 1,  # an event of the caller's
    ("kvxfer/decode/fetch.py", "Fetch.begin"): 1,  # a defect ends the fetch that it is in, and no other
    ("kvxfer/decode/receiver.py", "Receiver.on_accept"): 1,  # a defect ends the transfer that it is in, and no other
    ("kvxfer/decode/receiver.py", "Receiver.run"): 1,  # likewise
    ("kvxfer/tools/doctor/findings.py", "said"): 1,  # a check that breaks must not hide the others
    ("kvxfer/fabric/calls.py", "Fabric.step"): 1,  # the thread is supervised there
    ("kvxfer/fabric/calls.py", "Fabric._undo"): 1,  # the last step of the thread
    ("kvxfer/fabric/loopback.py", "_Ported._call"): 1,  # nobody is above a C function
    ("kvxfer/prefill/sender.py", "Sender.run"): 1,  # likewise
    (
        "kvxfer/integrations/opentelemetry.py",
        "_harmless.guarded",
    ): 1,  # samplers and span processors are the application's
    ("kvxfer/telemetry.py", "_Lines._proxy_to_logger"): 1,  # handlers and filters of log lines, likewise
    ("kvxfer/peers/link.py", "Link._handle"): 1,  # a defect ends the session that it is in, and no other
}


def functions(tree, prefix=""):
    """(qualified name, node) of every function, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def is_broad(handler):
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    names = {part.strip(" ()") for part in caught.split(",")}
    raises_again = isinstance(handler.body[-1], ast.Raise)
    return bool(names & {"Exception", "BaseException"}) and not raises_again


def broad_excepts(tree):
    covered = set()
    # inner functions last, so that each handler is counted for the innermost function around it
    for qualified, function in sorted(functions(tree), key=lambda item: -item[0].count(".")):
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and node not in covered and is_broad(node):
                covered.add(node)
                yield qualified
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node not in covered and is_broad(node):
            yield "<module>"


def reads_environment(node):
    if isinstance(node, ast.Attribute):
        return node.attr in {"environ", "environb", "getenv", "putenv"}
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and bool({alias.name for alias in node.names} & {"environ", "getenv"})
    )


def found(matches):
    """Where in the package a node matches, as `file:line`."""
    return [
        f"{name(path)}:{getattr(node, 'lineno', 0)}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if matches(node)
    ]


def test_nothing_is_checked_with_assert():
    assert found(lambda node: isinstance(node, ast.Assert)) == []


def test_the_environment_is_read_in_one_place():
    assert {place.rpartition(":")[0] for place in found(reads_environment)} == ENVIRONMENT


def test_every_broad_except_is_listed():
    listed = Counter((name(path), where) for path in MODULES for where in broad_excepts(ast.parse(path.read_text())))
    assert dict(listed) == BROAD


def lists_fields(node):
    """Whether it is a class that no user sees, whose docstring lists what is explained beside its fields."""
    seen = isinstance(node, ast.ClassDef) and (node.name in kvxfer.__all__ or node.name == "TransferStats")
    return isinstance(node, ast.ClassDef) and not seen and "\n\nAttributes:" in (ast.get_docstring(node) or "")


def test_fields_of_what_no_user_sees_are_explained_where_they_stand():
    for_users = ("kvxfer/tools/", "kvxfer/integrations/", "kvxfer/config.py", "kvxfer/errors.py", "kvxfer/tickets.py")
    assert [place for place in found(lists_fields) if not place.startswith(for_users)] == []


def test_the_rules_see_what_they_forbid():
    tree = ast.parse(
        "class A:\n  def f(self):\n    try: pass\n    except (KeyError, Exception): pass\n    except OSError: pass"
    )
    assert list(broad_excepts(tree)) == ["A.f"]
    assert list(broad_excepts(ast.parse("try: pass\nexcept: pass"))) == ["<module>"]
    assert list(broad_excepts(ast.parse("try: pass\nexcept BaseException:\n  raise"))) == []
    reads = [ast.parse(text).body[0] for text in ("import os", "from os import getenv")]
    assert [reads_environment(node) for node in reads] == [False, True]
    assert reads_environment(ast.parse("os.environ", mode="eval").body)
    classes = [f'class {name}:\n  """It.\n\n  Attributes:\n    a: A.\n  """' for name in ("Worker", "_Run")]
    assert [lists_fields(ast.parse(text).body[0]) for text in classes] == [False, True]
