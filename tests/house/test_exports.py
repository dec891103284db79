"""What is public exists, is in order, and every error explains itself."""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from test_layers import module_name  # pyright: ignore[reportMissingImports]

import kvxfer
from kvxfer import errors

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "kvxfer").rglob("*.py"))
NEEDS = {  # where the package may be missing
    "kvxfer.copy.kernel": "triton",
    "kvxfer.integrations.sglang.conn": "sglang",
    "kvxfer.integrations.vllm": "vllm",
    "kvxfer.integrations.vllm.connector": "vllm",
    **{f"kvxfer.tools.admin{name}": "prometheus_client" for name in ("", ".app", ".prometheus", ".server")},
}
# groups that are caught and never raised, so that they have neither a cause nor a remedy of their own
GROUPS = {errors.KvxferError, errors.PeerError, errors.TransferError}
CLASSES = [
    value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.KvxferError) and name == value.__name__
]


def declared(path):
    """The literal `__all__` of a module, or None."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def public_definitions(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name


def in_order(names):
    """Constants, then classes, then the rest, each alphabetically: the order that ruff keeps."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def test_all_is_declared_and_in_order():
    names = {module_name(path): (declared(path), list(public_definitions(path))) for path in MODULES}
    assert [name for name, (exported, public) in names.items() if exported is None and public] == []
    assert [name for name, (exported, _) in names.items() if exported and exported != in_order(set(exported))] == []


def test_every_exported_name_exists():
    modules = {module_name(path): names for path in MODULES if (names := declared(path))}
    here = [name for name in modules if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    assert len(here) > len(modules) - len(NEEDS)
    assert [
        (name, one) for name in here for one in modules[name] if not hasattr(importlib.import_module(name), one)
    ] == []


def test_the_package_exports_every_error():
    assert set(errors.__all__) <= set(kvxfer.__all__)
    assert all(getattr(kvxfer, name) is getattr(errors, name) for name in errors.__all__)


def test_type_checkers_see_what_the_package_exports():
    tree = ast.parse((ROOT / "kvxfer/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert all(f" {name} as {name}" in ast.unparse(block) for name in seen), "only `X as X` is a re-export to them"
    assert set(seen) | {"__version__"} == set(kvxfer.__all__)
    homes = {name: kvxfer._HOMES.get(name, "kvxfer.errors") for name in seen}
    assert homes == seen, "the lazy table and the block for type checkers name the same modules"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Wroker'"):
        _ = kvxfer.Wroker
    assert dir(kvxfer) == sorted(kvxfer.__all__)


def tree_of_errors():
    """(class, parent) as the drawing in the module's docstring has it."""
    stack = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^    ([| +-]*)(\w*Error)\b", line):
            depth = len(match[1]) // 4
            stack[depth:] = [match[2]]
            yield match[2], stack[depth - 1] if depth else None


def test_the_drawn_tree_is_the_real_tree():
    real = [
        (cls.__name__, None if cls is errors.KvxferError else next(b.__name__ for b in cls.__mro__[1:] if b in CLASSES))
        for cls in CLASSES
    ]
    assert sorted(tree_of_errors(), key=str) == sorted(real, key=str)


def test_an_error_explains_itself():
    assert {cls.__name__ for cls in CLASSES} <= set(errors.__all__)
    for cls in CLASSES:
        text = inspect.getdoc(cls) or ""
        for heading in ("Cause", "Remedy"):
            assert cls in GROUPS or re.search(rf"^{heading}: \S", text, re.MULTILINE), (cls, heading)
    text = inspect.getdoc(errors.KvxferError) or ""
    assert [name for name in vars(errors.KvxferError)["__annotations__"] if f"{name}: " not in text] == []


def test_codes_are_unique_and_each_error_has_its_own():
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all("code" in vars(cls) for cls in CLASSES)
    assert errors.Code(12_345) is errors.Code.UNKNOWN


def test_groups_of_errors_are_never_raised():
    groups = {cls.__name__ for cls in GROUPS}
    raised = {
        (ast.unparse(node.exc.func).rpartition(".")[2], module_name(path))
        for path in MODULES
        if "demo" not in path.parts  # a program on top of the library, which may fail with any words
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    assert raised
    assert [one for one in raised if one[0] in groups] == []


SHOWN = {
    kvxfer.Claim: "close ticket",
    kvxfer.FetchResult: "payload request stats",
    kvxfer.Offer: "attempt extend finish key ready released request state ticket tokens wait_end withdraw",
    kvxfer.Transfer: "cancel done failed_blocks id layers memory_safe outcome report request result state",
    kvxfer.Worker: """aclose begin_drain card claim config decline describe describe_soon drain engine fetch join occupy
        offer start_fetch""",
}


def test_what_is_handed_out_shows_what_its_holder_may_use_and_no_more():
    for cls, names in SHOWN.items():
        body = ast.walk(ast.parse(inspect.getsource(cls)))
        kept = {node.attr for node in body if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
        assert sorted(name for name in {*dir(cls), *kept} if not name.startswith("_")) == names.split()
