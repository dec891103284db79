"""What a released sglang does with the objects that a transfer backend makes for it, found in its sources.

Kinds of objects flow from `get_kv_class`, and from parameters that are annotated as one, through variables, attributes,
arguments and returns, until nothing new is found: by name alone, so rather too far than too short. A collection counts
as what is in it. Other backends' classes are left out, which make no object here; and modules of `ELSEWHERE`.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

BASES = {
    "BaseKVManager": "manager",
    "BaseKVSender": "sender",
    "BaseKVReceiver": "receiver",
    "BaseKVBootstrapServer": "server",
}
ASKED_FOR = {"MANAGER": "manager", "SENDER": "sender", "RECEIVER": "receiver", "BOOTSTRAP_SERVER": "server"}
"""By name in `KVClassType`."""
ELSEWHERE = (
    "mem_cache/",  # a store of blocks has a `kv_manager` of its own
    "disaggregation/common/staging_handler.py",  # with SGLANG_DISAGG_STAGING_BUFFER alone, which the manager refuses
)
COLLECTIONS = {*dir(dict), *dir(list), *dir(set)}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def last(node: ast.AST | None) -> str:
    """The last name of an expression."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Constant(str(name)):
            return name
    return ""


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


@dataclass(frozen=True)
class Use:
    """An attribute of an object that is read, set or called."""

    kind: str
    name: str
    where: str
    call: ast.Call | None = None
    more: frozenset[str] = frozenset()  # keywords that are passed with `**`


def members(node: ast.ClassDef) -> dict[str, Any]:
    """Methods, and attributes of a class or of its objects."""
    found: dict[str, Any] = {}
    for item in ast.walk(node):
        match item:
            case ast.FunctionDef() if item in node.body:
                found[item.name] = item
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                found.setdefault(name, None)
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)) if item in node.body:
                found.setdefault(name, None)
    return found


def is_missing(what: Any) -> bool:
    """Whether it is a method that a backend is to write."""
    if not isinstance(what, ast.FunctionDef):
        return False
    body = [line for line in what.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return is_abstract(what) or (len(body) == 1 and isinstance(body[0], ast.Raise))


def is_abstract(what: ast.FunctionDef) -> bool:
    return any(last(mark) == "abstractmethod" for mark in what.decorator_list)


class Ours:
    """What our objects have, by kind and name: a method, or None for any other; and what sglang's bases have."""

    def __init__(self, ours: list[str], base: str) -> None:
        classes = (node for node in ast.parse(base).body if isinstance(node, ast.ClassDef))
        self.bases = {BASES[node.name]: members(node) for node in classes if node.name in BASES}
        self.members: dict[str, dict[str, Any]] = {}
        for node in (node for text in ours for node in ast.walk(ast.parse(text))):
            match node:
                case ast.ClassDef("Directory"):
                    self.members["directory"] = members(node)
                case ast.ClassDef(_, [base_class]) if kind := BASES.get(last(base_class)):
                    inherited = {name: what for name, what in self.bases[kind].items() if not is_missing(what)}
                    self.members[kind] = inherited | members(node)


class Sources:
    """sglang's modules, as far as kinds of objects come there."""

    def __init__(self, root: Path) -> None:
        paths = {str(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
        texts = {name: path.read_text() for name, path in paths.items() if not name.startswith(ELSEWHERE)}
        inherits = [found for text in texts.values() for found in re.findall(r"\nclass (\w+)\(([^)]*)\)", text)]
        # by the function around it, or None for those of attributes, and of what functions return
        self.kinds_of: dict[tuple[Any, str], set[str]] = defaultdict(set)
        self.kinds_of[None, "prefill_info_table"] = {"directory"}
        self.functions: dict[str, list[tuple[Any, bool]]] = defaultdict(list)  # and whether it is a method
        self.classes: set[str] = set()
        self.others = set(BASES)  # classes of backends
        for _ in range(4):  # one may stand before the one that it inherits from
            self.others |= {name for name, bases in inherits if self.others.intersection(re.findall(r"\w+", bases))}
        self.backends: dict[str, ast.ClassDef] = {}
        self.nodes: list[tuple[str, Any, ast.AST]] = []  # by module and function
        known, before = set[str](), -1
        while before != (before := sum(map(len, self.kinds_of.values())) + len(known)):
            words = {"get_kv_class", *BASES, *(name.strip("()") for scope, name in self.kinds_of if scope is None)}
            for path, text in texts.items():
                if path not in known and not words.isdisjoint(re.findall(r"\w+", text)):
                    known.add(path)
                    self._collect(path, ast.parse(text), None, None)
            for _, scope, node in self.nodes:
                self._flow(node, scope)

    def _collect(self, path: str, node: ast.AST, scope: Any, owner: ast.ClassDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.ClassDef):
                self.classes.add(child.name)
                # those of the backend "fake" stand beside ours, in requests that only warm up
                if child.name in self.others and "/fake/" not in path:
                    self.backends[child.name] = child
                    continue
            if isinstance(child, FUNCTIONS):
                inner = scope or child
                marks = {last(mark) for mark in child.decorator_list}
                self.functions[child.name].append((child, owner is not None and "staticmethod" not in marks))
                for arg in arguments(child):
                    named = {last(part) for part in ast.walk(arg.annotation)} if arg.annotation else set[str]()
                    self.kinds_of[inner, arg.arg] |= {BASES[name] for name in named & BASES.keys()}
            else:
                self.nodes.append((path, scope, child))
            self._collect(path, child, inner, child if isinstance(child, ast.ClassDef) else None)

    def kinds(self, node: ast.AST | None, scope: Any) -> set[str]:
        """Of the objects that an expression may give; `class kind` for a class."""
        parts: list[Any] = []
        match node:
            case ast.Name(name):
                return self.kinds_of.get((scope, name), set())
            case ast.Attribute(attr=name) | ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
                return self.kinds_of.get((None, name), set())
            case ast.Call(ast.Name("get_kv_class"), [_, ast.Attribute(attr=name)]):
                return {f"class {ASKED_FOR[name]}"} if name in ASKED_FOR else set()
            case ast.Call(ast.Name("list" | "tuple" | "sorted" | "set"), [of, *_]):
                parts = [of]
            case ast.Call(ast.Attribute(of, "get" | "pop" | "values"), _):
                parts = [of]
            case ast.Call(function):
                made = {kind[6:] for kind in self.kinds(function, scope) if kind.startswith("class ")}
                return made | self.kinds_of.get((None, f"{last(function)}()"), set())
            case ast.IfExp(_, one, other):
                parts = [one, other]
            case ast.BoolOp(_, parts) | ast.List(parts) | ast.Tuple(parts) | ast.Set(parts):
                pass
            case ast.NamedExpr(_, of) | ast.Await(of) | ast.Starred(of) | ast.Subscript(of):
                parts = [of]
            case ast.ListComp(of) | ast.GeneratorExp(of) | ast.SetComp(of):
                parts = [of]
        return set[str]().union(*(self.kinds(part, scope) for part in parts))

    def _flow(self, node: ast.AST, scope: Any) -> None:
        match node:
            case ast.Assign(targets, value):
                for target in targets:
                    self._assign(target, value, scope)
            case ast.NamedExpr(target, value) | ast.AnnAssign(target, _, ast.expr() as value):
                self._assign(target, value, scope)
            case ast.For(target, of) | ast.AsyncFor(target, of) | ast.comprehension(target, of):
                self._each(target, of, scope)
            case ast.Return(ast.expr() as value) if scope:
                self._give((None, f"{scope.name}()"), self.kinds(value, scope))
            case ast.Call(ast.Attribute(of, "append" | "add"), [value]):
                self._assign(of, value, scope)
            case ast.Call(function, given, named):
                self._pass(last(function), given, named, scope)

    def _give(self, place: tuple[Any, str], kinds: set[str]) -> None:
        if kinds:
            self.kinds_of[place] |= kinds

    def _assign(self, target: ast.AST, value: ast.AST, scope: Any) -> None:
        match target, value:
            case (ast.Tuple(targets), ast.Tuple(values)):
                for one, given in zip(targets, values, strict=False):
                    self._assign(one, given, scope)
            case ast.Subscript(of), _:
                self._assign(of, value, scope)
            case ast.Name(name), _:
                self._give((scope, name), self.kinds(value, scope))
            case ast.Attribute(attr=name), _:
                self._give((None, name), self.kinds(value, scope))

    def _each(self, target: ast.AST, of: ast.AST, scope: Any) -> None:
        match target, of:
            case (ast.Tuple(targets), ast.Call(ast.Name("zip"), collections)):
                for one, collection in zip(targets, collections, strict=False):
                    self._assign(one, collection, scope)
            case (ast.Tuple([_, one]), ast.Call(ast.Name("enumerate"), [collection, *_])):
                self._assign(one, collection, scope)
            case _:
                self._assign(target, of, scope)

    def _pass(self, name: str, given: list[ast.expr], named: list[ast.keyword], scope: Any) -> None:
        """Arguments of a call, to every function of this name, and to what dataclasses keep of them."""
        passed = [self.kinds(value, scope) for value in given]
        keywords = {one.arg: self.kinds(one.value, scope) for one in named if one.arg}
        for called, is_bound in self.functions.get(name, ()):
            names = [arg.arg for arg in arguments(called)]
            for arg, kinds in [*zip(names[is_bound:], passed, strict=False), *keywords.items()]:
                if arg in names:
                    self._give((called, arg), kinds)
        for arg, kinds in keywords.items() if name in self.classes else ():
            self._give((None, arg), kinds)

    @cached_property
    def uses(self) -> list[Use]:
        """What is done with our objects."""
        return [*self._uses()]

    def _uses(self) -> Iterator[Use]:
        for path, scope, node in self.nodes:
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.Call(ast.Attribute(of, name)):
                    for kind in self.kinds(of, scope):
                        yield Use(kind, name, where, node, self._spread(node, scope))
                case ast.Call(ast.Name("getattr"), [of, ast.Constant(str(name))]) | ast.Attribute(of, name):
                    yield from (Use(kind, name, where) for kind in self.kinds(of, scope))
                case ast.Call(function):
                    for kind in self.kinds(function, scope):
                        if kind.startswith("class "):
                            yield Use(kind[6:], "__init__", where, node, self._spread(node, scope))

    def _spread(self, call: ast.Call, scope: Any) -> frozenset[str]:
        """Keywords that a mapping holds which is built in the function that passes it."""
        found, names = set[str](), {last(one.value) for one in call.keywords if not one.arg}
        for node in ast.walk(scope) if names else ():
            match node:
                case ast.Assign([ast.Name(name)], ast.Dict(keys)) if name in names:
                    found |= set(map(last, keys))
                case ast.Assign([ast.Subscript(ast.Name(name), key)]) if name in names:
                    found.add(last(key))
        return frozenset(found)
