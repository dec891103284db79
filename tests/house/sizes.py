"""How large the house is: `make house` prints it beside its limits and the goals.

Docstrings and blank lines count. The core is `kvxfer/` without its tools and integrations, which nothing in it imports.
"""

import ast
import subprocess
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import test_layers as layers  # pyright: ignore[reportMissingImports]

from kvxfer.config import Config

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvxfer"

LIMITS = {
    "modules in the root": (12, 12),
    "modules in the core": (65, 65),
    "lines in the core": (31_619, 18_000),
    "lines in kvxfer/": (43_912, 30_000),
    "floors of imports": (14, 10),
    "settings": (30, 30),
    "attributes of a class in the core at most": (40, 12),
    "class names in the core that mean two things": (0, 0),
    "lines of tests": (65_745, 35_000),
    "words in documents": (30_000, 30_000),
}
"""Of each figure, what it may be at most, which falls but for what mends a defect, and what it is to become."""


def lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def floors(paths):
    """Modules on the longest way down along what is imported when a module is."""
    names = {layers.module_name(path): path for path in paths}
    below = {}
    for name, path in names.items():
        tree = layers.at_the_top(ast.parse(path.read_text()))
        below[name] = {found for found, _ in layers.imports(tree, path)} & set(names) - {name}
    depth = {}
    for name in TopologicalSorter(below).static_order():
        depth[name] = 1 + max((depth[other] for other in below[name]), default=0)
    return max(depth.values())


def classes(paths):
    """(name, attributes) of every class."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                fields = {
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                }
                stored = {
                    one.attr
                    for one in ast.walk(node)
                    if isinstance(one, ast.Attribute)
                    and isinstance(one.ctx, ast.Store)
                    and isinstance(one.value, ast.Name)
                    and one.value.id == "self"
                }
                yield node.name, len(fields | stored)


def counted():
    """Every figure, by its name in `LIMITS`."""
    everything = sorted(PACKAGE.rglob("*.py"))
    core = [path for path in everything if path.relative_to(PACKAGE).parts[0] not in {"tools", "integrations"}]
    root = [path for path in core if path.parent == PACKAGE]
    known = list(classes(core))
    program = [path for path in core if path != PACKAGE / "protocol/messages.py"]  # those are `wire.X` everywhere
    names = Counter(name for name, _ in classes(program) if not name.startswith("_"))
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    pages = [ROOT / line for line in tracked.stdout.splitlines() if (ROOT / line).exists()]
    return {
        "modules in the root": len(root),
        "modules in the core": len(core),
        "lines in the core": lines(core),
        "lines in kvxfer/": lines(everything),
        "floors of imports": floors(everything),
        "settings": len(Config.model_fields),
        "attributes of a class in the core at most": max(attributes for _, attributes in known),
        "class names in the core that mean two things": sum(times > 1 for times in names.values()),
        "lines of tests": lines((ROOT / "tests").rglob("*.py")),
        "words in documents": sum(len(page.read_text().split()) for page in pages),
    }


if __name__ == "__main__":
    for name, count in counted().items():
        print(f"{name:48}{count:>10,}" + "".join(f"{limit:>10,}" for limit in LIMITS[name]))
