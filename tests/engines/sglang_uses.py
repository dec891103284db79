"""What a released sglang does with the objects that a transfer backend makes for it, found in its sources.

Kinds of objects flow from `get_kv_class`, and from parameters that are annotated as one, through variables, attributes,
arguments and returns, until nothing new is found: by name alone, so rather too far than too short. What is never run is
left out where that follows: other backends' classes, and what stands behind a condition that is known (a setting that
the manager refuses, something asked of an object that has or lacks it), or is mentioned there alone.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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
KINDS = {*BASES.values(), "directory"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
UNKNOWN: Any = object()


def last(node: ast.AST | None) -> str:
    """The last name of an expression."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Constant(str(name)):
            return name
    return ""


def inner(kinds: set[str]) -> set[str]:
    """Of collections, what is in them."""
    return {kind[1:] for kind in kinds if kind.startswith("*")}


def outer(kinds: set[str]) -> set[str]:
    return {f"*{kind}" for kind in kinds}


@dataclass(frozen=True)
class Place:
    """A function, with those around it and the class that it is a method of."""

    path: str
    chain: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    owner: ast.ClassDef | None
    words: set[str]  # names in it

    @property
    def node(self) -> ast.FunctionDef | ast.AsyncFunctionDef:
        return self.chain[0]

    def nodes(self) -> Iterator[ast.AST]:
        """All of it, without the functions in it."""
        todo: list[ast.AST] = [*self.node.args.defaults, *self.node.body]
        while todo:
            node = todo.pop()
            if not isinstance(node, FUNCTIONS | ast.ClassDef):
                yield node
                todo += ast.iter_child_nodes(node)


@dataclass(frozen=True)
class Use:
    """An attribute of an object that is read, set or called."""

    kind: str
    name: str
    where: str
    call: ast.Call | None = None
    more: frozenset[str] = frozenset()  # keywords that are passed with `**`


class Ours:
    """What our objects have: by kind and name, a method, the value of a class attribute, or None for any other."""

    def __init__(self, ours: list[str], base: str) -> None:
        self.members: dict[str, dict[str, Any]] = {}
        self.bases: dict[str, dict[str, Any]] = {}
        for node in ast.parse(base).body:
            if isinstance(node, ast.ClassDef) and node.name in BASES:
                self.bases[BASES[node.name]] = members(node)
        self.refused: set[str] = set()  # settings
        self.backend = ""  # whose place they take
        for node in (node for text in ours for node in ast.walk(ast.parse(text))):
            match node:
                case ast.ClassDef("Directory"):
                    self.members["directory"] = members(node)
                case ast.ClassDef(_, [base_class]) if kind := BASES.get(last(base_class)):
                    inherited = {name: what for name, what in self.bases[kind].items() if not is_missing(what)}
                    self.members[kind] = inherited | members(node)
                case ast.Attribute(ast.Name("TransferBackend"), name):
                    self.backend = name
                case ast.If(ast.Call(ast.Attribute(ast.Attribute(ast.Name("envs"), name), "get")), [ast.Raise()]):
                    self.refused.add(name)

    def value(self, kind: str, name: str) -> Any:
        """Of an attribute that never changes."""
        return found.value if isinstance(found := self.members[kind].get(name), ast.Constant) else UNKNOWN


def members(node: ast.ClassDef) -> dict[str, Any]:
    """Methods, and attributes of a class or of its objects; a value that is only ever one constant."""
    found: dict[str, Any] = {}
    for item in node.body:
        match item:
            case ast.FunctionDef():
                found[item.name] = item
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
                found[name] = value
    for item in ast.walk(node):
        match item:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                found[name] = None
    return found


def is_missing(what: Any) -> bool:
    """Whether it is a method that a backend is to write."""
    if not isinstance(what, ast.FunctionDef):
        return False
    body = [line for line in what.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return is_abstract(what) or (len(body) == 1 and isinstance(body[0], ast.Raise))


def is_abstract(what: ast.FunctionDef) -> bool:
    return any(last(mark) == "abstractmethod" for mark in what.decorator_list)


class Sources:
    """sglang's modules, as far as kinds of objects come there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts = {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*.py"))}
        self.kinds_of_attributes: dict[str, set[str]] = defaultdict(set)
        self.kinds_of_own: dict[tuple[Any, str], set[str]] = {}  # by class, of what it assigns itself
        self.kinds_of_variables: dict[tuple[ast.AST, str], set[str]] = defaultdict(set)
        self.kinds_of_returns: dict[str, set[str]] = defaultdict(set)
        self.kinds_of_classes = dict(BASES)
        self.backends: dict[str, ast.ClassDef] = {}  # classes of other backends, which make no object here
        self.places: list[Place] = []
        self.known: set[str] = set()
        self.loose: dict[str, set[str]] = defaultdict(set)  # by module, names that stand outside of functions
        self.kept: dict[str, list[ast.expr]] = defaultdict(list)  # what attributes are assigned
        self.functions: dict[str, list[Place]] = defaultdict(list)
        self.classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
        self.kinds_of_attributes["prefill_info_table"] = {"*directory"}  # by address
        names, fresh = {"get_kv_class", *BASES}, {"get_kv_class", *BASES}
        while fresh:
            for path in sorted({path for name in fresh for path in self.paths(name)} - self.known):
                self.read(path)
            self.settle()
            for table in (self.kinds_of_attributes, self.kinds_of_returns, self.kinds_of_classes):
                fresh = fresh | {name for name, kinds in table.items() if kinds}
            fresh, names = fresh - names, fresh | names

    def read(self, path: str) -> None:
        self.known.add(path)
        tree = ast.parse(self.texts[path])
        for _ in range(3):  # a class may stand before the one that it inherits from
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    for base in node.bases:
                        if kind := self.kinds_of_classes.get(last(base)):
                            self.kinds_of_classes[node.name] = kind
        self._collect(path, tree, (), None)

    def _collect(self, path: str, node: ast.AST, chain: tuple[Any, ...], owner: ast.ClassDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                # those of the backend "fake" stand beside ours, in requests that only warm up
                case ast.ClassDef(name) if name in self.kinds_of_classes and "/fake/" not in path:
                    self.backends[name] = child
                case ast.ClassDef(name):
                    self.loose[path] |= set(map(last, child.bases))
                    self.classes[name].append(child)
                    self._collect(path, child, chain, child)
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                    words = {last(node) for node in ast.walk(child)}
                    place = Place(path, (child, *chain), owner, words)
                    self.places.append(place)
                    self.functions[name].append(place)
                    for arg in arguments(child):
                        for part in ast.walk(arg.annotation) if arg.annotation else ():
                            if kind := self.kinds_of_classes.get(last(part)):
                                self.kinds_of_variables[child, arg.arg].add(kind)
                    self._collect(path, child, (child, *chain), None)
                case _:
                    if not chain:
                        self.loose[path].add(last(child))
                    match child:
                        case ast.Assign([ast.Attribute(attr=name)], value):
                            self.kept[name].append(value)
                    self._collect(path, child, chain, owner)

    def paths(self, name: str) -> list[str]:
        """Of the modules that may mention a name."""
        return [path for path, text in self.texts.items() if name in text and re.search(rf"\b{name}\b", text)]

    def settle(self) -> None:
        """Let kinds flow until nothing changes."""
        tables: Any = (self.kinds_of_attributes, self.kinds_of_variables, self.kinds_of_returns)
        before = -1
        while before != (before := sum(len(kinds) for table in tables for kinds in table.values())):
            for place in self.concerned():
                for node in place.nodes():
                    self._flow(node, place)

    def concerned(self) -> list[Place]:
        """Functions that have to do with any of the objects."""
        names = {"get_kv_class"}
        for table in (self.kinds_of_attributes, self.kinds_of_returns):
            names |= {name for name, kinds in table.items() if kinds}
        given = {function for (function, _), kinds in self.kinds_of_variables.items() if kinds}
        return [place for place in self.places if place.words & names or given.intersection(place.chain)]

    def kinds(self, node: ast.AST, place: Place) -> set[str]:
        """Of the objects that an expression may give; `*kind` for a collection, `class kind` for a class."""
        match node:
            case ast.Name(name):
                tables = (self.kinds_of_variables.get((function, name)) for function in place.chain)
                return next((kinds for kinds in tables if kinds), set())
            case ast.Attribute(ast.Name("self"), name) if (place.owner, name) in self.kinds_of_own:
                return self.kinds_of_own[place.owner, name]
            case ast.Attribute(attr=name) | ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
                return self.kinds_of_attributes.get(name, set())
            case ast.Call(ast.Name("get_kv_class"), [_, ast.Attribute(attr=name)]):
                return {f"class {ASKED_FOR[name]}"} if name in ASKED_FOR else set()
            case ast.Call(ast.Name("list" | "tuple" | "sorted" | "set"), [of, *_]):
                return self.kinds(of, place)
            case ast.Call(ast.Attribute(of, "get" | "pop" | "values"), _):
                return inner(self.kinds(of, place))
            case ast.Call(function):
                made = {kind[6:] for kind in self.kinds(function, place) if kind.startswith("class ")}
                return made | self.kinds_of_returns.get(last(function), set())
            case ast.IfExp(_, one, other):
                return self.kinds(one, place) | self.kinds(other, place)
            case ast.BoolOp(_, values):
                return set[str]().union(*(self.kinds(value, place) for value in values))
            case ast.NamedExpr(_, value) | ast.Await(value) | ast.Starred(value):
                return self.kinds(value, place)
            case ast.ListComp(element) | ast.GeneratorExp(element) | ast.SetComp(element):
                return outer(self.kinds(element, place))
            case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
                return outer(set[str]().union(*(self.kinds(element, place) for element in elements)))
            case ast.Subscript(of):
                return inner(self.kinds(of, place))
        return set()

    def _flow(self, node: ast.AST, place: Place) -> None:
        match node:
            case ast.Assign(targets, value):
                for target in targets:
                    self._assign(target, value, place)
            case ast.NamedExpr(target, value) | ast.AnnAssign(target, _, ast.expr() as value):
                self._assign(target, value, place)
            case ast.For(target, of) | ast.AsyncFor(target, of) | ast.comprehension(target, of):
                self._each(target, of, place)
            case ast.Return(ast.expr() as value):
                self.kinds_of_returns[place.node.name] |= self.kinds(value, place)
            case ast.Call(ast.Attribute(of, "append" | "add"), [value]):
                self._give(of, outer(self.kinds(value, place)), place)
            case ast.Call(function, given, named):
                self._pass(last(function), given, named, place)

    def _give(self, target: ast.AST, kinds: set[str], place: Place) -> None:
        match target:
            case _ if not kinds:
                pass
            case ast.Name(name):
                self.kinds_of_variables[place.node, name] |= kinds
            case ast.Attribute(attr=name):
                self.kinds_of_attributes[name] |= kinds
            case ast.Subscript(of):
                self._give(of, outer(kinds), place)

    def _assign(self, target: ast.AST, value: ast.AST, place: Place) -> None:
        match target, value:
            case (ast.Tuple(targets), ast.Tuple(values)):
                for one, given in zip(targets, values, strict=False):
                    self._assign(one, given, place)
            case _:
                kinds = self.kinds(value, place)
                match target:  # another class may have something else of the same name
                    case ast.Attribute(ast.Name("self"), name) if place.owner:
                        self.kinds_of_own.setdefault((place.owner, name), set()).update(kinds)
                self._give(target, kinds, place)

    def _each(self, target: ast.AST, of: ast.AST, place: Place) -> None:
        match target, of:
            case (ast.Tuple(targets), ast.Call(ast.Name("zip"), collections)):
                for one, collection in zip(targets, collections, strict=False):
                    self._each(one, collection, place)
            case (ast.Tuple([_, one]), ast.Call(ast.Name("enumerate"), [collection, *_])):
                self._each(one, collection, place)
            case _:
                self._give(target, inner(self.kinds(of, place)), place)

    def _pass(self, name: str, given: list[ast.expr], named: list[ast.keyword], place: Place) -> None:
        """Arguments of a call, to every function of this name and to the fields of every class."""
        passed = [self.kinds(value, place) for value in given]
        keywords = {one.arg: self.kinds(one.value, place) for one in named if one.arg}
        if not any(passed) and not any(keywords.values()):
            return
        made = [
            made for node in self.classes.get(name, ()) for made in self.functions["__init__"] if made.owner is node
        ]
        for node in self.classes.get(name, ()):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    self._give(
                        ast.Attribute(ast.Name(""), last(field.target)), keywords.get(last(field.target), set()), place
                    )
        for called in [*made, *self.functions.get(name, ())]:
            names = [arg.arg for arg in arguments(called.node)]
            bound = called.owner is not None and not any(
                last(mark) == "staticmethod" for mark in called.node.decorator_list
            )
            for arg, kinds in [*zip(names[bound:], passed, strict=False), *keywords.items()]:
                if kinds and arg in names:
                    self.kinds_of_variables[called.node, arg] |= kinds


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


class Uses:
    """What is done with our objects wherever that is run."""

    def __init__(self, sources: Sources, ours: Ours) -> None:
        self.sources, self.ours = sources, ours
        self._live: dict[ast.AST, list[ast.AST]] = {}
        self._shallow = False  # while variables are found out
        self._variables: dict[tuple[ast.AST, str], Any] = {}
        self._dead: dict[str, bool] = {}

    def all(self) -> Iterator[tuple[Use, Place]]:
        """Everything, also where a function is never called: see `is_dead`."""
        for place in self.sources.concerned():
            for node in self.live(place):
                yield from ((use, place) for use in self.of(node, place))

    def of(self, node: ast.AST, place: Place) -> Iterator[Use]:
        """What this one node does."""
        where = f"{place.path}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Call(function):
                if isinstance(function, ast.Attribute):
                    found = {(kind, function.attr) for kind in self.kinds(function.value, place)}
                else:
                    kinds = self.sources.kinds(function, place)
                    found = {(kind[6:], "__init__") for kind in kinds if kind.startswith("class ")}
                for kind, name in found:
                    more = (self.spread(one.value, place) for one in node.keywords if not one.arg)
                    yield Use(kind, name, where, node, frozenset[str]().union(*more))
            case ast.Attribute(of, name):
                yield from (Use(kind, name, where) for kind in self.kinds(of, place))
        match node:
            case ast.Call(ast.Name("getattr"), [of, ast.Constant(str(name))]):
                yield from (Use(kind, name, where) for kind in self.kinds(of, place))

    def spread(self, node: ast.AST, place: Place) -> set[str]:
        """Keywords that a mapping may hold: one that is built here, or what was passed to this function."""
        found: set[str] = set()
        match node:
            case ast.Dict(keys):
                found |= set(map(last, keys))
            case ast.IfExp(test, one, other):
                value = self.value(test, place)
                found |= self.spread(one, place) if value is not False else set()
                found |= self.spread(other, place) if value is not True else set()
            case ast.Name(name) if place.node.args.kwarg and place.node.args.kwarg.arg == name:
                own = {arg.arg for arg in arguments(place.node)}
                for caller in self.sources.concerned():
                    for call in self.live(caller) if place.node.name in caller.words else ():
                        if isinstance(call, ast.Call) and last(call.func) == place.node.name:
                            for one in call.keywords:
                                found |= {one.arg} - own if one.arg else self.spread(one.value, caller)
            case ast.Name(name):
                for other in self.live(place):
                    match other:
                        case ast.Assign([ast.Name(target)], value) if target == name:
                            found |= self.spread(value, place)
                        case ast.Assign([ast.Subscript(ast.Name(target), key)]) if target == name:
                            found.add(last(key))
            case _:
                found.add("*")  # nobody has such a parameter
        return found

    def kinds(self, node: ast.AST, place: Place) -> set[str]:
        return self.sources.kinds(node, place) & KINDS

    def live(self, place: Place) -> Iterator[ast.AST]:
        """What of a function is run."""
        body = [*place.node.args.defaults, *place.node.body]
        if self._shallow:
            return self._block(body, place)
        if place.node not in self._live:
            self._live[place.node] = list(self._block(body, place))
        return iter(self._live[place.node])

    def _block(self, nodes: list[Any], place: Place) -> Iterator[ast.AST]:
        for node in nodes:
            yield from self._node(node, place)
            if isinstance(node, ast.If) and self._ends(node, place):
                return

    def _ends(self, node: ast.If, place: Place) -> bool:
        """Whether nothing after it is run."""
        test = self.value(node.test, place)
        taken = node.body if test is not UNKNOWN and test else node.orelse if test is not UNKNOWN else []
        return bool(taken) and isinstance(taken[-1], ast.Return | ast.Raise | ast.Continue)

    def _fails(self, lines: list[Any], place: Place) -> bool:
        """Whether a block raises in the end: nothing that it assigns is seen after it."""
        failing = (line for line in lines if isinstance(line, ast.If) and isinstance(line.body[-1], ast.Raise))
        return any(self.value(line.test, place) is True for line in failing)

    def _node(self, node: ast.AST, place: Place) -> Iterator[ast.AST]:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            return
        yield node
        match node:
            case ast.If(test, body, orelse) | ast.IfExp(test, body, orelse):
                yield from self._node(test, place)
                value = self.value(test, place)
                for part, excluded in ((body, False), (orelse, True)):
                    lines = part if isinstance(part, list) else [part]
                    if (value is UNKNOWN or bool(value) is not excluded) and not (
                        self._shallow and self._fails(lines, place)
                    ):
                        yield from self._block(lines, place)
            case ast.BoolOp(op, values):
                for part in values:
                    yield from self._node(part, place)
                    value = self.value(part, place)
                    if value is not UNKNOWN and bool(value) is isinstance(op, ast.Or):
                        return
            case _:
                for _, field in ast.iter_fields(node):
                    if isinstance(field, list):
                        yield from self._block([part for part in field if isinstance(part, ast.AST)], place)
                    elif isinstance(field, ast.AST):
                        yield from self._node(field, place)

    def value(self, node: ast.AST, place: Place) -> Any:
        """Of an expression, if it is always the same."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Call(ast.Name("hasattr" | "getattr" as how), [of, ast.Constant(str(name)), *default]):
                kinds = self.kinds(of, place)
                if not kinds or (how == "getattr" and not default):
                    return UNKNOWN
                has = {name in self.ours.members[kind] for kind in kinds}
                if how == "hasattr":
                    return has.pop() if len(has) == 1 else UNKNOWN
                return (
                    self.value(default[0], place)
                    if has == {False}
                    else self._one([self.ours.value(kind, name) for kind in kinds])
                )
            case ast.Call(ast.Attribute(ast.Attribute(ast.Name("envs"), name), "get")) if name in self.ours.refused:
                return False
            case ast.Attribute(of, name):
                if kinds := self.kinds(of, place):
                    return self._one([self.ours.value(kind, name) for kind in kinds])
                return self._setting(name, place)
            case ast.Name(name) if name not in [arg.arg for arg in arguments(place.node)]:
                return self._variable(name, place)
            case ast.UnaryOp(ast.Not(), of):
                return UNKNOWN if (value := self.value(of, place)) is UNKNOWN else not value
            case ast.BoolOp(op, parts):
                values = [self.value(part, place) for part in parts]
                decisive = [value for value in values if value is not UNKNOWN and bool(value) is isinstance(op, ast.Or)]
                return decisive[0] if decisive else UNKNOWN if UNKNOWN in values else values[-1]
            case ast.Compare(_, [ast.Eq() | ast.NotEq() as how], [ast.Attribute(ast.Name("TransferBackend"), name)]):
                return (name == self.ours.backend) is isinstance(how, ast.Eq)
            case ast.Compare(of, [ast.Is() | ast.IsNot() as how], [ast.Constant(None)]):
                value = self.value(of, place)
                return UNKNOWN if value is UNKNOWN else (value is None) is isinstance(how, ast.Is)
        return UNKNOWN

    @staticmethod
    def _one(values: list[Any]) -> Any:
        return values[0] if values and all(value is values[0] for value in values) else UNKNOWN

    def _variable(self, name: str, place: Place) -> Any:
        """What one thing alone is assigned to where that is run, by what is known without variables."""
        if self._shallow:
            return UNKNOWN
        if (place.node, name) not in self._variables:
            self._shallow = True
            nodes = list(self.live(place))
            stored = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
            values = [
                self.value(node.value, place)
                for node in nodes
                if isinstance(node, ast.Assign) and [last(target) for target in node.targets] == [name]
            ]
            self._shallow = False
            whole = len(values) == sum(not isinstance(node.ctx, ast.Load) for node in stored)
            self._variables[place.node, name] = self._one(values) if whole else UNKNOWN
        return self._variables[place.node, name]

    def _setting(self, name: str, place: Place) -> Any:
        """An attribute that keeps what the environment says."""
        kept = self.sources.kept.get(name, [])
        simple = all(isinstance(value, ast.Call) for value in kept)
        return self._one([self.value(value, place) for value in kept]) if simple else UNKNOWN

    def is_dead(self, place: Place) -> bool:
        """Whether nothing that is run mentions this function, or the class that it is a method of."""
        return any(
            self._is_unmentioned(name) for name in (place.node.name, place.owner.name if place.owner else "") if name
        )

    def _is_unmentioned(self, name: str) -> bool:
        if name not in self._dead:
            self._dead[name] = True  # what mentions itself alone is dead
            self._dead[name] = name != "__init__" and not any(
                self._mentions(path, name) for path in self.sources.paths(name)
            )
        return self._dead[name]

    def _mentions(self, path: str, name: str) -> bool:
        if path not in self.sources.known:
            return True
        if name in self.sources.loose[path]:
            return True
        return any(
            place.path == path
            and place.node.name != name
            and any(last(node) == name for node in self.live(place) if not isinstance(node, ast.Constant))
            and not self.is_dead(place)
            for place in self.sources.places
        )
