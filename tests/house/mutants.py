"""How much of what the code could do wrong do tests see? `make mutants` changes one place of it at a time, and counts.

Places are drawn from a number, as many from each of `PACKAGES`: a guard is taken away, a condition is negated, a bound
moves by one, of two operands one is left, a call is left out, a function returns nothing. A copy of the checkout is
changed, never the checkout. One run of the tests finds which of them come by which place; each mutant is then given to
these, the nearest and quickest first. `--tests COMMIT` takes tests as they were at a commit. A test that fails without
a mutant is left out.
Compiled functions are left alone, since one change compiles all of them anew; so are lines of the log.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from itertools import accumulate, islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("prefill", "decode", "copy", "memory", "safety")
COMPILED = {"binding.py", "compiler.py", "cuda.py", "kernel.py", "machine.py", "posts.py", "walk.py"}
"""Modules of compiled functions, and what only a GPU plays."""
UNASKED = "bench demo deploy docs doctor engines examples faults gpu house network release rows tools"
"""Tests of the text, of programs above the core, and those that take many seconds each."""
TESTS_S, LIMIT_S = 30, 60
"""What the tests of one mutant may take by their own clocks, and what they may take altogether."""
ENDS = {None: "timed out", 0: "survived", 1: "caught", 2: "caught", 5: "not reached"}
"""What exit codes of pytest mean; 5 is that there were no tests."""
LEAVING = ast.Raise, ast.Return, ast.Continue, ast.Break
ONE, OTHER = (ast.Lt, ast.Gt, ast.Eq, ast.Is, ast.In), (ast.LtE, ast.GtE, ast.NotEq, ast.IsNot, ast.NotIn)
OTHERS: dict[type[ast.cmpop], type[ast.cmpop]] = dict(zip(ONE + OTHER, OTHER + ONE, strict=True))


@dataclass(frozen=True)
class Mutant:
    """One change: `new` stands for the expression in `source[start:end]`, which is evaluated whenever it matters."""

    path: Path
    line: int
    kind: str
    start: int
    end: int
    new: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


class Places(ast.NodeVisitor):
    """Everything that could be changed inside the functions of a module."""

    def __init__(self, path: Path) -> None:
        self.path, self.source = path, (ROOT / path).read_bytes()
        self.lines = [0, *accumulate(map(len, self.source.splitlines(keepends=True)))]
        self.found: list[Mutant] = []
        for node in ast.walk(ast.parse(self.source)):
            for one in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.visit(one)

    def add(self, kind: str, node: ast.expr, new: str) -> None:
        """In `new`, `{}` is what stands there now."""
        start = self.lines[node.lineno - 1] + node.col_offset
        end = self.lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        new = new.replace("{}", self.source[start:end].decode())
        self.found.append(Mutant(self.path, node.lineno, kind, start, end, new))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for one in node.body:  # and neither its defaults nor its types
            self.visit(one)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_JoinedStr(self, node: ast.AST) -> None:
        """Words that somebody reads, and patterns, in which no expression can stand."""

    visit_Raise = visit_MatchValue = visit_JoinedStr

    def visit_If(self, node: ast.If | ast.IfExp | ast.comprehension) -> None:
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], LEAVING):
            self.add("guard removed", node.test, "(({}) and False)")
        for test in node.ifs if isinstance(node, ast.comprehension) else (node.test,):
            if not isinstance(test, ast.Compare):  # that is changed anyhow
                self.add("condition negated", test, "(not ({}))")
        self.generic_visit(node)

    visit_IfExp = visit_comprehension = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        changed = ast.Compare(node.left, [OTHERS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        self.add("comparison changed", node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp | ast.BinOp | ast.Call) -> None:
        match node:
            case ast.BoolOp():
                operands = node.values
            case ast.BinOp(left, ast.Add() | ast.Sub(), right):
                operands = [left, right]
            case ast.Call(ast.Name("min" | "max"), [_, _, *_] as operands):
                pass
            case _:
                operands = []
        for one in operands:
            self.add("operand alone", node, f"({ast.unparse(one)})")
        self.generic_visit(node)

    visit_BinOp = visit_Call = visit_BoolOp

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add("number raised", node, str(node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            self.add("result negated", node.value, str(not node.value.value))
        elif node.value and not isinstance(node.value, ast.Constant):
            self.add("result dropped", node.value, "None")
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            if ast.unparse(call.func).startswith(("_log.", "assert_never")):
                return
            self.add("call dropped", node.value, "None")
        self.generic_visit(node)


def drawn(seed: int, count: int) -> Iterator[Mutant]:
    for package in PACKAGES:
        modules = sorted((ROOT / "kvxfer" / package).glob("*.py"))
        places = [one for path in modules if path.name not in COMPILED for one in Places(path.relative_to(ROOT)).found]
        yield from random.Random(f"{seed} {package}").sample(places, count // len(PACKAGES))


# --- in the processes of tests: this file is imported there, and is a plugin of pytest

_seen: set[tuple[int, str]] = set()


def reached(number: int) -> None:
    """Note that this test comes by that place; it stands before the expression there, as `reached(7) or ...`."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (number, test) not in _seen:
        _seen.add((number, test))
        _note("reached", number, test)


def _note(*what: object) -> None:
    with Path(os.environ["MUTANTS_NOTES"]).open("a") as notes:
        notes.write(json.dumps(what) + "\n")


def pytest_runtest_logreport(report) -> None:  # pyright: ignore[reportMissingParameterType]
    if "PYTEST_XDIST_WORKER" in os.environ:  # else it is told of reports again, by those
        _note(report.outcome, report.duration, report.nodeid)


# --- and in this one


class Copy:
    """The checkout in a folder, with the tests of a commit if there is one."""

    def __init__(self, folder: Path, tests: str | None) -> None:
        self.folder, self.tree, self.notes = folder, folder / "tree", folder / "notes"
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
        shutil.copy(__file__, folder)
        if tests:
            shutil.rmtree(self.tree / "tests")
            archive = subprocess.run(["git", "archive", tests, "tests"], cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "-x"], cwd=self.tree, check=True, input=archive.stdout)
        compiler = self.tree / "kvxfer/copy/compiler.py"  # machine code is kept, whatever is changed beside it
        assert "source.read_bytes()" in compiler.read_text()
        compiler.write_text(compiler.read_text().replace("source.read_bytes()", "source.name.encode()"))

    def write(self, path: Path, source: bytes) -> None:
        (self.tree / path).write_bytes(source)
        for stale in (self.tree / path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def pytest(self, *given: str, limit_s: float | None = None, notes: str = "") -> tuple[int | None, str]:
        """Its exit code, or None if it was killed after so many seconds; and what it said."""
        own = {"PYTHONPATH": f"{self.tree}:{self.folder}", "NUMBA_CACHE_DIR": str(self.folder), "MUTANTS_NOTES": notes}
        quiet = ("-q", "--tb=no", "--assert=plain", "--hypothesis-seed=0", "-p", "no:cacheprovider", "-p", "mutants")
        command, env = [sys.executable, "-m", "pytest", *quiet, *given], os.environ | own
        with (self.folder / "said").open("w+") as said:
            process = subprocess.Popen(
                command, cwd=self.tree, env=env, stdout=said, stderr=said, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait() and None
            return code, Path(said.name).read_text()

    def find(self, mutants: list[Mutant]) -> None:
        """Note which tests come by which mutant, what they take, and which fail."""
        inserted: dict[Path, list[tuple[int, int, str]]] = defaultdict(list)
        for number, one in enumerate(mutants):
            inserted[one.path] += [(one.start, 1, f"(__import__('mutants').reached({number}) or ("), (one.end, 0, "))")]
        for path, texts in inserted.items():
            source = (ROOT / path).read_bytes()
            for at, _, text in sorted(texts, reverse=True):
                source = source[:at] + text.encode() + source[at:]
            self.write(path, source)
        ignored = [f"--ignore=tests/{name}" for name in UNASKED.split()]
        print(self.pytest("tests", "-n", "2", *ignored, notes=str(self.notes))[1][-3000:])
        for path in inserted:
            self.write(path, (ROOT / path).read_bytes())

    def given(self, mutants: list[Mutant]) -> Iterator[list[str]]:
        """To which tests each mutant is given."""
        by, took, failed = defaultdict[int, set[str]](set), Counter[str](), set[str]()
        for what, figure, test in map(json.loads, self.notes.read_text().splitlines()):
            if what == "reached":
                by[figure].add(test)
            else:
                took[test] += figure
                failed |= {test} if what == "failed" else set()
        for number, one in enumerate(mutants):
            near = {test: re.search(rf"[/_]({one.path.stem}|{one.path.parent.name})[/_.]", test) for test in by[number]}
            tests = sorted(near.keys() & took.keys() - failed, key=lambda test: (not near[test], took[test]))
            clock = accumulate(took[test] for test in tests)
            yield [test for test, now in zip(tests, clock, strict=True) if now < TESTS_S or test == tests[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="the number they are drawn from")
    parser.add_argument("--tests", metavar="COMMIT", help="tests as they were then")
    options = parser.parse_args()
    mutants, ends = list(drawn(options.seed, options.count)), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), options.tests)
        copy.find(mutants)
        for number, (one, tests) in enumerate(zip(mutants, copy.given(mutants), strict=True)):
            source = (ROOT / one.path).read_bytes()
            copy.write(one.path, one.applied(source))
            code, said = copy.pytest(*tests, "-x", "--timeout=20", limit_s=LIMIT_S) if tests else (5, "")
            copy.write(one.path, source)
            end = ENDS.get(code, f"caught, by exit code {code}")
            ends[end] += 1
            by = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
            lines = [text.decode().splitlines() for text in (source, one.applied(source))]
            diff = islice(unified_diff(lines[0], lines[1], n=0, lineterm=""), 3, None)
            print(f"{number}: {end}. {one.path}:{one.line}, {one.kind}, {len(tests)} tests", *by, *diff, sep="\n")
    print(f"{ends['caught']} of {ends.total()} caught, seed {options.seed}:", dict(ends))


if __name__ == "__main__":
    main()
